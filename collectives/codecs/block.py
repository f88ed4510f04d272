"""Codecs that treat every block of B values alike: casts, block integers, block fp8.

Packet: header | scales [num_blocks] | payload rows [num_blocks, W]. A last block of fewer than B values is encoded as if
padded with zeros; of its row only the elements that carry values are sent.

Work goes in tiles that stay in the second-level cache, so that error feedback and sums of packets cost one pass over
memory, as a fused kernel would.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from collectives.codecs.codec import (
    ALIGN_BYTES,
    HEADER_BYTES,
    Array,
    Flag,
    Fp32Codec,
    Residual,
    keep_lost,
    packet_bytes,
    pad16,
    write_header,
)
from collectives.codecs.hashing import keys
from collectives.codecs.lanes import can_stream, copy_past_caches

if TYPE_CHECKING:
    from collectives.codecs.gpu import BlockSide

TILE_VALUES = 1 << 16
MAX_BLOCK = 256
STREAM_BYTES = 4 << 20
"""Results from this size on leave the caches anyway: they are written past them."""
STREAM_TILE = 1 << 17


class _Feedback(NamedTuple):
    """Residuals of a stretch of elements, flat, and room for two tiles."""

    old: Array
    new: Array
    scratch: Array

    @classmethod
    def of(cls, old: Array, new: Array) -> _Feedback:
        return cls(old, new, np.empty((2, max(min(TILE_VALUES, old.size), MAX_BLOCK)), np.float32))

    def part(self, start: int, stop: int) -> _Feedback:
        return _Feedback(self.old[start:stop], self.new[start:stop], self.scratch)


def leaves_caches(out: Array) -> bool:
    """Whether a result is so large that it is better written past the caches, and lies where it can be."""
    return out.nbytes >= STREAM_BYTES and can_stream(out)


def _tiles(numel: int) -> Iterator[tuple[int, int]]:
    """Element ranges that start at block borders and fit the cache."""
    for start in range(0, numel, TILE_VALUES):
        yield start, min(start + TILE_VALUES, numel)


@dataclass(frozen=True, kw_only=True)
class BlockCodec(Fp32Codec):
    """Blocks of `block` values, each one scale (or none) and one payload row of `row_width` elements."""

    block: ClassVar[int]
    row_width: ClassVar[int]
    payload_dtype: ClassVar[np.dtype[Any]]
    scale_dtype: ClassVar[np.dtype[Any] | None] = None
    streams: ClassVar[bool] = False
    """`_decode_rows` itself writes what `leaves_caches` past them."""

    @property
    def fused_feedback(self) -> bool:
        """`_feedback_rows` is one kernel, so that it needs no tiles."""
        return False

    @abstractmethod
    def _encode_rows(
        self, x: Array, scales: Array, payload: Array, first: int, seed: tuple[np.uint32, np.uint32]
    ) -> int:
        """Encode rows x [k, B] into scales [k] and payload [k, W]; `first` is the index of their first element.

        Returns the flags these rows raise.
        """

    @abstractmethod
    def _decode_rows(self, scales: Array, payload: Array, out: Array, accumulate: bool, factor: np.float32) -> None:
        """out [k, B] = factor * decoded rows, or += ."""

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
        """Encode x + old and write new = (x + old) - decoded; rows that are not finite keep new = old."""
        total, decoded = (row[: x.size].reshape(x.shape) for row in scratch)
        np.add(x, old, out=total)
        flags = self._encode_rows(total, scales, payload, first, seed)
        self._decode_rows(scales, payload, decoded, False, np.float32(1))
        keep_lost(total.reshape(-1), decoded.reshape(-1), old.reshape(-1), new.reshape(-1))
        return flags

    def _tail_width(self, rest: int) -> int:
        """Payload elements to send for a last block of `rest` values."""
        return rest * self.row_width // self.block

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        rows, rest = divmod(numel, self.block)
        payload = (rows * self.row_width + (self._tail_width(rest) if rest else 0)) * self.payload_dtype.itemsize
        return HEADER_BYTES + self._scale_bytes(numel) + pad16(payload)

    def _scale_bytes(self, numel: int) -> int:
        return 0 if self.scale_dtype is None else pad16(-(-numel // self.block) * self.scale_dtype.itemsize)

    def _sections(self, buffer: Array, numel: int) -> tuple[Array, Array]:
        """Views of the scales [num_blocks] and of the flat payload, cut to what `numel` values need."""
        start = HEADER_BYTES + self._scale_bytes(numel)
        payload = buffer[start:].view(self.payload_dtype)
        if self.scale_dtype is None:
            return np.empty(-(-numel // self.block), np.uint8), payload
        num_blocks = -(-numel // self.block)
        return buffer[HEADER_BYTES:start].view(self.scale_dtype)[:num_blocks], payload

    def side(self, tensor: Tensor) -> BlockSide | None:
        return cast("BlockSide | None", super().side(tensor))

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        scales, payload = self._open(buffer, x.size)
        return self._encode_tile(x, None, scales, payload, 0, seed), self.wire_bytes(x.size)

    def _encode_feedback(self, x: Array, old: Array, new: Array, buffer: Array, seed: int) -> tuple[int, int]:
        scales, payload = self._open(buffer, x.size)
        feedback, flags = _Feedback.of(old, new), 0
        fused = self.fused_feedback and not self.reference
        for start, stop in [(0, x.size)] if fused else _tiles(x.size):
            flags |= self._encode_tile(x[start:stop], feedback.part(start, stop), scales, payload, start, seed)
        return flags, self.wire_bytes(x.size)

    def _open(self, buffer: Array, numel: int) -> tuple[Array, Array]:
        """The sections of a packet to be written. Padding is zeroed, so that equal inputs give equal bytes."""
        used = self.wire_bytes(numel)
        scales, payload = self._sections(buffer[:used], numel)
        buffer[used - ALIGN_BYTES : used] = 0
        if self.scale_dtype is not None:
            buffer[HEADER_BYTES + scales.nbytes : HEADER_BYTES + self._scale_bytes(numel)] = 0
        return scales, payload

    def _encode_tile(
        self, x: Array, feedback: _Feedback | None, scales: Array, payload: Array, start: int, seed: int
    ) -> int:
        """Encode x, which starts at element `start` (a block border) of the packet."""
        rows, rest = divmod(x.size, self.block)
        first_row, body = start // self.block, rows * self.block
        begin, flags = (first_row + rows) * self.row_width, 0
        if rows:
            target = payload[first_row * self.row_width : begin].reshape(rows, -1)
            part = None if feedback is None else feedback.part(0, body)
            row_scales = scales[first_row : first_row + rows]
            flags |= self._encode_whole(x[:body], part, row_scales, target, start, seed)
        if rest:
            row = np.zeros((1, self.row_width), self.payload_dtype)
            part = None
            if feedback is not None:
                old, new = self._padded(feedback.old[body:]), self._padded(feedback.new[body:])
                part = _Feedback(old, new, feedback.scratch)
            last_scale = scales[first_row + rows : first_row + rows + 1]
            flags |= self._encode_whole(self._padded(x[body:]), part, last_scale, row, start + body, seed)
            if feedback is not None and part is not None:
                feedback.new[body:] = part.new[:rest]
            width = self._tail_width(rest)
            payload[begin : begin + width] = row[0, :width]
        return flags

    def _encode_whole(
        self, x: Array, feedback: _Feedback | None, scales: Array, payload: Array, first: int, seed: int
    ) -> int:
        """Encode whole blocks, flat."""
        shape = (-1, self.block)
        if feedback is None:
            return self._encode_rows(x.reshape(shape), scales, payload, first, keys(seed))
        arrays = (x.reshape(shape), feedback.old.reshape(shape), feedback.new.reshape(shape))
        return self._feedback_rows(*arrays, scales, payload, first, keys(seed), feedback.scratch)

    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        scales, payload = self._sections(buffer, out.size)
        if self.streams or self.reference or accumulate or not leaves_caches(out):
            self._decode_tile(scales, payload, out, 0, accumulate, scale)
            return
        tile = np.empty(STREAM_TILE, np.float32)
        for start in range(0, out.size, STREAM_TILE):
            part = out[start : start + STREAM_TILE]
            self._decode_tile(scales, payload, tile[: part.size], start, False, scale)
            copy_past_caches(part, tile[: part.size])

    def _decode_tile(
        self, scales: Array, payload: Array, out: Array, start: int, accumulate: bool, factor: np.float32
    ) -> None:
        """Decode the elements from `start` (a block border) on into `out`."""
        rows, rest = divmod(out.size, self.block)
        first_row, body = start // self.block, rows * self.block
        if rows:
            source = payload[first_row * self.row_width : (first_row + rows) * self.row_width].reshape(rows, -1)
            target = out[:body].reshape(rows, self.block)
            self._decode_rows(scales[first_row : first_row + rows], source, target, accumulate, factor)
        if rest:
            width, begin = self._tail_width(rest), (first_row + rows) * self.row_width
            row = np.zeros((1, self.row_width), self.payload_dtype)
            row[0, :width] = payload[begin : begin + width]
            padded = self._padded(out[body:])
            last_scale = scales[first_row + rows : first_row + rows + 1]
            self._decode_rows(last_scale, row, padded.reshape(1, -1), accumulate, factor)
            out[body:] = padded[:rest]

    def _padded(self, x: Array) -> Array:
        """One block that starts with x and goes on with zeros."""
        row = np.zeros(self.block, np.float32)
        row[: x.size] = x
        return row

    def reduce(
        self, packets: Sequence[Tensor], out: Tensor, weights: Sequence[float] | None = None, scale: float = 1.0
    ) -> Flag:
        if side := self.side(out):
            return side.reduce(packets, out, weights, scale)
        values = self._values(out)
        flags, sources = self._sources(packets, values.size, weights)
        with np.errstate(all="ignore"):
            for start, stop in _tiles(values.size):
                self._sum_tile(sources, values[start:stop], start, np.float32(scale))
        return flags

    def reduce_encode(
        self,
        packets: Sequence[Tensor],
        numel: int,
        weights: Sequence[float] | None = None,
        scale: float = 1.0,
        residual: Residual | None = None,
        out: Tensor | None = None,
        seed: int = 0,
    ) -> Tensor:
        if packets and (side := self.side(packets[0])):
            return side.reduce_encode(packets, numel, weights, scale, residual, out, seed)
        common, sources = self._sources(packets, numel, weights)
        packet, buffer = self._room(self.wire_bytes(numel), out)
        scales, payload = self._open(buffer, numel)
        feedback = None
        if residual is not None:
            feedback = _Feedback.of(self._values(residual.value), self._values(residual.update))
        total, flags = np.empty(min(TILE_VALUES, numel), np.float32), int(common)
        with np.errstate(all="ignore"):
            for start, stop in _tiles(numel):
                tile = total[: stop - start]
                self._sum_tile(sources, tile, start, np.float32(scale))
                part = None if feedback is None else feedback.part(start, stop)
                flags |= self._encode_tile(tile, part, scales, payload, start, seed)
        write_header(buffer, self.codec_id, flags, numel)
        return packet[: self.wire_bytes(numel)]

    def _sources(
        self, packets: Sequence[Tensor], numel: int, weights: Sequence[float] | None
    ) -> tuple[Flag, list[tuple[np.float32, Array, Array]]]:
        """(weight, scales, payload) of every packet with a weight, and the union of their common flags."""
        flags, sources = 0, []
        for packet, weight in zip(packets, weights or [1.0] * len(packets), strict=True):
            if weight != 0:
                buffer = packet_bytes(packet)
                flags |= self._check(buffer, numel, self.wire_bytes(numel))
                sources.append((np.float32(weight), *self._sections(buffer, numel)))
        return Flag(flags & 0xFF), sources

    def _sum_tile(
        self, sources: Sequence[tuple[np.float32, Array, Array]], out: Array, start: int, scale: np.float32
    ) -> None:
        out[:] = 0
        for weight, scales, payload in sources:
            self._decode_tile(scales, payload, out, start, True, weight)
        if scale != 1:
            out *= scale
