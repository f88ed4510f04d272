"""Block-scaled integers: int8 in blocks of 256 (the default codec) and int4 in blocks of 32.

The largest magnitude of a block is an integer maximum over the absolute fp32 bits: free of order, equal in NumPy,
numba and CUDA, and at or above 0x7f800000 exactly when the block holds a NaN or an infinity. Such a block gets a NaN
scale and zero payload. A block below 2^-118 gets scale 0: there 127/amax would overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import njit

from collectives.codecs.block import BlockCodec, leaves_caches
from collectives.codecs.codec import ABS_MASK, INF_BITS, Array, Flag
from collectives.codecs.hadamard import rotate32, rotate32_numpy
from collectives.codecs.hashing import hash32, hash32_numpy
from collectives.codecs.lanes import (
    AHEAD,
    LANES,
    LINE,
    floats,
    high4,
    larger,
    largest,
    load,
    low4,
    magnitude,
    minus,
    narrow,
    nearest,
    pack4,
    plus,
    prefetch,
    scaled,
    store,
    stream,
    wide,
)

TINY_BITS = np.int32(0x04800000)
"""2^-118 as fp32 bits."""
INT4_AHEAD = AHEAD * 8
"""Blocks of 32."""


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
    streams: ClassVar[bool] = True

    @property
    def fused_feedback(self) -> bool:
        return True

    def _encode_rows(
        self, x: Array, scales: Array, payload: Array, first: int, seed: tuple[np.uint32, np.uint32]
    ) -> int:
        if self.reference:
            return int8_encode_numpy(x, x.view(np.int32), scales, payload)
        return int(_int8_encode(x.reshape(-1), scales, payload.reshape(-1)))

    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        if self.reference:
            values = payload.astype(np.float32) * scales[:, None] * factor
            out[:] = out + values if accumulate else values
        else:
            past = leaves_caches(out)
            _int8_decode(scales, payload.reshape(-1), out.reshape(-1), accumulate, past, factor)

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
        rows = (array.reshape(-1) for array in (x, old, new))
        return int(_int8_feedback(*rows, scales, payload.reshape(-1), scratch[0]))


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


@njit(nogil=True, cache=True)
def _int8_scale(top):  # type: ignore[no-untyped-def]
    """scale and 127/amax from the largest magnitude of a block."""
    if top < TINY_BITS:
        return np.float32(0), np.float32(0)
    amax = np.int32(top).view(np.float32)
    return amax / np.float32(127), np.float32(127) / amax


# No clip is needed: |x| * (127/amax) rounds to at most 127 * (1 + 2^-22).


@njit(nogil=True, cache=True)
def _int8_encode(x, scales, payload):  # type: ignore[no-untyped-def]
    flags = 0
    for b in range(scales.shape[0]):
        start, stop = b * 256, b * 256 + 256
        tops = magnitude(load(x, start))
        for i in range(start, stop, LANES):
            prefetch(x, i + AHEAD * 256)
            tops = larger(tops, magnitude(load(x, i)))
        top = largest(tops)
        if top >= INF_BITS:
            flags = 1
            scales[b] = np.float32(np.nan)
            payload[start:stop] = 0
            continue
        scales[b], inverse = _int8_scale(top)
        for i in range(start, stop, LANES):
            store(payload, i, narrow(nearest(scaled(load(x, i), inverse))))
    return flags


@njit(nogil=True, cache=True)
def _int8_feedback(x, old, new, scales, payload, total):  # type: ignore[no-untyped-def]
    flags = 0
    for b in range(scales.shape[0]):
        start = b * 256
        tops = magnitude(plus(load(x, start), load(old, start)))
        for i in range(0, 256, LANES):
            prefetch(x, start + i + AHEAD * 256)
            prefetch(old, start + i + AHEAD * 256)
            added = plus(load(x, start + i), load(old, start + i))
            store(total, i, added)
            tops = larger(tops, magnitude(added))
        top = largest(tops)
        if top >= INF_BITS:
            flags = 1
            scales[b] = np.float32(np.nan)
            payload[start : start + 256] = 0
            new[start : start + 256] = old[start : start + 256]
            continue
        scale, inverse = _int8_scale(top)
        scales[b] = scale
        for i in range(0, 256, LANES):
            added = load(total, i)
            code = nearest(scaled(added, inverse))
            store(payload, start + i, narrow(code))
            store(new, start + i, minus(added, scaled(floats(code), scale)))
    return flags


@njit(nogil=True, cache=True)
def _int8_decode(scales, payload, out, accumulate, past, factor):  # type: ignore[no-untyped-def]
    for b in range(scales.shape[0]):
        scale = scales[b]
        for i in range(b * 256, b * 256 + 256, LANES):
            values = scaled(scaled(floats(wide(load(payload, i))), scale), factor)
            if accumulate:
                store(out, i, plus(load(out, i), values))
            elif past:
                stream(out, i, values)
            else:
                store(out, i, values)


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
    streams: ClassVar[bool] = True

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
        if self.stochastic:
            return int(_int4_encode_stochastic(x.reshape(-1), scales, payload.reshape(-1), np.int64(first), *seed))
        return int(_int4_encode(x.reshape(-1), scales, payload.reshape(-1)))

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
        rows = (array.reshape(-1) for array in (x, old, new))
        return int(_int4_feedback(*rows, scales, payload.reshape(-1)))

    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        if not (self.hadamard or self.reference):
            past = leaves_caches(out)
            _int4_decode(scales, payload.reshape(-1), out.reshape(-1), accumulate, past, factor)
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


@njit(nogil=True, cache=True)
def _int4_scale(top):  # type: ignore[no-untyped-def]
    """scale as bf16 bits, the same as fp32, and 1/scale, from the largest magnitude of a block."""
    if top < TINY_BITS:
        return np.uint16(0), np.float32(0), np.float32(0)
    u = np.float32(np.int32(top).view(np.float32) / np.float32(7)).view(np.int32)
    rounded = (u + np.int32(0x7FFF) + ((u >> np.int32(16)) & np.int32(1))) & np.int32(-65536)
    scale = np.int32(rounded).view(np.float32)
    return np.uint16(rounded >> np.int32(16)), scale, np.float32(1) / scale


@njit(nogil=True, cache=True)
def _int4_encode(x, scales, payload):  # type: ignore[no-untyped-def]
    flags = 0
    for b in range(scales.shape[0]):
        prefetch(x, (b + INT4_AHEAD) * 32)
        prefetch(x, (b + INT4_AHEAD) * 32 + LINE)
        low, high = load(x, b * 32), load(x, b * 32 + 16)
        top = largest(larger(magnitude(low), magnitude(high)))
        if top >= INF_BITS:
            flags = 1
            scales[b] = np.uint16(0x7FC0)
            payload[b * 16 : b * 16 + 16] = 0
            continue
        scales[b], _, inverse = _int4_scale(top)
        store(payload, b * 16, pack4(nearest(scaled(low, inverse)), nearest(scaled(high, inverse))))
    return flags


@njit(nogil=True, cache=True)
def _int4_feedback(x, old, new, scales, payload):  # type: ignore[no-untyped-def]
    flags = 0
    for b in range(scales.shape[0]):
        start = b * 32
        for i in (start, start + LINE):
            prefetch(x, i + INT4_AHEAD * 32)
            prefetch(old, i + INT4_AHEAD * 32)
        low, high = plus(load(x, start), load(old, start)), plus(load(x, start + 16), load(old, start + 16))
        top = largest(larger(magnitude(low), magnitude(high)))
        if top >= INF_BITS:
            flags = 1
            scales[b] = np.uint16(0x7FC0)
            payload[b * 16 : b * 16 + 16] = 0
            new[start : start + 32] = old[start : start + 32]
            continue
        scales[b], scale, inverse = _int4_scale(top)
        low_code, high_code = nearest(scaled(low, inverse)), nearest(scaled(high, inverse))
        store(payload, b * 16, pack4(low_code, high_code))
        store(new, start, minus(low, scaled(floats(low_code), scale)))
        store(new, start + 16, minus(high, scaled(floats(high_code), scale)))
    return flags


@njit(nogil=True, cache=True)
def _int4_encode_stochastic(x, scales, payload, first, low, high):  # type: ignore[no-untyped-def]
    flags = 0
    codes = np.empty(32, np.int32)
    for b in range(scales.shape[0]):
        start = b * 32
        top = largest(larger(magnitude(load(x, start)), magnitude(load(x, start + 16))))
        if top >= INF_BITS:
            flags = 1
            scales[b] = np.uint16(0x7FC0)
            payload[b * 16 : b * 16 + 16] = 0
            continue
        scales[b], _, inverse = _int4_scale(top)
        for i in range(32):
            u = np.float32(hash32(first + start + i, low, high) >> np.uint32(8)) * np.float32(2.0**-24)
            codes[i] = min(max(np.int32(np.floor(x[start + i] * inverse + u)), np.int32(-7)), np.int32(7))
        store(payload, b * 16, pack4(load(codes, 0), load(codes, 16)))
    return flags


@njit(nogil=True, cache=True)
def _int4_decode(scales, payload, out, accumulate, past, factor):  # type: ignore[no-untyped-def]
    for b in range(scales.shape[0]):
        scale = np.int32(np.int32(scales[b]) << np.int32(16)).view(np.float32)
        codes = load(payload, b * 16)
        low = scaled(scaled(floats(low4(codes)), scale), factor)
        high = scaled(scaled(floats(high4(codes)), scale), factor)
        if accumulate:
            store(out, b * 32, plus(load(out, b * 32), low))
            store(out, b * 32 + 16, plus(load(out, b * 32 + 16), high))
        elif past:
            stream(out, b * 32, low)
            stream(out, b * 32 + 16, high)
        else:
            store(out, b * 32, low)
            store(out, b * 32 + 16, high)
