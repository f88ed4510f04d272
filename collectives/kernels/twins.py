"""NumPy definitions of the kernels, slow and plain: what a kernel on any device must reproduce bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def nonzero_rows(matrix: np.ndarray) -> np.ndarray:
    """Rows of [R, W] with any value != 0 (NaN counts, -0.0 does not): int64 [k]."""
    return np.flatnonzero((matrix != 0).any(axis=1))


def sum_rows(num_rows: int, positions: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of all contributions at their positions, added in order in float32: float32 [num_rows, W].

    A row's first contribution is assigned, not added to zero.
    """
    total = np.zeros((num_rows, values[0].shape[1]), np.float32)
    fresh = np.ones(num_rows, bool)
    for where, rows in zip(positions, values, strict=True):
        for position, row in zip(where, rows.astype(np.float32), strict=True):
            total[position] = row if fresh[position] else total[position] + row
            fresh[position] = False
    return total


def union_ids(lists: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The sorted unique union, and each list's positions in it."""
    union = np.unique(np.concatenate(lists))
    return union, [np.searchsorted(union, ids) for ids in lists]


def bitmap(ids: np.ndarray, num_positions: int) -> np.ndarray:
    """Bit i of byte b stands for position 8 b + i: uint8 [ceil(num_positions / 8)]."""
    flags = np.zeros(num_positions, np.uint8)
    flags[ids] = 1
    return np.packbits(flags, bitorder="little")


def gaps(ids: np.ndarray) -> bytes:
    """id[0] and id[i] - id[i-1] - 1 in little-endian base 128, high bit = more follows."""
    coded = bytearray()
    for gap in np.diff(ids, prepend=-1) - 1:
        rest = int(gap)
        while rest >= 128:
            coded.append(rest & 127 | 128)
            rest >>= 7
        coded.append(rest)
    return bytes(coded)


def partition_by_owner(owners: np.ndarray, num_owners: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries per owner and the stable order that groups them."""
    return np.bincount(owners, minlength=num_owners), np.argsort(owners, kind="stable")


def permute(x: int, num_positions: int, keys: Sequence[int]) -> int:
    """The Feistel permutation of `hashing.HashedOwners`: B = ceil(log2 N) bits, the low half the larger one."""
    bits = (num_positions - 1).bit_length()
    low_bits = bits - bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits // 2) - 1
    while True:
        high, low = x >> low_bits, x & low_mask
        for turn, key in enumerate(keys):
            if turn % 2 == 0:
                high ^= finalise(low ^ key) & high_mask
            else:
                low ^= finalise(high ^ key) & low_mask
        x = high << low_bits | low
        if x < num_positions:
            return x


def finalise(h: int) -> int:
    """The finaliser of 32-bit MurmurHash3 (Austin Appleby, public domain)."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16
