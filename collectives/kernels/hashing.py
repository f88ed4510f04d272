"""A keyed bijection of [0, N) and the owner function built on it.

owner(x) = pi(x) mod n and slot(x) = pi(x) div n for a permutation pi: owned sets differ by at most one position, slots
are unique and dense, and x = pi^-1(slot * n + owner) needs no table. pi is a Feistel network of four rounds over
ceil(log2 N) bits with cycle walking; the round function is the finaliser of 32-bit MurmurHash3 (public domain).
Affine maps would be cheaper and are not used: strides that share factors with n collapse onto one owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.kernels import gpu
from collectives.kernels.cuda import on_gpu
from collectives.kernels.host import Array, Scalar, host_array
from collectives.kernels.twins import finalise

NUM_ROUNDS = 4

_C1, _C2, _S13, _S16 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(13), np.uint32(16)


@njit(nogil=True, cache=True)
def _mix(half: Scalar, key: Scalar) -> Scalar:
    h = np.uint32(half ^ key)
    h = np.uint32(h ^ np.uint32(h >> _S16))
    h = np.uint32(h * _C1)
    h = np.uint32(h ^ np.uint32(h >> _S13))
    h = np.uint32(h * _C2)
    return np.uint32(h ^ np.uint32(h >> _S16))


@njit(nogil=True, cache=True)
def _permute(x: Array, low_bits: Scalar, high_mask: Scalar, low_mask: Scalar, keys: Array) -> None:
    """One evaluation in place. Both this and `_invert` stay one straight line over uint32 halves, so they vectorise."""
    key0, key1, key2, key3 = keys[0], keys[1], keys[2], keys[3]
    for i in range(x.shape[0]):
        high, low = np.uint32(x[i] >> low_bits), np.uint32(np.uint32(x[i]) & low_mask)
        high = np.uint32(high ^ np.uint32(_mix(low, key0) & high_mask))
        low = np.uint32(low ^ np.uint32(_mix(high, key1) & low_mask))
        high = np.uint32(high ^ np.uint32(_mix(low, key2) & high_mask))
        low = np.uint32(low ^ np.uint32(_mix(high, key3) & low_mask))
        x[i] = (np.uint64(high) << low_bits) | np.uint64(low)


@njit(nogil=True, cache=True)
def _invert(y: Array, low_bits: Scalar, high_mask: Scalar, low_mask: Scalar, keys: Array) -> None:
    key0, key1, key2, key3 = keys[0], keys[1], keys[2], keys[3]
    for i in range(y.shape[0]):
        high, low = np.uint32(y[i] >> low_bits), np.uint32(np.uint32(y[i]) & low_mask)
        low = np.uint32(low ^ np.uint32(_mix(high, key3) & low_mask))
        high = np.uint32(high ^ np.uint32(_mix(low, key2) & high_mask))
        low = np.uint32(low ^ np.uint32(_mix(high, key1) & low_mask))
        high = np.uint32(high ^ np.uint32(_mix(low, key0) & high_mask))
        y[i] = (np.uint64(high) << low_bits) | np.uint64(low)


@njit(nogil=True, cache=True)
def _split(images: Array, num_owners: Scalar, owners: Array, slots: Array) -> None:
    for i in range(images.shape[0]):
        slot = images[i] // num_owners
        slots[i] = slot
        owners[i] = images[i] - slot * num_owners


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
        """The round keys, uint32 [4], derived from the seed."""
        words = [(self.seed + 0x9E3779B9 * (t + 1)) & 0xFFFFFFFF for t in range(NUM_ROUNDS)]
        return np.array([finalise(word) for word in words], np.uint32)

    def split(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `Owners`."""
        if on_gpu(ids):
            return gpu.hashed_split(ids, self.num_positions, self.num_owners, self._network())
        images = self._walk(_permute, host_array(ids).astype(self._word))
        owners, slots = torch.empty(ids.numel(), dtype=torch.int32), torch.empty(ids.numel(), dtype=torch.int64)
        _split(images, self._word(self.num_owners), host_array(owners), host_array(slots))
        return owners, slots

    def join(self, owner: int, slots: Tensor) -> Tensor:
        """See `Owners`."""
        if on_gpu(slots):
            return gpu.hashed_join(owner, slots, self.num_positions, self.num_owners, self._network())
        images = (host_array(slots) * self.num_owners + owner).astype(self._word)
        return torch.from_numpy(self._walk(_invert, images).astype(np.int64))

    @property
    def _word(self) -> type[np.uint32] | type[np.uint64]:
        """32-bit words where positions fit: four times faster."""
        return np.uint32 if self.num_positions <= 1 << 32 else np.uint64

    def _walk(self, evaluate: Callable[..., None], words: Array) -> Array:
        """Evaluate in place, and again where the result lies outside [0, N); below two evaluations on average."""
        low_bits, high_mask, low_mask, *keys = self._network()
        network = (np.uint64(low_bits), high_mask, low_mask, np.array(keys, np.uint32))
        evaluate(words, *network)
        outside = np.flatnonzero(words >= self.num_positions)
        while len(outside):
            strays = words[outside]
            evaluate(strays, *network)
            words[outside] = strays
            outside = outside[strays >= self.num_positions]
        return words

    def _network(self) -> list[np.uint32]:
        """Bits of the low half, masks of the high and the low half, and the round keys."""
        bits = (self.num_positions - 1).bit_length()
        high_bits, low_bits = bits // 2, bits - bits // 2
        return [np.uint32(low_bits), np.uint32((1 << high_bits) - 1), np.uint32((1 << low_bits) - 1), *self.keys()]

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
        starts = self._starts().to(ids.device)
        owners = torch.searchsorted(starts[1:], ids, right=True)
        return owners.to(torch.int32), ids - starts[owners]

    def join(self, owner: int, slots: Tensor) -> Tensor:
        """See `Owners`."""
        return slots + self.num_positions * owner // self.num_owners

    def num_slots(self, owner: int) -> int:
        """See `Owners`."""
        return self.num_positions * (owner + 1) // self.num_owners - self.num_positions * owner // self.num_owners
