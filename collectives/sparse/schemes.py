"""The schemes by name: what a policy, a planner or a benchmark may ask for."""

from __future__ import annotations

from collectives.sparse.baselines import DenseRing
from collectives.sparse.columns import AllGatherSparse, ColumnSplit
from collectives.sparse.rows import Scheme

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (ColumnSplit(), AllGatherSparse(), DenseRing())}
