"""Column split and AGsparse: every rank learns all ids, and sums the columns it owns.

Column split: rank j owns the columns [j W / n, (j + 1) W / n) of every touched row. Ids go to everybody, values to the
owners of their columns, and the sums come back without an index, because all ranks hold the same union. Skewed ids cannot
unbalance it; what remains is the difference between the ranks' own counts, and the rounding where n does not divide W.

AGsparse is the same exchange with every rank owning all columns: everything goes to everybody and nothing comes back.
It is PyTorch DDP's way on Gloo; at n = 2 it meets the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from collectives.kernels.idcoding import check_ids, coded_bytes, decode_ids, encode_ids, index_dtype
from collectives.kernels.idsets import union_ids
from collectives.kernels.rows import as_rows
from collectives.sparse.merging import RankOrderSum
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.workspace import METADATA, PULL, PUSH, Workspace
from collectives.transport import Parcel, Transport, all_gather_records, as_bytes, others


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
    """The default for rows. Messages: columns of values with coded ids behind them; summed columns."""

    name = "column"

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`."""
        work, rank, width = Workspace.of(transport), transport.rank, rows.width
        with work.timed("pack"):
            coded = encode_ids(rows.ids, rows.num_rows)
        sizes = agreed_sizes(rows, coded, transport, sizes)
        cuts = column_cuts(width, transport.size)
        own = slice(cuts[rank], cuts[rank + 1])
        incoming = incoming_letters(transport, work, sizes, own.stop - own.start, rows.values.dtype)
        with transport.exchange(PUSH, [Parcel(w, letter.data) for w, letter in incoming.items()]) as push:
            for peer in others(transport):
                with work.timed("pack"):
                    columns = rows.values[:, cuts[peer] : cuts[peer + 1]]
                    letter = Letter.of(work, f"out{peer}", columns, coded)
                push.send(peer, letter.data)
            for _ in push.arrivals():
                pass
            with work.timed("union"):
                union, positions = union_ids(
                    [
                        rows.ids if w == rank else decode_ids(incoming[w].ids, int(sizes[w, 0]), rows.num_rows)
                        for w in range(transport.size)
                    ],
                    rows.num_rows,
                )
            blocks = [
                work.buffer(f"block{j}", (len(union), cuts[j + 1] - cuts[j]), rows.values.dtype)
                for j in range(transport.size)
            ]
            with transport.exchange(PULL, [Parcel(peer, blocks[peer]) for peer in others(transport)]) as pull:
                with work.timed("sum"):
                    total = RankOrderSum(blocks[rank], work)
                    for w in range(transport.size):
                        values, first = (rows.values, own.start) if w == rank else (incoming[w].values, 0)
                        total.add(positions[w], values, first)
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
    """AGsparse. Messages: whole rows with plain ids behind them."""

    name = "agsparse"

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`."""
        work, rank, plain = Workspace.of(transport), transport.rank, index_dtype(rows.num_rows)
        ids = as_bytes(rows.ids.to(plain))
        counts = agreed_sizes(rows, ids, transport, sizes)[:, 0]
        plain_sizes = np.stack([counts, counts * plain.itemsize], axis=1)
        incoming = incoming_letters(transport, work, plain_sizes, rows.width, rows.values.dtype)
        with transport.exchange(PUSH, [Parcel(w, letter.data) for w, letter in incoming.items()]) as push:
            with work.timed("pack"):
                letter = Letter.of(work, "out", rows.values, ids)
            for peer in others(transport):
                push.send(peer, letter.data)
            for _ in push.arrivals():
                pass
            with work.timed("union"):
                union, positions = union_ids(
                    [
                        rows.ids if w == rank else check_ids(incoming[w].ids.clone().view(plain), rows.num_rows)
                        for w in range(transport.size)
                    ],
                    rows.num_rows,
                )
            with work.timed("sum"):
                total = RankOrderSum(rows.values.new_empty((len(union), rows.width)), work)
                for w in range(transport.size):
                    total.add(positions[w], rows.values if w == rank else incoming[w].values)
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


@dataclass(frozen=True)
class Letter:
    """Rows and their ids in one message: a message costs more than the few bytes of ids are worth.

    data: uint8, all of it. values [k, width] and ids (uint8, coded or plain) are views into it.
    """

    data: Tensor
    values: Tensor
    ids: Tensor

    @classmethod
    def blank(cls, work: Workspace, name: str, shape: Sequence[int], dtype: torch.dtype, id_bytes: int) -> Letter:
        """To be filled, in the buffer `name`; `shape` is that of the values."""
        value_bytes = prod(shape) * dtype.itemsize
        data = work.buffer(name, (value_bytes + id_bytes,), torch.uint8)
        return cls(data, data[:value_bytes].view(dtype).view(*shape), data[value_bytes:])

    @classmethod
    def of(cls, work: Workspace, name: str, values: Tensor, ids: Tensor) -> Letter:
        """Copies of `values` and `ids`, in the buffer `name`."""
        letter = cls.blank(work, name, values.shape, values.dtype, ids.numel())
        letter.values.copy_(values)
        letter.ids.copy_(ids)
        return letter


def incoming_letters(
    transport: Transport, work: Workspace, sizes: np.ndarray, width: int, dtype: torch.dtype
) -> dict[int, Letter]:
    """What every peer will send, by peer in rank order, rows of `width` values.

    sizes: int64 [n, 2], rows and id bytes of each rank.
    """
    return {
        w: Letter.blank(work, f"in{w}", (int(sizes[w, 0]), width), dtype, int(sizes[w, 1]))
        for w in peers_in_rank_order(transport)
    }


def in_rank_order(arrivals: Iterator[Parcel], own: Tensor, transport: Transport) -> Iterator[Tensor]:
    """This rank's contribution at its place among the arrivals, which were posted in rank order."""
    for w in range(transport.size):
        if w == transport.rank:
            yield own
        else:
            parcel = next(arrivals)
            assert parcel.peer == w
            yield parcel.data
