"""Counter-based random numbers: the same on every rank, on a retry, and in NumPy, numba and CUDA.

A number is a hash of (seed, index), so no generator state exists that could get out of step.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, np.dtype[Any]]

M64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Murmur3's 64-bit finaliser."""
    value &= M64
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & M64
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & M64
    return value ^ (value >> 33)


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 64-bit seed for one use of a random codec: derive_seed(run_seed, step, parameter_name, chunk)."""
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        seed = mix64(seed ^ mix64(number + 0x9E3779B97F4A7C15))
    return seed & M64


def keys(seed: int) -> tuple[np.uint32, np.uint32]:
    """The two 32-bit keys of `hash32`."""
    mixed = mix64(seed)
    return np.uint32(mixed & 0xFFFFFFFF), np.uint32(mixed >> 32)


def hash32_numpy(index: Array, low: np.uint32, high: np.uint32) -> Array:
    """uint32 [n]: two rounds of Murmur3's 32-bit finaliser over the low 32 bits of `index`, keyed."""
    h = index.astype(np.uint32) ^ low
    for key in (high, np.uint32(0)):
        h = h ^ (h >> np.uint32(16))
        h = h * np.uint32(0x85EBCA6B)
        h = h ^ (h >> np.uint32(13))
        h = h * np.uint32(0xC2B2AE35)
        h = h ^ (h >> np.uint32(16))
        h = h ^ key
    return h


@njit(nogil=True, cache=True, inline="always")
def _finalise(h):  # type: ignore[no-untyped-def]
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit(nogil=True, cache=True, inline="always")
def hash32(index, low, high):  # type: ignore[no-untyped-def]
    """One uint32, equal to `hash32_numpy`."""
    return _finalise(np.uint32(_finalise(np.uint32(np.uint32(index) ^ low)) ^ high))
