"""A keyed bijection of [0, N) and the owner function built on it.

owner(x) = pi(x) mod n and slot(x) = pi(x) div n for a permutation pi: owned sets differ by at most one position, slots
are unique and dense, and x = pi^-1(slot * n + owner) needs no table. pi is a Feistel network of four rounds over
ceil(log2 N) bits with cycle walking; the round function is the finaliser of 32-bit MurmurHash3 (public domain).
Affine maps would be cheaper and are not used: strides that share factors with n collapse onto one owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.kernels.host import Array, Scalar, host_array
from collectives.kernels.twins import finalise

NUM_ROUNDS = 4

_MASK32, _C1, _C2 = np.uint64(0xFFFFFFFF), np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_S13, _S16 = np.uint64(13), np.uint64(16)


@njit(nogil=True, cache=True)
def _mix(half: Scalar, key: Scalar) -> Scalar:
    h = half ^ key
    h ^= h >> _S16
    h = (h * _C1) & _MASK32
    h ^= h >> _S13
    h = (h * _C2) & _MASK32
    return h ^ (h >> _S16)


@njit(nogil=True, cache=True)
def _permute(
    x: Scalar, num_positions: Scalar, low_bits: Scalar, high_mask: Scalar, low_mask: Scalar, keys: Array
) -> Scalar:
    while True:
        high, low = x >> low_bits, x & low_mask
        high ^= _mix(low, keys[0]) & high_mask
        low ^= _mix(high, keys[1]) & low_mask
        high ^= _mix(low, keys[2]) & high_mask
        low ^= _mix(high, keys[3]) & low_mask
        x = (high << low_bits) | low
        if x < num_positions:
            return x


@njit(nogil=True, cache=True)
def _invert(
    y: Scalar, num_positions: Scalar, low_bits: Scalar, high_mask: Scalar, low_mask: Scalar, keys: Array
) -> Scalar:
    while True:
        high, low = y >> low_bits, y & low_mask
        low ^= _mix(high, keys[3]) & low_mask
        high ^= _mix(low, keys[2]) & high_mask
        low ^= _mix(high, keys[1]) & low_mask
        high ^= _mix(low, keys[0]) & high_mask
        y = (high << low_bits) | low
        if y < num_positions:
            return y


@njit(nogil=True, cache=True)
def _owner_slot(
    ids: Array,
    n: Scalar,
    num: Scalar,
    low_bits: Scalar,
    high: Scalar,
    low: Scalar,
    keys: Array,
    owners: Array,
    slots: Array,
) -> None:
    for i in range(ids.shape[0]):
        image = _permute(np.uint64(ids[i]), num, low_bits, high, low, keys)
        slot = image // n
        slots[i] = np.int64(slot)
        owners[i] = np.int32(image - slot * n)


@njit(nogil=True, cache=True)
def _ids_of(
    slots: Array,
    owner: Scalar,
    n: Scalar,
    num: Scalar,
    low_bits: Scalar,
    high: Scalar,
    low: Scalar,
    keys: Array,
    ids: Array,
) -> None:
    for i in range(slots.shape[0]):
        ids[i] = np.int64(_invert(np.uint64(slots[i]) * n + owner, num, low_bits, high, low, keys))


class Owners(Protocol):
    """An owner map: every position of [0, N) has one owner and, there, one slot."""

    def split(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Owner (int32 [k]) and slot (int64 [k]) of each id (int64 [k] in [0, num_positions))."""

    def join(self, owner: int, slots: Tensor) -> Tensor:
        """The ids (int64 [k]) at these slots of one owner: the inverse of `split`."""

    def num_slots(self, owner: int) -> int:
        """How many positions this owner holds."""


@dataclass(frozen=True)
class HashedOwners:
    """The hashed owner map of `num_positions` positions over `num_owners` owners; equal seeds give equal maps.

    num_positions in [1, 2**63]: halves then fit the 32-bit round function.
    """

    num_positions: int
    num_owners: int
    seed: int = 0

    def keys(self) -> np.ndarray:
        """The round keys, uint64 [4] below 2**32, derived from the seed."""
        words = [(self.seed + 0x9E3779B9 * (t + 1)) & 0xFFFFFFFF for t in range(NUM_ROUNDS)]
        return np.array([finalise(word) for word in words], np.uint64)

    def _network(self) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.ndarray]:
        bits = (self.num_positions - 1).bit_length()
        high_bits, low_bits = bits // 2, bits - bits // 2
        masks = np.uint64((1 << high_bits) - 1), np.uint64((1 << low_bits) - 1)
        return np.uint64(self.num_positions), np.uint64(low_bits), *masks, self.keys()

    def split(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `Owners`."""
        owners, slots = torch.empty(ids.numel(), dtype=torch.int32), torch.empty(ids.numel(), dtype=torch.int64)
        _owner_slot(
            host_array(ids), np.uint64(self.num_owners), *self._network(), host_array(owners), host_array(slots)
        )
        return owners, slots

    def join(self, owner: int, slots: Tensor) -> Tensor:
        """See `Owners`."""
        ids = torch.empty(slots.numel(), dtype=torch.int64)
        _ids_of(host_array(slots), np.uint64(owner), np.uint64(self.num_owners), *self._network(), host_array(ids))
        return ids

    def num_slots(self, owner: int) -> int:
        """How many positions this owner holds: the floor or the ceiling of num_positions / num_owners."""
        return (self.num_positions - owner + self.num_owners - 1) // self.num_owners


@dataclass(frozen=True)
class RangeOwners:
    """The contiguous owner map: owner j holds [j N / n, (j + 1) N / n). Skewed inputs overload single owners."""

    num_positions: int
    num_owners: int

    def _starts(self) -> Tensor:
        cuts = [self.num_positions * j // self.num_owners for j in range(self.num_owners + 1)]
        return torch.tensor(cuts, dtype=torch.int64)

    def split(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `Owners`."""
        starts = self._starts()
        owners = torch.searchsorted(starts[1:], ids, right=True)
        return owners.to(torch.int32), ids - starts[owners]

    def join(self, owner: int, slots: Tensor) -> Tensor:
        """See `Owners`."""
        return slots + self.num_positions * owner // self.num_owners

    def num_slots(self, owner: int) -> int:
        """See `Owners`."""
        return self.num_positions * (owner + 1) // self.num_owners - self.num_positions * owner // self.num_owners
