"""One shard of one step as bytes on their way to a holder: a fixed header, then JSON values and safetensors.

Nothing here is believed before it is checked: the header carries a crc32 of itself and a digest of what follows, and no
size is used before both it and the limit allow it. The digest is the sha256 of the crc32 of every MiB: it guards against
damage, not against an enemy, and costs a third of a sha256 of all bytes; checkpoints on storage carry the full one.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass, replace
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
_PIECE_BYTES = 1 << 20


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
    digest: str

    @property
    def payload_bytes(self) -> int:
        return self.values_bytes + self.tensors_bytes

    @property
    def key(self) -> tuple[int, int]:
        """The set that this shard belongs to."""
        return (self.step, self.num_shards)

    def held(self) -> Held:
        """As a holder reports it."""
        return Held(self.rank, self.num_shards, self.step, self.epoch, self.digest)


def run_tag(run_id: str) -> bytes:
    """16 bytes that stand for a run."""
    return hashlib.sha256(run_id.encode()).digest()[:16]


def digest_of(payload: Bytes) -> str:
    """See the module; 64 hexadecimal digits."""
    pieces = [zlib.crc32(payload[start : start + _PIECE_BYTES].data) for start in range(0, payload.size, _PIECE_BYTES)]
    return hashlib.sha256(struct.pack(f"<{len(pieces)}IQ", *pieces, payload.size)).hexdigest()


def seal(buffer: Bytes, frame: Frame) -> Frame:
    """Write the header of a frame whose payload is in place; returns it with the digest of the payload."""
    payload = buffer[HEADER_BYTES : HEADER_BYTES + frame.payload_bytes]
    sealed = replace(frame, digest=digest_of(payload))
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
        bytes.fromhex(sealed.digest),
    )
    head = head.ljust(HEADER_BYTES - 4, b"\0")
    buffer[:HEADER_BYTES] = np.frombuffer(head + struct.pack("<I", zlib.crc32(head)), np.uint8)
    return sealed


def read_header(head: Bytes, run_id: str, limit_bytes: int) -> Frame:
    """Check the first HEADER_BYTES of a frame. Raises WireFormatError."""
    raw = head.tobytes()
    if zlib.crc32(raw[:-4]) != struct.unpack("<I", raw[-4:])[0]:
        raise WireFormatError("the header of a checkpoint frame is damaged: its crc32 does not match")
    magic, version, _, epoch, rank, shards, step, base_step, base_shards, values, tensors, tag, digest = (
        _FIELDS.unpack_from(raw)
    )
    if (magic, version) != (MAGIC, VERSION):
        raise WireFormatError(f"not a checkpoint frame of version {VERSION}: {magic!r}, {version}")
    if tag != run_tag(run_id):
        raise WireFormatError(f"a checkpoint frame of another run than {run_id}")
    if not rank < shards or values + tensors > limit_bytes:
        raise WireFormatError(f"shard {rank} of {shards} claims {values} + {tensors} bytes; {limit_bytes} are allowed")
    return Frame(run_id, epoch, rank, shards, step, (base_step, base_shards), values, tensors, digest.hex())


def check_payload(payload: Bytes, frame: Frame) -> None:
    """Raise WireFormatError unless these are the bytes that the header speaks of."""
    if digest_of(payload) != frame.digest:
        raise WireFormatError(f"shard {frame.rank} of step {frame.step} is damaged: its digest does not match")


def read(buffer: Bytes, run_id: str, limit_bytes: int) -> Frame:
    """Check a whole frame and return its header. Raises WireFormatError; reads nothing beyond the buffer."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not HEADER_BYTES <= buffer.size <= HEADER_BYTES + limit_bytes:
        raise WireFormatError(f"a checkpoint frame of {buffer.nbytes} bytes; {limit_bytes} are allowed")
    frame = read_header(buffer[:HEADER_BYTES], run_id, limit_bytes)
    if frame.payload_bytes != buffer.size - HEADER_BYTES:
        raise WireFormatError(
            f"shard {frame.rank} claims {frame.values_bytes} + {frame.tensors_bytes} bytes in {buffer.size - HEADER_BYTES}"
        )
    check_payload(buffer[HEADER_BYTES:], frame)
    return frame


def parts(buffer: Bytes, frame: Frame) -> tuple[dict[str, Any], bytes]:
    """The JSON values and the safetensors bytes of a checked frame."""
    middle = HEADER_BYTES + frame.values_bytes
    values: dict[str, Any] = json.loads(buffer[HEADER_BYTES:middle].tobytes())
    return values, buffer[middle : middle + frame.tensors_bytes].tobytes()
