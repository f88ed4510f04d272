"""Block-scaled integers: int8 in blocks of 256 (the default codec) and int4 in blocks of 32.

The largest magnitude of a block is an integer maximum over the absolute fp32 bits: free of order, equal in NumPy,
numba and CUDA, and at or above 0x7f800000 exactly when the block holds a NaN or an infinity. Such a block gets a NaN
scale and zero payload. A block below 2^-118 gets scale 0: there 127/amax would overflow.

The loop forms matter: see the comments at the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import njit

from collectives.codecs.block import BlockCodec
from collectives.codecs.codec import ABS_MASK, INF_BITS, Array, Flag
from collectives.codecs.hadamard import rotate32, rotate32_numpy
from collectives.codecs.hashing import hash32, hash32_numpy
from collectives.codecs.lanes import AHEAD, LINE, prefetch, top32

TINY_BITS = np.int32(0x04800000)
"""2^-118 as fp32 bits."""


@dataclass(frozen=True, kw_only=True)
class Int8Block(BlockCodec):
    """scale = amax/127, q = rint(x * (127/amax)), ties to even. 8.125 bits, |error| <= amax/254 of the block."""

    name: ClassVar[str] = "int8b"
    codec_id: ClassVar[int] = 3
    min_numel: ClassVar[int] = 16
    align: ClassVar[int] = 256
    block: ClassVar[int] = 256
    row_width: ClassVar[int] = 256
    payload_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    scale_dtype: ClassVar[np.dtype[Any] | None] = np.dtype(np.float32)

    @property
    def fused_feedback(self) -> bool:
        return True

    def _encode_rows(
        self, x: Array, scales: Array, payload: Array, first: int, seed: tuple[np.uint32, np.uint32]
    ) -> int:
        kernel = int8_encode_numpy if self.reference else _int8_encode
        return int(kernel(x, x.view(np.int32), scales, payload))

    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        if self.reference:
            values = payload.astype(np.float32) * scales[:, None] * factor
            out[:] = out + values if accumulate else values
        else:
            _int8_decode(scales, payload, out, accumulate, factor)

    def _feedback_rows(
        self,
        x: Array,
        old: Array,
        new: Array,
        scales: Array,
        payload: Array,
        first: int,
        seed: tuple[np.uint32, np.uint32],
        scratch: Array,
    ) -> int:
        if self.reference:
            return super()._feedback_rows(x, old, new, scales, payload, first, seed, scratch)
        total = scratch[0, : self.block]
        return int(_int8_feedback(x, old, new, scales, payload, total, total.view(np.int32)))


def int8_encode_numpy(x: Array, bits: Array, scales: Array, payload: Array) -> int:
    """The format of int8b: x fp32 [k, 256] -> scales fp32 [k], payload int8 [k, 256]; returns the flags."""
    top = (bits & ABS_MASK).max(axis=1)
    amax = top.view(np.float32)
    usable = (top >= TINY_BITS) & (top < INF_BITS)
    safe = np.where(usable, amax, np.float32(1))
    inverse = np.where(usable, np.float32(127) / safe, np.float32(0))
    scales[:] = np.where(usable, safe / np.float32(127), np.float32(0))
    scales[top >= INF_BITS] = np.float32(np.nan)
    finite = np.where((top < INF_BITS)[:, None], x, np.float32(0))
    payload[:] = np.clip(np.rint(finite * inverse[:, None]), -127, 127).astype(np.int8)
    return Flag.NONFINITE if (top >= INF_BITS).any() else 0


# Row views of 2-D arrays, a literal trip count, int32 maxima and the cast float -> int32 -> int8 make these loops
# vectors; a flat index b*256+i, a float maximum or an unsigned mix costs a factor of two to ten. No clip is needed:
# |x| * (127/amax) rounds to at most 127 * (1 + 2^-22).


@njit(nogil=True, cache=True)
def _int8_encode(x, bits, scales, payload):  # type: ignore[no-untyped-def]
    flags, flat = 0, x.reshape(-1)
    for b in range(x.shape[0]):
        row, word, code = x[b], bits[b], payload[b]
        for i in range(0, 256, LINE):
            prefetch(flat, (b + AHEAD) * 256 + i)
        top = np.int32(0)
        for i in range(256):
            top = max(top, word[i] & ABS_MASK)
        inverse, scale = np.float32(0), np.float32(0)
        if top >= TINY_BITS:
            amax = np.int32(top).view(np.float32)
            inverse, scale = np.float32(127) / amax, amax / np.float32(127)
        if top < INF_BITS:
            scales[b] = scale
            for i in range(256):
                code[i] = np.int8(np.int32(np.rint(row[i] * inverse)))
        else:
            flags = 1
            scales[b] = np.float32(np.nan)
            code[:] = 0
    return flags


@njit(nogil=True, cache=True)
def _int8_feedback(x, old, new, scales, payload, total, total_bits):  # type: ignore[no-untyped-def]
    flags, flat, flat_old = 0, x.reshape(-1), old.reshape(-1)
    for b in range(x.shape[0]):
        row, before, after, code = x[b], old[b], new[b], payload[b]
        for i in range(0, 256, LINE):
            prefetch(flat, (b + AHEAD) * 256 + i)
            prefetch(flat_old, (b + AHEAD) * 256 + i)
        for i in range(256):
            total[i] = row[i] + before[i]
        top = np.int32(0)
        for i in range(256):
            top = max(top, total_bits[i] & ABS_MASK)
        inverse, scale = np.float32(0), np.float32(0)
        if top >= TINY_BITS:
            amax = np.int32(top).view(np.float32)
            inverse, scale = np.float32(127) / amax, amax / np.float32(127)
        if top < INF_BITS:
            scales[b] = scale
            for i in range(256):
                code[i] = np.int8(np.int32(np.rint(total[i] * inverse)))
            for i in range(256):
                after[i] = total[i] - np.rint(total[i] * inverse) * scale
        else:
            flags = 1
            scales[b] = np.float32(np.nan)
            code[:] = 0
            for i in range(256):
                after[i] = before[i]
    return flags


@njit(nogil=True, cache=True)
def _int8_decode(scales, payload, out, accumulate, factor):  # type: ignore[no-untyped-def]
    if accumulate:
        for b in range(out.shape[0]):
            scale, code, row = scales[b], payload[b], out[b]
            for i in range(256):
                row[i] += np.float32(code[i]) * scale * factor
    else:
        for b in range(out.shape[0]):
            scale, code, row = scales[b], payload[b], out[b]
            for i in range(256):
                row[i] = np.float32(code[i]) * scale * factor


@dataclass(frozen=True, kw_only=True)
class Int4Block(BlockCodec):
    """s = bf16(amax/7), q = rint(x * (1/s)) in [-7, 7]. 4.5 bits.

    Byte i of a block holds q+8 of element i in its low and of element i+16 in its high half.
    """

    name: ClassVar[str] = "int4b"
    codec_id: ClassVar[int] = 4
    min_numel: ClassVar[int] = 16
    align: ClassVar[int] = 32
    block: ClassVar[int] = 32
    row_width: ClassVar[int] = 16
    payload_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)
    scale_dtype: ClassVar[np.dtype[Any] | None] = np.dtype(np.uint16)

    stochastic: bool = False
    """Round up with the probability of the fraction, from a hash of (seed, element): unbiased, error 1.4x larger."""
    hadamard: bool = False
    """Rotate each block by H32/sqrt(32) first, which spreads outliers. Blocks beyond 6e37 then count as not finite."""

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def fused_feedback(self) -> bool:
        return not (self.stochastic or self.hadamard)

    def _tail_width(self, rest: int) -> int:
        return min(rest, 16) if not self.hadamard else 16

    def _encode_rows(
        self, x: Array, scales: Array, payload: Array, first: int, seed: tuple[np.uint32, np.uint32]
    ) -> int:
        if self.hadamard:
            rotated = np.empty_like(x)
            (rotate32_numpy if self.reference else rotate32)(x, rotated)
            x = rotated
        if self.reference:
            noise = first if self.stochastic else None
            return int4_encode_numpy(x, x.view(np.int32), scales, payload, noise, seed)
        words = payload.view(np.uint64)
        if self.stochastic:
            return int(_int4_encode_stochastic(x, x.view(np.int32), scales, payload, np.int64(first), *seed))
        return int(_int4_encode(x, x.view(np.int32), scales, words, *_scratch()))

    def _feedback_rows(
        self,
        x: Array,
        old: Array,
        new: Array,
        scales: Array,
        payload: Array,
        first: int,
        seed: tuple[np.uint32, np.uint32],
        scratch: Array,
    ) -> int:
        if self.reference or not self.fused_feedback:
            return super()._feedback_rows(x, old, new, scales, payload, first, seed, scratch)
        total = np.empty((INT4_TILE, 32), np.float32)
        bits = total.reshape(-1).view(np.int32)
        return int(_int4_feedback(x, old, new, scales, payload.view(np.uint64), total, bits, *_scratch()))

    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        if not (self.hadamard or self.reference):
            _int4_decode(scales, payload.view(np.uint64), out, accumulate, factor, *_scratch()[2:4])
            return
        values = int4_decode_numpy(scales, payload)
        if self.hadamard:
            rotated = values.copy()
            (rotate32_numpy if self.reference else rotate32)(rotated, values)
        out[:] = out + values * factor if accumulate else values * factor


def int4_scales_numpy(bits: Array) -> tuple[Array, Array, Array]:
    """Per block of bits int32 [k, 32]: scale as bf16 bits uint16, 1/scale fp32, whether it is finite."""
    top = (bits & ABS_MASK).max(axis=1)
    usable = (top >= TINY_BITS) & (top < INF_BITS)
    safe = np.where(usable, top.view(np.float32), np.float32(7))
    u = (safe / np.float32(7)).view(np.int32)
    rounded = (u + np.int32(0x7FFF) + ((u >> 16) & np.int32(1))) >> 16
    inverse = np.where(usable, np.float32(1) / (rounded << 16).view(np.float32), np.float32(0))
    scale = np.where(usable, rounded, 0).astype(np.uint16)
    scale[top >= INF_BITS] = 0x7FC0
    return scale, inverse.astype(np.float32), top < INF_BITS


def int4_encode_numpy(
    x: Array, bits: Array, scales: Array, payload: Array, first: int | None, seed: tuple[np.uint32, np.uint32]
) -> int:
    """The format of int4b; `first` is the element index of x[0, 0] for stochastic rounding, None for nearest."""
    scales[:], inverse, finite = int4_scales_numpy(bits)
    scaled = np.where(finite[:, None], x, np.float32(0)) * inverse[:, None]
    if first is None:
        q = np.rint(scaled)
    else:
        index = np.arange(first, first + x.size, dtype=np.int64).reshape(x.shape)
        u = (hash32_numpy(index, *seed) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        q = np.floor(scaled + u)
    codes = (np.clip(q, -7, 7).astype(np.int32) + 8).astype(np.uint8)
    payload[:] = codes[:, :16] | (codes[:, 16:] << np.uint8(4))
    payload[~finite] = 0
    return 0 if finite.all() else Flag.NONFINITE


def int4_decode_numpy(scales: Array, payload: Array) -> Array:
    """fp32 [k, 32] from scales uint16 [k] and payload uint8 [k, 16]."""
    codes = np.concatenate([payload & np.uint8(15), payload >> np.uint8(4)], axis=1).astype(np.int32) - 8
    scale = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return codes.astype(np.float32) * scale[:, None]


# Loops of 16 or 32 with a literal trip count are unrolled before they could become vectors. So each step is a long loop
# over a tile of 128 blocks: maxima, scales, codes as bytes (rows of run-time length), and the packing of two half-bytes on
# whole 64-bit words.

INT4_TILE = 128
HALF_BYTES = np.uint64(0x0F0F0F0F0F0F0F0F)


def _scratch() -> tuple[Array, Array, Array, Array]:
    """tops, inverses, codes, and the same as 64-bit words."""
    codes = np.empty((INT4_TILE, 32), np.uint8)
    return np.empty(INT4_TILE, np.int32), np.empty(INT4_TILE, np.float32), codes, codes.view(np.uint64)


@njit(nogil=True, cache=True)
def _int4_scales(tops, inverses, scales):  # type: ignore[no-untyped-def]
    """Scales and 1/scale of a tile; blocks that are zero or not finite get 0. Returns whether some are not finite."""
    num, amax, words = scales.shape[0], tops.view(np.float32), inverses.view(np.int32)
    for b in range(num):
        inverses[b] = amax[b] / np.float32(7)
    top = np.int32(0)
    for b in range(num):
        u = words[b]
        rounded = (u + np.int32(0x7FFF) + ((u >> np.int32(16)) & np.int32(1))) & np.int32(-65536)
        words[b] = rounded if (tops[b] >= TINY_BITS) & (tops[b] < INF_BITS) else np.int32(0)
        top = max(top, tops[b])
    for b in range(num):
        scales[b] = np.uint16(words[b] >> np.int32(16))
    for b in range(num):
        scale = inverses[b]
        inverses[b] = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
    return top >= INF_BITS


@njit(nogil=True, cache=True)
def _int4_encode(x, bits, scales, words, tops, inverses, codes, code_words):  # type: ignore[no-untyped-def]
    flags, flat = 0, bits.reshape(-1)
    for start in range(0, x.shape[0], INT4_TILE):
        num = min(INT4_TILE, x.shape[0] - start)
        for b in range(num):
            tops[b] = top32(flat, (start + b) * 32, ABS_MASK)
        nonfinite = _int4_scales(tops, inverses, scales[start : start + num])
        for b in range(num):
            row, code, inverse = x[start + b], codes[b], inverses[b]
            prefetch(flat, (start + INT4_TILE + b) * 32)
            prefetch(flat, (start + INT4_TILE + b) * 32 + LINE)
            for i in range(row.shape[0]):
                code[i] = np.uint8(np.int32(np.rint(row[i] * inverse)) + np.int32(8))
        for b in range(num):
            words[start + b, 0] = code_words[b, 0] | (code_words[b, 2] << np.uint64(4))
            words[start + b, 1] = code_words[b, 1] | (code_words[b, 3] << np.uint64(4))
        if nonfinite:
            flags = 1
            for b in range(num):
                if tops[b] >= INF_BITS:
                    scales[start + b] = np.uint16(0x7FC0)
                    words[start + b, 0] = 0
                    words[start + b, 1] = 0
    return flags


@njit(nogil=True, cache=True)
def _int4_feedback(x, old, new, scales, words, total, bits, tops, inverses, codes, code_words):  # type: ignore[no-untyped-def]
    flags, flat, flat_old = 0, x.reshape(-1), old.reshape(-1)
    for start in range(0, x.shape[0], INT4_TILE):
        num = min(INT4_TILE, x.shape[0] - start)
        for b in range(num):
            row, before, added = x[start + b], old[start + b], total[b]
            for i in range(0, 32, LINE):
                prefetch(flat, (start + INT4_TILE + b) * 32 + i)
                prefetch(flat_old, (start + INT4_TILE + b) * 32 + i)
            for i in range(row.shape[0]):
                added[i] = row[i] + before[i]
        for b in range(num):
            tops[b] = top32(bits, b * 32, ABS_MASK)
        if _int4_scales(tops, inverses, scales[start : start + num]):
            flags = 1
        for b in range(num):
            added, code, inverse = total[b], codes[b], inverses[b]
            for i in range(added.shape[0]):
                code[i] = np.uint8(np.int32(np.rint(added[i] * inverse)) + np.int32(8))
        for b in range(num):
            scale = np.int32(np.int32(scales[start + b]) << np.int32(16)).view(np.float32)
            added, code, after = total[b], codes[b], new[start + b]
            if tops[b] < INF_BITS:
                for i in range(added.shape[0]):
                    after[i] = added[i] - np.float32(np.int32(code[i]) - np.int32(8)) * scale
                words[start + b, 0] = code_words[b, 0] | (code_words[b, 2] << np.uint64(4))
                words[start + b, 1] = code_words[b, 1] | (code_words[b, 3] << np.uint64(4))
            else:
                scales[start + b] = np.uint16(0x7FC0)
                words[start + b, 0] = 0
                words[start + b, 1] = 0
                after[:] = old[start + b]
    return flags


@njit(nogil=True, cache=True)
def _int4_encode_stochastic(x, bits, scales, payload, first, low, high):  # type: ignore[no-untyped-def]
    flags, flat = 0, bits.reshape(-1)
    tops, inverses = np.empty(1, np.int32), np.empty(1, np.float32)
    codes = np.empty(32, np.int32)
    for b in range(x.shape[0]):
        tops[0] = top32(flat, b * 32, ABS_MASK)
        if _int4_scales(tops, inverses, scales[b : b + 1]):
            flags = 1
            scales[b] = np.uint16(0x7FC0)
            payload[b, :] = 0
            continue
        for i in range(32):
            u = np.float32(hash32(first + b * 32 + i, low, high) >> np.uint32(8)) * np.float32(2.0**-24)
            q = np.int32(np.floor(x[b, i] * inverses[0] + u))
            codes[i] = min(max(q, np.int32(-7)), np.int32(7)) + np.int32(8)
        for i in range(16):
            payload[b, i] = np.uint8(codes[i] | (codes[i + 16] << np.int32(4)))
    return flags


@njit(nogil=True, cache=True)
def _int4_decode(scales, words, out, accumulate, factor, codes, code_words):  # type: ignore[no-untyped-def]
    for start in range(0, out.shape[0], INT4_TILE):
        num = min(INT4_TILE, out.shape[0] - start)
        for b in range(num):
            first, second = words[start + b, 0], words[start + b, 1]
            code_words[b, 0] = first & HALF_BYTES
            code_words[b, 1] = second & HALF_BYTES
            code_words[b, 2] = (first >> np.uint64(4)) & HALF_BYTES
            code_words[b, 3] = (second >> np.uint64(4)) & HALF_BYTES
        if accumulate:
            for b in range(num):
                scale = np.int32(np.int32(scales[start + b]) << np.int32(16)).view(np.float32)
                row, code = out[start + b], codes[b]
                for i in range(row.shape[0]):
                    row[i] += np.float32(np.int32(code[i]) - np.int32(8)) * scale * factor
        else:
            for b in range(num):
                scale = np.int32(np.int32(scales[start + b]) << np.int32(16)).view(np.float32)
                row, code = out[start + b], codes[b]
                for i in range(row.shape[0]):
                    row[i] = np.float32(np.int32(code[i]) - np.int32(8)) * scale * factor
