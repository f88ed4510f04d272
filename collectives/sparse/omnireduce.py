"""OmniReduce's format: only blocks of 256 values with something in them travel, over contiguous ranges of blocks.

The streaming look-ahead of the original changes latency, not bytes, and is left out. A block does not say which of its
rows were touched, so touched ids travel as bitmaps in a phase of their own, charged apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from collectives.kernels.hashing import RangeOwners
from collectives.kernels.idsets import union_ids
from collectives.kernels.rows import as_rows, copy_blocks_to_rows, copy_rows_to_blocks
from collectives.sparse.baselines import TOUCHED, touched_table, union_touched
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.zen import PushPull, row_unit
from collectives.transport import Transport

BLOCK_WIDTH = 256


def blocks_of_rows(ids: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Sorted ids of the blocks that rows of `width` values touch (int64 [m]), and each row's first block in them [k]."""
    first, last = ids * width // BLOCK_WIDTH, ((ids + 1) * width - 1) // BLOCK_WIDTH
    spans = [first + offset for offset in range((width - 2) // BLOCK_WIDTH + 2)]
    blocks, positions = union_ids([torch.minimum(span, last) for span in spans], num_blocks(num_rows, width))
    return blocks, positions[0]


def num_blocks(num_rows: int, width: int) -> int:
    """Blocks of the flattened tensor, the last one padded."""
    return -(-num_rows * width // BLOCK_WIDTH)


class OmniReduce:
    """Contiguous ranges of blocks, plain block ids both ways."""

    name = "omnireduce"

    def __init__(self) -> None:
        self.ranges = PushPull("blocks", row_unit, RangeOwners, "coo")

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`."""
        union = union_touched(rows.ids, rows.num_rows, transport)
        ids, first = blocks_of_rows(rows.ids, rows.num_rows, rows.width)
        blocks = rows.values.new_zeros((len(ids), BLOCK_WIDTH))
        copy_rows_to_blocks(rows.values, rows.ids, first, blocks)
        summed = self.ranges.all_reduce(SparseRows(ids, blocks, num_blocks(rows.num_rows, rows.width)), transport, op)
        result = rows.values.new_empty((len(union), rows.width))
        copy_blocks_to_rows(summed.values, union, blocks_of_rows(union, rows.num_rows, rows.width)[1], result)
        return SparseRows(union, result, rows.num_rows)

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """See `Scheme`."""
        blocks = [blocks_of_rows(as_rows(one), num_rows, width)[0].numpy() for one in ids]
        table = self.ranges.wire_bytes(blocks, num_blocks(num_rows, width), BLOCK_WIDTH, itemsize)
        return {TOUCHED: touched_table(num_rows, len(ids)), **table}
