"""The one in-memory form of a sparse gradient, and the interface of a scheme that reduces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from collectives.transport import Transport

Op = Literal["sum", "mean"]


@dataclass(frozen=True)
class SparseRows:
    """The touched rows of a [num_rows, width] tensor. Element-sparse tensors have width 1.

    ids: int64 [k], sorted, unique, in [0, num_rows). values: [k, width], float32, float16 or bfloat16. k may be 0, and
    then values is [0, width].
    """

    ids: Tensor
    values: Tensor
    num_rows: int

    @property
    def width(self) -> int:
        """Values per row."""
        return int(self.values.shape[1])


class Scheme(Protocol):
    """One way to reduce sparse rows over all ranks (column split, balanced parallelism, AGsparse, ...)."""

    @property
    def name(self) -> str:
        """The name under which policies, plans and benchmarks know it."""

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """Return the reduced rows: sorted unique ids, the same bytes on every rank, summed in rank order.

        Called by all ranks with the same num_rows, width, dtype and op (`sparse_all_reduce` checks that first).
        sizes: int64 [n, 2], every rank's number of rows and bytes of coded ids (`Agreement.sizes`), where a metadata
        round has gathered them already; without it the scheme runs its own round.
        """

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """Bytes that `all_reduce` would put on the wire, by phase: int64 [n, n], row = sender, column = receiver.

        ids: the sorted unique index set of each rank. Value-free: the same partition and sizing code, no values moved.
        Includes the phase "metadata" of a call without `sizes`.
        """
