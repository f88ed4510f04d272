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
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.codecs.codec import HEADER_BYTES, Array, Flag, Fp32Codec, Residual, packet_bytes, pad16, write_header
from collectives.codecs.hashing import keys

TILE_VALUES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class BlockCodec(Fp32Codec):
    """Blocks of `block` values, each one scale (or none) and one payload row of `row_width` elements."""

    block: ClassVar[int]
    row_width: ClassVar[int]
    payload_dtype: ClassVar[np.dtype[Any]]
    scale_dtype: ClassVar[np.dtype[Any] | None] = None

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
    ) -> int:
        """Encode x + old and write new = (x + old) - decoded; rows that are not finite keep new = old."""
        total = np.empty_like(x)
        decoded = np.empty_like(x)
        np.add(x, old, out=total)
        flags = self._encode_rows(total, scales, payload, first, seed)
        self._decode_rows(scales, payload, decoded, False, np.float32(1))
        _keep_lost(total, decoded, old, new)
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

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        return self._encode_all(x, None, None, buffer, seed)

    def _encode_feedback(self, x: Array, old: Array, new: Array, buffer: Array, seed: int) -> tuple[int, int]:
        return self._encode_all(x, old, new, buffer, seed)

    def _encode_all(self, x: Array, old: Array | None, new: Array | None, buffer: Array, seed: int) -> tuple[int, int]:
        used = self.wire_bytes(x.size)
        scales, payload = self._sections(buffer[:used], x.size)
        buffer[used - pad16(1) : used] = 0
        _clear_gap(buffer, HEADER_BYTES + scales.nbytes, HEADER_BYTES + self._scale_bytes(x.size))
        flags = 0
        for start, stop in self._tiles(x.size, fused=old is None):
            before, after = (None if e is None else e[start:stop] for e in (old, new))
            flags |= self._encode_tile(x[start:stop], before, after, scales, payload, start, seed)
        return flags, used

    def _encode_tile(
        self,
        x: Array,
        old: Array | None,
        new: Array | None,
        scales: Array,
        payload: Array,
        start: int,
        seed: int,
    ) -> int:
        """Encode x, which starts at element `start` (a block border) of the packet."""
        rows, rest = divmod(x.size, self.block)
        first_row, body = start // self.block, rows * self.block
        flags, hash_keys = 0, keys(seed)
        if rows:
            shape = (rows, self.block)
            target = payload[first_row * self.row_width : (first_row + rows) * self.row_width].reshape(rows, -1)
            row_scales = scales[first_row : first_row + rows]
            if old is None or new is None:
                flags |= self._encode_rows(x[:body].reshape(shape), row_scales, target, start, hash_keys)
            else:
                whole = (x[:body].reshape(shape), old[:body].reshape(shape), new[:body].reshape(shape))
                flags |= self._feedback_rows(*whole, row_scales, target, start, hash_keys)
        if rest:
            row = np.zeros((1, self.row_width), self.payload_dtype)
            last_scale = scales[first_row + rows : first_row + rows + 1]
            if old is None or new is None:
                flags |= self._encode_rows(self._padded(x[body:]), last_scale, row, start + body, hash_keys)
            else:
                lost = self._padded(new[body:])
                padded = (self._padded(x[body:]), self._padded(old[body:]), lost)
                flags |= self._feedback_rows(*padded, last_scale, row, start + body, hash_keys)
                new[body:] = lost[0, :rest]
            width = self._tail_width(rest)
            begin = (first_row + rows) * self.row_width
            payload[begin : begin + width] = row[0, :width]
        return flags

    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        scales, payload = self._sections(buffer, out.size)
        self._decode_tile(scales, payload, out, 0, accumulate, scale)

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
            self._decode_rows(last_scale, row, padded, accumulate, factor)
            out[body:] = padded[0, :rest]

    def _padded(self, x: Array) -> Array:
        row = np.zeros((1, self.block), np.float32)
        row[0, : x.size] = x
        return row

    def _tiles(self, numel: int, fused: bool = False) -> Iterator[tuple[int, int]]:
        """Element ranges that start at block borders and fit the cache; one range where the kernel is fused anyway."""
        step = max(numel, 1) if fused else TILE_VALUES
        for start in range(0, numel, step):
            yield start, min(start + step, numel)

    def reduce(
        self, packets: Sequence[Tensor], out: Tensor, weights: Sequence[float] | None = None, scale: float = 1.0
    ) -> Flag:
        values = self._values(out)
        flags, sources = self._sources(packets, values.size, weights)
        with np.errstate(all="ignore"):
            for start, stop in self._tiles(values.size):
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
        common, sources = self._sources(packets, numel, weights)
        packet, buffer = self._room(self.wire_bytes(numel), out)
        used = self.wire_bytes(numel)
        scales, payload = self._sections(buffer[:used], numel)
        buffer[used - pad16(1) : used] = 0
        _clear_gap(buffer, HEADER_BYTES + scales.nbytes, HEADER_BYTES + self._scale_bytes(numel))
        old = None if residual is None else residual.value.view(-1).numpy()
        new = None if residual is None else residual.update.view(-1).numpy()
        total = np.empty(min(TILE_VALUES, numel), np.float32)
        flags = int(common)
        with np.errstate(all="ignore"):
            for start, stop in self._tiles(numel):
                tile = total[: stop - start]
                self._sum_tile(sources, tile, start, np.float32(scale))
                before, after = (None if e is None else e[start:stop] for e in (old, new))
                flags |= self._encode_tile(tile, before, after, scales, payload, start, seed)
        write_header(buffer, self.codec_id, flags, numel)
        return packet[:used]

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


def _clear_gap(buffer: Array, start: int, stop: int) -> None:
    """Padding is zero, so that equal inputs give equal bytes."""
    buffer[start:stop] = 0


@njit(nogil=True, cache=True)
def _keep_lost(total, decoded, old, new):  # type: ignore[no-untyped-def]
    for b in range(total.shape[0]):
        a, d, before, after = total[b], decoded[b], old[b], new[b]
        for i in range(a.shape[0]):
            lost = a[i] - d[i]
            after[i] = lost if np.abs(lost) < np.inf else before[i]
