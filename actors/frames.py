"""One shard of one step as bytes on their way to a holder: a fixed header, then JSON values and safetensors.

Nothing here is believed before it is checked: the header carries a crc32 of itself and the sha256 of what follows, and
no size is used before both it and the limit allow it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import WireFormatError
from placement.recovery import Held

Bytes = NDArray[np.uint8]

MAGIC = b"ZRCK"
VERSION = 1
_FIELDS = struct.Struct("<4sHHIIIQQIQQ16s32s")
HEADER_BYTES = 128
"""Fields, zeros, and in the last four bytes a crc32 of the rest."""


@dataclass(frozen=True)
class Frame:
    """The header. base: (step, num_shards) of the last committed set, which a holder must keep while this arrives."""

    run_id: str
    epoch: int
    rank: int
    num_shards: int
    step: int
    base: tuple[int, int]
    values_bytes: int
    tensors_bytes: int
    sha256: str

    @property
    def payload_bytes(self) -> int:
        return self.values_bytes + self.tensors_bytes

    @property
    def key(self) -> tuple[int, int]:
        """The set that this shard belongs to."""
        return (self.step, self.num_shards)

    def held(self) -> Held:
        """As a holder reports it."""
        return Held(self.rank, self.num_shards, self.step, self.epoch, self.sha256)


def run_tag(run_id: str) -> bytes:
    """16 bytes that stand for a run."""
    return hashlib.sha256(run_id.encode()).digest()[:16]


def seal(buffer: Bytes, frame: Frame) -> Frame:
    """Write the header of a frame whose payload is in place; returns it with the sha256 of the payload."""
    payload = buffer[HEADER_BYTES : HEADER_BYTES + frame.payload_bytes]
    sealed = Frame(**{**frame.__dict__, "sha256": hashlib.sha256(payload.data).hexdigest()})
    head = _FIELDS.pack(
        MAGIC,
        VERSION,
        0,
        frame.epoch,
        frame.rank,
        frame.num_shards,
        frame.step,
        frame.base[0],
        frame.base[1],
        frame.values_bytes,
        frame.tensors_bytes,
        run_tag(frame.run_id),
        bytes.fromhex(sealed.sha256),
    )
    head = head.ljust(HEADER_BYTES - 4, b"\0")
    buffer[:HEADER_BYTES] = np.frombuffer(head + struct.pack("<I", zlib.crc32(head)), np.uint8)
    return sealed


def read(buffer: Bytes, run_id: str, limit_bytes: int) -> Frame:
    """Check a received frame and return its header. Raises WireFormatError; reads nothing beyond the buffer."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not HEADER_BYTES <= buffer.size <= HEADER_BYTES + limit_bytes:
        raise WireFormatError(f"a checkpoint frame of {buffer.nbytes} bytes; {limit_bytes} are allowed")
    head = buffer[:HEADER_BYTES].tobytes()
    if zlib.crc32(head[:-4]) != struct.unpack("<I", head[-4:])[0]:
        raise WireFormatError("the header of a checkpoint frame is damaged: its crc32 does not match")
    magic, version, _, epoch, rank, shards, step, base_step, base_shards, values, tensors, tag, sha = (
        _FIELDS.unpack_from(head)
    )
    if (magic, version) != (MAGIC, VERSION):
        raise WireFormatError(f"not a checkpoint frame of version {VERSION}: {magic!r}, {version}")
    if tag != run_tag(run_id):
        raise WireFormatError(f"a checkpoint frame of another run than {run_id}")
    if not rank < shards or values + tensors != buffer.size - HEADER_BYTES:
        raise WireFormatError(
            f"shard {rank} of {shards} claims {values} + {tensors} bytes in {buffer.size - HEADER_BYTES}"
        )
    if hashlib.sha256(buffer[HEADER_BYTES:].data).digest() != sha:
        raise WireFormatError(f"shard {rank} of step {step} is damaged: its sha256 does not match")
    return Frame(run_id, epoch, rank, shards, step, (base_step, base_shards), values, tensors, sha.hex())


def parts(buffer: Bytes, frame: Frame) -> tuple[dict[str, Any], bytes]:
    """The JSON values and the safetensors bytes of a checked frame."""
    middle = HEADER_BYTES + frame.values_bytes
    values: dict[str, Any] = json.loads(buffer[HEADER_BYTES:middle].tobytes())
    return values, buffer[middle : middle + frame.tensors_bytes].tobytes()
