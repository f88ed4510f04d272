"""The schemes by name: what a policy, a planner or a benchmark may ask for."""

from __future__ import annotations

from functools import cache

import torch

from collectives.kernels.rows import coalesce, has_nonfinite, nonzero_rows
from collectives.sparse.baselines import DenseRing
from collectives.sparse.columns import AllGatherSparse, ColumnSplit
from collectives.sparse.doubling import RecursiveDoubling
from collectives.sparse.omnireduce import OmniReduce
from collectives.sparse.rows import Scheme, SparseRows
from collectives.sparse.two_level import TwoLevel
from collectives.sparse.zen import HASHED_BLOCKS, HASHED_ROWS, SPARSE_PS, ZEN, ZEN_ROWS
from collectives.transport import LocalTransport, run_local

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        ColumnSplit(),
        ZEN,
        ZEN_ROWS,
        HASHED_ROWS,
        HASHED_BLOCKS,
        AllGatherSparse(),
        RecursiveDoubling(),
        TwoLevel(),
        SPARSE_PS,
        OmniReduce(),
        DenseRing(),
    )
}


@cache
def warm_up() -> None:
    """Compile the CPU kernels of all schemes for fp32, so that no training step waits for it.

    A few seconds once per installation; later under one second, for loading them from numba's cache.
    """
    ids, values = torch.tensor([7, 1, 1]), torch.ones(3, 4)
    unique, summed = coalesce(ids, values, 1 << 12)
    nonzero_rows(values)
    has_nonfinite(values)

    def reduce(transport: LocalTransport) -> None:
        for scheme in SCHEMES.values():
            for rows in (SparseRows(unique, summed, 1 << 12), SparseRows(unique, summed[:, :1].contiguous(), 1 << 12)):
                scheme.all_reduce(rows, transport, "mean")

    run_local(2, reduce)
