"""Hierarchical centralization: recursive doubling of whole merged tensors (SparCML, Renggli et al., SC'19).

At stage s rank r swaps everything it has with rank r XOR 2^s and merges. The tree is fixed and the lower rank is always
added first, so replicas agree bit by bit, but sums associate by the tree and not by rank; 16-bit values are rounded
between stages. If n is no power of two, the surplus ranks fold into a partner first and receive the result last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from collectives.kernels.idcoding import check_ids, index_dtype
from collectives.kernels.idsets import decode_bitmap, encode_bitmap, union_ids
from collectives.kernels.rows import as_rows, gather_rows, scatter_rows
from collectives.sparse.merging import RankOrderSum
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.workspace import METADATA, PUSH, Workspace
from collectives.transport import Parcel, Transport


class Meeting(NamedTuple):
    """What one rank does in one round: with whom, and whether it gives and takes."""

    peer: int
    gives: bool
    takes: bool


def meetings(rank: int, size: int) -> list[Meeting | None]:
    """The rounds of one rank, equally many on all ranks; None where it sits out."""
    core = 1 << (size.bit_length() - 1)
    surplus, stages = size - core, core.bit_length() - 1
    if rank >= core:
        return [Meeting(rank - core, True, False), *[None] * stages, Meeting(rank - core, False, True)]
    doubling: list[Meeting | None] = [Meeting(rank ^ (1 << stage), True, True) for stage in range(stages)]
    if not surplus:
        return doubling
    has_partner = rank < surplus
    fold = Meeting(rank + core, False, True) if has_partner else None
    unfold = Meeting(rank + core, True, False) if has_partner else None
    return [fold, *doubling, unfold]


def goes_dense(num_ids: int, num_rows: int, width: int, itemsize: int) -> bool:
    """Whether the dense tensor is no larger than ids and values: D (v + i) >= v, counted in rows."""
    return num_ids * (width * itemsize + index_dtype(num_rows).itemsize) >= num_rows * width * itemsize


def message_bytes(num_ids: int, num_rows: int, width: int, itemsize: int) -> int:
    """Bytes of one message: plain ids and rows, or everything with a bitmap of what was touched."""
    if goes_dense(num_ids, num_rows, width, itemsize):
        return num_rows * width * itemsize + (num_rows + 7) // 8
    return num_ids * (width * itemsize + index_dtype(num_rows).itemsize)


class RecursiveDoubling:
    """`sparcml`. Each round swaps a count, then ids and values; a message goes dense where that is smaller."""

    name = "sparcml"

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`."""
        work, held = Workspace.of(transport), rows
        rounds = meetings(transport.rank, transport.size)
        last_merge = max(
            (i for i, meeting in enumerate(rounds) if meeting and meeting.gives and meeting.takes), default=-1
        )
        for i, meeting in enumerate(rounds):
            received = self._meet(held, meeting, transport, f"{i % 2}")
            if received is None or meeting is None:
                continue
            if not meeting.gives and i > 0:
                held = received
                continue
            pair = (held, received) if transport.rank < meeting.peer else (received, held)
            held = merge(*pair, "mean" if op == "mean" and i == last_merge else "sum", transport.size, work, f"held{i}")
        return SparseRows(held.ids.clone(), held.values.clone(), rows.num_rows)

    def _meet(self, held: SparseRows, meeting: Meeting | None, transport: Transport, tag: str) -> SparseRows | None:
        """One round: a count, then the message. Ranks that sit out open empty exchanges, to stay in step."""
        work, width, dtype = Workspace.of(transport), held.width, held.values.dtype
        count = torch.tensor([len(held.ids)], dtype=torch.int64, device=held.ids.device)
        theirs = torch.zeros_like(count)
        takes, gives = meeting is not None and meeting.takes, meeting is not None and meeting.gives
        peer = meeting.peer if meeting else transport.rank
        with transport.exchange(METADATA, [Parcel(peer, theirs)] if takes else []) as exchange:
            if gives:
                exchange.send(peer, count)
        num_ids = int(theirs)
        dense = takes and goes_dense(num_ids, held.num_rows, width, dtype.itemsize)
        plain = index_dtype(held.num_rows)
        if dense:
            named = work.buffer(f"named{tag}", ((held.num_rows + 7) // 8,), torch.uint8)
        else:
            named = work.buffer(f"named{tag}", (num_ids,), plain)
        values = work.buffer(f"received{tag}", (held.num_rows if dense else num_ids, width), dtype)
        with transport.exchange(PUSH, [Parcel(peer, named), Parcel(peer, values)] if takes else []) as exchange:
            if gives:
                for part in self._message(held, work):
                    exchange.send(peer, part)
        if not takes:
            return None
        if not dense:
            return SparseRows(check_ids(named, held.num_rows), values, held.num_rows)
        ids = decode_bitmap(named)
        return SparseRows(ids, gather_rows(values, ids, values.new_empty((len(ids), width))), held.num_rows)

    def _message(self, held: SparseRows, work: Workspace) -> tuple[Tensor, Tensor]:
        if not goes_dense(len(held.ids), held.num_rows, held.width, held.values.element_size()):
            return held.ids.to(index_dtype(held.num_rows)), held.values
        dense = work.buffer("dense", (held.num_rows, held.width), held.values.dtype).zero_()
        scatter_rows(dense, held.ids, held.values)
        return encode_bitmap(held.ids, held.num_rows), dense

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """See `Scheme`."""
        size = len(ids)
        metadata, push = np.zeros((size, size), np.int64), np.zeros((size, size), np.int64)
        held = [as_rows(one) for one in ids]
        for rounds in zip(*(meetings(rank, size) for rank in range(size)), strict=True):
            merged: dict[tuple[int, int], Tensor] = {}
            before = list(held)
            for rank, meeting in enumerate(rounds):
                if meeting is None:
                    continue
                if meeting.gives:
                    metadata[rank, meeting.peer] += 8
                    push[rank, meeting.peer] += message_bytes(len(before[rank]), num_rows, width, itemsize)
                if meeting.takes:
                    pair = (min(rank, meeting.peer), max(rank, meeting.peer))
                    if pair not in merged:
                        merged[pair] = union_ids([before[pair[0]], before[pair[1]]], num_rows)[0]
                    held[rank] = merged[pair]
        return {METADATA: metadata, PUSH: push}


def merge(first: SparseRows, second: SparseRows, op: Op, size: int, work: Workspace, name: str) -> SparseRows:
    """The sum of two sets of rows, `first` first, in the buffer `name`; for the mean also divided by `size`."""
    with work.timed("sum"):
        union, positions = union_ids([first.ids, second.ids], first.num_rows)
        total = RankOrderSum(work.buffer(name, (len(union), first.width), first.values.dtype), work)
        total.add(positions[0], first.values)
        total.add(positions[1], second.values)
        return SparseRows(union, total.finish(op, size), first.num_rows)
