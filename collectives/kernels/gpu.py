"""CUDA callers of the row and set kernels: same arguments and results as their CPU namesakes in rows.py and idsets.py.

Results whose length depends on the data (lists of ids) wait for the device once, to learn that length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from collectives.kernels.cuda import THREADS, WARPS, Argument, blocks_for, launch

BITMAP_GROUP = 4 * THREADS
"""Words whose ones are counted together (kernels.cu)."""
PARTITION_TILE = 2048
"""Entries that a warp partitions in order (kernels.cu)."""
MAX_PARTITION_OWNERS = 512
"""Beyond, the counters of a block exceed its shared memory, and a stable sort groups the entries."""
SPARSEST_BITMAP = 1024
"""As in idsets.py: above this many positions per id, sort."""


def scan_scratch(num_parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(counts int64 [num_parts + 1], ticket): what a kernel needs that ends in a prefix sum over its parts."""
    memory = torch.zeros(num_parts + 2, dtype=torch.int64, device=device)
    return memory[:-1], memory[-1:]


def nonzero_rows(matrix: Tensor) -> Tensor:
    """See `rows.nonzero_rows`."""
    num_rows, width = matrix.shape
    bitmap = torch.empty(-(-num_rows // 32), dtype=torch.int32, device=matrix.device)
    args = (matrix, np.int64(num_rows), np.int64(width), bitmap)
    launch(f"nonzero_rows_{8 * matrix.element_size()}", blocks_for(bitmap.numel(), WARPS), THREADS, args, like=matrix)
    return _list(bitmap)


def _list(bitmap: Tensor) -> Tensor:
    """Sorted ids (int64) of the ones of int32 words."""
    num_words = np.int64(bitmap.numel())
    num_groups = -(-bitmap.numel() // BITMAP_GROUP)
    starts, ticket = scan_scratch(num_groups, bitmap.device)
    grid = blocks_for(num_groups, 1)
    launch("bitmap_count", grid, THREADS, (bitmap, num_words, starts, ticket), like=bitmap)
    ids = torch.empty(int(starts[num_groups]), dtype=torch.int64, device=bitmap.device)
    launch("bitmap_list", grid, THREADS, (bitmap, num_words, starts, ids), like=bitmap)
    return ids


def _mark(bitmap: Tensor, ids: Tensor) -> None:
    launch("bitmap_mark", blocks_for(ids.numel(), THREADS), THREADS, (ids, np.int64(ids.numel()), bitmap), like=bitmap)


def encode_bitmap(ids: Tensor, num_positions: int) -> Tensor:
    """See `idsets.encode_bitmap`."""
    words = torch.zeros(-(-num_positions // 32), dtype=torch.int32, device=ids.device)
    _mark(words, ids)
    return words.view(torch.uint8)[: (num_positions + 7) // 8]


def decode_bitmap(bitmap: Tensor) -> Tensor:
    """See `idsets.decode_bitmap`."""
    words = torch.zeros(-(-bitmap.numel() // 4), dtype=torch.int32, device=bitmap.device)
    words.view(torch.uint8)[: bitmap.numel()] = bitmap
    return _list(words)


def union_ids(lists: Sequence[Tensor], num_positions: int) -> tuple[Tensor, list[Tensor]]:
    """See `idsets.union_ids`."""
    sizes = [ids.numel() for ids in lists]
    if num_positions > SPARSEST_BITMAP * max(1, sum(sizes)):
        union, inverse = torch.unique(torch.cat(list(lists)), return_inverse=True)
        return union, list(torch.split(inverse, sizes))
    words = torch.zeros(-(-num_positions // 32), dtype=torch.int32, device=lists[0].device)
    for ids in lists:
        _mark(words, ids)
    union = _list(words)
    return union, [torch.searchsorted(union, ids) for ids in lists]


def gather_rows(source: Tensor, rows: Tensor, out: Tensor, first_column: int = 0) -> None:
    """See `rows.gather_rows`."""
    itemsize, (num, width) = source.element_size(), out.shape
    sizes = (np.int64(source.stride(0) * itemsize), rows, np.int64(num), np.int64(width * itemsize))
    launch(
        "gather_rows",
        _row_blocks(num, width),
        THREADS,
        (source[:, first_column:], *sizes, out),
        like=out,
    )


def scatter_rows(out: Tensor, positions: Tensor, values: Tensor) -> None:
    """See `rows.scatter_rows`."""
    num, width = values.shape
    args = (values, positions, np.int64(num), np.int64(width * values.element_size()), out)
    launch("scatter_rows", _row_blocks(num, width), THREADS, args, like=out)


def scatter_add_rows(total: Tensor, positions: Tensor, values: Tensor, fresh: Tensor, first_column: int = 0) -> None:
    """See `rows.scatter_add_rows`; here the positions of one call must be unique."""
    values, width = _wide(values[:, first_column:]), total.shape[1]
    sizes = (np.int64(len(positions)), np.int64(width))
    launch(
        f"scatter_add_rows_{_suffix(values)}",
        _row_blocks(len(positions), width),
        THREADS,
        (total, positions, *sizes, values, np.int64(values.stride(0)), fresh),
        like=total,
    )


def coalesce(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """See `rows.coalesce`, for ids that do need sorting. No atomics: each sum is made by one warp, in order."""
    ordered, order = torch.sort(ids, stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = torch.zeros(len(unique) + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(counts, 0, out=starts[1:])
    wide, width = _wide(values.contiguous()), values.shape[1]
    total = torch.empty((len(unique), width), dtype=torch.float32, device=ids.device)
    args = (wide, order, starts, np.int64(len(unique)), np.int64(width), total)
    launch(f"sum_segments_{_suffix(wide)}", _row_blocks(len(unique), width), THREADS, args, like=total)
    return unique, total.to(values.dtype)


def _wide(values: Tensor) -> Tensor:
    """fp16 as fp32: the kernels read fp32 and bf16."""
    return values.float() if values.dtype == torch.float16 else values


def _suffix(values: Tensor) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16"}[values.dtype]


def _row_blocks(num_rows: int, width: int) -> int:
    """Blocks for kernels in which up to 32 lanes share a row."""
    return blocks_for(num_rows * min(max(width, 1), 32), THREADS)


def partition_by_owner(owners: Tensor, num_owners: int) -> tuple[Tensor, Tensor]:
    """See `idsets.partition_by_owner`."""
    num = owners.numel()
    if num_owners > MAX_PARTITION_OWNERS:
        return torch.bincount(owners, minlength=num_owners), torch.sort(owners, stable=True).indices
    num_tiles = -(-num // PARTITION_TILE)
    starts, ticket = scan_scratch(num_owners * num_tiles, owners.device)
    order = torch.empty(num, dtype=torch.int64, device=owners.device)
    if num == 0:
        return torch.zeros(num_owners, dtype=torch.int64, device=owners.device), order
    grid, sizes = blocks_for(num_tiles, WARPS), (np.int64(num), np.int32(num_owners))
    counters = WARPS * num_owners
    launch("partition_count", grid, THREADS, (owners, *sizes, starts, ticket), like=owners, shared_bytes=4 * counters)
    launch("partition_scatter", grid, THREADS, (owners, *sizes, starts, order), like=owners, shared_bytes=8 * counters)
    return starts[::num_tiles].diff(), order


def hashed_split(
    ids: Tensor, num_positions: int, num_owners: int, network: Sequence[np.uint32]
) -> tuple[Tensor, Tensor]:
    """See `hashing.HashedOwners.split`. network: low bits, high mask, low mask and the four keys."""
    num = ids.numel()
    owners = torch.empty(num, dtype=torch.int32, device=ids.device)
    slots = torch.empty(num, dtype=torch.int64, device=ids.device)
    args: list[Argument] = [ids, np.int64(num), np.uint64(num_positions), np.uint32(num_owners)]
    launch("hashed_split", blocks_for(num, THREADS), THREADS, [*args, *network, owners, slots], like=ids)
    return owners, slots


def hashed_join(owner: int, slots: Tensor, num_positions: int, num_owners: int, network: Sequence[np.uint32]) -> Tensor:
    """See `hashing.HashedOwners.join`."""
    ids = torch.empty_like(slots)
    num = slots.numel()
    args: list[Argument] = [slots, np.int64(num), np.uint64(num_positions), np.uint32(num_owners), np.uint32(owner)]
    launch("hashed_join", blocks_for(num, THREADS), THREADS, [*args, *network, ids], like=slots)
    return ids
