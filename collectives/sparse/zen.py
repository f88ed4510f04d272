"""Balanced parallelism: push parts to their owners, sum there, pull the sums (ZEN, Wang et al., OSDI'25).

A tensor is cut into units (elements, whole rows, or blocks of a row), each unit has one owner, and every rank is owner of
one part. What varies is the unit, the owner map and how the owner names its units on the way back:

- `zen`: elements, hashed, bitmap pull: the paper's scheme for element-sparse gradients;
- `zen_rows`, `hashed_rows`: whole rows, hashed, bitmap or plain ids back;
- `hashed_blocks`: blocks of 64 to 128 values, for tensors with too few touched rows to balance;
- `sparse_ps`: whole rows in contiguous ranges, which skewed ids overload (Parallax).

Owners keep slots, not ids: the owner map is a bijection, so neither side needs a table, and a bitmap over the slots of
one owner costs N / (8 n) bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from collectives.errors import WireFormatError
from collectives.kernels.hashing import HashedOwners, Owners, RangeOwners
from collectives.kernels.idcoding import check_ids, index_dtype
from collectives.kernels.idsets import decode_bitmap, encode_bitmap, partition_by_owner, union_ids
from collectives.kernels.rows import as_rows, gather_rows, scatter_rows
from collectives.sparse.columns import broadcast_table, in_rank_order, metadata_table, peers_in_rank_order
from collectives.sparse.merging import RankOrderSum
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.workspace import METADATA, PULL, PUSH, Workspace, gather_records
from collectives.transport import Parcel, Transport, all_gather_records, others

MIN_BLOCK_WIDTH = 64
"""Values per block of `hashed_blocks`, at least: an id costs 4 bytes, 1.6 % of 64 fp32 values."""

CHUNK_UNITS = 1 << 18
"""Units counted at a time without values: bounds the memory of element-wise counts and stays near the caches."""


def row_unit(width: int) -> int:
    """The whole row."""
    return width


def element_unit(width: int) -> int:
    """One value."""
    return 1


def block_unit(width: int) -> int:
    """The smallest divisor of `width` from MIN_BLOCK_WIDTH on, or the whole row."""
    return next((unit for unit in range(MIN_BLOCK_WIDTH, width) if width % unit == 0), width)


def cut_ids(ids: Tensor, units_per_row: int) -> Tensor:
    """Ids of the units of each row: int64 [k * units_per_row], sorted where `ids` are."""
    if units_per_row == 1:
        return ids
    return (ids[:, None] * units_per_row + torch.arange(units_per_row, device=ids.device)).view(-1)


@dataclass(frozen=True)
class PushPull:
    """One scheme of the family; see the module. Messages: plain slots and values to the owner, sums to everybody."""

    name: str
    unit: Callable[[int], int]
    """From the width of a row to the width of a unit, a divisor of it."""
    owners: Callable[[int, int], Owners]
    """From the number of units and of ranks to the owner map; the same on all ranks."""
    pull: Literal["bitmap", "coo"]

    def all_reduce(self, rows: SparseRows, transport: Transport, op: Op, sizes: np.ndarray | None = None) -> SparseRows:
        """See `Scheme`. `sizes` is not enough here: the n x n table of part sizes takes its own metadata round."""
        work, rank, unit = Workspace.of(transport), transport.rank, self.unit(rows.width)
        per_row = rows.width // unit
        num_units, dtype = rows.num_rows * per_row, rows.values.dtype
        owners, plain = self.owners(num_units, transport.size), index_dtype(num_units)
        with work.timed("pack"):
            ids, values = cut_ids(rows.ids, per_row), rows.values.view(-1, unit)
            owner_of, slots = owners.split(ids)
            counts, order = partition_by_owner(owner_of, transport.size)
        with gather_records(transport, counts.tolist()) as table, work.timed("pack"):
            packed_slots = torch.split(slots[order].to(plain), counts.tolist())
            packed = torch.split(
                gather_rows(values, order, work.buffer("packed", values.shape, dtype)), counts.tolist()
            )
        peers = peers_in_rank_order(transport)
        slot_recvs = [Parcel(w, work.buffer(f"slots{w}", (int(table[w, rank]),), plain)) for w in peers]
        value_recvs = [Parcel(w, work.buffer(f"values{w}", (int(table[w, rank]), unit), dtype)) for w in peers]
        with transport.exchange(PUSH, slot_recvs + value_recvs) as push:
            for parts in (packed_slots, packed):
                for peer in others(transport):
                    push.send(peer, parts[peer])
            arrivals = push.arrivals()
            slot_lists = [
                check_ids(part, owners.num_slots(rank))
                for part in in_rank_order(arrivals, packed_slots[rank], transport)
            ]
            with work.timed("union"):
                owned, positions = union_ids(slot_lists, owners.num_slots(rank))
            slots_of = self._share_slots(owned, owners, plain, transport)
            blocks = [work.buffer(f"block{j}", (len(slots_of[j]), unit), dtype) for j in range(transport.size)]
            with transport.exchange(PULL, [Parcel(j, blocks[j]) for j in others(transport)]) as pull:
                total = RankOrderSum(blocks[rank], work)
                for w, part in enumerate(in_rank_order(arrivals, packed[rank], transport)):
                    with work.timed("sum"):
                        total.add(positions[w], part)
                with work.timed("sum"):
                    total.finish(op, transport.size)
                for peer in others(transport):
                    pull.send(peer, blocks[rank])
                with work.timed("union"):
                    union, places = union_ids([owners.join(j, s) for j, s in enumerate(slots_of)], num_units)
                result = rows.values.new_empty((len(union), unit))
                scatter_rows(result, places[rank], blocks[rank])
                for parcel in pull.arrivals():
                    with work.timed("assemble"):
                        scatter_rows(result, places[parcel.peer], parcel.data)
        return SparseRows(union[::per_row] // per_row, result.view(-1, rows.width), rows.num_rows)

    def _share_slots(self, owned: Tensor, owners: Owners, plain: torch.dtype, transport: Transport) -> list[Tensor]:
        """Every owner's sorted slots (int64), by owner. With a bitmap its ones also say how many values will follow."""
        if self.pull == "bitmap":
            mine, dtype = encode_bitmap(owned, owners.num_slots(transport.rank)), torch.uint8
            lengths = [(owners.num_slots(j) + 7) // 8 for j in range(transport.size)]
        else:
            mine, dtype = owned.to(plain), plain
            lengths = all_gather_records(transport, METADATA, [len(owned)])[:, 0].tolist()
        coded = [torch.empty(length, dtype=dtype, device=owned.device) for length in lengths]
        with transport.exchange(PULL, [Parcel(j, coded[j]) for j in others(transport)]) as exchange:
            for peer in others(transport):
                exchange.send(peer, mine)
        coded[transport.rank] = mine
        return [
            check_slots(decode_bitmap(part) if self.pull == "bitmap" else part.to(torch.int64), owners.num_slots(j), j)
            for j, part in enumerate(coded)
        ]

    def partition(self, ids: Sequence[np.ndarray], num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Units of each rank w at each owner j, c[w][j] (int64 [n, n]), and of the union at each owner, int64 [n]."""
        per_row = width // self.unit(width)
        owners = self.owners(num_rows * per_row, len(ids))
        lists = [as_rows(one) for one in ids]

        def count(rows: Tensor) -> np.ndarray:
            total = np.zeros(len(ids), np.int64)
            for chunk in torch.split(rows, max(1, CHUNK_UNITS // per_row)):
                owner_of = owners.split(cut_ids(chunk, per_row))[0].numpy()
                total += np.bincount(owner_of, minlength=len(ids))
            return total

        return np.stack([count(one) for one in lists]), count(union_ids(lists, num_rows)[0])

    def part_bytes(
        self, parts: tuple[np.ndarray, np.ndarray], num_rows: int, width: int, itemsize: int
    ) -> dict[str, np.ndarray]:
        """`wire_bytes` from the result of `partition`."""
        pushed, owned = parts
        size, unit = len(owned), self.unit(width)
        num_units = num_rows * width // unit
        index_bytes = index_dtype(num_units).itemsize
        push = pushed * (unit * itemsize + index_bytes)
        np.fill_diagonal(push, 0)
        if self.pull == "bitmap":
            owners = self.owners(num_units, size)
            named = np.array([(owners.num_slots(j) + 7) // 8 for j in range(size)], np.int64)
        else:
            named = owned * index_bytes
        metadata = metadata_table(size, size + (self.pull == "coo"))
        return {METADATA: metadata, PUSH: push, PULL: broadcast_table(owned * unit * itemsize + named)}

    def wire_bytes(self, ids: Sequence[np.ndarray], num_rows: int, width: int, itemsize: int) -> dict[str, np.ndarray]:
        """See `Scheme`."""
        return self.part_bytes(self.partition(ids, num_rows, width), num_rows, width, itemsize)


def check_slots(slots: Tensor, num_slots: int, owner: int) -> Tensor:
    """Received slots of one owner, or WireFormatError where they are not sorted, unique and in range."""
    if slots.numel() and not (
        int(slots[0]) >= 0 and int(slots[-1]) < num_slots and bool((slots[1:] > slots[:-1]).all())
    ):
        raise WireFormatError(f"slots of owner {owner} are not a sorted set in [0, {num_slots})")
    return slots


ZEN = PushPull("zen", element_unit, HashedOwners, "bitmap")
ZEN_ROWS = PushPull("zen_rows", row_unit, HashedOwners, "bitmap")
HASHED_ROWS = PushPull("hashed_rows", row_unit, HashedOwners, "coo")
HASHED_BLOCKS = PushPull("hashed_blocks", block_unit, HashedOwners, "coo")
SPARSE_PS = PushPull("sparse_ps", row_unit, RangeOwners, "coo")
