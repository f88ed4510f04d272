"""Block-scaled 8-bit floats: e4m3 (3 bits of mantissa, largest 448) and e5m2 (2 bits, largest 57344), blocks of 256.

scale = amax/max; values are rounded to nearest even by integer arithmetic on the fp32 bits and saturate. On bell-shaped
blocks this is worse than int8 at the same size; it pays where the values of one block span many powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numba import njit

from collectives.codecs.block import BlockCodec
from collectives.codecs.codec import ABS_MASK, INF_BITS, Array, Flag
from collectives.codecs.lanes import AHEAD, LINE, prefetch

TINY_BITS = np.int32(0x08800000)
"""2^-110 as fp32 bits: below it amax/57344 would be subnormal and 57344/amax overflow. Such blocks become zero."""

Layout = tuple[np.int32, np.int32, np.int32, np.float32, np.float32]

LAYOUTS: dict[str, Layout] = {
    # bits dropped from the fp32 mantissa, exponent bias, largest code, largest value, 1/(smallest subnormal)
    "e4m3": (np.int32(20), np.int32(7), np.int32(0x7E), np.float32(448), np.float32(2.0**9)),
    "e5m2": (np.int32(21), np.int32(15), np.int32(0x7B), np.float32(57344), np.float32(2.0**16)),
}


@dataclass(frozen=True, kw_only=True)
class Fp8Block(BlockCodec):
    """8.125 bits. Relative error of a value up to 2^-4 (e4m3) or 2^-3 (e5m2) within the format's range."""

    name: ClassVar[str] = "fp8b"
    codec_id: ClassVar[int] = 5
    min_numel: ClassVar[int] = 16
    align: ClassVar[int] = 256
    block: ClassVar[int] = 256
    row_width: ClassVar[int] = 256
    payload_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)
    scale_dtype: ClassVar[np.dtype[Any] | None] = np.dtype(np.float32)

    form: Literal["e4m3", "e5m2"] = "e4m3"
    """e4m3 for values, e5m2 for gradients of wide range."""

    def _encode_rows(
        self, x: Array, scales: Array, payload: Array, first: int, seed: tuple[np.uint32, np.uint32]
    ) -> int:
        layout = LAYOUTS[self.form]
        if self.reference:
            return fp8_encode_numpy(x, scales, payload, *layout)
        scaled = np.empty(256, np.float32)
        return int(_fp8_encode(x, x.view(np.int32), scales, payload, scaled, scaled.view(np.int32), *layout))

    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        shift, bias, _, _, steps = LAYOUTS[self.form]
        if self.reference:
            values = fp8_decode_numpy(payload, shift, bias, steps) * scales[:, None] * factor
            out[:] = out + values if accumulate else values
        else:
            _fp8_decode(scales, payload, out, accumulate, factor, shift, bias, np.float32(1) / steps)


def fp8_encode_numpy(
    x: Array,
    scales: Array,
    payload: Array,
    shift: np.int32,
    bias: np.int32,
    top_code: np.int32,
    largest: np.float32,
    steps: np.float32,
) -> int:
    """The format of fp8b: x fp32 [k, 256] -> scales fp32 [k], payload uint8 [k, 256]; returns the flags."""
    top = (x.view(np.int32) & ABS_MASK).max(axis=1)
    usable, finite = (top >= TINY_BITS) & (top < INF_BITS), top < INF_BITS
    amax = np.where(usable, top.view(np.float32), np.float32(1))
    scales[:] = np.where(usable, amax / largest, np.float32(0))
    scales[~finite] = np.nan
    inverse = np.where(usable, largest / amax, np.float32(0))
    y = np.where(finite[:, None], x, np.float32(0)) * inverse[:, None]
    u = np.ascontiguousarray(y).view(np.int32)
    magnitude = u & ABS_MASK
    half = (np.int32(1) << (shift - np.int32(1))) - np.int32(1)
    normal = ((magnitude + half + ((magnitude >> shift) & np.int32(1))) >> shift) - (
        (np.int32(127) - bias) << (np.int32(23) - shift)
    )
    small = np.rint(np.minimum(np.abs(y) * steps, np.float32(64))).astype(np.int32)
    code = np.where(magnitude < ((np.int32(128) - bias) << np.int32(23)), small, np.minimum(normal, top_code))
    payload[:] = (code | ((u >> np.int32(24)) & np.int32(0x80))).astype(np.uint8)
    payload[~finite] = 0
    return 0 if finite.all() else Flag.NONFINITE


def fp8_decode_numpy(payload: Array, shift: np.int32, bias: np.int32, steps: np.float32) -> Array:
    """fp32 values of 8-bit codes, before the scale."""
    code = payload.astype(np.int32)
    magnitude = code & np.int32(0x7F)
    mantissa_bits = np.int32(23) - shift
    normal = ((magnitude << shift) + ((np.int32(127) - bias) << np.int32(23))).view(np.float32)
    small = magnitude.astype(np.float32) * (np.float32(1) / steps)
    value = np.where(magnitude >> mantissa_bits == 0, small, normal)
    return np.where(code & np.int32(0x80), -value, value)


@njit(nogil=True, cache=True)
def _fp8_encode(x, bits, scales, payload, scaled, scaled_bits, shift, bias, top_code, largest, steps):  # type: ignore[no-untyped-def]
    flags = 0
    half = np.int32((np.int32(1) << np.int32(shift - np.int32(1))) - np.int32(1))
    rebias = np.int32(np.int32(np.int32(127) - bias) << np.int32(np.int32(23) - shift))
    smallest = np.int32(np.int32(np.int32(128) - bias) << np.int32(23))
    flat = bits.reshape(-1)
    for b in range(x.shape[0]):
        row, word, code = x[b], bits[b], payload[b]
        for i in range(0, 256, LINE):
            prefetch(flat, (b + AHEAD) * 256 + i)
        top = np.int32(0)
        for i in range(256):
            top = max(top, word[i] & ABS_MASK)
        if top >= INF_BITS:
            flags = 1
            scales[b] = np.float32(np.nan)
            code[:] = 0
            continue
        inverse, scale = np.float32(0), np.float32(0)
        if top >= TINY_BITS:
            amax = np.int32(top).view(np.float32)
            inverse, scale = largest / amax, amax / largest
        scales[b] = scale
        for i in range(256):
            scaled[i] = row[i] * inverse
        for i in range(256):
            u = scaled_bits[i]
            magnitude = u & ABS_MASK
            normal = ((magnitude + half + ((magnitude >> shift) & np.int32(1))) >> shift) - rebias
            small = np.int32(np.rint(min(np.abs(scaled[i]) * steps, np.float32(64))))
            value = small if magnitude < smallest else min(normal, top_code)
            code[i] = np.uint8(value | ((u >> np.int32(24)) & np.int32(0x80)))
    return flags


@njit(nogil=True, cache=True)
def _fp8_decode(scales, payload, out, accumulate, factor, shift, bias, step):  # type: ignore[no-untyped-def]
    rebias = np.int32(np.int32(np.int32(127) - bias) << np.int32(23))
    first_normal = np.int32(np.int32(1) << np.int32(np.int32(23) - shift))
    values = np.empty(256, np.float32)
    words = values.view(np.int32)
    for b in range(out.shape[0]):
        scale, code, row = scales[b], payload[b], out[b]
        for i in range(256):
            words[i] = ((np.int32(code[i]) & np.int32(0x7F)) << shift) + rebias
        for i in range(256):
            c = np.int32(code[i])
            magnitude = c & np.int32(0x7F)
            value = np.float32(magnitude) * step if magnitude < first_normal else values[i]
            values[i] = -value if c >= np.int32(128) else value
        if accumulate:
            for i in range(256):
                row[i] += values[i] * scale * factor
        else:
            for i in range(256):
                row[i] = values[i] * scale * factor
