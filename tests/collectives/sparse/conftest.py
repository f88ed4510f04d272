"""Sparse gradients for n ranks and the float64 oracle that every scheme is held against."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.sparse.rows import SparseRows

PATTERNS = ("all_empty", "one_empty", "one_full", "equal", "disjoint", "skewed")


def _touched(pattern: str, rank: int, size: int, num_rows: int, rng: np.random.Generator) -> np.ndarray:
    count = min(num_rows, int(rng.integers(1, max(2, num_rows // 3))))
    some = np.sort(rng.choice(num_rows, count, replace=False))
    if pattern == "all_empty" or (pattern == "one_empty" and rank == size - 1):
        return np.empty(0, np.int64)
    if pattern == "one_full" and rank == 0:
        return np.arange(num_rows)
    if pattern == "equal":
        return np.arange(0, num_rows, 3)
    if pattern == "disjoint":
        return np.arange(rank, num_rows, size)
    if pattern == "skewed":
        return np.arange(min(num_rows, 1 + rank))
    return some


@pytest.fixture
def make_rows() -> Callable[..., list[SparseRows]]:
    """(pattern, size, num_rows, width, dtype) -> normalised rows of every rank."""

    def make(
        pattern: str, size: int, num_rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> list[SparseRows]:
        rng = np.random.default_rng([PATTERNS.index(pattern), size, num_rows, width])
        rows = []
        for rank in range(size):
            ids = torch.from_numpy(_touched(pattern, rank, size, num_rows, rng).astype(np.int64))
            values = torch.from_numpy(rng.standard_normal((len(ids), width), dtype=np.float32)).to(dtype)
            rows.append(SparseRows(ids, values, num_rows))
        return rows

    return make


@pytest.fixture
def oracle() -> Callable[[Sequence[SparseRows]], tuple[np.ndarray, np.ndarray]]:
    """Rows of all ranks -> sorted union of ids [K] and the float64 sum [K, width]."""

    def total(rows: Sequence[SparseRows]) -> tuple[np.ndarray, np.ndarray]:
        union = np.unique(np.concatenate([one.ids.numpy() for one in rows]))
        result = np.zeros((len(union), rows[0].width))
        for one in rows:
            result[np.searchsorted(union, one.ids.numpy())] += one.values.double().numpy()
        return union, result

    return total


@pytest.fixture
def bits() -> Callable[[Tensor], bytes]:
    """The memory of a tensor, to compare replicas bit by bit (NaN included)."""
    return lambda tensor: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
