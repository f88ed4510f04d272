"""Column split and AGsparse: every rank learns all ids, and sums the columns it owns.

Column split: rank j owns the columns [j W / n, (j + 1) W / n) of every touched row. Ids go to everybody, values to the
owners of their columns, and the sums come back without an index, because all ranks hold the same union. Skewed ids cannot
unbalance it; what remains is the difference between the ranks' own counts, and the rounding where n does not divide W.

AGsparse is the same exchange with every rank owning all columns: everything goes to everybody and nothing comes back.
It is PyTorch DDP's way on Gloo; at n = 2 it meets the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from collectives.kernels.idcoding import check_ids, coded_bytes, decode_ids, encode_ids, index_dtype
from collectives.kernels.idsets import union_ids
from collectives.kernels.rows import as_rows
from collectives.sparse.merging import RankOrderSum
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.workspace import METADATA, PULL, PUSH, Workspace
from collectives.transport import Exchange, Parcel, Transport, all_gather_records, others


def column_cuts(width: int, size: int) -> list[int]:
    """The first column of each owner, and the width at the end: int [size + 1]."""
    return [width * j // size for j in range(size + 1)]


def broadcast_table(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [n, n]: rank w sends sizes[w] bytes to every other rank."""
    row = np.asarray(sizes, np.int64)
    table = np.repeat(row[:, None], len(row), axis=1)
    np.fill_diagonal(table, 0)
    return table


def metadata_table(size: int, record_length: int) -> np.ndarray:
    """Bytes of one round of records: int64 [n, n]."""
    return broadcast_table([8 * record_length] * size)


def peers_in_rank_order(transport: Transport) -> list[int]:
    """The other ranks, ascending: the order in which contributions are added and therefore received."""
    return [peer for peer in range(transport.size) if peer != transport.rank]


class ColumnSplit:
    """The default for rows. Messages: coded ids, columns of values, summed columns."""

    name = "column"

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`."""
        work, rank, width = Workspace.of(transport), transport.rank, rows.width
        with work.timed("pack"):
            coded = encode_ids(rows.ids, rows.num_rows)
        sizes = agreed_sizes(rows, coded, transport, sizes)
        cuts = column_cuts(width, transport.size)
        own = slice(cuts[rank], cuts[rank + 1])

        def pack(peer: int) -> Tensor:
            columns = rows.values[:, cuts[peer] : cuts[peer + 1]]
            return work.buffer(f"pack{peer}", columns.shape, columns.dtype).copy_(columns)

        with open_push(transport, work, sizes, cuts[rank + 1] - cuts[rank], rows.values.dtype) as push:
            for peer in others(transport):
                push.send(peer, coded)
            for peer in others(transport):
                with work.timed("pack"):
                    part = pack(peer)
                push.send(peer, part)
            arrivals = push.arrivals()
            coded_lists = [rows.ids if w == rank else next(arrivals).data for w in range(transport.size)]
            with work.timed("union"):
                lists = [
                    ids if w == rank else decode_ids(ids, int(sizes[w, 0]), rows.num_rows)
                    for w, ids in enumerate(coded_lists)
                ]
                union, positions = union_ids(lists, rows.num_rows)
            blocks = [
                work.buffer(f"block{j}", (len(union), cuts[j + 1] - cuts[j]), rows.values.dtype)
                for j in range(transport.size)
            ]
            with transport.exchange(PULL, [Parcel(peer, blocks[peer]) for peer in others(transport)]) as pull:
                total = RankOrderSum(blocks[rank], work)
                for w, values in enumerate(in_rank_order(arrivals, rows.values, transport)):
                    with work.timed("sum"):
                        total.add(positions[w], values, own.start if w == rank else 0)
                with work.timed("sum"):
                    total.finish(op, transport.size)
                for peer in others(transport):
                    pull.send(peer, blocks[rank])
                result = rows.values.new_empty((len(union), width))
                result[:, own] = blocks[rank]
                for parcel in pull.arrivals():
                    with work.timed("assemble"):
                        result[:, cuts[parcel.peer] : cuts[parcel.peer + 1]] = parcel.data
        return SparseRows(union, result, rows.num_rows)

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """See `Scheme`."""
        lists = [as_rows(one) for one in ids]
        columns = np.diff(column_cuts(width, len(ids)))
        coded = [coded_bytes(one, num_rows) for one in lists]
        counts = np.array([len(one) for one in lists], np.int64)
        push = broadcast_table(coded) + counts[:, None] * columns * itemsize
        np.fill_diagonal(push, 0)
        pull = broadcast_table(len(union_ids(lists, num_rows)[0]) * columns * itemsize)
        return {METADATA: metadata_table(len(ids), 2), PUSH: push, PULL: pull}


class AllGatherSparse:
    """AGsparse. Messages: plain ids, whole rows."""

    name = "agsparse"

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`."""
        work, rank, plain = Workspace.of(transport), transport.rank, index_dtype(rows.num_rows)
        ids = rows.ids.to(plain)
        counts = agreed_sizes(rows, ids, transport, sizes)[:, 0]
        plain_sizes = np.stack([counts, counts * plain.itemsize], axis=1)
        with open_push(transport, work, plain_sizes, rows.width, rows.values.dtype) as push:
            for peer in others(transport):
                push.send(peer, ids)
            for peer in others(transport):
                push.send(peer, rows.values)
            arrivals = push.arrivals()
            lists = [
                rows.ids if w == rank else check_ids(next(arrivals).data.view(plain), rows.num_rows)
                for w in range(transport.size)
            ]
            with work.timed("union"):
                union, positions = union_ids(lists, rows.num_rows)
            total = RankOrderSum(rows.values.new_empty((len(union), rows.width)), work)
            for w, values in enumerate(in_rank_order(arrivals, rows.values, transport)):
                with work.timed("sum"):
                    total.add(positions[w], values)
        return SparseRows(union, total.finish(op, transport.size), rows.num_rows)

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """See `Scheme`."""
        per_row = width * itemsize + index_dtype(num_rows).itemsize
        return {
            METADATA: metadata_table(len(ids), 2),
            PUSH: broadcast_table([len(one) * per_row for one in ids]),
        }


def agreed_sizes(rows: SparseRows, coded: Tensor, transport: Transport, sizes: np.ndarray | None) -> np.ndarray:
    """Every rank's (rows, bytes of coded ids): as given, or from a round of our own."""
    return all_gather_records(transport, METADATA, [len(rows.ids), coded.numel()]) if sizes is None else sizes


def open_push(transport: Transport, work: Workspace, sizes: np.ndarray, width: int, dtype: torch.dtype) -> Exchange:
    """Post the receives of one push: first everybody's ids, then everybody's rows of `width` values, in rank order.

    sizes: int64 [n, 2], rows and id bytes of each rank.
    """
    peers = peers_in_rank_order(transport)
    ids = [Parcel(w, work.buffer(f"ids{w}", (int(sizes[w, 1]),), torch.uint8)) for w in peers]
    values = [Parcel(w, work.buffer(f"values{w}", (int(sizes[w, 0]), width), dtype)) for w in peers]
    return transport.exchange(PUSH, ids + values)


def in_rank_order(arrivals: Iterator[Parcel], own: Tensor, transport: Transport) -> Iterator[Tensor]:
    """This rank's contribution at its place among the arrivals, which were posted in rank order."""
    for w in range(transport.size):
        if w == transport.rank:
            yield own
        else:
            parcel = next(arrivals)
            assert parcel.peer == w
            yield parcel.data
