"""Error-bounded codec: every decoded value is within an absolute bound of the input (the cuSZp family's layout).

Packet: header | bin width fp32, 4 zero bytes, payload bytes uint64 | one byte per block of 32 | payload words.
A value becomes q = rint(x/w), decoded as q*w. The byte b of a block is the bit length of its largest |q|: 0 stores
nothing; otherwise follow one word of signs and b words, word k holding bit k of |q| of the 32 values. 255 marks a raw
block of 32 fp32: taken where the bound would not hold, a value is not finite (which is thereby kept exactly), or
b > 30. A last block is encoded as if padded with zeros.

Most values of a gradient quantise to zero at the bounds that training tolerates: selection and quantisation in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.codecs.codec import HEADER_BYTES, Array, Flag, Fp32Codec, packet_bytes, pad16, write_header
from collectives.errors import ConfigError, WireFormatError
from collectives.transport import Transport, all_gather_records

BLOCK = 32
RAW = 255
MAX_BITS = 30
SHRINK = 1 - 2.0**-12
MIN_WIDTH, MAX_WIDTH = 2.0**-120, 2.0**126
SIDE = HEADER_BYTES + 16

WORDS = np.full(256, -1, np.int64)
"""Payload words of a block, by its header byte; -1 where no such byte exists."""
WORDS[: MAX_BITS + 1] = [0, *(1 + b for b in range(1, MAX_BITS + 1))]
WORDS[RAW] = BLOCK


@dataclass(frozen=True, kw_only=True)
class ErrorBounded(Fp32Codec):
    """|x - D(C(x))| <= bound, absolute or as a share of the tensor's rms or range."""

    name: ClassVar[str] = "eb"
    codec_id: ClassVar[int] = 6
    align: ClassVar[int] = BLOCK
    min_numel: ClassVar[int] = 64
    side_bytes: ClassVar[int] = 16

    bound: float = 0.1
    """The bound, in units of `relative_to`."""
    relative_to: Literal["one", "rms", "range"] = "rms"
    """"one": the bound is absolute."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound >= 0):
            raise ConfigError(f"{self.name}: bound must be a finite number >= 0, not {self.bound}")

    @classmethod
    def for_result(cls, bound: float, size: int, op: Literal["sum", "mean"]) -> Self:
        """The codec with which `two_shot` over `size` ranks keeps the *result* within the absolute `bound`.

        Both encodes use one width: a mean splits the bound in halves, a sum into size+1 shares.
        """
        return cls(bound=bound / 2 if op == "mean" else bound / (size + 1), relative_to="one")

    @property
    def fixed_size(self) -> bool:
        return False

    def for_tensor(self, x: Tensor) -> Self:
        """The same bound in absolute terms for the tensor x; values that are not finite do not count."""
        if self.relative_to == "one":
            return self
        return replace(self, bound=self.bound * _magnitude(x, self.relative_to), relative_to="one")

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        num_blocks = -(-numel // BLOCK)
        return SIDE + pad16(num_blocks) + num_blocks * BLOCK * 4

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        bound = self.for_tensor(torch.from_numpy(x)).bound
        width, limit = bin_width(bound), round_down(bound)
        inverse = np.float32(1) / width if width > 0 else np.float32(0)
        heads, words = _sections(buffer, x.size)
        pack = pack_numpy if self.reference else _pack
        body = x.size // BLOCK * BLOCK
        full = heads[: body // BLOCK]
        used = int(pack(x[:body].reshape(-1, BLOCK), width, inverse, limit, full, words, 0))
        if body < x.size:
            last = np.zeros((1, BLOCK), np.float32)
            last[0, : x.size - body] = x[body:]
            used = int(pack(last, width, inverse, limit, heads[-1:], words, used))
        end = _finish(buffer, x.size, width, used)
        return int(Flag.NONFINITE) if _any_nonfinite(x, heads) else 0, end

    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        width, heads, words = self._open(buffer, out.size)
        unpack = unpack_numpy if self.reference else _unpack
        body = out.size // BLOCK * BLOCK
        used = int(unpack(heads[: body // BLOCK], words, 0, width, out[:body].reshape(-1, BLOCK), accumulate, scale))
        if body < out.size:
            last = np.zeros((1, BLOCK), np.float32)
            last[0, : out.size - body] = out[body:]
            unpack(heads[-1:], words, used, width, last, accumulate, scale)
            out[body:] = last[0, : out.size - body]

    def _open(self, buffer: Array, numel: int) -> tuple[np.float32, Array, Array]:
        """Validated (width, block bytes, payload words) of a packet whose header is good."""
        num_blocks = -(-numel // BLOCK)
        start = SIDE + pad16(num_blocks)
        if buffer.size < start:
            raise WireFormatError(f"{self.name} packet of {buffer.size} bytes cannot hold {num_blocks} block bytes")
        width, claimed = buffer[HEADER_BYTES : HEADER_BYTES + 4].view(np.float32)[0], int(_payload_size(buffer)[0])
        heads, words = _sections(buffer, numel)
        sizes = WORDS[heads]
        if not (np.isfinite(width) and width >= 0) or (sizes < 0).any():
            raise WireFormatError(f"{self.name} packet with bin width {width} or a block byte out of range")
        expected = int(sizes.sum()) * 4
        if claimed != expected or buffer.size != start + pad16(expected):
            raise WireFormatError(
                f"{self.name} packet of {buffer.size} bytes: its blocks need {expected} payload bytes, it claims {claimed}"
            )
        return width, heads, words


@dataclass(frozen=True, kw_only=True)
class ErrorBoundedSum(ErrorBounded):
    """The same format with one width on all ranks, so that packets add without being decoded (`add`)."""

    name: ClassVar[str] = "eb_sum"
    codec_id: ClassVar[int] = 7
    needs_shared_scale: ClassVar[bool] = True

    def agree(self, x: Tensor, transport: Transport) -> Self:
        """The codec with the largest absolute bound that any rank's tensor asks for."""
        bits = np.float64(self.for_tensor(x).bound).view(np.int64)
        table = all_gather_records(transport, "bound", [int(bits)])
        return replace(self, bound=float(table.view(np.float64).max()), relative_to="one")

    def add(self, packets: Sequence[Tensor], numel: int, out: Tensor | None = None) -> Tensor:
        """The packet of the sum: integers are added, and a block that is raw anywhere becomes the raw fp32 sum.

        Exact, so the order of packets only matters for raw blocks. Raises WireFormatError where widths differ.
        """
        packet, buffer = self._room(self.wire_bytes(numel), out)
        num_blocks, flags = -(-numel // BLOCK), 0
        sums, totals = np.zeros((num_blocks, BLOCK), np.int64), np.zeros((num_blocks, BLOCK), np.float32)
        raw = np.zeros(num_blocks, np.bool_)
        width = np.float32(0)
        for number, source in enumerate(packets):
            theirs = packet_bytes(source)
            flags |= self._check(theirs, numel, self.wire_bytes(numel))
            their_width, heads, words = self._open(theirs, numel)
            if number and their_width != width:
                raise WireFormatError(f"{self.name}: bin widths {width} and {their_width} differ; agree on one first")
            width = their_width
            add_blocks = add_numpy if self.reference else _add
            with np.errstate(all="ignore"):
                add_blocks(heads, words, width, sums, totals, raw)
        heads, words = _sections(buffer, numel)
        used = int((pack_sums_numpy if self.reference else _pack_sums)(sums, totals, raw, heads, words))
        end = _finish(buffer, numel, width, used)
        write_header(buffer, self.codec_id, flags, numel)
        return packet[:end]


def bin_width(bound: float) -> np.float32:
    """2 * bound * (1 - 2^-12), rounded down to fp32; 0, which makes every non-zero block raw, below 2^-120."""
    width = min(2 * bound * SHRINK, MAX_WIDTH)
    return round_down(width) if width >= MIN_WIDTH else np.float32(0)


def round_down(value: float) -> np.float32:
    """The largest fp32 that is not above `value`, which is >= 0."""
    rounded = np.float32(min(value, float(np.finfo(np.float32).max)))
    return np.nextafter(rounded, np.float32(0)) if float(rounded) > value else rounded


def _magnitude(x: Tensor, kind: str) -> float:
    """rms or range of the finite values of x, in double precision where single would overflow."""
    if not x.numel():
        return 0.0
    finite = x.reshape(-1)
    if kind == "rms":
        norm = float(torch.linalg.vector_norm(finite))
        if not 1e-15 < norm < 1e38:
            finite = finite[torch.isfinite(finite)].double()
            norm = float(torch.linalg.vector_norm(finite))
        return norm / math.sqrt(max(finite.numel(), 1))
    low, high = (float(v) for v in torch.aminmax(finite))
    if not (math.isfinite(low) and math.isfinite(high)):
        finite = finite[torch.isfinite(finite)]
        low, high = (float(v) for v in torch.aminmax(finite)) if finite.numel() else (0.0, 0.0)
    return high - low


def _payload_size(buffer: Array) -> Array:
    return buffer[HEADER_BYTES + 8 : SIDE].view(np.uint64)


def _sections(buffer: Array, numel: int) -> tuple[Array, Array]:
    """Views of the block bytes and of all payload words behind them."""
    num_blocks = -(-numel // BLOCK)
    start = SIDE + pad16(num_blocks)
    return buffer[SIDE : SIDE + num_blocks], buffer[start : start + (buffer.size - start) // 4 * 4].view(np.uint32)


def _finish(buffer: Array, numel: int, width: np.float32, num_words: int) -> int:
    """Write the side data and the padding; returns the bytes used."""
    num_blocks = -(-numel // BLOCK)
    start = SIDE + pad16(num_blocks)
    buffer[HEADER_BYTES:SIDE] = 0
    buffer[HEADER_BYTES : HEADER_BYTES + 4].view(np.float32)[0] = width
    _payload_size(buffer)[0] = num_words * 4
    buffer[SIDE + num_blocks : start] = 0
    end = start + pad16(num_words * 4)
    buffer[start + num_words * 4 : end] = 0
    return end


def _any_nonfinite(x: Array, heads: Array) -> bool:
    """Only raw blocks can hold such values."""
    blocks = np.flatnonzero(heads == RAW)
    return any(not np.isfinite(x[block * BLOCK : (block + 1) * BLOCK]).all() for block in blocks)


# --- the format in NumPy ----------------------------------------------------------------------------------------------


def _bit_length(top: Array) -> Array:
    return np.ceil(np.log2(top.astype(np.float64) + 1)).astype(np.int64)


def _write_blocks(q: Array, raw_values: Array, raw: Array, heads: Array, words: Array, cursor: int) -> int:
    """Write blocks of integers q [k, 32], or of raw fp32 where `raw`, from word `cursor` on; returns the new cursor."""
    bits = _bit_length(np.abs(q).max(axis=1, initial=0))
    heads[:] = np.where(raw, RAW, bits)
    for block in range(len(q)):
        b = int(heads[block])
        if b == RAW:
            words[cursor : cursor + BLOCK] = raw_values[block].view(np.uint32)
        elif b:
            planes = [q[block] < 0, *((np.abs(q[block]) >> k) & 1 for k in range(b))]
            packed = np.packbits(np.array(planes, np.uint8), axis=1, bitorder="little")
            words[cursor : cursor + 1 + b] = packed.view(np.uint32)[:, 0]
        cursor += int(WORDS[b])
    return cursor


def _read_blocks(heads: Array, words: Array, cursor: int) -> tuple[Array, Array, Array, int]:
    """(q int64 [k, 32], raw fp32 [k, 32], which are raw, new cursor)."""
    q, values, raw = np.zeros((len(heads), BLOCK), np.int64), np.zeros((len(heads), BLOCK), np.float32), heads == RAW
    for block, b in enumerate(heads.tolist()):
        part = words[cursor : cursor + int(WORDS[b])]
        if b == RAW:
            values[block] = part.view(np.float32)
        elif b:
            planes = np.unpackbits(part.copy().view(np.uint8).reshape(-1, 4), axis=1, bitorder="little").astype(
                np.int64
            )
            magnitude = (planes[1:] << np.arange(b)[:, None]).sum(axis=0)
            q[block] = np.where(planes[0] == 1, -magnitude, magnitude)
        cursor += int(WORDS[b])
    return q, values, raw, cursor


def pack_numpy(
    x: Array, width: np.float32, inverse: np.float32, limit: np.float32, heads: Array, words: Array, cursor: int
) -> int:
    """Quantise and write the blocks x [k, 32]; `limit` is the bound that each value is checked against."""
    q = np.rint(x * inverse)
    good = (np.abs(x - q * width) <= limit) & (np.abs(q) < np.float32(2**MAX_BITS))
    raw: Array = np.any(~good, axis=1)
    return _write_blocks(np.where(raw[:, None], 0, q).astype(np.int64), x, raw, heads, words, cursor)


def unpack_numpy(
    heads: Array, words: Array, cursor: int, width: np.float32, out: Array, accumulate: bool, scale: np.float32
) -> int:
    """out [k, 32] = scale * decoded blocks, or += ."""
    q, values, raw, cursor = _read_blocks(heads, words, cursor)
    decoded = np.where(raw[:, None], values, q.astype(np.float32) * width) * scale
    out[:] = out + decoded if accumulate else decoded
    return cursor


def add_numpy(heads: Array, words: Array, width: np.float32, sums: Array, totals: Array, raw: Array) -> None:
    """Add one packet's blocks to the integer sums, the decoded values to the fp32 totals, and note raw blocks."""
    q, values, theirs, _ = _read_blocks(heads, words, 0)
    sums += q
    totals += np.where(theirs[:, None], values, q.astype(np.float32) * width)
    raw |= theirs


def pack_sums_numpy(sums: Array, totals: Array, raw: Array, heads: Array, words: Array) -> int:
    """Write summed blocks; those that are raw or need more than 30 bits as their fp32 totals."""
    wide = raw | (np.abs(sums).max(axis=1, initial=0) >= 2**MAX_BITS)
    return _write_blocks(np.where(wide[:, None], 0, sums), totals, wide, heads, words, 0)


# --- compiled ---------------------------------------------------------------------------------------------------------
# Rows have a run-time length (`row.shape[0]`): a literal 32 is unrolled before it can become vector code.


@njit(nogil=True, cache=True)
def _write_block(q, top, heads, block, words, cursor):  # type: ignore[no-untyped-def]
    num_bits = 0
    while top >> num_bits:
        num_bits += 1
    heads[block] = num_bits
    if num_bits:
        signs = np.int32(0)
        for i in range(q.shape[0]):
            signs |= np.int32(q[i] < 0) << np.int32(i)
            q[i] = abs(q[i])
        words[cursor] = np.uint32(signs)
        for k in range(num_bits):
            word = np.int32(0)
            for i in range(q.shape[0]):
                word |= ((q[i] >> np.int32(k)) & np.int32(1)) << np.int32(i)
            words[cursor + 1 + k] = np.uint32(word)
        cursor += 1 + num_bits
    return cursor


@njit(nogil=True, cache=True)
def _write_raw(values, heads, block, words, cursor):  # type: ignore[no-untyped-def]
    heads[block] = RAW
    bits = values.view(np.uint32)
    for i in range(BLOCK):
        words[cursor + i] = bits[i]
    return cursor + BLOCK


@njit(nogil=True, cache=True)
def _pack(x, width, inverse, limit, heads, words, cursor):  # type: ignore[no-untyped-def]
    q = np.empty(BLOCK, np.int32)
    for block in range(x.shape[0]):
        row = x[block]
        num_bad, top = np.int32(0), np.int32(0)
        for i in range(row.shape[0]):
            r = np.rint(row[i] * inverse)
            good = (np.abs(row[i] - r * width) <= limit) & (np.abs(r) < np.float32(1 << MAX_BITS))
            num_bad += np.int32(0 if good else 1)
            q[i] = np.int32(r if good else np.float32(0))
        if num_bad:
            cursor = _write_raw(row, heads, block, words, cursor)
        else:
            for i in range(q.shape[0]):
                top = max(top, abs(q[i]))
            cursor = _write_block(q, top, heads, block, words, cursor)
    return cursor


@njit(nogil=True, cache=True)
def _read_block(words, cursor, num_bits, q):  # type: ignore[no-untyped-def]
    for i in range(q.shape[0]):
        q[i] = 0
    for k in range(num_bits):
        word = np.int32(words[cursor + 1 + k])
        for i in range(q.shape[0]):
            q[i] |= ((word >> np.int32(i)) & np.int32(1)) << np.int32(k)
    signs = np.int32(words[cursor])
    for i in range(q.shape[0]):
        q[i] = -q[i] if (signs >> np.int32(i)) & np.int32(1) else q[i]


@njit(nogil=True, cache=True)
def _unpack(heads, words, cursor, width, out, accumulate, scale):  # type: ignore[no-untyped-def]
    q = np.empty(BLOCK, np.int32)
    values = np.empty(BLOCK, np.float32)
    raw_bits = values.view(np.uint32)
    for block in range(heads.shape[0]):
        num_bits = heads[block]
        row = out[block]
        if num_bits == 0:
            for i in range(row.shape[0]):
                row[i] = row[i] + np.float32(0) if accumulate else np.float32(0) * scale
            continue
        if num_bits == RAW:
            for i in range(BLOCK):
                raw_bits[i] = words[cursor + i]
            cursor += BLOCK
        else:
            _read_block(words, cursor, num_bits, q)
            for i in range(q.shape[0]):
                values[i] = np.float32(q[i]) * width
            cursor += 1 + num_bits
        if accumulate:
            for i in range(row.shape[0]):
                row[i] += values[i] * scale
        else:
            for i in range(row.shape[0]):
                row[i] = values[i] * scale
    return cursor


@njit(nogil=True, cache=True)
def _add(heads, words, width, sums, totals, raw):  # type: ignore[no-untyped-def]
    q = np.empty(BLOCK, np.int32)
    values = np.empty(BLOCK, np.float32)
    raw_bits = values.view(np.uint32)
    cursor = 0
    for block in range(heads.shape[0]):
        num_bits = heads[block]
        if num_bits == RAW:
            raw[block] = True
            for i in range(BLOCK):
                raw_bits[i] = words[cursor + i]
                totals[block, i] += values[i]
            cursor += BLOCK
        elif num_bits:
            _read_block(words, cursor, num_bits, q)
            for i in range(q.shape[0]):
                sums[block, i] += q[i]
                totals[block, i] += np.float32(q[i]) * width
            cursor += 1 + num_bits


@njit(nogil=True, cache=True)
def _pack_sums(sums, totals, raw, heads, words):  # type: ignore[no-untyped-def]
    q = np.empty(BLOCK, np.int32)
    cursor = 0
    for block in range(sums.shape[0]):
        top = np.int64(0)
        for i in range(BLOCK):
            top = max(top, abs(sums[block, i]))
        if raw[block] or top >= 1 << MAX_BITS:
            cursor = _write_raw(totals[block], heads, block, words, cursor)
        else:
            for i in range(BLOCK):
                q[i] = np.int32(sums[block, i])
            cursor = _write_block(q, np.int32(top), heads, block, words, cursor)
    return cursor
