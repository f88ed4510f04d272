"""Summing rows of several ranks at their owner, in rank order, with 32-bit accumulators."""

from __future__ import annotations

import torch
from torch import Tensor

from collectives.kernels.rows import scatter_add_rows
from collectives.sparse.rows import Op
from collectives.sparse.workspace import Workspace


class RankOrderSum:
    """A [K, width] block under construction: `add` once per rank, in rank order, then `finish`.

    out: [K, width] memory for the result, in the dtype of the tensor; every row must be touched by some rank.
    """

    def __init__(self, out: Tensor, work: Workspace):
        self.out = out
        self.total = out if out.dtype == torch.float32 else work.buffer("sum", out.shape, torch.float32)
        self.fresh = work.buffer("fresh", (out.shape[0],), torch.uint8).fill_(1)

    def add(self, positions: Tensor, values: Tensor, first_column: int = 0) -> None:
        """Add rows `values` [k, >= width], from `first_column` on, at `positions` (int64 [k]) of the block."""
        scatter_add_rows(self.total, positions, values, self.fresh, first_column)

    def finish(self, op: Op, size: int) -> Tensor:
        """Divide once for the mean, and convert back; returns `out`."""
        if op == "mean":
            self.total.div_(size)
        if self.total is not self.out:
            self.out.copy_(self.total)
        return self.out
