"""Which elements a selection codec takes, and how their indices are written.

Magnitudes are compared as integers (fp32 bits without the sign); among equals the lower index wins. All functions
return ascending uint32 or int64 indices without duplicates.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from collectives.codecs.codec import ABS_MASK, INF_BITS, Array
from collectives.codecs.hashing import mix64
from collectives.errors import WireFormatError

SELECT_BLOCK = 1024
MAX_ROUNDS = 10


def largest_numpy(bits: Array, k: int) -> Array:
    """Indices of the k largest magnitudes of bits int32 [n]: the definition of an exact top-k."""
    order = np.lexsort((np.arange(bits.size), -(bits & ABS_MASK)))
    return np.sort(order[:k])


def largest(bits: Array, k: int) -> Array:
    """`largest_numpy` by three counting passes over the digits of the threshold."""
    if k == 0:
        return np.empty(0, np.int64)
    threshold, num_ties = _kth_largest(bits, k, np.zeros(2048, np.int64))
    out = np.empty(k, np.int64)
    return out[: _compact(bits, threshold, num_ties, out)]


def sampled(bits: Array, k: int, density: float, seed: int) -> Array:
    """About the k largest, at most k, never a zero: a threshold from a strided sample that starts at random.

    Far too many are cut to the k largest of them, far too few lower the threshold; what is left is cut to k in index
    order.
    """
    n = bits.size
    if k == 0:
        return np.empty(0, np.int64)
    stride = max(int(1 / max(0.01, 2 * density)), 1)
    sample = bits[mix64(seed) % stride % n :: stride] & ABS_MASK
    take = min(max(round(sample.size * density), 1), sample.size)
    threshold: int = max(int(np.partition(sample, sample.size - take)[sample.size - take]), 1)
    for _ in range(MAX_ROUNDS):
        count = int(_count(bits, np.int32(threshold)))
        if count >= 0.8 * k or threshold == 1:
            break
        threshold = max(int(np.float32(np.int32(threshold).view(np.float32) * np.float32(0.8)).view(np.int32)), 1)
    else:
        count = int(_count(bits, np.int32(threshold)))
    chosen = np.empty(count, np.int64)
    chosen = chosen[: _compact(bits, np.int32(threshold - 1), 0, chosen)]
    if count > 1.3 * k:
        return chosen[largest(bits[chosen], k)]
    return chosen[:k]


def per_block_numpy(bits: Array, k: int) -> Array:
    """The k largest of every 1024 consecutive elements (of the last block: as many as it has, if fewer)."""
    parts = [
        largest_numpy(bits[start : start + SELECT_BLOCK], k) + start for start in range(0, bits.size, SELECT_BLOCK)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def per_block(bits: Array, k: int) -> Array:
    """`per_block_numpy`, compiled."""
    out = np.empty(per_block_count(bits.size, k), np.int64)
    _per_block(bits, k, out)
    return out


def per_block_count(numel: int, k: int) -> int:
    """How many elements `per_block` takes of `numel`."""
    blocks, rest = divmod(numel, SELECT_BLOCK)
    return blocks * min(k, SELECT_BLOCK) + min(k, rest)


def finite(bits: Array) -> bool:
    """Whether no element is NaN or infinite."""
    return not _count(bits, INF_BITS)


# --- the three ways to write indices ----------------------------------------------------------------------------------


def write_bitmap(index: Array, numel: int) -> Array:
    """uint8 [ceil(numel/8)], lowest bit first."""
    mask = np.zeros(numel, np.bool_)
    mask[index] = True
    return np.packbits(mask, bitorder="little")


def read_bitmap(data: Array, numel: int, count: int) -> Array:
    """Indices of a bitmap that must have `count` bits set within the first numel."""
    index = np.flatnonzero(np.unpackbits(data, bitorder="little"))
    if index.size != count or (count and index[-1] >= numel):
        raise WireFormatError(f"bitmap marks {index.size} elements, the packet announces {count} of {numel}")
    return index


def read_words(data: Array, numel: int) -> Array:
    """Ascending uint32 indices, checked."""
    index = data.astype(np.int64)
    if index.size and ((np.diff(index) <= 0).any() or index[-1] >= numel):
        raise WireFormatError(f"{index.size} indices are not ascending, or reach beyond {numel} elements")
    return index


def write_positions(index: Array) -> Array:
    """uint16 positions inside blocks of 1024, for indices made by `per_block`."""
    return (index % SELECT_BLOCK).astype(np.uint16)


def read_positions(data: Array, numel: int, k: int) -> Array:
    """Indices from the positions of `per_block`, checked: ascending within each block, inside the tensor."""
    full = numel // SELECT_BLOCK * k
    rows = data[:full].astype(np.int64).reshape(-1, k)
    last = data[full:].astype(np.int64)
    bad = (np.diff(rows, axis=1) <= 0).any() or (np.diff(last) <= 0).any() or (rows >= SELECT_BLOCK).any()
    if bad or (last.size and last[-1] >= numel % SELECT_BLOCK):
        raise WireFormatError(
            f"positions inside blocks of {SELECT_BLOCK} are not ascending, or beyond {numel} elements"
        )
    rows += np.arange(len(rows))[:, None] * SELECT_BLOCK
    return np.concatenate([rows.reshape(-1), last + numel // SELECT_BLOCK * SELECT_BLOCK])


# --- compiled ---------------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _count(bits, threshold):  # type: ignore[no-untyped-def]
    """Elements of magnitude >= threshold. Counts in int32 runs, which become vectors."""
    total = 0
    for start in range(0, bits.shape[0], 1 << 20):
        part = bits[start : start + (1 << 20)]
        count = np.int32(0)
        for i in range(part.shape[0]):
            count += np.int32((part[i] & ABS_MASK) >= threshold)
        total += int(count)
    return total


@njit(nogil=True, cache=True)
def _kth_largest(bits, k, counts):  # type: ignore[no-untyped-def]
    """(t, ties): magnitudes > t plus `ties` of those equal to t make k elements. Radix select: 11, 11, 9 bits."""
    prefix, mask, left = np.int32(0), np.int32(0), k
    for digit in range(3):
        shift = np.int32(20 if digit == 0 else (9 if digit == 1 else 0))
        width = np.int32(2047 if digit < 2 else 511)
        counts[:] = 0
        for i in range(bits.shape[0]):
            m = bits[i] & ABS_MASK
            if (m & mask) == prefix:
                counts[(m >> shift) & width] += 1
        value = width
        while counts[value] < left:
            left -= counts[value]
            value -= np.int32(1)
        prefix |= np.int32(value << shift)
        mask |= np.int32(width << shift)
    return prefix, left


@njit(nogil=True, cache=True)
def _compact(bits, threshold, num_ties, out):  # type: ignore[no-untyped-def]
    """Indices of magnitudes > threshold, and of the first num_ties that equal it; returns how many."""
    count = 0
    for i in range(bits.shape[0]):
        m = bits[i] & ABS_MASK
        if m >= threshold and (m > threshold or num_ties > 0):
            if m == threshold:
                num_ties -= 1
            out[count] = i
            count += 1
    return count


@njit(nogil=True, cache=True)
def _per_block(bits, k, out):  # type: ignore[no-untyped-def]
    """Bisection on the bits: the counting loop is a vector loop, so 31 rounds over a block beat sorting it."""
    cursor = 0
    for start in range(0, bits.shape[0], SELECT_BLOCK):
        part = bits[start : start + SELECT_BLOCK]
        take = min(k, part.shape[0])
        threshold = np.int32(0)
        for bit in range(30, -1, -1):
            candidate = np.int32(threshold | (np.int32(1) << np.int32(bit)))
            count = np.int32(0)
            for i in range(part.shape[0]):
                count += np.int32((part[i] & ABS_MASK) >= candidate)
            if count >= take:
                threshold = candidate
        above = np.int32(0)
        for i in range(part.shape[0]):
            above += np.int32((part[i] & ABS_MASK) > threshold)
        ties = take - above
        for i in range(part.shape[0]):
            m = part[i] & ABS_MASK
            if m > threshold or (m == threshold and ties > 0):
                if m == threshold:
                    ties -= 1
                out[cursor] = start + i
                cursor += 1
