"""One bit a value: its sign, times the mean magnitude of the packet's values.

A sign cannot say zero: a tensor that is constantly zero in places builds up residual there. Useful with SGD; with
Adam, compress the momentum instead (1-bit Adam), because the second moment loses its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numba import njit

from collectives.codecs.codec import HEADER_BYTES, Array, Flag, Fp32Codec, pad16

LANES = 64
SIDE = HEADER_BYTES + 16


@dataclass(frozen=True, kw_only=True)
class Sign(Fp32Codec):
    """Packet: header | mean magnitude fp32, 12 zero bytes | one bit a value, 1 for a set sign bit, lowest bit first.

    The mean is a double-precision sum in a fixed order: 64 lanes, lane j adding |x[j]|, |x[j+64]|, ..., then the lanes
    one after the other. A value that is not finite makes the whole packet decode to NaN.
    """

    name: ClassVar[str] = "sign"
    codec_id: ClassVar[int] = 8
    min_numel: ClassVar[int] = 64
    align: ClassVar[int] = LANES

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return SIDE + pad16(-(-numel // 8))

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        used = self.wire_bytes(x.size)
        buffer[HEADER_BYTES:used] = 0
        body = x.size // LANES * LANES
        rows, bits = x[:body].reshape(-1, LANES), buffer[SIDE : SIDE + body // 8].reshape(-1, LANES // 8)
        lanes = np.zeros(LANES, np.float64)
        pack = sign_pack_numpy if self.reference else _sign_pack
        finite = bool(pack(rows, rows.view(np.int32), bits, lanes))
        if body < x.size:
            last, row = np.zeros((1, LANES), np.float32), np.zeros((1, LANES // 8), np.uint8)
            last[0, : x.size - body] = x[body:]
            finite &= bool(pack(last, last.view(np.int32), row, lanes))
            num_bytes = -(-(x.size - body) // 8)
            buffer[SIDE + body // 8 : SIDE + body // 8 + num_bytes] = row[0, :num_bytes]
        if not finite:
            buffer[SIDE:used] = 0
            return int(Flag.NONFINITE), used
        total = 0.0
        for lane in lanes.tolist():
            total += lane
        buffer[HEADER_BYTES : HEADER_BYTES + 4].view(np.float32)[0] = np.float32(total / max(x.size, 1))
        return 0, used

    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        mean = buffer[HEADER_BYTES : HEADER_BYTES + 4].view(np.float32)[0]
        magnitude = np.float32(np.nan) if flags & Flag.NONFINITE else mean * scale
        body = out.size // 8 * 8
        bits = buffer[SIDE : SIDE + body // 8]
        unpack = sign_unpack_numpy if self.reference else _sign_unpack
        unpack(bits, out[:body].reshape(-1, 8), accumulate, magnitude)
        if body < out.size:
            last = np.zeros((1, 8), np.float32)
            last[0, : out.size - body] = out[body:]
            unpack(buffer[SIDE + body // 8 : SIDE + body // 8 + 1], last, accumulate, magnitude)
            out[body:] = last[0, : out.size - body]


def sign_pack_numpy(x: Array, words: Array, bits: Array, lanes: Array) -> bool:
    """Bits [k, 8] of rows x [k, 64]; adds |x| to the lanes; returns whether all values are finite."""
    bits[:] = np.packbits(words < 0, axis=1, bitorder="little")
    for row in np.abs(x).astype(np.float64):
        lanes += row
    return bool(np.isfinite(x).all())


def sign_unpack_numpy(bits: Array, out: Array, accumulate: bool, magnitude: np.float32) -> None:
    """out [k, 8] = -magnitude where the bit is set, else +magnitude; or +=."""
    negative = np.unpackbits(bits.reshape(-1, 1), axis=1, bitorder="little").astype(np.bool_)
    values = np.where(negative, -magnitude, magnitude)
    out[:] = out + values if accumulate else values


@njit(nogil=True, cache=True)
def _sign_pack(x, words, bits, lanes):  # type: ignore[no-untyped-def]
    top = np.int32(0)
    for r in range(x.shape[0]):
        row, word, target = x[r], words[r], bits[r]
        for i in range(LANES):
            lanes[i] += np.float64(np.abs(row[i]))
        for i in range(LANES):
            top = max(top, word[i] & np.int32(0x7FFFFFFF))
        for j in range(LANES // 8):
            byte = np.int32(0)
            for i in range(8):
                byte |= np.int32(word[8 * j + i] < 0) << np.int32(i)
            target[j] = np.uint8(byte)
    return top < np.int32(0x7F800000)


@njit(nogil=True, cache=True)
def _sign_unpack(bits, out, accumulate, magnitude):  # type: ignore[no-untyped-def]
    for r in range(out.shape[0]):
        byte, row = np.int32(bits[r]), out[r]
        if accumulate:
            for i in range(row.shape[0]):
                row[i] += -magnitude if (byte >> np.int32(i)) & np.int32(1) else magnitude
        else:
            for i in range(row.shape[0]):
                row[i] = -magnitude if (byte >> np.int32(i)) & np.int32(1) else magnitude
