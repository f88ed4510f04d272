"""A rank's shard: its own states whole, and its share of the states that are equal on all ranks.

With plain data parallelism parameters and optimizer are the same bytes on every rank. As one safetensors image they are
cut into as many ranges as there are ranks, and each rank keeps one: n ranks keep the state once instead of n times. The
snapshot is the only copy: tensors go straight into the frame that travels, and those that nothing but the next update
changes do so while the next step computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from actors.errors import CheckpointError
from actors.frames import HEADER_BYTES, Bytes, Frame
from actors.state import Resharding, StateProvider, collect, distribute, state_of

RANGE_KEY = "range of the replicated states"
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Layout:
    """Where tensors of given names, types and shapes lie in a safetensors image: the same from step to step."""

    head: Bytes
    offsets: tuple[int, ...]
    """Of each tensor, in the order of their names, from the beginning of the image."""
    num_bytes: int
    sha256: str


@lru_cache(maxsize=16)
def layout_of(signature: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]) -> Layout:
    """signature: name, type, shape and bytes of each tensor, sorted."""
    entries: dict[str, Any] = {}
    end = 0
    begins = []
    for name, dtype, shape, num_bytes in signature:
        if dtype not in _DTYPES:
            raise CheckpointError(f"state '{name}' is {dtype}, which safetensors cannot hold")
        begin, end = end, end + num_bytes
        begins.append(begin)
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    offsets = tuple(head.size + begin for begin in begins)
    return Layout(head, offsets, head.size + end, hashlib.sha256(text).hexdigest())


class Image:
    """The safetensors image of some tensors, of which any range can be written without making the rest.

    In the order of their names: equal states have equal bytes, also where one has just been restored.
    """

    def __init__(self, tensors: Mapping[str, Tensor | Room]):
        named = sorted(tensors.items())
        self.layout = layout_of(tuple((name, tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in named))
        self.pieces = [(begin, piece) for begin, (_, piece) in zip(self.layout.offsets, named, strict=True)]
        """Where each tensor begins, and the tensor."""
        self.num_bytes = self.layout.num_bytes

    def write(self, out: Bytes, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of the image into `out`, except where there is room for others."""
        _copy_overlap(self.layout.head, 0, out, start, stop)
        for begin, tensor in self.pieces:
            if isinstance(tensor, Tensor) and max(begin, start) < min(begin + tensor.nbytes, stop):
                flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                _copy_overlap(flat, begin, out, start, stop)

    def room(self, out: Bytes) -> Bytes:
        """Where the bytes of its `Room` belong in `out`, a buffer of the whole image."""
        ((begin, room),) = [(begin, room) for begin, room in self.pieces if isinstance(room, Room)]
        return out[begin : begin + room.nbytes]


@dataclass(frozen=True)
class Room:
    """Bytes of an image that are filled in later, as a tensor of it."""

    nbytes: int
    dtype: torch.dtype = torch.uint8

    @property
    def shape(self) -> tuple[int]:
        return (self.nbytes,)


@dataclass(frozen=True)
class Snapshot:
    """A frame, not sealed yet. complete: copies what it still lacks; to be called before the next update."""

    data: Bytes
    frame: Frame
    complete: Callable[[], None]


def _copy_overlap(piece: Bytes, begin: int, out: Bytes, start: int, stop: int) -> None:
    low, high = max(begin, start), min(begin + piece.size, stop)
    if low < high:
        out[low - start : high - start] = piece[low - begin : high - begin]


def share(num_bytes: int, rank: int, num_shards: int) -> tuple[int, int]:
    """The range of an image that a rank keeps."""
    return num_bytes * rank // num_shards, num_bytes * (rank + 1) // num_shards


def snapshot(
    header: Frame, own: Sequence[StateProvider], replicated: Sequence[StateProvider], buffer: Bytes | None = None
) -> Snapshot:
    """Copy this rank's own states and all values into a frame. `header` says whose it is; its sizes are filled in.

    The replicated tensors are left to `Snapshot.complete`, unless a device holds some: its streams know no order with
    the thread that completes. buffer: memory to reuse; a new one is made where it is too small.
    """
    own_tensors, own_values = collect(own)
    shared_tensors, shared_values = collect(replicated)
    shared = Image(shared_tensors)
    start, stop = share(shared.num_bytes, header.rank, header.num_shards)
    image = Image({**own_tensors, RANGE_KEY: Room(stop - start)})
    parts = {"own": own_values, "replicated": shared_values, "layout_sha256": shared.layout.sha256}
    values = json.dumps(parts, sort_keys=True).encode()
    values += b" " * (-len(values) % 8)
    middle = HEADER_BYTES + len(values)
    num_bytes = middle + image.num_bytes
    if buffer is None or buffer.size < num_bytes:
        buffer = np.empty(num_bytes + num_bytes // 16, np.uint8)
    buffer[HEADER_BYTES:middle] = np.frombuffer(values, np.uint8)
    content = buffer[middle:num_bytes]
    image.write(content, 0, image.num_bytes)
    frame = replace(header, values_bytes=len(values), tensors_bytes=image.num_bytes)
    taken = Snapshot(buffer[:num_bytes], frame, partial(shared.write, image.room(content), start, stop))
    if all(tensor.device.type == "cpu" for tensor in shared_tensors.values()):
        return taken
    taken.complete()
    return replace(taken, complete=lambda: None)


def restore(
    shards: Sequence[tuple[Mapping[str, Any], bytes]],
    own_shard: int | None,
    num_ranks: int,
    own: Sequence[StateProvider],
    replicated: Sequence[StateProvider],
) -> None:
    """Load (values, safetensors bytes) of all shards of one step, in order.

    own_shard: whose own states to take; None leaves them as the program made them. In a group of another size,
    num_ranks, the states that know how to (`Resharding`) are made from those of all old ranks instead. Raises
    CheckpointError before anything is touched if the shards do not fit together.
    """
    layouts = {values["layout_sha256"] for values, _ in shards}
    if len(layouts) != 1:
        raise CheckpointError(
            f"{len(shards)} shards belong to {len(layouts)} different layouts of the replicated states"
        )
    try:
        tensors = [load_tensors(data) for _, data in shards]
        whole = b"".join(part.pop(RANGE_KEY).numpy().tobytes() for part in tensors)
        shared = load_tensors(whole)
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{len(shards)} shards do not make up one state: {error}") from error
    distribute(shared, shards[0][0]["replicated"], replicated)
    moved = [p for p in own if isinstance(p, Resharding)] if num_ranks != len(shards) else []
    if own_shard is not None:
        names = {provider.name for provider in moved}
        held = {name: state for name, state in shards[own_shard][0]["own"].items() if name not in names}
        distribute(tensors[own_shard], held, [provider for provider in own if provider.name not in names])
    for provider in moved:
        states = [
            state_of(provider.name, part, values["own"]) for part, (values, _) in zip(tensors, shards, strict=True)
        ]
        provider.load_all(states)
