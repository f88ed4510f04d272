"""A rank's shard: its own states whole, and its share of the states that are equal on all ranks.

With plain data parallelism parameters and optimizer are the same bytes on every rank. As one safetensors image they are
cut into as many ranges as there are ranks, and each rank keeps one: n ranks keep the state once instead of n times. The
snapshot is the only copy: tensors go straight into the frame that travels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from actors.errors import CheckpointError
from actors.frames import HEADER_BYTES, Bytes, Frame, seal
from actors.state import StateProvider, collect, distribute

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


class Image:
    """The safetensors image of some tensors, of which any range can be written without making the rest.

    In the order of their names: equal states have equal bytes, also where one has just been restored.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        entries: dict[str, Any] = {}
        end = 0
        self.pieces: list[tuple[int, Tensor]] = []
        """Offset in the image, and the tensor that begins there."""
        for name, tensor in sorted(tensors.items()):
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(f"state '{name}' is {tensor.dtype}, which safetensors cannot hold")
            begin, end = end, end + tensor.nbytes
            entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            self.pieces.append((begin, tensor))
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self.head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
        self.num_bytes = self.head.size + end
        self.layout_sha256 = hashlib.sha256(text).hexdigest()

    def write(self, out: Bytes, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of the image into `out`."""
        _copy_overlap(self.head, 0, out, start, stop)
        for begin, tensor in self.pieces:
            begin += self.head.size
            if tensor.nbytes and begin < stop and begin + tensor.nbytes > start:
                flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                _copy_overlap(flat, begin, out, start, stop)


def _copy_overlap(piece: Bytes, begin: int, out: Bytes, start: int, stop: int) -> None:
    low, high = max(begin, start), min(begin + piece.size, stop)
    if low < high:
        out[low - start : high - start] = piece[low - begin : high - begin]


def share(num_bytes: int, rank: int, num_shards: int) -> tuple[int, int]:
    """The range of an image that a rank keeps."""
    return num_bytes * rank // num_shards, num_bytes * (rank + 1) // num_shards


def snapshot(header: Frame, own: Sequence[StateProvider], replicated: Sequence[StateProvider]) -> tuple[Bytes, Frame]:
    """Copy this rank's shard into a new sealed frame. `header` says whose it is; its sizes and digest are filled in."""
    own_tensors, own_values = collect(own)
    shared_tensors, shared_values = collect(replicated)
    shared = Image(shared_tensors)
    start, stop = share(shared.num_bytes, header.rank, header.num_shards)
    part = torch.empty(stop - start, dtype=torch.uint8)
    shared.write(part.numpy(), start, stop)
    image = Image({**own_tensors, RANGE_KEY: part})
    parts = {"own": own_values, "replicated": shared_values, "layout_sha256": shared.layout_sha256}
    values = json.dumps(parts, sort_keys=True).encode()
    values += b" " * (-len(values) % 8)
    buffer = np.empty(HEADER_BYTES + len(values) + image.num_bytes, np.uint8)
    middle = HEADER_BYTES + len(values)
    buffer[HEADER_BYTES:middle] = np.frombuffer(values, np.uint8)
    image.write(buffer[middle:], 0, image.num_bytes)
    sized = {**header.__dict__, "values_bytes": len(values), "tensors_bytes": image.num_bytes}
    return buffer, seal(buffer, Frame(**sized))


def restore(
    shards: Sequence[tuple[Mapping[str, Any], bytes]],
    own_shard: int | None,
    own: Sequence[StateProvider],
    replicated: Sequence[StateProvider],
) -> None:
    """Load (values, safetensors bytes) of all shards of one step, in order.

    own_shard: whose own states to take; None leaves them as the program made them. Raises CheckpointError before
    anything is touched if the shards do not fit together.
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
    if own_shard is not None:
        distribute(tensors[own_shard], shards[own_shard][0]["own"], own)
