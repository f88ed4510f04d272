"""The schemes by name: what a policy, a planner or a benchmark may ask for."""

from __future__ import annotations

from collectives.sparse.baselines import DenseRing
from collectives.sparse.columns import AllGatherSparse, ColumnSplit
from collectives.sparse.doubling import RecursiveDoubling
from collectives.sparse.omnireduce import OmniReduce
from collectives.sparse.rows import Scheme
from collectives.sparse.two_level import TwoLevel
from collectives.sparse.zen import HASHED_BLOCKS, HASHED_ROWS, SPARSE_PS, ZEN, ZEN_ROWS

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
