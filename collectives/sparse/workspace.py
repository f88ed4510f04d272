"""What one rank keeps from call to call: scratch buffers at their high-water mark, and seconds per phase.

Fresh pages cost several times a copy of the same bytes, so parts that live only during a call are views of buffers that
stay. They belong to the transport, because one transport is driven by one thread and lives as long as its group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from collectives.transport import Parcel, Transport, others

METADATA = "metadata"
"""Phase of the size rounds, reported apart from the payload."""

PUSH, PULL = "push", "pull"
"""Phases of the payload: towards the owner of a part, and back to everybody."""

_workspaces: WeakKeyDictionary[Transport, Workspace] = WeakKeyDictionary()


class Workspace:
    """Scratch of one rank. A buffer is valid until the next call asks for the same name; results never live in one."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self._storage: dict[str, Tensor] = {}

    @staticmethod
    def of(transport: Transport) -> Workspace:
        """The workspace of this rank, made at first use and dropped with the transport."""
        found = _workspaces.get(transport)
        if found is None:
            found = _workspaces[transport] = Workspace(transport.device)
        return found

    @staticmethod
    def share(child: Transport, parent: Transport) -> None:
        """Let a short-lived view of a transport use the workspace of the transport itself."""
        _workspaces[child] = Workspace.of(parent)

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised contiguous memory of this shape, reused by name."""
        num_bytes = prod(shape) * dtype.itemsize
        storage = self._storage.get(name)
        if storage is None or storage.numel() < num_bytes:
            storage = self._storage[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return storage[:num_bytes].view(dtype).view(*shape)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to `seconds[phase]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@contextmanager
def gather_records(transport: Transport, record: Sequence[int]) -> Iterator[np.ndarray]:
    """Gather one int64 record per rank while the block runs: the yielded table [n, len(record)] is valid after it.

    Sizes are a few bytes but cost a whole message delay; packing inside the block hides it.
    """
    table = torch.empty((transport.size, len(record)), dtype=torch.int64, device=transport.device)
    table[transport.rank] = torch.tensor(list(record), dtype=torch.int64)
    result = np.empty(tuple(table.shape), np.int64)
    with transport.exchange(METADATA, [Parcel(peer, table[peer]) for peer in others(transport)]) as exchange:
        for peer in others(transport):
            exchange.send(peer, table[transport.rank])
        yield result
    result[:] = table.cpu().numpy()
