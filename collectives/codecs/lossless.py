"""Exact: byte planes, then zstandard at level 1.

For optimizer shards, parameters, checkpoints and users who forbid loss; it moves data and is never part of a reduction.
Splitting the bytes of a value into planes puts the exponents, which repeat, next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from collectives.codecs.codec import (
    HEADER_BYTES,
    Array,
    Codec,
    Residual,
    packet_bytes,
    pad16,
    read_header,
    write_header,
)
from collectives.errors import ConfigError, WireFormatError

SIDE = HEADER_BYTES + 16
LEVEL = 1
MAX_ITEMSIZE = 8


@dataclass(frozen=True, kw_only=True)
class Lossless(Codec):
    """Packet: header (flags: bytes per value << 8) | compressed bytes uint64, 8 zero bytes | the zstandard frame.

    Takes any dtype, on the CPU. A frame that would be larger than the planes is replaced by the planes themselves.
    """

    name: ClassVar[str] = "lossless"
    codec_id: ClassVar[int] = 13
    min_numel: ClassVar[int] = 1024
    side_bytes: ClassVar[int] = 16

    @property
    def fixed_size(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return True

    def supports(self, dtype: torch.dtype, device: torch.device) -> bool:
        return device.type == "cpu"

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return SIDE + pad16(numel * dtype.itemsize)

    def encode(self, x: Tensor, residual: Residual | None = None, out: Tensor | None = None, seed: int = 0) -> Tensor:
        if residual is not None:
            raise ConfigError("lossless leaves no residual; pass none")
        import zstandard  # only here: a machine that checks a card need not have it

        item, raw = x.dtype.itemsize, self._raw(x)
        bound = self.wire_bytes(x.numel(), x.dtype)
        packet, buffer = self._room(bound, out)
        planes = np.ascontiguousarray(raw.reshape(-1, item).T).reshape(-1)
        frame = np.frombuffer(zstandard.ZstdCompressor(level=LEVEL).compress(planes.data), np.uint8)
        payload = frame if frame.size < planes.size else planes
        used = SIDE + pad16(payload.size)
        buffer[HEADER_BYTES:used] = 0
        buffer[HEADER_BYTES : HEADER_BYTES + 8].view(np.uint64)[0] = payload.size
        buffer[SIDE : SIDE + payload.size] = payload
        write_header(buffer, self.codec_id, item << 8, x.numel())
        return packet[:used]

    def decode(self, packet: Tensor, out: Tensor, accumulate: bool = False, scale: float = 1.0) -> None:
        buffer, item = packet_bytes(packet), out.dtype.itemsize
        target = self._raw(out)
        codec_id, flags, _ = read_header(buffer)
        if codec_id == self.codec_id and flags >> 8 != item:  # before the length, whose bound depends on it
            raise WireFormatError(f"lossless packet holds {flags >> 8}-byte values, out has {item}-byte ones")
        self._check(buffer, out.numel(), self.wire_bytes(out.numel(), out.dtype))
        size = int(buffer[HEADER_BYTES : HEADER_BYTES + 8].view(np.uint64)[0])
        if SIDE + pad16(size) != buffer.size:
            raise WireFormatError(f"lossless packet of {buffer.size} bytes claims a payload of {size}")
        planes = buffer[SIDE : SIDE + size]
        if size != target.size:
            planes = _inflate(planes, target.size)
        values = np.ascontiguousarray(planes.reshape(item, -1).T).reshape(-1)
        if accumulate or scale != 1:
            decoded = torch.from_numpy(values).view(out.dtype).view(out.shape)
            out.copy_(out + decoded * scale if accumulate else decoded * scale)
        else:
            target[:] = values

    def _raw(self, x: Tensor) -> Array:
        """The bytes of x, zero-copy."""
        if x.device.type != "cpu" or not x.is_contiguous():
            raise ConfigError(f"lossless takes contiguous tensors on the cpu, not {x.dtype} on {x.device}")
        raw: Array = x.detach().reshape(-1).view(torch.uint8).numpy()
        return raw


def _inflate(frame: Array, num_bytes: int) -> Array:
    """Decompress exactly `num_bytes`, which the caller expects, whatever the frame claims."""
    import zstandard

    try:
        parameters = zstandard.get_frame_parameters(frame.tobytes())
        if parameters.content_size != num_bytes:
            raise WireFormatError(f"lossless frame holds {parameters.content_size} bytes, expected {num_bytes}")
        plain = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=num_bytes)
    except zstandard.ZstdError as error:
        raise WireFormatError(f"lossless frame of {frame.size} bytes cannot be read: {error}") from None
    return np.frombuffer(plain, np.uint8)
