"""Which card of which node is free, indexed so that a placement costs nothing per node of the cluster.

Nodes of one GPU type form a pool. Inside a pool they hang in doubly linked lists by their number of free GPUs, which
is all that placing needs: nodes of one (pool, free) list are interchangeable. The ledger proper is per card: its owner
and the bytes reserved on it. Kernels work on `Cells`, a tuple of arrays; `Ledger` is the face for people.

What always holds: a card has at most one owner and its reserved bytes never exceed what the card has; a card that an
outside process fills is not free; `find` changes nothing, `commit` takes all of a placement or is not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from placement.errors import PlacementError
from placement.jobs import MAX_GPUS_PER_NODE, NodeSpec

NOBODY = -1
DETACHED = -2
WHOLE = np.array(
    [[free // group * group for group in range(1, MAX_GPUS_PER_NODE + 1)] for free in range(MAX_GPUS_PER_NODE + 1)]
)
"""WHOLE[free, group - 1]: how many of `free` cards make whole groups, int64. A table, as divisions took time."""


class Cells(NamedTuple):
    """N nodes, P pools, W cards on the widest node, S job slots, E placement entries. All integers int32 unless said."""

    pool: np.ndarray
    """[N] pool of a node."""
    width: np.ndarray
    """[P] cards on the widest node of a pool."""
    free: np.ndarray
    """[N] bit mask of cards that may be given away."""
    num_free: np.ndarray
    """[N] bits in `free`."""
    tally: np.ndarray
    """[P, W + 1] nodes by number of free cards."""
    head: np.ndarray
    """[P, W + 1] first node of that list, or -1; nodes without a free card are in no list."""
    after: np.ndarray
    """[N] next node of its list, or -1; DETACHED if the node is down."""
    before: np.ndarray
    """[N] previous node of its list."""
    held: np.ndarray
    """[N] bit mask of idle cards kept back for the reserved job."""
    promised: np.ndarray
    """[N] cards that the reservation wants of this node."""
    owner: np.ndarray
    """[N, W] job slot, or -1."""
    reserved_bytes: np.ndarray
    """[S] int64, bytes that a job slot may use on each of its cards."""
    usable: np.ndarray
    """[N] bit mask of cards that are up and not filled by an outside process."""
    job_entry: np.ndarray
    """[S] first placement entry of a job slot, or -1."""
    entry_node: np.ndarray
    """[E] node of an entry."""
    entry_mask: np.ndarray
    """[E] its cards."""
    entry_after: np.ndarray
    """[E] next entry of the job, or of the list of unused entries."""
    spare: np.ndarray
    """[1] first unused entry."""


@njit(nogil=True, cache=True)
def count_bits(mask: int) -> int:
    """Set bits of a small non-negative mask."""
    bits = 0
    while mask:
        mask &= mask - 1
        bits += 1
    return bits


@njit(nogil=True, cache=True)
def unlink(cells: Cells, node: int) -> None:
    """Take a node out of its list."""
    pool, free = cells.pool[node], cells.num_free[node]
    before, after = cells.before[node], cells.after[node]
    if before >= 0:
        cells.after[before] = after
    elif free > 0:
        cells.head[pool, free] = after
    if after >= 0:
        cells.before[after] = before
    cells.tally[pool, free] -= 1
    cells.after[node] = DETACHED


@njit(nogil=True, cache=True)
def link(cells: Cells, node: int) -> None:
    """Put a node in front of the list of its free count."""
    pool, free = cells.pool[node], cells.num_free[node]
    first = cells.head[pool, free]
    cells.before[node], cells.after[node] = -1, first
    if first >= 0:
        cells.before[first] = node
    if free > 0:
        cells.head[pool, free] = node
    cells.tally[pool, free] += 1


@njit(nogil=True, cache=True)
def set_free(cells: Cells, node: int, mask: int) -> None:
    """Change the free cards of a node that is up, and its list with them."""
    unlink(cells, node)
    cells.free[node] = mask
    cells.num_free[node] = count_bits(mask)
    link(cells, node)


@njit(nogil=True, cache=True)
def find(cells: Cells, pool: int, num_gpus: int, tp_group: int, nodes: np.ndarray, takes: np.ndarray) -> int:
    """Choose cards for `num_gpus` GPUs in whole tp groups; returns how many nodes were written to nodes/takes, 0 = none.

    Up to the pool's widest node: one node, exact fit first, then the least left over. Above: whole groups on the
    fullest-free nodes, and for the rest of the last node again the tightest. Nothing is changed.
    """
    width = cells.width[pool]
    tally, head = cells.tally[pool], cells.head[pool]
    if num_gpus <= width:
        for free in range(num_gpus, width + 1):
            if tally[free] > 0:
                nodes[0], takes[0] = head[free], num_gpus
                return 1
        return 0
    available = 0
    for free in range(tp_group, width + 1):
        available += tally[free] * WHOLE[free, tp_group - 1]
    if available < num_gpus:
        return 0
    rest, used = num_gpus, 0
    for take in range(WHOLE[width, tp_group - 1], 0, -tp_group):
        for free in range(take, min(take + tp_group, width + 1)):
            node = head[free]
            while node >= 0 and rest > take:
                nodes[used], takes[used] = node, take
                used, rest, node = used + 1, rest - take, cells.after[node]
            if node >= 0:
                for tight in range(rest, free):
                    if tally[tight] > 0:
                        node = head[tight]
                        break
                nodes[used], takes[used] = node, rest
                return used + 1
    return 0


@njit(nogil=True, cache=True)
def lowest_bits(mask: int, num: int) -> int:
    """The `num` lowest set bits of a mask."""
    rest = mask
    for _ in range(num):
        rest &= rest - 1
    return mask & ~rest


@njit(nogil=True, cache=True)
def add_entry(cells: Cells, slot: int, node: int, mask: int) -> None:
    """Write cards of one node to a job's account."""
    entry = cells.spare[0]
    cells.spare[0] = cells.entry_after[entry]
    cells.entry_node[entry], cells.entry_mask[entry] = node, mask
    cells.entry_after[entry] = cells.job_entry[slot]
    cells.job_entry[slot] = entry
    for gpu in range(cells.owner.shape[1]):
        if mask >> gpu & 1:
            cells.owner[node, gpu] = slot


@njit(nogil=True, cache=True)
def commit(cells: Cells, slot: int, used: int, nodes: np.ndarray, takes: np.ndarray, memory_bytes: int) -> None:
    """Give nodes, of one pool as `find` chooses them or of several, to a job slot.

    Written out in one loop: it is most of a large pass.
    """
    free, num_free, owner, after, before = cells.free, cells.num_free, cells.owner, cells.after, cells.before
    entry_node, entry_mask, entry_after = cells.entry_node, cells.entry_mask, cells.entry_after
    pool = cells.pool[nodes[0]]
    tally, head = cells.tally[pool], cells.head[pool]
    entry, last = cells.spare[0], cells.job_entry[slot]
    for i in range(used):
        node, take = nodes[i], takes[i]
        if cells.pool[node] != pool:
            pool = cells.pool[node]
            tally, head = cells.tally[pool], cells.head[pool]
        have, idle = num_free[node], free[node]
        mask = idle if take == have else lowest_bits(idle, take)
        left, right = before[node], after[node]
        if left >= 0:
            after[left] = right
        else:
            head[have] = right
        if right >= 0:
            before[right] = left
        first = head[have - take]
        before[node], after[node] = -1, first
        if first >= 0:
            before[first] = node
        if take < have:
            head[have - take] = node
        tally[have] -= 1
        tally[have - take] += 1
        free[node], num_free[node] = idle & ~mask, have - take
        following = entry_after[entry]
        entry_node[entry], entry_mask[entry], entry_after[entry] = node, mask, last
        last, entry = entry, following
        gpu, rest = 0, mask
        while rest:
            if rest & 1:
                owner[node, gpu] = slot
            gpu, rest = gpu + 1, rest >> 1
    cells.spare[0], cells.job_entry[slot] = entry, last
    cells.reserved_bytes[slot] = memory_bytes


@njit(nogil=True, cache=True)
def give_back(cells: Cells, node: int, mask: int) -> None:
    """Idle cards of a node: first to the reservation that waits for them, the rest to the free list."""
    mask &= cells.usable[node]
    lack = cells.promised[node] - count_bits(cells.held[node])
    if lack > 0:
        kept = lowest_bits(mask, min(lack, count_bits(mask)))
        cells.held[node] |= kept
        mask &= ~kept
    if mask and cells.after[node] != DETACHED:
        set_free(cells, node, cells.free[node] | mask)


@njit(nogil=True, cache=True)
def release(cells: Cells, slot: int, touched: np.ndarray) -> None:
    """Free every card of a job slot and mark the pools in `touched` (bool [P])."""
    entry = cells.job_entry[slot]
    while entry >= 0:
        node, mask = cells.entry_node[entry], cells.entry_mask[entry]
        for gpu in range(cells.owner.shape[1]):
            if mask >> gpu & 1:
                cells.owner[node, gpu] = NOBODY
        give_back(cells, node, mask)
        touched[cells.pool[node]] = True
        following = cells.entry_after[entry]
        cells.entry_after[entry] = cells.spare[0]
        cells.spare[0] = entry
        entry = following
    cells.job_entry[slot] = -1
    cells.reserved_bytes[slot] = 0


@njit(nogil=True, cache=True)
def list_entries(cells: Cells, slots: np.ndarray, ends: np.ndarray, nodes: np.ndarray, masks: np.ndarray) -> int:
    """Write node and card mask of every entry of these jobs, job after job; ends[i] is where those of job i end.

    Returns how many there are; nodes and masks have room for every entry of the ledger.
    """
    used = 0
    for i in range(slots.shape[0]):
        entry = cells.job_entry[slots[i]]
        while entry >= 0:
            nodes[used], masks[used] = cells.entry_node[entry], cells.entry_mask[entry]
            used, entry = used + 1, cells.entry_after[entry]
        ends[i] = used
    return used


@njit(nogil=True, cache=True)
def hold(cells: Cells, node: int, num_gpus: int) -> None:
    """Promise cards of a node to the reservation; those that are idle now are kept back at once."""
    cells.promised[node] = num_gpus
    kept = lowest_bits(cells.free[node], min(num_gpus, cells.num_free[node]))
    cells.held[node] = kept
    if kept:
        set_free(cells, node, cells.free[node] & ~kept)


@njit(nogil=True, cache=True)
def unhold(cells: Cells, node: int) -> None:
    """Forget the promise; held cards are free again."""
    mask = cells.held[node]
    cells.held[node], cells.promised[node] = 0, 0
    give_back(cells, node, mask)


@njit(nogil=True, cache=True)
def set_usable(cells: Cells, node: int, mask: int) -> None:
    """Change which cards of a node may be given away; 0 takes the node out of its list. Held cards are free again."""
    idle = (cells.free[node] | cells.held[node]) & mask
    for gpu in range(cells.owner.shape[1]):
        if (mask & ~cells.usable[node]) >> gpu & 1 and cells.owner[node, gpu] == NOBODY:
            idle |= 1 << gpu
    cells.usable[node], cells.held[node] = mask, 0
    if cells.after[node] != DETACHED:
        unlink(cells, node)
    cells.free[node], cells.num_free[node] = 0, 0
    if mask:
        link(cells, node)
        give_back(cells, node, idle)


@dataclass(frozen=True)
class Fit:
    """Cards found for one request: node indices and how many of each, int32 arrays of equal length."""

    pool: int
    nodes: np.ndarray
    takes: np.ndarray


class Ledger:
    """The cards of one cluster. Slots number the jobs; the caller hands them out."""

    def __init__(self, nodes: Sequence[NodeSpec]):
        if not nodes:
            raise PlacementError("the cluster has no node; add at least one NodeSpec")
        for spec in nodes:
            if not 1 <= spec.num_gpus <= MAX_GPUS_PER_NODE:
                raise PlacementError(
                    f"node {spec.name} has {spec.num_gpus} GPUs; 1 to {MAX_GPUS_PER_NODE} are supported"
                )
        self.nodes = tuple(nodes)
        self.node_index = {spec.name: i for i, spec in enumerate(nodes)}
        if len(self.node_index) != len(nodes):
            raise PlacementError("two nodes share one name; node names must be unique")
        classes = sorted({(spec.gpu_type, spec.memory_bytes) for spec in nodes}, key=lambda c: (c[1], c[0]))
        self.pools = tuple(classes)
        """(gpu_type, memory_bytes per card) of each pool, smallest memory first."""
        index = {c: i for i, c in enumerate(classes)}
        pool = np.array([index[spec.gpu_type, spec.memory_bytes] for spec in nodes], np.int32)
        widths = np.array([spec.num_gpus for spec in nodes], np.int32)
        self.cells = _fresh_cells(pool, widths, len(classes))
        self._resize_scratch()

    def find(self, pool: int, num_gpus: int, tp_group: int = 1) -> Fit | None:
        """Cards for one gang in one pool by HAS's rule, or None; nothing changes."""
        used = find(self.cells, pool, num_gpus, tp_group, *self._scratch)
        return Fit(pool, self._scratch[0][:used].copy(), self._scratch[1][:used].copy()) if used else None

    def take(self, slot: int, fit: Fit, memory_bytes: int) -> None:
        """Give the cards of `fit`, found since the last change, to `slot`."""
        self.require_slots(slot + 1)
        if self.cells.job_entry[slot] >= 0:
            raise PlacementError(f"job slot {slot} holds cards already; release it first")
        if memory_bytes > self.pools[fit.pool][1]:
            raise PlacementError(
                f"{memory_bytes} bytes a card asked of pool {self.pools[fit.pool][0]}, whose cards have "
                f"{self.pools[fit.pool][1]}; choose a plan that fits"
            )
        if np.any(self.cells.num_free[fit.nodes] < fit.takes):
            raise PlacementError("the cards of this fit were taken meanwhile; call find again")
        commit(self.cells, slot, len(fit.nodes), fit.nodes, fit.takes, memory_bytes)

    def release(self, slot: int) -> np.ndarray:
        """Free all cards of `slot`; returns bool [P], the pools that gained cards."""
        touched = np.zeros(len(self.pools), np.bool_)
        release(self.cells, slot, touched)
        return touched

    def cards(self, slots: Sequence[int] | np.ndarray) -> list[tuple[tuple[int, int], ...]]:
        """(node index, card mask) of each job slot, nodes ascending: one tuple of pairs per slot."""
        wanted = np.asarray(slots, np.int32)
        ends = np.zeros(len(wanted), np.int32)
        used = list_entries(self.cells, wanted, ends, self._entry_nodes, self._entry_masks)
        return split_entries(ends, self._entry_nodes[:used], self._entry_masks[:used])

    def owners(self, node: int) -> list[int]:
        """Job slots with a card on this node."""
        return sorted({slot for slot in self.cells.owner[node].tolist() if slot >= 0})

    def set_usable(self, node: int, mask: int) -> None:
        """Cards of a node that may be given away from now on: 0 = the node is down. Owned cards stay with their owner."""
        set_usable(self.cells, node, mask)

    def _resize_scratch(self) -> None:
        num_nodes, num_entries = len(self.nodes), len(self.cells.entry_node)
        self._scratch = (np.zeros(num_nodes, np.int32), np.zeros(num_nodes, np.int32))
        self._entry_nodes, self._entry_masks = np.zeros(num_entries, np.int32), np.zeros(num_entries, np.int32)

    def require_slots(self, num_slots: int) -> None:
        """Make room for job slots below `num_slots`."""
        have = len(self.cells.job_entry)
        if num_slots > have:
            grown = np.full(max(num_slots, 2 * have), -1, np.int32)
            grown[:have] = self.cells.job_entry
            reserved = np.zeros(len(grown), np.int64)
            reserved[:have] = self.cells.reserved_bytes
            self.cells = self.cells._replace(job_entry=grown, reserved_bytes=reserved)

    def add_node(self, spec: NodeSpec) -> int:
        """A new node of a known pool; O(nodes). Returns its index."""
        key = (spec.gpu_type, spec.memory_bytes)
        if spec.name in self.node_index:
            raise PlacementError(f"node {spec.name} is known already; report it as up again instead")
        if key not in self.pools or spec.num_gpus > self.cells.owner.shape[1]:
            raise PlacementError(
                f"node {spec.name} opens a new GPU type or width {key, spec.num_gpus}; rebuild the ledger"
            )
        self.cells = _grow(self.cells, self.pools.index(key), spec.num_gpus)
        self.nodes = (*self.nodes, spec)
        node = self.node_index[spec.name] = len(self.nodes) - 1
        self._resize_scratch()
        self.set_usable(node, (1 << spec.num_gpus) - 1)
        return node


def split_entries(ends: np.ndarray, nodes: np.ndarray, masks: np.ndarray) -> list[tuple[tuple[int, int], ...]]:
    """(node index, card mask) pairs of each job, nodes ascending, from what `list_entries` wrote."""
    pairs = list(zip(nodes.tolist(), masks.tolist(), strict=True))
    begin, result = 0, []
    for end in ends.tolist():
        result.append((pairs[begin],) if end == begin + 1 else tuple(sorted(pairs[begin:end])))
        begin = end
    return result


def _node_columns(num_nodes: int, widest: int) -> dict[str, np.ndarray]:
    """The fields [N] and [N, W] of `Cells`, zeros, as columns of one int32 table whose rows begin at a cache line.

    With up to 8 cards a node is one line of 64 bytes: a change to one of many nodes waits for memory once, not nine times.
    """
    names = ("pool", "free", "num_free", "after", "before", "held", "promised", "usable")
    stride = -(-(len(names) + widest) // 16) * 16
    flat = np.zeros(num_nodes * stride + 16, np.int32)
    skipped = -flat.ctypes.data % 64 // 4
    table = flat[skipped : skipped + num_nodes * stride].reshape(num_nodes, stride)
    columns = {name: table[:, i] for i, name in enumerate(names)}
    return columns | {"owner": table[:, len(names) : len(names) + widest]}


def _fresh_cells(pool: np.ndarray, widths: np.ndarray, num_pools: int) -> Cells:
    num_nodes, widest, num_entries = len(pool), int(widths.max()), int(widths.sum())
    pool_width = np.zeros(num_pools, np.int32)
    np.maximum.at(pool_width, pool, widths)
    columns = _node_columns(num_nodes, widest)
    columns["pool"][:], columns["num_free"][:] = pool, widths
    columns["after"][:], columns["before"][:], columns["owner"][:] = DETACHED, -1, NOBODY
    columns["free"][:] = columns["usable"][:] = (1 << widths) - 1
    cells = Cells(
        width=pool_width,
        tally=np.zeros((num_pools, widest + 1), np.int32),
        head=np.full((num_pools, widest + 1), -1, np.int32),
        reserved_bytes=np.zeros(64, np.int64),
        job_entry=np.full(64, -1, np.int32),
        entry_node=np.zeros(num_entries, np.int32),
        entry_mask=np.zeros(num_entries, np.int32),
        entry_after=np.append(np.arange(1, num_entries, dtype=np.int32), np.int32(-1)),
        spare=np.zeros(1, np.int32),
        **columns,
    )
    _link_all(cells)
    return cells


@njit(nogil=True, cache=True)
def _link_all(cells: Cells) -> None:
    for node in range(cells.pool.shape[0] - 1, -1, -1):
        link(cells, node)


def _grow(cells: Cells, pool: int, num_gpus: int) -> Cells:
    """Room for one more node, still detached, with `num_gpus` more entries."""
    num_nodes, widest = cells.owner.shape
    columns = _node_columns(num_nodes + 1, widest)
    for name, column in columns.items():
        column[:num_nodes] = getattr(cells, name)
    columns["pool"][-1], columns["after"][-1], columns["before"][-1], columns["owner"][-1] = pool, DETACHED, -1, NOBODY
    first = len(cells.entry_node)
    tail = np.append(np.arange(first + 1, first + num_gpus, dtype=np.int32), cells.spare[0])
    cells.width[pool] = max(cells.width[pool], num_gpus)
    return cells._replace(
        entry_node=np.append(cells.entry_node, np.zeros(num_gpus, np.int32)),
        entry_mask=np.append(cells.entry_mask, np.zeros(num_gpus, np.int32)),
        entry_after=np.append(cells.entry_after, tail).astype(np.int32),
        spare=np.array([first], np.int32),
        **columns,
    )
