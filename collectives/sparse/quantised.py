"""Sparse and quantised together: the column split with its values as packets of a codec, and residuals by row.

Ids travel exactly, so the union and the result's ids are those of the exact scheme; every value is encoded twice, once
towards the owner of its column and once back, and all ranks decode the same packets. What the first encode lost is
kept per row and added the next time the row is touched: an embedding row that comes back rarely waits as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from collectives.codecs import CODECS, Codec
from collectives.kernels.idcoding import decode_ids, encode_ids
from collectives.kernels.idsets import union_ids
from collectives.sparse.columns import agreed_sizes, column_cuts, peers_in_rank_order
from collectives.sparse.merging import RankOrderSum
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.workspace import PULL, PUSH, Workspace
from collectives.transport import Parcel, Transport, others


@dataclass
class RowFeedback:
    """Residuals of one rank by parameter name, fp32 [num_rows, width]. A step is pending until `commit`."""

    tables: dict[str, Tensor] = field(default_factory=dict)
    pending: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def owed(self, name: str, num_rows: int, width: int, ids: Tensor) -> Tensor:
        """What is owed to these rows, [k, width]; a table of another shape starts again from zero."""
        table = self.tables.get(name)
        if table is None or table.shape != (num_rows, width):
            table = self.tables[name] = torch.zeros(num_rows, width)
        return table.index_select(0, ids)

    def note(self, name: str, ids: Tensor, lost: Tensor) -> None:
        """This step's losses; rows that are not finite keep what they owed."""
        finite = torch.isfinite(lost).all(1)
        self.pending[name] = (ids[finite], lost[finite])

    def commit(self) -> None:
        """The step counts."""
        for name, (ids, lost) in self.pending.items():
            self.tables[name].index_copy_(0, ids, lost)
        self.pending.clear()

    def rollback(self) -> None:
        """The step was skipped."""
        self.pending.clear()

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return sum(table.nbytes for table in self.tables.values())

    def load(self, tables: Mapping[str, Tensor]) -> None:
        """Replace all residuals."""
        self.tables, self.pending = {name: table.clone() for name, table in tables.items()}, {}


class QuantisedColumns:
    """Column split for fp32 rows with packets of a codec of fixed size."""

    def __init__(self, codec: Codec):
        self.codec, self.name = codec, f"column+{codec.name}"

    def all_reduce(
        self,
        rows: SparseRows,
        transport: Transport,
        op: Op,
        sizes: np.ndarray | None = None,
        feedback: RowFeedback | None = None,
        tensor: str = "tensor",
    ) -> SparseRows:
        """As `Scheme.all_reduce`, lossy. feedback: residuals to add and to update under the name `tensor`."""
        work, rank, size = Workspace.of(transport), transport.rank, transport.size
        coded = encode_ids(rows.ids, rows.num_rows)
        sizes = agreed_sizes(rows, coded, transport, sizes)
        cuts = column_cuts(rows.width, size)
        values = rows.values.float()
        if feedback is not None:
            values = values + feedback.owed(tensor, rows.num_rows, rows.width, rows.ids)
        packets, lost = self._encode_columns(values, cuts)
        if feedback is not None:
            feedback.note(tensor, rows.ids, lost)
        width = cuts[rank + 1] - cuts[rank]
        with transport.exchange(PUSH, self._receives(transport, work, sizes, width)) as push:
            for parts in ([coded] * size, packets):
                for peer in others(transport):
                    push.send(peer, parts[peer])
            arrivals = push.arrivals()
            lists = [
                rows.ids if w == rank else decode_ids(next(arrivals).data, int(sizes[w, 0]), rows.num_rows)
                for w in range(size)
            ]
            union, positions = union_ids(lists, rows.num_rows)
            total = RankOrderSum(work.buffer("block", (len(union), width), torch.float32), work)
            for w in range(size):
                packet = packets[rank] if w == rank else next(arrivals).data
                total.add(positions[w], self._decoded(packet, (int(sizes[w, 0]), width)))
        return self._share(total.finish(op, size), union, cuts, rows, transport, work)

    def _encode_columns(self, values: Tensor, cuts: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """One packet per owner of columns, and what they lost [k, width]."""
        packets, lost = [], torch.zeros_like(values)
        for begin, end in pairwise(cuts):
            block = values[:, begin:end].contiguous()
            packet = self.codec.encode(block) if block.numel() else torch.empty(0, dtype=torch.uint8)
            packets.append(packet)
            lost[:, begin:end] = block - self._decoded(packet, tuple(block.shape))
        return packets, lost

    def _decoded(self, packet: Tensor, shape: tuple[int, ...]) -> Tensor:
        out = torch.zeros(shape)
        if out.numel():
            self.codec.decode(packet, out)
        return out

    def _bytes(self, num_rows: int, width: int) -> int:
        return self.codec.wire_bytes(num_rows * width) if num_rows * width else 0

    def _receives(self, transport: Transport, work: Workspace, sizes: np.ndarray, width: int) -> list[Parcel]:
        """First everybody's ids, then everybody's packets, in rank order."""
        peers = peers_in_rank_order(transport)
        ids = [Parcel(w, work.buffer(f"ids{w}", (int(sizes[w, 1]),), torch.uint8)) for w in peers]
        bounds = [self._bytes(int(sizes[w, 0]), width) for w in peers]
        packets = [Parcel(w, torch.empty(n, dtype=torch.uint8)) for w, n in zip(peers, bounds, strict=True)]
        return ids + packets

    def _share(
        self,
        block: Tensor,
        union: Tensor,
        cuts: Sequence[int],
        rows: SparseRows,
        transport: Transport,
        work: Workspace,
    ) -> SparseRows:
        """The second encode: summed columns to everybody; the owner, too, uses the decoded values."""
        rank = transport.rank
        widths = [end - begin for begin, end in pairwise(cuts)]
        packets = [torch.empty(self._bytes(len(union), width), dtype=torch.uint8) for width in widths]
        if block.numel():
            packets[rank] = self.codec.encode(block)
        with transport.exchange(PULL, [Parcel(peer, packets[peer]) for peer in others(transport)]) as pull:
            for peer in others(transport):
                pull.send(peer, packets[rank])
        result = torch.empty(len(union), rows.width)
        for j, packet in enumerate(packets):
            result[:, cuts[j] : cuts[j + 1]] = self._decoded(packet, (len(union), widths[j]))
        return SparseRows(union, result.to(rows.values.dtype), rows.num_rows)


QUANTISED: dict[str, QuantisedColumns] = {
    f"column+{name}": QuantisedColumns(CODECS[name]) for name in ("bf16", "int8b", "int4b")
}
"""By the name that a policy gives them."""
