"""Which ranks share a node: links between nodes are the slow ones, and policies tell the two apart."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from collectives.transport import Transport, all_gather_records


@dataclass(frozen=True)
class Topology:
    """node_of[r]: number of the node that rank r is on, in order of first appearance."""

    node_of: tuple[int, ...]

    @property
    def spans_nodes(self) -> bool:
        """Whether any message between ranks leaves a node."""
        return len(set(self.node_of)) > 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks on every node where ranks are numbered node by node and all nodes hold as many; otherwise 1."""
        per_node = self.node_of.count(0)
        regular = tuple(rank // per_node for rank in range(len(self.node_of)))
        return per_node if self.node_of == regular and len(self.node_of) % per_node == 0 else 1

    @classmethod
    def one_node(cls, size: int) -> Topology:
        """All ranks together."""
        return cls((0,) * size)


def probe_topology(transport: Transport) -> Topology:
    """Compare the ranks' nodes; a collective call. Ranks in different network namespaces count as different nodes."""
    if transport.size == 1:
        return Topology((0,))
    seen = all_gather_records(transport, "metadata", [zlib.crc32(_node_name().encode())])[:, 0].tolist()
    order = list(dict.fromkeys(seen))
    return Topology(tuple(order.index(node) for node in seen))


def _node_name() -> str:
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return "|".join(parts)
