"""The baselines that are no push and pull of sparse parts: the dense ring, and recursive doubling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from collectives.kernels.idsets import decode_bitmap, encode_bitmap
from collectives.kernels.rows import gather_rows
from collectives.sparse.columns import peers_in_rank_order
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.workspace import Workspace
from collectives.transport import Parcel, Transport, all_gather, others

TOUCHED = "touched"
"""Phase of the bitmaps that carry touched ids for schemes whose own format would lose them."""

DENSE = "all_reduce"


def cut_evenly(length: int, size: int) -> list[int]:
    """Borders of `size` nearly equal parts of [0, length): int [size + 1]."""
    return [length * j // size for j in range(size + 1)]


def two_shot_table(part_bytes: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [n, n]: every rank sends part j to rank j, then its own part to everybody."""
    parts = np.asarray(part_bytes, np.int64)
    table = parts[None, :] + parts[:, None]
    np.fill_diagonal(table, 0)
    return table


def two_shot_all_reduce(transport: Transport, phase: str, data: Tensor, op: Op = "sum") -> None:
    """Reduce a flat float tensor in place: parts to their owners, summed in rank order in float32, sums to everybody."""
    work, cuts = Workspace.of(transport), cut_evenly(data.numel(), transport.size)
    parts = [data[cuts[j] : cuts[j + 1]] for j in range(transport.size)]
    own = parts[transport.rank]
    inbox = [Parcel(w, work.buffer(f"part{w}", own.shape, data.dtype)) for w in peers_in_rank_order(transport)]
    with transport.exchange(phase, inbox) as exchange:
        for peer in others(transport):
            exchange.send(peer, parts[peer])
        arrivals = exchange.arrivals()
        total = work.buffer("sum", own.shape, torch.float32).zero_()
        for w in range(transport.size):
            total.add_(own if w == transport.rank else next(arrivals).data)
    own.copy_(total.div_(transport.size) if op == "mean" else total)
    all_gather(transport, phase, parts)


def union_touched(ids: Tensor, num_rows: int, transport: Transport) -> Tensor:
    """The sorted union of all ranks' ids, by OR-ing bitmaps in parts: 2 (n-1)/n of num_rows / 8 bytes."""
    bitmap = encode_bitmap(ids, num_rows)
    cuts = cut_evenly(bitmap.numel(), transport.size)
    parts = [bitmap[cuts[j] : cuts[j + 1]] for j in range(transport.size)]
    own = parts[transport.rank]
    inbox = [Parcel(w, torch.empty_like(own)) for w in others(transport)]
    with transport.exchange(TOUCHED, inbox) as exchange:
        for peer in others(transport):
            exchange.send(peer, parts[peer])
        for parcel in exchange.arrivals():
            torch.bitwise_or(own, parcel.data, out=own)
    all_gather(transport, TOUCHED, parts)
    return decode_bitmap(bitmap)


def touched_table(num_rows: int, size: int) -> np.ndarray:
    """Bytes of `union_touched`: int64 [n, n]."""
    return two_shot_table(np.diff(cut_evenly((num_rows + 7) // 8, size)))


class DenseRing:
    """The library's all-reduce of the whole tensor. 16-bit values take a two-shot with 32-bit sums instead.

    Touched ids travel as bitmaps in a phase of their own: a dense sum does not say which rows were touched.
    """

    name = "dense"

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`."""
        work = Workspace.of(transport)
        union = union_touched(rows.ids, rows.num_rows, transport)
        with work.timed("pack"):
            dense = work.buffer("dense", (rows.num_rows, rows.width), rows.values.dtype).zero_()
            dense[rows.ids] = rows.values
        if dense.dtype == torch.float32:
            transport.all_reduce(DENSE, dense)
        else:
            two_shot_all_reduce(transport, DENSE, dense.view(-1), op)
        with work.timed("assemble"):
            result = gather_rows(dense, union, dense.new_empty((len(union), rows.width)))
        if op == "mean" and dense.dtype == torch.float32:
            result.div_(transport.size)
        return SparseRows(union, result, rows.num_rows)

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """See `Scheme`. For a library that reduces in a ring, the row sums hold, not which peer is sent to."""
        parts = np.diff(cut_evenly(num_rows * width, len(ids))) * itemsize
        return {TOUCHED: touched_table(num_rows, len(ids)), DENSE: two_shot_table(parts)}
