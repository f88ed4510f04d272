"""How packets travel: buffers that are kept, swaps and shares of packets whose sizes the receiver cannot know.

Packets of fixed size go straight. Otherwise one round of int64 sizes comes first; a size that no packet of that many
elements can have raises WireFormatError before a buffer is allocated for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collectives.codecs.codec import pad16
from collectives.errors import WireFormatError
from collectives.transport import Parcel, Transport, all_gather_records, others

CPU = torch.device("cpu")


@dataclass
class Workspace:
    """Buffers kept between calls, by use; they only grow. One per tensor or bucket; not for two calls at once."""

    device: torch.device = CPU
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, use: str, num_bytes: int) -> Tensor:
        """A flat uint8 tensor of `num_bytes`, contents undefined."""
        if use not in self.buffers or self.buffers[use].numel() < num_bytes:
            self.buffers[use] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self.buffers[use][:num_bytes]

    def packets(self, use: str, sizes: Sequence[int]) -> list[Tensor]:
        """One view per size, each starting at a multiple of 16."""
        starts = np.concatenate([[0], np.cumsum([pad16(size) for size in sizes], dtype=np.int64)]).tolist()
        arena = self.take(use, starts[-1])
        return [arena[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(buffer.numel() for buffer in self.buffers.values())


def swap(
    transport: Transport, phase: str, outgoing: Sequence[Tensor], bounds: Sequence[int], fixed: bool, space: Workspace
) -> list[Tensor]:
    """All-to-all of packets: send outgoing[j] to rank j, return what every rank sent here (own packet included).

    bounds[r]: the largest packet that rank r may send here, 0 for none; its exact size when `fixed`.
    """
    sizes = list(bounds)
    if not fixed:
        table = all_gather_records(transport, f"{phase}-sizes", [packet.numel() for packet in outgoing])
        sizes = _checked(table[:, transport.rank], bounds, phase)
    rank, peers = transport.rank, others(transport)
    incoming = space.packets(f"{phase}-in", [0 if r == rank else size for r, size in enumerate(sizes)])
    incoming[rank] = outgoing[rank]
    with transport.exchange(phase, [Parcel(peer, incoming[peer]) for peer in peers]) as exchange:
        for peer in peers:
            exchange.send(peer, outgoing[peer])
    return incoming


def share(
    transport: Transport, phase: str, packet: Tensor, bounds: Sequence[int], fixed: bool, space: Workspace
) -> list[Tensor]:
    """All-gather of packets: every rank's packet, by rank. bounds as for `swap`."""
    sizes = list(bounds)
    if not fixed:
        table = all_gather_records(transport, f"{phase}-sizes", [packet.numel()])
        sizes = _checked(table[:, 0], bounds, phase)
    rank, peers = transport.rank, others(transport)
    packets = space.packets(f"{phase}-in", [0 if r == rank else size for r, size in enumerate(sizes)])
    packets[rank] = packet
    with transport.exchange(phase, [Parcel(peer, packets[peer]) for peer in peers]) as exchange:
        for peer in peers:
            exchange.send(peer, packet)
    return packets


def _checked(sizes: np.ndarray, bounds: Sequence[int], phase: str) -> list[int]:
    for rank, (size, bound) in enumerate(zip(sizes.tolist(), bounds, strict=True)):
        if not 0 <= size <= bound:
            raise WireFormatError(f"rank {rank} announces a packet of {size} bytes in phase '{phase}', at most {bound}")
    return [int(size) for size in sizes]
