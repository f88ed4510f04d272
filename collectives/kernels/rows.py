"""Kernels on rows of 2-D tensors: scan, gather, scatter-add, coalesce. One core, no allocation in the hot loops.

Rows are addressed by int64 indices that the caller has validated: no kernel checks bounds. Matrices are C-contiguous; a
slice of their columns is named by its first column, because a strided view would lose the vector loops.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.kernels import gpu
from collectives.kernels.cuda import on_gpu
from collectives.kernels.host import Array, Scalar, bit_array, host_array
from collectives.kernels.idsets import union_ids

_MAGNITUDE = {2: 0x7FFF, 4: 0x7FFFFFFF}
_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


@njit(nogil=True, cache=True)
def _nonzero_rows(bits: Array, magnitude: int, found: Array) -> int:
    count = 0
    for i in range(bits.shape[0]):
        row = bits[i]
        seen = bits[0, 0] & 0
        for j in range(row.shape[0]):
            seen |= row[j]
        if seen & magnitude:
            found[count] = i
            count += 1
    return count


def nonzero_rows(matrix: Tensor) -> Tensor:
    """Ids (int64, sorted) of the rows of `matrix` [R, W] with any value != 0. NaN counts, -0.0 does not.

    Reads each byte once: the bits of a row are OR-ed and the sign bits masked off at the end.
    """
    num_rows, width = matrix.shape
    found = torch.empty(0 if on_gpu(matrix) else num_rows, dtype=torch.int64, device=matrix.device)
    if num_rows == 0 or width == 0:
        return found[:0]
    if on_gpu(matrix):
        return gpu.nonzero_rows(matrix)
    count = _nonzero_rows(bit_array(matrix), _MAGNITUDE[matrix.element_size()], host_array(found))
    return found[:count].clone()


@njit(nogil=True, cache=True)
def _gather_rows(source: Array, rows: Array, first: int, out: Array) -> None:
    width = out.shape[1]
    for i in range(rows.shape[0]):
        src, dst = source[rows[i], first : first + width], out[i]
        for j in range(width):
            dst[j] = src[j]


def gather_rows(source: Tensor, rows: Tensor, out: Tensor, first_column: int = 0) -> Tensor:
    """out[i] = source[rows[i], first_column : first_column + c] for out [k, c] of the same dtype; returns out."""
    if out.numel() and on_gpu(out):
        gpu.gather_rows(source, rows, out, first_column)
    elif out.numel():
        _gather_rows(bit_array(source), host_array(rows), first_column, bit_array(out))
    return out


@njit(nogil=True, cache=True)
def _scatter_rows(out: Array, positions: Array, values: Array) -> None:
    for i in range(positions.shape[0]):
        src, dst = values[i], out[positions[i]]
        for j in range(src.shape[0]):
            dst[j] = src[j]


def scatter_rows(out: Tensor, positions: Tensor, values: Tensor) -> None:
    """out[positions[i]] = values[i] for values [k, W] and out [K, W] of one dtype; positions are unique."""
    if values.numel() and on_gpu(out):
        gpu.scatter_rows(out, positions, values)
    elif values.numel():
        _scatter_rows(bit_array(out), host_array(positions), bit_array(values))


@njit(nogil=True, cache=True)
def _scatter_add_rows(total: Array, positions: Array, values: Array, first: int, fresh: Array) -> None:
    width = total.shape[1]
    for i in range(positions.shape[0]):
        position = positions[i]
        src, dst = values[i, first : first + width], total[position]
        if fresh[position]:
            fresh[position] = 0
            for j in range(width):
                dst[j] = src[j]
        else:
            for j in range(width):
                dst[j] += src[j]


def scatter_add_rows(total: Tensor, positions: Tensor, values: Tensor, fresh: Tensor, first_column: int = 0) -> None:
    """total[positions[i]] += values[i, first_column : first_column + c], in order of i, accumulated in float32.

    total: float32 [K, c]. values: [k, W], any floating dtype. fresh: uint8 [K], 1 where a row of `total` is still
    unwritten memory; such a row is assigned instead of added to and its flag cleared, which saves zeroing `total`.
    On a GPU the positions of one call must be unique; calls add up in their order.
    """
    width = total.shape[1]
    if not positions.numel() or not width:
        return
    if on_gpu(total):
        gpu.scatter_add_rows(total, positions, values, fresh, first_column)
        return
    if values.dtype != torch.float32:
        values, first_column = values[:, first_column : first_column + width].float(), 0
    _scatter_add_rows(host_array(total), host_array(positions), host_array(values), first_column, host_array(fresh))


def coalesce(ids: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sort ids and sum the rows of equal ids, in their order of appearance and in float32.

    ids: int64 [m] in [0, num_rows). values: [m, W]. Returns sorted unique ids [k] and values [k, W] of the same dtype;
    the inputs themselves where they are sorted and unique already.
    """
    if ids.numel() < 2 or bool((ids[1:] > ids[:-1]).all()):
        return ids, values
    if on_gpu(ids):
        return gpu.coalesce(ids, values)
    unique, (positions,) = union_ids([ids], num_rows)
    total = torch.empty((unique.numel(), values.shape[1]), dtype=torch.float32)
    scatter_add_rows(total, positions, values, torch.ones(unique.numel(), dtype=torch.uint8))
    return unique, total.to(values.dtype)


@njit(nogil=True, cache=True)
def _largest_magnitude(bits: Array, magnitude: int) -> Scalar:
    largest = bits[0] & 0
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & magnitude)
    return largest


def has_nonfinite(values: Tensor) -> bool:
    """Whether any value is infinite or NaN: an integer maximum over the bits, one read."""
    if not values.numel():
        return False
    if on_gpu(values):
        return not bool(torch.isfinite(values).all())
    bits = bit_array(values.view(-1))
    return bool(_largest_magnitude(bits, bits.dtype.type(_MAGNITUDE[values.element_size()])) >= _INFINITY[values.dtype])


@njit(nogil=True, cache=True)
def _rows_to_blocks(values: Array, ids: Array, block_of: Array, blocks: Array, forward: bool) -> None:
    width, block_width = values.shape[1], blocks.shape[1]
    for i in range(ids.shape[0]):
        element, column, block = ids[i] * width, 0, block_of[i]
        while column < width:
            offset = (element + column) % block_width
            run = min(block_width - offset, width - column)
            row, part = values[i, column : column + run], blocks[block, offset : offset + run]
            if forward:
                for j in range(run):
                    part[j] = row[j]
            else:
                for j in range(run):
                    row[j] = part[j]
            column += run
            block += 1


def copy_rows_to_blocks(values: Tensor, ids: Tensor, block_of: Tensor, blocks: Tensor) -> None:
    """Copy rows into the blocks that cut the flattened tensor; `block_of[i]` is the position of row i's first block.

    values: [k, W] of rows `ids`. blocks: [m, B], same dtype, consecutive blocks of one row at consecutive positions.
    """
    if values.numel():
        _rows_to_blocks(bit_array(values), host_array(ids), host_array(block_of), bit_array(blocks), True)


def copy_blocks_to_rows(blocks: Tensor, ids: Tensor, block_of: Tensor, values: Tensor) -> None:
    """The inverse of `copy_rows_to_blocks`: fill `values` [k, W] from `blocks`."""
    if values.numel():
        _rows_to_blocks(bit_array(values), host_array(ids), host_array(block_of), bit_array(blocks), False)


def as_rows(array: np.ndarray) -> Tensor:
    """A NumPy id array as an int64 tensor (zero-copy where it is int64 already)."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
