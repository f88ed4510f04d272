"""Selection codecs: the largest elements alone (`TopK`), the same quantised (`SelectQuantise`), and with momentum
correction for plain SGD (`Dgc`, deep gradient compression).

Packet: header | number of elements sent uint64, 8 zero bytes | indices | values. The header flag BITMAP tells how the
indices are written; per-block selection always writes uint16 positions. A value that is not finite anywhere makes the
whole packet decode to NaN. Decoding fills what was not sent with zeros, so these codecs need error feedback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.codecs.block import BlockCodec
from collectives.codecs.blockint import Int4Block, Int8Block
from collectives.codecs.codec import HEADER_BYTES, Array, Flag, Fp32Codec, Residual, pad16
from collectives.codecs.selection import (
    SELECT_BLOCK,
    finite,
    largest,
    largest_numpy,
    per_block,
    per_block_count,
    per_block_numpy,
    read_bitmap,
    read_positions,
    read_words,
    sampled,
    write_bitmap,
    write_positions,
)
from collectives.errors import ConfigError, WireFormatError

SIDE = HEADER_BYTES + 16
BITMAP = 1 << 8


@dataclass(frozen=True, kw_only=True)
class TopK(Fp32Codec):
    """The largest `density` of the elements, as fp32. 64 bits each, or 32 and a bitmap above density 1/32.

    method: "exact"; "sampled", a threshold from a sample, at most as many as exact; "block", exactly k of every 1024.
    """

    name: ClassVar[str] = "topk"
    codec_id: ClassVar[int] = 9
    min_numel: ClassVar[int] = 256
    side_bytes: ClassVar[int] = 16

    density: float = 0.01
    method: Literal["exact", "sampled", "block"] = "sampled"

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"{self.name}: density must be in (0, 1], not {self.density}")

    @property
    def fixed_size(self) -> bool:
        return self.method != "sampled"

    def ef_default(self, optimizer: str) -> bool:
        return True

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        count = self._max_count(numel)
        return SIDE + pad16(self._index_bytes(numel, count)) + self._value_bytes(count)

    def _per_block(self) -> int:
        return max(math.ceil(self.density * SELECT_BLOCK), 1)

    def _max_count(self, numel: int) -> int:
        if self.method == "block":
            return per_block_count(numel, self._per_block())
        return min(math.ceil(self.density * numel), numel)

    def _index_bytes(self, numel: int, count: int) -> int:
        return 2 * count if self.method == "block" else min(4 * count, -(-numel // 8))

    def _value_bytes(self, count: int) -> int:
        return pad16(4 * count)

    def _select(self, bits: Array, seed: int) -> Array:
        if self.method == "block":
            return (per_block_numpy if self.reference else per_block)(bits, self._per_block())
        count = self._max_count(bits.size)
        if self.method == "sampled":
            return sampled(bits, count, self.density, seed)
        return (largest_numpy if self.reference else largest)(bits, count)

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        if x.size >= 1 << 32:
            raise ConfigError(f"{self.name} writes 32-bit indices; cut the {x.size} elements into chunks")
        if not finite(x.view(np.int32)):
            return self._write(np.empty(0, np.int64), x, buffer, Flag.NONFINITE)
        return self._write(self._select(x.view(np.int32), seed), x, buffer, Flag.NONE)

    def _write(self, index: Array, x: Array, buffer: Array, flags: int) -> tuple[int, int]:
        start = SIDE + pad16(self._index_bytes(x.size, index.size))
        used = self.wire_bytes(x.size) if self.fixed_size else start + self._value_bytes(index.size)
        buffer[HEADER_BYTES:used] = 0
        buffer[HEADER_BYTES : HEADER_BYTES + 8].view(np.uint64)[0] = index.size
        if flags & Flag.NONFINITE:
            return flags, used
        if self.method == "block":
            data = write_positions(index).view(np.uint8)
        elif 4 * index.size <= -(-x.size // 8):
            data = index.astype(np.uint32).view(np.uint8)
        else:
            data, flags = write_bitmap(index, x.size), flags | BITMAP
        buffer[SIDE : SIDE + data.size] = data
        self._write_values(x[index], buffer[start:used])
        return flags, used

    def _write_values(self, values: Array, buffer: Array) -> None:
        buffer.view(np.float32)[: values.size] = values

    def _read_values(self, buffer: Array, count: int) -> Array:
        return buffer.view(np.float32)[:count]

    def _read(self, buffer: Array, flags: int, numel: int) -> tuple[Array, Array]:
        """Checked (indices, values) of a packet without NaN."""
        count = int(buffer[HEADER_BYTES : HEADER_BYTES + 8].view(np.uint64)[0])
        bound = self._max_count(numel)
        exact = count == bound or (not self.fixed_size and count < bound)
        start = SIDE + pad16(self._index_bytes(numel, count)) if exact else 0
        if not exact or buffer.size != start + self._value_bytes(count):
            raise WireFormatError(
                f"{self.name} packet of {buffer.size} bytes announces {count} of {numel} elements; "
                f"{'exactly' if self.fixed_size else 'at most'} {bound} expected"
            )
        data = buffer[SIDE : SIDE + self._index_bytes(numel, count)]
        if self.method == "block":
            index = read_positions(data.view(np.uint16), numel, self._per_block())
        elif flags & BITMAP:
            index = read_bitmap(data, numel, count)
        elif data.size == 4 * count:
            index = read_words(data.view(np.uint32), numel)
        else:
            raise WireFormatError(f"{self.name} packet with {count} of {numel} elements must carry a bitmap")
        return index, self._read_values(buffer[start:], count)

    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        if flags & Flag.NONFINITE:
            out[:] = np.nan
            return
        index, values = self._read(buffer, flags, out.size)
        if not accumulate:
            out[:] = 0
        out[index] += values * scale

    def _encode_feedback(self, x: Array, old: Array, new: Array, buffer: Array, seed: int) -> tuple[int, int]:
        total = np.empty_like(x)
        np.add(x, old, out=total)
        flags, used = self._encode(total, buffer, seed)
        if flags & Flag.NONFINITE:
            new[:] = old
            return flags, used
        index, values = self._read(buffer[:used], flags, x.size)
        new[:] = total
        new[index] -= values
        return flags, used


@dataclass(frozen=True, kw_only=True)
class SelectQuantise(TopK):
    """Select, then quantise: the values in index order are themselves an int8b or int4b packet. About 0.27 bits at 1 %.

    The residual covers both losses.
    """

    name: ClassVar[str] = "sq"
    codec_id: ClassVar[int] = 10

    method: Literal["exact", "sampled", "block"] = "block"
    values: Literal["int8b", "int4b"] = "int8b"

    @property
    def _inner(self) -> BlockCodec:
        return Int8Block(reference=self.reference) if self.values == "int8b" else Int4Block(reference=self.reference)

    def _value_bytes(self, count: int) -> int:
        return self._inner.wire_bytes(count)

    def _write_values(self, values: Array, buffer: Array) -> None:
        self._inner.encode(torch.from_numpy(np.ascontiguousarray(values)), out=torch.from_numpy(buffer))

    def _read_values(self, buffer: Array, count: int) -> Array:
        values = np.empty(count, np.float32)
        self._inner.decode(torch.from_numpy(buffer), torch.from_numpy(values))
        return values


@dataclass(frozen=True, kw_only=True)
class Dgc(TopK):
    """Deep gradient compression (Lin et al., ICLR'18): top-k of the accumulated velocity. Only with plain SGD.

    A step is: u = `accelerate`(g, velocity); reduce u with this codec and the residual; `clear_sent`. One-dimensional
    parameters are reduced densely with the same momentum.
    """

    name: ClassVar[str] = "dgc"
    codec_id: ClassVar[int] = 12

    density: float = 0.001
    momentum: float = 0.9
    clip: float | None = None
    """Limit of the gradient's 2-norm for the whole group; each of n ranks clips its own at clip/sqrt(n)."""

    WARM_UP: ClassVar[tuple[float, ...]] = (0.25, 0.0625, 0.0156, 0.004)

    def at_epoch(self, epoch: int) -> Self:
        """The codec with the density of this epoch: 25 %, 6.25 %, 1.56 %, 0.4 %, then its own."""
        if epoch < len(self.WARM_UP):
            return replace(self, density=max(self.WARM_UP[epoch], self.density))
        return self

    def accelerate(self, gradient: Tensor, velocity: Residual, num_ranks: int) -> Tensor:
        """velocity.update = momentum * velocity.value + clipped gradient; returns it (fp32, flat)."""
        factor = 1.0
        if self.clip is not None:
            norm, limit = float(torch.linalg.vector_norm(gradient)), self.clip / math.sqrt(num_ranks)
            factor = limit / norm if norm > limit else 1.0
        arrays = [self._values(t) for t in (gradient, velocity.value, velocity.update)]
        _accelerate(*arrays, np.float32(self.momentum), np.float32(factor))
        return velocity.update

    def clear_sent(self, velocity: Residual, residual: Residual) -> None:
        """Zero the velocity where the residual came out zero, which is where an element was sent."""
        _clear_sent(self._values(velocity.update), self._values(residual.update))


@njit(nogil=True, cache=True)
def _accelerate(gradient, old, new, momentum, factor):  # type: ignore[no-untyped-def]
    for i in range(gradient.shape[0]):
        new[i] = momentum * old[i] + factor * gradient[i]


@njit(nogil=True, cache=True)
def _clear_sent(velocity, residual):  # type: ignore[no-untyped-def]
    for i in range(velocity.shape[0]):
        velocity[i] = np.float32(0) if residual[i] == 0 else velocity[i]
