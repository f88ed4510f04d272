"""Two levels: dense sums inside a node, where links are fast, and a sparse scheme between nodes, one shard per rank.

A node is `node_size` consecutive ranks. Its ranks shard a tensor by columns, so that all of them hold the same touched
rows, or by rows where there are fewer columns than ranks. Rank l of every node reduces shard l with its namesakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from collectives.kernels.idsets import decode_bitmap, encode_bitmap, union_ids
from collectives.kernels.rows import as_rows, gather_rows
from collectives.sparse.baselines import cut_evenly
from collectives.sparse.columns import ColumnSplit, in_rank_order, peers_in_rank_order
from collectives.sparse.rows import Op, Scheme, SparseRows
from collectives.sparse.workspace import METADATA, Workspace
from collectives.sparse.zen import ZEN_ROWS
from collectives.subgroup import SubTransport
from collectives.transport import Parcel, Transport, all_gather_records, others

NODE_PUSH, NODE_PULL = "node_push", "node_pull"
"""Phases on the links inside a node."""


class Shard(NamedTuple):
    """A rectangle of a [num_rows, width] tensor."""

    first_row: int
    last_row: int
    first_column: int
    last_column: int


def shards(num_rows: int, width: int, size: int) -> list[Shard]:
    """One shard per rank of a node: columns, or rows where the columns do not suffice."""
    if width >= size:
        cuts = cut_evenly(width, size)
        return [Shard(0, num_rows, a, b) for a, b in pairwise(cuts)]
    cuts = cut_evenly(num_rows, size)
    return [Shard(a, b, 0, width) for a, b in pairwise(cuts)]


class TwoLevel:
    """`two_level`. The node size used is the greatest common divisor of `node_size` and the number of ranks."""

    name = "two_level"

    def __init__(self, node_size: int = 8):
        self.node_size = node_size

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`. Partial sums travel in the dtype of the tensor."""
        per_node = gcd(self.node_size, transport.size)
        local = transport.rank % per_node
        first = transport.rank - local
        node = SubTransport(transport, range(first, first + per_node))
        peers = SubTransport(transport, range(local, transport.size, per_node))
        for part in (node, peers):
            Workspace.share(part, transport)
        parts = shards(rows.num_rows, rows.width, per_node)
        mine = _reduce_shard(rows, parts, node)
        mine = _between_nodes(rows.width, per_node).all_reduce(mine, peers, "sum")
        if op == "mean":
            mine.values.div_(transport.size)
        return _gather_shards(mine, parts, node, rows)

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """See `Scheme`."""
        size, per_node = len(ids), gcd(self.node_size, len(ids))
        tables: dict[str, np.ndarray] = {}

        def add(phase: str, sender: int, receiver: int, num_bytes: int) -> None:
            table = tables.setdefault(phase, np.zeros((size, size), np.int64))
            table[sender, receiver] += num_bytes

        held = [as_rows(one) for one in node_unions(ids, num_rows, self.node_size)]
        union = union_ids(held, num_rows)[0]
        for local, shard in enumerate(shards(num_rows, width, per_node)):
            span, columns = shard.last_row - shard.first_row, shard.last_column - shard.first_column
            between = _between_nodes(width, per_node).wire_bytes(
                [rows_of_shard(one, shard).numpy() for one in held], span, columns, itemsize
            )
            for phase, table in between.items():
                for sender, receiver in np.argwhere(table):
                    add(phase, sender * per_node + local, receiver * per_node + local, table[sender, receiver])
            count = len(rows_of_shard(union, shard))
            for me in range(local, size, per_node):
                for peer in range(me - local, me - local + per_node):
                    if peer == me:
                        continue
                    add(NODE_PUSH, peer, me, span * columns * itemsize + (num_rows + 7) // 8)
                    add(NODE_PULL, me, peer, count * columns * itemsize)
                    if width < per_node:
                        add(METADATA, me, peer, 8)
                        add(NODE_PULL, me, peer, 8 * count)
        return tables


def node_unions(ids: Sequence[np.ndarray], num_rows: int, node_size: int) -> list[np.ndarray]:
    """Rows touched in each node: the index sets between which the sparse scheme runs."""
    lists = [as_rows(one) for one in ids]
    per_node = gcd(node_size, len(ids))
    return [union_ids(lists[w : w + per_node], num_rows)[0].numpy() for w in range(0, len(ids), per_node)]


def _between_nodes(width: int, per_node: int) -> Scheme:
    """The same scheme for all shards, because subgroups make their calls in step."""
    return ColumnSplit() if width >= per_node else ZEN_ROWS


def rows_of_shard(ids: Tensor, shard: Shard) -> Tensor:
    """The ids that lie in a shard, counted from its first row."""
    return ids[(ids >= shard.first_row) & (ids < shard.last_row)] - shard.first_row


def _reduce_shard(rows: SparseRows, parts: Sequence[Shard], node: Transport) -> SparseRows:
    """Dense reduce-scatter inside the node: this rank's shard, summed in rank order, at the rows the node touched."""
    work, dtype, own = Workspace.of(node), rows.values.dtype, parts[node.rank]

    def dense(shard: Shard, name: str) -> Tensor:
        shape = (shard.last_row - shard.first_row, shard.last_column - shard.first_column)
        matrix = work.buffer(name, shape, dtype).zero_()
        inside = (rows.ids >= shard.first_row) & (rows.ids < shard.last_row)
        values = rows.values[inside, shard.first_column : shard.last_column]
        matrix[rows.ids[inside] - shard.first_row] = values
        return matrix

    mine, bitmap = dense(own, f"node{node.rank}"), encode_bitmap(rows.ids, rows.num_rows)
    others_first = peers_in_rank_order(node)
    bitmaps = [Parcel(w, torch.empty_like(bitmap)) for w in others_first]
    inbox = [Parcel(w, work.buffer(f"shard{w}", mine.shape, dtype)) for w in others_first]
    with node.exchange(NODE_PUSH, bitmaps + inbox) as exchange:
        for peer in others(node):
            exchange.send(peer, bitmap)
        for peer in others(node):
            exchange.send(peer, dense(parts[peer], f"node{peer}"))
        arrivals = exchange.arrivals()
        touched = [decode_bitmap(part) for part in in_rank_order(arrivals, bitmap, node)]
        total = torch.zeros(mine.shape, dtype=torch.float32, device=mine.device)
        for part in in_rank_order(arrivals, mine, node):
            total.add_(part)
    ids = rows_of_shard(union_ids(touched, rows.num_rows)[0], own)
    values = gather_rows(total, ids, total.new_empty((len(ids), mine.shape[1])))
    return SparseRows(ids, values.to(dtype), mine.shape[0])


def _gather_shards(mine: SparseRows, parts: Sequence[Shard], node: Transport, like: SparseRows) -> SparseRows:
    """All-gather the reduced shards inside the node: columns side by side, or rows one below the other."""
    by_columns = like.width >= node.size
    if by_columns:
        counts = [len(mine.ids)] * node.size
    else:
        counts = all_gather_records(node, METADATA, [len(mine.ids)])[:, 0].tolist()
    ids = [mine.ids.new_empty(0 if by_columns else count) for count in counts]
    blocks = [
        mine.values.new_empty((count, part.last_column - part.first_column))
        for count, part in zip(counts, parts, strict=True)
    ]
    inbox = [Parcel(w, data) for w in others(node) for data in (ids[w], blocks[w])]
    with node.exchange(NODE_PULL, inbox) as exchange:
        for peer in others(node):
            exchange.send(peer, ids[node.rank] if by_columns else mine.ids)
            exchange.send(peer, mine.values)
    blocks[node.rank] = mine.values
    if by_columns:
        return SparseRows(mine.ids, torch.cat(blocks, dim=1), like.num_rows)
    ids[node.rank] = mine.ids
    shifted = [one + part.first_row for one, part in zip(ids, parts, strict=True)]
    return SparseRows(torch.cat(shifted), torch.cat(blocks), like.num_rows)
