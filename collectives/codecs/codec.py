"""The contract of every codec: packets, their header, error feedback inside `encode`, and sums of packets.

A packet is a flat uint8 tensor: a 16-byte header, then side data (scales, widths, indices), then the payload, each
section starting at a multiple of 16 and the whole padded to 16. Scales travel with the payload, so one transfer moves
both. All numbers are little-endian.

What always holds: a header is checked before anything is allocated or written, and lengths and indices before they are
used (`WireFormatError`). Codecs add; division by the weight total is the `scale` of a sum. A NaN or an infinity in a
block decodes to NaN for that block on every rank and leaves its residual as it was. Codecs are immutable and may be
shared by threads. The NumPy twin (`reference=True`) defines each format; the compiled kernels write the same bytes.
CUDA tensors go to the codec's `Side` (gpu.py), everything else through NumPy views.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.errors import ConfigError, WireFormatError
from collectives.kernels.cuda import on_gpu

if TYPE_CHECKING:
    from collectives.codecs.gpu import Side

Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"zC"
VERSION = 1
ALIGN_BYTES = 16
HEADER = struct.Struct("<2sBBIQ")  # magic, version, codec id, flags, number of elements
HEADER_BYTES = HEADER.size

ABS_MASK = np.int32(0x7FFFFFFF)
INF_BITS = np.int32(0x7F800000)
"""An integer maximum of (bits & ABS_MASK) at or above this says that a block holds a NaN or an infinity."""


class Flag(IntFlag):
    """Header flags. The low byte is common to all codecs and survives a sum; the rest belongs to the codec."""

    NONE = 0
    NONFINITE = 1
    """At least one block was not finite and decodes to NaN."""
    UNDERFLOW = 2
    """More than 1 % of the non-zero values became zero in the cast."""
    TAKEN_BACK = 4
    """The sender will not use this codec again for such messages, from the next step on."""


STICKY = 0xFF


@dataclass(frozen=True)
class Residual:
    """The error that earlier steps left behind: fp32 [n], added before encoding.

    `value` is read and `update` is written; both may be the same tensor. Two tensors let a step be taken back.
    """

    value: Tensor
    update: Tensor

    @classmethod
    def in_place(cls, tensor: Tensor) -> Self:
        """Read and write one tensor: for steps that always count."""
        return cls(tensor, tensor)

    def part(self, start: int, stop: int) -> Residual:
        """The residual of elements [start, stop)."""
        return Residual(self.value[start:stop], self.update[start:stop])


def pad16(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of 16."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def write_header(buffer: Array, codec_id: int, flags: int, numel: int) -> None:
    """Fill the first 16 bytes of a packet."""
    buffer[:HEADER_BYTES] = np.frombuffer(HEADER.pack(MAGIC, VERSION, codec_id, flags, numel), np.uint8)


def read_header(buffer: Array) -> tuple[int, int, int]:
    """Return (codec id, flags, numel). Raises WireFormatError."""
    if buffer.size < HEADER_BYTES:
        raise WireFormatError(f"a packet of {buffer.size} bytes has no room for its {HEADER_BYTES}-byte header")
    magic, version, codec_id, flags, numel = HEADER.unpack(buffer[:HEADER_BYTES].tobytes())
    if magic != MAGIC:
        raise WireFormatError(f"packet starts with {magic!r}, not {MAGIC!r}: it is no packet, or an offset is wrong")
    if version != VERSION:
        raise WireFormatError(f"packet has format version {version}, this build reads {VERSION}: update all ranks")
    return codec_id, flags, numel


def packet_flags(packet: Tensor) -> Flag:
    """The common flags of a packet, without decoding it."""
    return Flag(read_header(packet[:HEADER_BYTES].cpu().numpy())[1] & STICKY)


def packet_bytes(packet: Tensor) -> Array:
    """Zero-copy uint8 view of a packet; a copy where its address is not a multiple of 16 (typed views need that)."""
    if not packet.is_cpu:
        raise ConfigError(
            f"this operation has no CUDA kernel, and the packet is on {packet.device}; move it to the CPU"
        )
    array: Array = packet.numpy()
    return array.copy() if array.ctypes.data % ALIGN_BYTES else array


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """One way to write n fp32 values in fewer bytes. See the module for what holds for all of them."""

    reference: bool = False
    """Run the NumPy twin instead of the compiled kernels."""

    name: ClassVar[str]
    codec_id: ClassVar[int]
    linear: ClassVar[bool] = False
    """Encoded values of several ranks may be added on the wire (see `summand`)."""
    deterministic: ClassVar[bool] = True
    """The bytes depend on the input and the seed alone."""
    needs_shared_scale: ClassVar[bool] = False
    """All ranks must encode with the same width for a sum of packets to exist."""
    side_bytes: ClassVar[int] = 0
    """Bytes that follow the header in every packet of a codec without fixed size."""
    shared_seed: ClassVar[bool] = False
    """All ranks must draw the same random numbers."""
    min_numel: ClassVar[int] = 1
    """Below this many elements the packet is no smaller than the tensor."""
    align: ClassVar[int] = 1
    """Chunk borders should be multiples of this many elements."""

    @property
    def fixed_size(self) -> bool:
        """Packets of n elements always have `wire_bytes(n)` bytes."""
        return True

    @property
    def unbiased(self) -> bool:
        """The expected decoded value, over seeds, is the input."""
        return False

    def supports(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `encode` takes tensors of this kind."""
        if device.type == "cuda":
            from collectives.codecs import gpu  # it needs this module

            return gpu.supports(self, dtype)
        return dtype == torch.float32 and device.type == "cpu"

    def ef_default(self, optimizer: str) -> bool:
        """Whether error feedback should be on for `optimizer` ("sgd", "adam", "adamw", ...)."""
        return False

    def for_tensor(self, x: Tensor) -> Codec:
        """The codec with settings that are relative to the whole tensor made absolute."""
        return self

    @abstractmethod
    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Upper bound of the packet size for `numel` elements; exact when `fixed_size`."""

    @abstractmethod
    def encode(self, x: Tensor, residual: Residual | None = None, out: Tensor | None = None, seed: int = 0) -> Tensor:
        """Write `x` (contiguous, any shape) as a packet and return it: a view of `out`, or a new tensor.

        With `residual` the packet carries x + residual.value, and residual.update receives what the packet lost.
        out: uint8 with at least `wire_bytes(n)` bytes, 16-byte aligned. seed: names this tensor and step for codecs
        that draw random numbers. Raises ConfigError for inputs the codec does not take.
        """

    @abstractmethod
    def decode(self, packet: Tensor, out: Tensor, accumulate: bool = False, scale: float = 1.0) -> None:
        """Write `scale` times the packet's values into `out` (contiguous), or add them to it.

        Raises WireFormatError, with `out` untouched, where the packet does not describe out.numel() elements.
        """

    def reduce(
        self, packets: Sequence[Tensor], out: Tensor, weights: Sequence[float] | None = None, scale: float = 1.0
    ) -> Flag:
        """out = scale * sum of weight_r * D(packet_r), in fp32, in rank order from zero; returns the common flags.

        Packets of weight 0 are not looked at.
        """
        out.zero_()
        flags = Flag.NONE
        for packet, weight in zip(packets, weights or [1.0] * len(packets), strict=True):
            if weight != 0:
                flags |= packet_flags(packet)
                self.decode(packet, out, accumulate=True, scale=weight)
        if scale != 1:
            out.mul_(scale)
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
        """`reduce`, then `encode`: what the owner of a chunk does. The common flags of all sources are kept."""
        total = torch.empty(numel, dtype=torch.float32, device=packets[0].device)
        flags = self.reduce(packets, total, weights, scale)
        packet = self.encode(total, residual, out, seed)
        add_flags(packet, flags)
        return packet

    def summand(self, packet: Tensor) -> Tensor:
        """The part of a packet that a native all-reduce may add in place. Only where `linear`."""
        raise ConfigError(f"{self.name} packets cannot be added on the wire")

    def twin(self) -> Codec:
        """The same codec, running the NumPy definition of its format."""
        return replace(self, reference=True)

    def warm_up(self) -> None:
        """Compile the kernels outside any timed path."""
        x = torch.ones(600, dtype=torch.float32)
        packet = self.encode(x, Residual.in_place(torch.zeros(600)))
        self.encode(x)
        self.reduce_encode([packet], 600)
        self.decode(packet, x)

    def room(self, bound: int, out: Tensor | None, device: torch.device) -> Tensor:
        """`out`, or a new packet of `bound` bytes. Raises ConfigError where `out` cannot hold a packet."""
        packet = torch.empty(bound, dtype=torch.uint8, device=device) if out is None else out
        aligned = packet.data_ptr() % ALIGN_BYTES == 0
        fits = packet.dtype == torch.uint8 and packet.dim() == 1 and packet.numel() >= bound
        if not fits or not aligned or packet.device != device:
            raise ConfigError(
                f"{self.name}: out must be a flat uint8 tensor of at least {bound} bytes at a multiple of {ALIGN_BYTES} "
                f"on {device}; got {packet.dtype} {tuple(packet.shape)} on {packet.device}, "
                f"{'aligned' if aligned else 'not aligned'}"
            )
        return packet

    def _room(self, bound: int, out: Tensor | None) -> tuple[Tensor, Array]:
        """`room` on the CPU, and its NumPy view."""
        packet = self.room(bound, out, torch.device("cpu"))
        return packet, packet.numpy()

    def _check(self, buffer: Array, numel: int, bound: int) -> int:
        """Validate header and length against what the receiver expects; returns the flags."""
        return self.check(buffer, numel, buffer.size, bound)

    def check(self, buffer: Array, numel: int, num_bytes: int, bound: int | None = None) -> int:
        """`_check` of a packet of `num_bytes` of which only the first ones are at hand; bound as of fp32 if None."""
        bound = self.wire_bytes(numel) if bound is None else bound
        codec_id, flags, claimed = read_header(buffer)
        if codec_id != self.codec_id:
            raise WireFormatError(f"packet was written by codec {codec_id}, expected {self.name} ({self.codec_id})")
        if claimed != numel:
            raise WireFormatError(f"{self.name} packet claims {claimed} elements, expected {numel}")
        least = bound if self.fixed_size else HEADER_BYTES + self.side_bytes
        if not least <= num_bytes <= bound or num_bytes % ALIGN_BYTES:
            raise WireFormatError(
                f"{self.name} packet of {num_bytes} bytes for {numel} elements; "
                f"{'exactly' if self.fixed_size else 'a multiple of 16, at most'} {bound} expected"
            )
        return flags


@dataclass(frozen=True, kw_only=True)
class Fp32Codec(Codec):
    """A codec of flat fp32 arrays: a subclass fills the packet behind the header and reads it back."""

    def side(self, tensor: Tensor) -> Side | None:
        """The CUDA side where `tensor` is on a GPU. Raises ConfigError where this codec has none."""
        if self.reference or not on_gpu(tensor):
            return None
        from collectives.codecs import gpu  # it needs this module

        return gpu.side_of(self)

    def encode(self, x: Tensor, residual: Residual | None = None, out: Tensor | None = None, seed: int = 0) -> Tensor:
        if side := self.side(x):
            return side.encode(x, residual, out, seed)
        values = self._values(x)
        packet, buffer = self._room(self.wire_bytes(values.size), out)
        with np.errstate(all="ignore"):
            if residual is None:
                flags, used = self._encode(values, buffer, seed)
            else:
                old, new = self._values(residual.value), self._values(residual.update)
                if not old.size == new.size == values.size:
                    raise ConfigError(f"{self.name}: the residual has {old.size} elements, x has {values.size}")
                flags, used = self._encode_feedback(values, old, new, buffer, seed)
        write_header(buffer, self.codec_id, flags, values.size)
        return packet[:used]

    def decode(self, packet: Tensor, out: Tensor, accumulate: bool = False, scale: float = 1.0) -> None:
        if side := self.side(out):
            return side.decode(packet, out, accumulate, scale)
        values, buffer = self._values(out), packet_bytes(packet)
        flags = self._check(buffer, values.size, self.wire_bytes(values.size))
        with np.errstate(all="ignore"):
            self._decode(buffer, flags, values, accumulate, np.float32(scale))

    @abstractmethod
    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        """Fill `buffer` behind its header; return (flags, bytes used)."""

    def _encode_feedback(self, x: Array, old: Array, new: Array, buffer: Array, seed: int) -> tuple[int, int]:
        """Encode a = x + old and write new = a - D(packet); where that is not finite, new = old."""
        total = x + old
        flags, used = self._encode(total, buffer, seed)
        decoded = np.empty_like(total)
        self._decode(buffer[:used], flags, decoded, False, np.float32(1))
        keep_lost(total, decoded, old, new)
        return flags, used

    @abstractmethod
    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        """Decode a packet whose header is good; checks side data before it writes."""

    def _values(self, x: Tensor) -> Array:
        if not x.is_cpu or not self.supports(x.dtype, x.device) or not x.is_contiguous():
            raise ConfigError(
                f"{self.name} takes contiguous float32 tensors on the cpu, not {x.dtype} on {x.device}"
                f"{'' if x.is_contiguous() else ' with strides'}; convert it first"
            )
        values: Array = x.detach().view(-1).numpy()
        return values


def add_flags(packet: Tensor, flags: int) -> None:
    """Set further flags in a finished packet."""
    if not packet.is_cpu:
        packet[4:8].view(torch.int32).bitwise_or_(int(flags))
        return
    codec_id, present, numel = read_header(packet.numpy())
    write_header(packet.numpy(), codec_id, present | flags, numel)


@njit(nogil=True, cache=True)
def keep_lost(total, decoded, old, new):  # type: ignore[no-untyped-def]
    """new = total - decoded, and old where that is not finite; flat fp32, new may be old."""
    for i in range(total.shape[0]):
        lost = total[i] - decoded[i]
        new[i] = lost if np.abs(lost) < np.float32(np.inf) else old[i]
