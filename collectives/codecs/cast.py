"""16-bit casts: bf16, and fp16 with a guard against what its range does to gradients.

Both are elementwise, without scales; sums are made in fp32 by `reduce_encode`, because a native 16-bit sum rounds at
every hop of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.codecs.block import BlockCodec
from collectives.codecs.codec import HEADER_BYTES, INF_BITS, Array, Flag
from collectives.codecs.lanes import AHEAD, LINE, prefetch
from collectives.errors import CollectiveError

FP16_MAX = np.float32(65504)
FP16_MAX_BITS = np.int32(0x477FE000)
UNDERFLOW_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class _Cast(BlockCodec):
    """One 16-bit word a value."""

    linear: ClassVar[bool] = True
    block: ClassVar[int] = 256
    row_width: ClassVar[int] = 256
    payload_dtype: ClassVar[np.dtype[np.uint16]] = np.dtype(np.uint16)
    wire_dtype: ClassVar[torch.dtype]

    def summand(self, packet: Tensor) -> Tensor:
        """The payload in the wire type. A backend adds it with one rounding per hop."""
        return packet[HEADER_BYTES:].view(self.wire_dtype)


@dataclass(frozen=True, kw_only=True)
class Bf16(_Cast):
    """bfloat16, rounded to nearest even; infinities stay, NaN becomes a quiet NaN. 16 bits, relative error 2^-9."""

    name: ClassVar[str] = "bf16"
    codec_id: ClassVar[int] = 1
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16

    def _encode_rows(
        self, x: Array, scales: Array, payload: Array, first: int, seed: tuple[np.uint32, np.uint32]
    ) -> int:
        kernel = bf16_encode_numpy if self.reference else _bf16_encode
        return int(kernel(x.view(np.int32), payload))

    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        if self.reference:
            _store(out, bf16_decode_numpy(payload), accumulate, factor)
        else:
            _bf16_decode(payload, out, accumulate, factor)


def bf16_encode_numpy(bits: Array, out: Array) -> int:
    """fp32 bits int32 -> bf16 bits uint16: u + 0x7fff + (lowest kept bit), upper half. Returns the flags."""
    u = bits.view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    magnitude = bits & np.int32(0x7FFFFFFF)
    quiet = (u >> np.uint32(16)) | np.uint32(0x40)
    out[:] = np.where(magnitude > INF_BITS, quiet, rounded).astype(np.uint16)
    return Flag.NONFINITE if (magnitude >= INF_BITS).any() else 0


def bf16_decode_numpy(payload: Array) -> Array:
    """bf16 bits -> fp32."""
    return (payload.astype(np.uint32) << np.uint32(16)).view(np.float32)


@njit(nogil=True, cache=True)
def _bf16_encode(bits, out):  # type: ignore[no-untyped-def]
    top, flat = np.int32(0), bits.reshape(-1)
    for b in range(bits.shape[0]):
        row, code = bits[b], out[b]
        for i in range(0, 256, LINE):
            prefetch(flat, (b + AHEAD) * 256 + i)
        for i in range(256):
            u = row[i]
            magnitude = u & np.int32(0x7FFFFFFF)
            top = max(top, magnitude)
            rounded = (u + np.int32(0x7FFF) + ((u >> np.int32(16)) & np.int32(1))) >> np.int32(16)
            quiet = (u >> np.int32(16)) | np.int32(0x40)
            code[i] = np.uint16(quiet if magnitude > INF_BITS else rounded)
    return 1 if top >= INF_BITS else 0


@njit(nogil=True, cache=True)
def _bf16_decode(payload, out, accumulate, factor):  # type: ignore[no-untyped-def]
    bits = out.view(np.int32)
    if accumulate:
        for b in range(out.shape[0]):
            code, row = payload[b], out[b]
            for i in range(256):
                row[i] += np.int32(np.int32(code[i]) << np.int32(16)).view(np.float32) * factor
    elif factor == np.float32(1):
        for b in range(out.shape[0]):
            code, word = payload[b], bits[b]
            for i in range(256):
                word[i] = np.int32(code[i]) << np.int32(16)
    else:
        for b in range(out.shape[0]):
            code, row = payload[b], out[b]
            for i in range(256):
                row[i] = np.int32(np.int32(code[i]) << np.int32(16)).view(np.float32) * factor


@dataclass(frozen=True, kw_only=True)
class Fp16(_Cast):
    """IEEE half. |x| > 65504 becomes NaN and raises NONFINITE; more than 1 % flushed to zero raises UNDERFLOW.

    The second cast of a reduction keeps the UNDERFLOW of its sources and does not count anew.

    Divide before the cast: a mean is divided in fp32 by `reduce_encode`, ahead of its second cast.
    """

    name: ClassVar[str] = "fp16"
    codec_id: ClassVar[int] = 2
    wire_dtype: ClassVar[torch.dtype] = torch.float16

    def _encode_rows(
        self, x: Array, scales: Array, payload: Array, first: int, seed: tuple[np.uint32, np.uint32]
    ) -> int:
        # torch casts by hardware instructions, to nearest even as NumPy does; numba has no half precision.
        magnitude = x.view(np.int32) & np.int32(0x7FFFFFFF) if self.reference else x.view(np.int32)
        if self.reference:
            payload[:] = np.clip(x, -FP16_MAX, FP16_MAX).astype(np.float16).view(np.uint16)
            top = magnitude.max(initial=0)
        else:
            torch.from_numpy(payload.view(np.float16)).copy_(torch.from_numpy(x))
            top = _top_magnitude(magnitude)
        if top <= FP16_MAX_BITS:
            return 0
        payload[(magnitude & np.int32(0x7FFFFFFF)) > FP16_MAX_BITS] = 0x7E00
        return int(Flag.NONFINITE)

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        flags, used = super()._encode(x, buffer, seed)
        sent = self._sections(buffer[:used], x.size)[1][: x.size]
        num_nonzero, num_zero_sent = int(np.count_nonzero(x)), x.size - int(np.count_nonzero(sent & np.uint16(0x7FFF)))
        num_flushed = num_nonzero + num_zero_sent - x.size
        return flags | (int(Flag.UNDERFLOW) if num_flushed > UNDERFLOW_SHARE * num_nonzero else 0), used

    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        half = payload.view(np.float16)
        if self.reference:
            _store(out, half.astype(np.float32), accumulate, factor)
            return
        target, source = torch.from_numpy(out), torch.from_numpy(half)
        if accumulate:
            target.add_(source.float().mul_(float(factor)))
        else:
            target.copy_(source)
            if factor != 1:
                target.mul_(float(factor))


@njit(nogil=True, cache=True)
def _top_magnitude(bits):  # type: ignore[no-untyped-def]
    top = np.int32(0)
    for b in range(bits.shape[0]):
        row = bits[b]
        for i in range(256):
            top = max(top, row[i] & np.int32(0x7FFFFFFF))
    return top


def _store(out: Array, values: Array, accumulate: bool, factor: np.float32) -> None:
    values *= factor
    if accumulate:
        out += values
    else:
        out[:] = values


@dataclass
class UnderflowGuard:
    """Ends a run that trains on zeros: call `observe` once a step with the flags that a reduction returned."""

    max_consecutive: int = 20
    num_consecutive: int = field(default=0, init=False)

    def observe(self, flags: Flag) -> bool:
        """Whether to warn about this step. Raises CollectiveError after `max_consecutive` such steps in a row."""
        self.num_consecutive = self.num_consecutive + 1 if Flag.UNDERFLOW in flags else 0
        if self.num_consecutive >= self.max_consecutive:
            raise CollectiveError(
                f"fp16 set more than {UNDERFLOW_SHARE:.0%} of the non-zero gradient values to zero in "
                f"{self.num_consecutive} steps in a row; raise the loss scale, or use bf16 or int8b"
            )
        return self.num_consecutive > 0
