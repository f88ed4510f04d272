"""Kernels on sets of ids: union with positions, partition by owner, bitmaps.

A set in [0, N) is held as a bitmap of 64-bit words with the number of ones before each word, so that both "list the set
in order" and "at which position is x" cost a few operations and N/8 bytes, whatever the order of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.kernels import gpu
from collectives.kernels.cuda import on_gpu
from collectives.kernels.host import Array, Scalar, host_array

SPARSEST_BITMAP = 1024
"""Above this many positions per id a bitmap is mostly empty memory, and sorting the ids is faster."""

_M1, _M2, _M4 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_H01, _ONE, _ZERO = np.uint64(0x0101010101010101), np.uint64(1), np.uint64(0)
_S1, _S2, _S4, _S56 = np.uint64(1), np.uint64(2), np.uint64(4), np.uint64(56)


@njit(nogil=True, cache=True)
def _popcount(word: Scalar) -> Scalar:
    word = word - ((word >> _S1) & _M1)
    word = (word & _M2) + ((word >> _S2) & _M2)
    word = (word + (word >> _S4)) & _M4
    return np.int64((word * _H01) >> _S56)


@njit(nogil=True, cache=True)
def _mark(words: Array, ids: Array) -> None:
    for i in range(ids.shape[0]):
        words[ids[i] >> 6] |= _ONE << np.uint64(ids[i] & 63)


@njit(nogil=True, cache=True)
def _count(words: Array, before: Array) -> int:
    total = 0
    for i in range(words.shape[0]):
        before[i] = total
        total += _popcount(words[i])
    return total


@njit(nogil=True, cache=True)
def _list(words: Array, out: Array) -> None:
    count = 0
    for i in range(words.shape[0]):
        word = words[i]
        while word != _ZERO:
            lowest = word & (~word + _ONE)
            out[count] = i * 64 + _popcount(lowest - _ONE)
            word ^= lowest
            count += 1


@njit(nogil=True, cache=True)
def _rank(words: Array, before: Array, ids: Array, out: Array) -> None:
    for i in range(ids.shape[0]):
        word = ids[i] >> 6
        below = (_ONE << np.uint64(ids[i] & 63)) - _ONE
        out[i] = before[word] + _popcount(words[word] & below)


def union_ids(lists: Sequence[Tensor], num_positions: int) -> tuple[Tensor, list[Tensor]]:
    """The sorted unique union of int64 id lists in [0, num_positions), and each list's positions in it (int64).

    The lists may be unsorted and may repeat ids.
    """
    if lists and on_gpu(lists[0]):
        return gpu.union_ids(lists, num_positions)
    arrays = [host_array(ids) for ids in lists]
    if num_positions > SPARSEST_BITMAP * max(1, sum(len(ids) for ids in arrays)):
        joined = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        unique, inverse = np.unique(joined, return_inverse=True)
        cuts = np.cumsum([len(ids) for ids in arrays])[:-1]
        parts = np.split(inverse.astype(np.int64, copy=False), cuts) if arrays else []
        return torch.from_numpy(unique), [torch.from_numpy(part) for part in parts]
    words = np.zeros((num_positions + 63) // 64, np.uint64)
    before = np.empty(len(words), np.int64)
    for ids in arrays:
        _mark(words, ids)
    union = torch.empty(_count(words, before), dtype=torch.int64)
    _list(words, host_array(union))
    positions = [torch.empty(len(ids), dtype=torch.int64) for ids in arrays]
    for ids, out in zip(arrays, positions, strict=True):
        _rank(words, before, ids, host_array(out))
    return union, positions


def encode_bitmap(ids: Tensor, num_positions: int) -> Tensor:
    """One bit per position, bit i of byte b standing for 8 b + i: uint8 [ceil(num_positions / 8)]."""
    if on_gpu(ids):
        return gpu.encode_bitmap(ids, num_positions)
    words = np.zeros((num_positions + 63) // 64, np.uint64)
    _mark(words, host_array(ids))
    return torch.from_numpy(words.view(np.uint8)[: (num_positions + 7) // 8])


def decode_bitmap(bitmap: Tensor) -> Tensor:
    """The sorted ids (int64) of the ones in a bitmap of `encode_bitmap`."""
    if on_gpu(bitmap):
        return gpu.decode_bitmap(bitmap)
    words = np.zeros((bitmap.numel() + 7) // 8, np.uint64)
    words.view(np.uint8)[: bitmap.numel()] = host_array(bitmap)
    ids = torch.empty(_count(words, np.empty(len(words), np.int64)), dtype=torch.int64)
    _list(words, host_array(ids))
    return ids


@njit(nogil=True, cache=True)
def _partition(owners: Array, cursor: Array, order: Array) -> None:
    for i in range(owners.shape[0]):
        owner = owners[i]
        order[cursor[owner]] = i
        cursor[owner] += 1


def partition_by_owner(owners: Tensor, num_owners: int) -> tuple[Tensor, Tensor]:
    """Stable counting partition: entries per owner (int64 [n]) and the order (int64 [k]) that groups them by owner.

    owners: int32 [k] in [0, n). Histogram, exclusive scan, stable scatter: the result does not depend on timing.
    """
    if on_gpu(owners):
        return gpu.partition_by_owner(owners, num_owners)
    counts = np.bincount(host_array(owners), minlength=num_owners).astype(np.int64)
    order = torch.empty(owners.numel(), dtype=torch.int64)
    _partition(host_array(owners), np.cumsum(counts) - counts, host_array(order))
    return torch.from_numpy(counts), order
