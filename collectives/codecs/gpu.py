"""The CUDA side of the codecs that have one: block formats, error-bounded blocks, and top-k by threshold.

Packets, flags and errors are those of the CPU, byte for byte, with one exception: which NaN a sum of NaNs leaves.
Besides fp32, inputs may be bf16, which is widened exactly. Every packet is checked before it is used, so each decode
waits for the few bytes of its header; packets of unknown size wait once more to learn it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from collectives.codecs.bounded import BLOCK, bin_width, round_down
from collectives.codecs.bounded import SIDE as BOUNDED_SIDE
from collectives.codecs.codec import (
    ALIGN_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Codec,
    Flag,
    Residual,
    pad16,
)
from collectives.codecs.hashing import keys, mix64
from collectives.codecs.selection import MAX_ROUNDS
from collectives.codecs.topk import BITMAP
from collectives.codecs.topk import SIDE as TOPK_SIDE
from collectives.errors import ConfigError, WireFormatError
from collectives.kernels.cuda import THREADS, blocks_for, launch
from collectives.kernels.gpu import decode_bitmap, encode_bitmap, scan_scratch

if TYPE_CHECKING:
    from collectives.codecs.bounded import ErrorBounded
    from collectives.codecs.topk import TopK

INPUTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
VALUES_PER_BLOCK = 8 * 256
"""A tile of 256 values for each warp (kernels.cu)."""
BOUNDED_GROUP = 256
"""Blocks of 32 values for each block of threads (kernels.cu)."""
NUM_BINS, BIN_SHIFT, FIRST_NONFINITE_BIN = 2048, 20, 2040
ABS_MASK = 0x7FFFFFFF

BLOCK_KERNELS: dict[str, Callable[[Any], str]] = {
    "int8b": lambda codec: "int8b",
    "int4b": lambda codec: "int4b_hadamard" if codec.hadamard else "int4b",
    "fp8b": lambda codec: f"fp8b_{codec.form}",
    "bf16": lambda codec: "bf16",
}
"""By codec name: the prefix of its kernels."""


class Side(Protocol):
    """What a codec does on the GPU; arguments as for `Codec`."""

    def encode(self, x: Tensor, residual: Residual | None, out: Tensor | None, seed: int) -> Tensor: ...

    def decode(self, packet: Tensor, out: Tensor, accumulate: bool, scale: float) -> None: ...


def supports(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether `encode` takes CUDA tensors of this type."""
    exists = codec.name in (*BLOCK_KERNELS, "eb") or (codec.name == "topk" and _topk(codec).method != "block")
    return exists and dtype in INPUTS


def side_of(codec: Codec) -> Side:
    """The CUDA side of a codec. Raises ConfigError where there is none."""
    if not supports(codec, torch.float32):
        raise ConfigError(
            f"{codec.name} with these settings has no CUDA kernels; use int8b, int4b, fp8b, bf16, eb or topk"
        )
    if codec.name in BLOCK_KERNELS:
        return BlockSide(codec)
    return TopKSide(_topk(codec)) if codec.name == "topk" else BoundedSide(cast("ErrorBounded", codec))


def _topk(codec: Codec) -> TopK:
    return cast("TopK", codec)


# --- what all share ---------------------------------------------------------------------------------------------------


def _head(codec: Codec) -> np.uint32:
    """The first word of a packet's header."""
    return np.uint32(int.from_bytes(HEADER.pack(MAGIC, VERSION, codec.codec_id, 0, 0)[:4], "little"))


def _checked_input(codec: Codec, x: Tensor, residual: Residual | None) -> tuple[Tensor | None, Tensor | None]:
    """The residual's two tensors, or (None, None). Raises ConfigError for what the kernels cannot take."""
    if x.dtype not in INPUTS or not x.is_contiguous():
        raise ConfigError(
            f"{codec.name} takes contiguous float32 or bfloat16 tensors on a GPU, not {x.dtype} of strides {x.stride()}"
        )
    if residual is None:
        return None, None
    for tensor in (residual.value, residual.update):
        fits = tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device == x.device
        if not fits or tensor.numel() != x.numel():
            raise ConfigError(
                f"{codec.name}: the residual is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it must be "
                f"contiguous float32 with {x.numel()} elements on {x.device}"
            )
    return residual.value, residual.update


def _checked_output(codec: Codec, out: Tensor) -> None:
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise ConfigError(f"{codec.name} decodes into contiguous float32 tensors, not {out.dtype} of {out.stride()}")


def _aligned(packet: Tensor) -> Tensor:
    return packet if packet.data_ptr() % ALIGN_BYTES == 0 else packet.clone()


def _host(data: Tensor) -> np.ndarray:
    """A few bytes of the device on the host; waits for the stream."""
    return data.cpu().numpy()


# --- block formats ----------------------------------------------------------------------------------------------------


class BlockSide:
    """int8b, int4b, fp8b and bf16: one launch each way, and one for the sum of any number of packets."""

    def __init__(self, codec: Codec):
        self.codec, self.kernel = codec, BLOCK_KERNELS[codec.name](codec)

    def _noise(self, seed: int) -> tuple[np.uint32, np.uint32, np.uint32]:
        return (np.uint32(self.codec.unbiased), *keys(seed))

    def _new_packet(self, numel: int, out: Tensor | None, device: torch.device) -> Tensor:
        packet = self.codec.room(self.codec.wire_bytes(numel), out, device)
        packet[:HEADER_BYTES].zero_()  # kernels add flags to it
        return packet[: self.codec.wire_bytes(numel)]

    def encode(self, x: Tensor, residual: Residual | None, out: Tensor | None, seed: int) -> Tensor:
        old, new = _checked_input(self.codec, x, residual)
        packet = self._new_packet(x.numel(), out, x.device)
        args = (x, np.int64(x.numel()), old, new, packet, _head(self.codec), *self._noise(seed))
        name = f"{self.kernel}_encode_{INPUTS[x.dtype]}"
        launch(name, blocks_for(x.numel(), VALUES_PER_BLOCK), THREADS, args, like=x)
        return packet

    def decode(self, packet: Tensor, out: Tensor, accumulate: bool, scale: float) -> None:
        _checked_output(self.codec, out)
        numel = out.numel()
        self.codec.check(_host(packet[:HEADER_BYTES]), numel, packet.numel())
        args = (_aligned(packet), np.int64(numel), out, np.uint32(accumulate), np.float32(scale))
        launch(f"{self.kernel}_decode", blocks_for(numel, VALUES_PER_BLOCK), THREADS, args, like=out)

    def reduce(self, packets: Sequence[Tensor], out: Tensor, weights: Sequence[float] | None, scale: float) -> Flag:
        _checked_output(self.codec, out)
        numel = out.numel()
        flags, table, kept = self._sources(packets, numel, weights, out.device)
        args = (table, np.int32(len(kept)), np.int64(numel), np.float32(scale), out)
        launch(f"{self.kernel}_reduce", blocks_for(numel, VALUES_PER_BLOCK), THREADS, args, like=out)
        return flags

    def reduce_encode(
        self,
        packets: Sequence[Tensor],
        numel: int,
        weights: Sequence[float] | None,
        scale: float,
        residual: Residual | None,
        out: Tensor | None,
        seed: int,
    ) -> Tensor:
        device = packets[0].device
        old, new = _checked_input(self.codec, torch.empty(numel, device=device), residual)
        flags, table, kept = self._sources(packets, numel, weights, device)
        packet = self._new_packet(numel, out, device)
        sums = (table, np.int32(len(kept)), np.int64(numel), np.float32(scale))
        args = (*sums, old, new, packet, _head(self.codec), np.uint32(flags), *self._noise(seed))
        launch(f"{self.kernel}_reduce_encode", blocks_for(numel, VALUES_PER_BLOCK), THREADS, args, like=packet)
        return packet

    def _sources(
        self, packets: Sequence[Tensor], numel: int, weights: Sequence[float] | None, device: torch.device
    ) -> tuple[Flag, Tensor, list[Tensor]]:
        """Common flags, the kernel's table of (address, weight) int64 [n, 2], and the packets that count."""
        pairs = [(p, w) for p, w in zip(packets, weights or [1.0] * len(packets), strict=True) if w != 0]
        kept, flags = [_aligned(packet) for packet, _ in pairs], 0
        if kept:
            headers = _host(torch.stack([packet[:HEADER_BYTES] for packet in kept]))
            for packet, header in zip(kept, headers, strict=True):
                flags |= self.codec.check(header, numel, packet.numel())
        bits = [int(np.float32(weight).view(np.uint32)) for _, weight in pairs]
        rows = [[packet.data_ptr(), word] for packet, word in zip(kept, bits, strict=True)] or [[0, 0]]
        return Flag(flags & 0xFF), torch.tensor(rows, dtype=torch.int64).to(device), kept


# --- error-bounded ----------------------------------------------------------------------------------------------------


class BoundedSide:
    """eb: sizes and their prefix sums, then the words; the packet's length comes back to the host."""

    def __init__(self, codec: ErrorBounded):
        self.codec = codec

    def encode(self, x: Tensor, residual: Residual | None, out: Tensor | None, seed: int) -> Tensor:
        old, new = _checked_input(self.codec, x, residual)
        bound = self.codec.bound
        if self.codec.relative_to != "one":
            bound = self.codec.for_tensor(x.float() if old is None else x.float() + old).bound
        width = bin_width(bound)
        inverse = np.float32(1) / width if width > 0 else np.float32(0)
        numel, num_blocks = x.numel(), -(-x.numel() // BLOCK)
        packet = self.codec.room(self.codec.wire_bytes(numel), out, x.device)
        packet[:HEADER_BYTES].zero_()
        num_groups = -(-num_blocks // BOUNDED_GROUP)
        starts, ticket = scan_scratch(num_groups, x.device)
        grid, suffix, limits = blocks_for(num_groups, 1), INPUTS[x.dtype], (width, inverse, round_down(bound))
        sizes = (x, np.int64(numel), old, *limits, packet[BOUNDED_SIDE:], starts, ticket)
        launch(f"bounded_sizes_{suffix}", grid, THREADS, sizes, like=x)
        words = (x, np.int64(numel), old, new, *limits, packet, _head(self.codec), starts)
        launch(f"bounded_write_{suffix}", grid, THREADS, words, like=x)
        return packet[: BOUNDED_SIDE + pad16(num_blocks) + pad16(4 * int(starts[num_groups]))]

    def decode(self, packet: Tensor, out: Tensor, accumulate: bool, scale: float) -> None:
        _checked_output(self.codec, out)
        name, numel, packet = self.codec.name, out.numel(), _aligned(packet)
        side = _host(packet[:BOUNDED_SIDE])
        self.codec.check(side, numel, packet.numel())
        num_blocks = -(-numel // BLOCK)
        begin = BOUNDED_SIDE + pad16(num_blocks)
        width, claimed = side[16:20].view(np.float32)[0], int(side[24:32].view(np.uint64)[0])
        if packet.numel() < begin or not (np.isfinite(width) and width >= 0):
            raise WireFormatError(
                f"{name} packet of {packet.numel()} bytes with bin width {width} for {num_blocks} blocks"
            )
        num_groups = -(-num_blocks // BOUNDED_GROUP)
        memory = torch.zeros(num_groups + 3, dtype=torch.int64, device=out.device)
        starts, bad, ticket = memory[: num_groups + 1], memory[-2:-1], memory[-1:]
        grid = blocks_for(num_groups, 1)
        heads = (packet[BOUNDED_SIDE:], np.int64(num_blocks), starts, bad, ticket)
        launch("bounded_starts", grid, THREADS, heads, like=out)
        num_words, num_bad = (int(v) for v in _host(memory[num_groups : num_groups + 2]))
        if num_bad or claimed != 4 * num_words or packet.numel() != begin + pad16(4 * num_words):
            raise WireFormatError(
                f"{name} packet of {packet.numel()} bytes: {num_bad} block bytes are out of range, the others need "
                f"{4 * num_words} payload bytes, it claims {claimed}"
            )
        args = (packet, np.int64(numel), starts, out, np.uint32(accumulate), np.float32(scale))
        launch("bounded_decode", grid, THREADS, args, like=out)


# --- top-k ------------------------------------------------------------------------------------------------------------


class TopKSide:
    """topk: a histogram of magnitudes or a sample gives the threshold, one pass collects what reaches it."""

    def __init__(self, codec: TopK):
        self.codec = codec

    def encode(self, x: Tensor, residual: Residual | None, out: Tensor | None, seed: int) -> Tensor:
        old, new = _checked_input(self.codec, x, residual)
        total, codec, numel = x.float().view(-1), self.codec, x.numel()
        if old is not None:
            total = total + old.view(-1)
        if numel >= 1 << 32:
            raise ConfigError(f"{codec.name} writes 32-bit indices; cut the {numel} elements into chunks")
        index = self._select(total, seed)
        flags, count = (Flag.NONFINITE, 0) if index is None else (Flag.NONE, index.numel())
        by_word = 4 * count <= -(-numel // 8)
        begin = TOPK_SIDE + pad16(codec._index_bytes(numel, count))
        used = codec.wire_bytes(numel) if codec.fixed_size else begin + pad16(4 * count)
        packet = codec.room(codec.wire_bytes(numel), out, x.device)[:used]
        packet[HEADER_BYTES:].zero_()
        if index is not None:
            data = index.to(torch.int32).view(torch.uint8) if by_word else encode_bitmap(index, numel)
            packet[TOPK_SIDE : TOPK_SIDE + data.numel()] = data
            packet[begin : begin + 4 * count].view(torch.float32).copy_(total[index])
        header = HEADER.pack(MAGIC, VERSION, codec.codec_id, flags if by_word else flags | BITMAP, numel)
        side = header + count.to_bytes(8, "little")
        packet[: len(side)] = torch.frombuffer(bytearray(side), dtype=torch.uint8).to(x.device)
        if old is not None and new is not None:
            new.copy_(old if index is None else total.view_as(new))
            if index is not None:
                new.view(-1)[index] = 0
        return packet

    def decode(self, packet: Tensor, out: Tensor, accumulate: bool, scale: float) -> None:
        _checked_output(self.codec, out)
        codec, numel, flat, packet = self.codec, out.numel(), out.view(-1), _aligned(packet)
        side = _host(packet[:TOPK_SIDE])
        flags = codec.check(side, numel, packet.numel())
        if flags & Flag.NONFINITE:
            out.fill_(torch.nan)
            return
        count, bound = int(side[16:24].view(np.uint64)[0]), codec._max_count(numel)
        size = codec._index_bytes(numel, min(count, bound))
        begin = TOPK_SIDE + pad16(size)
        exact = count == bound or (not codec.fixed_size and count < bound)
        if not exact or packet.numel() != begin + pad16(4 * count) or bool(flags & BITMAP) != (size != 4 * count):
            raise WireFormatError(
                f"{codec.name} packet of {packet.numel()} bytes announces {count} of {numel} elements"
            )
        data = packet[TOPK_SIDE : TOPK_SIDE + size]
        index = decode_bitmap(data) if flags & BITMAP else data.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        ascending = index.numel() == count and bool((index[1:] > index[:-1]).all())
        if not ascending or (count and int(index[-1]) >= numel):
            raise WireFormatError(f"{codec.name}: indices are not {count} ascending numbers below {numel}")
        values = packet[begin : begin + 4 * count].view(torch.float32) * float(np.float32(scale))
        if not accumulate:
            out.zero_()
        flat[index] += values

    def _select(self, x: Tensor, seed: int) -> Tensor | None:
        """Ascending indices (int64) of the elements to send; None where one is not finite. See selection.py."""
        k = self.codec._max_count(x.numel())
        if x.numel() == 0:
            return torch.empty(0, dtype=torch.int64, device=x.device)
        return self._exact(x, k) if self.codec.method == "exact" else self._sampled(x, k, seed)

    def _exact(self, x: Tensor, k: int) -> Tensor | None:
        counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=x.device)
        grid = blocks_for(x.numel(), VALUES_PER_BLOCK)
        launch("magnitude_histogram", grid, THREADS, (x, np.int64(x.numel()), counts), like=x)
        reached = np.cumsum(_host(counts)[::-1])  # values in the uppermost 1, 2, ... bins
        if reached[NUM_BINS - 1 - FIRST_NONFINITE_BIN]:
            return None
        taken = int(np.searchsorted(reached, k))
        found, _, _ = self._collect(x, (NUM_BINS - 1 - taken) << BIN_SHIFT, int(reached[taken]))
        return _largest(found, k)

    def _sampled(self, x: Tensor, k: int, seed: int) -> Tensor | None:
        density = self.codec.density
        stride = max(int(1 / max(0.01, 2 * density)), 1)
        sample = x.view(torch.int32)[mix64(seed) % stride % x.numel() :: stride] & ABS_MASK
        take = min(max(round(sample.numel() * density), 1), sample.numel())
        threshold = max(int(sample.kthvalue(sample.numel() - take + 1).values), 1)
        for round_number in range(MAX_ROUNDS + 1):
            found, count, finite = self._collect(x, threshold, int(1.3 * k) + 1)
            if not finite:
                return None
            if count >= 0.8 * k or threshold == 1 or round_number == MAX_ROUNDS:
                break
            lower = np.float32(np.int32(threshold).view(np.float32) * np.float32(0.8))
            threshold = max(int(lower.view(np.int32)), 1)
        if count > found.numel():
            found, _, _ = self._collect(x, threshold, count)
        return _largest(found, k) if count > 1.3 * k else (found & 0xFFFFFFFF).sort().values[:k]

    def _collect(self, x: Tensor, threshold: int, room: int) -> tuple[Tensor, int, bool]:
        """(keys, number of values of magnitude >= threshold, whether they are finite); keys as far as there is room."""
        found = torch.empty(room, dtype=torch.int64, device=x.device)
        state = torch.zeros(2, dtype=torch.int64, device=x.device)
        args = (x, np.int64(x.numel()), np.int32(threshold), state, found, np.int64(room))
        launch("select_at_least", blocks_for(x.numel(), VALUES_PER_BLOCK), THREADS, args, like=x)
        count, nonfinite = (int(v) for v in _host(state))
        return found[: min(count, room)], count, not nonfinite


def _largest(found: Tensor, k: int) -> Tensor:
    """Ascending indices of the k largest; keys fall with magnitude and rise with the index."""
    return (found.sort().values[:k] & 0xFFFFFFFF).sort().values
