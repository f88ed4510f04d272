"""The queueing pass: heterogeneity-aware first fit by plan order, with aging, one reservation and backfill.

Order of plans and tightest nodes follow Frenzy's HAS as far as its abstract tells; aging, reservation and backfill are
added. Classes keep their waiting jobs in lists by priority key (submission minus boost), so that the head of a class
stands for all of it: what does not fit it fits none of its class, and free cards only shrink inside a pass. A pass
costs classes x (plans + placements) and no step depends on the number of nodes or of waiting jobs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.experimental import structref

from placement.ledger import (
    WHOLE,
    Cells,
    add_entry,
    commit,
    count_bits,
    find,
    hold,
    list_entries,
    lowest_bits,
    release,
    set_usable,
    unhold,
)

BACKFILL_DEPTH = 16
"""Waiting jobs of one class that are looked at for the reserved cards."""


class Queue(NamedTuple):
    """C classes with up to K plans, S job slots, P pools. int32 unless said."""

    option_pool: np.ndarray
    """[C, K] pool of a plan."""
    option_gpus: np.ndarray
    """[C, K] GPUs."""
    option_tp: np.ndarray
    """[C, K] GPUs that must share a node."""
    option_bytes: np.ndarray
    """[C, K] int64, predicted bytes per GPU."""
    option_step_s: np.ndarray
    """[C, K] float64, predicted step time."""
    num_options: np.ndarray
    """[C] plans, best first."""
    pools: np.ndarray
    """[C, P] bool: pools that some plan of the class uses."""
    first: np.ndarray
    """[C] waiting job of best priority, or -1."""
    last: np.ndarray
    """[C] waiting job of worst priority."""
    after: np.ndarray
    """[S] next waiting job of the class."""
    before: np.ndarray
    """[S] previous one."""
    class_of: np.ndarray
    """[S] class of a job."""
    key: np.ndarray
    """[S] float64, priority: smaller goes first."""
    submit_s: np.ndarray
    """[S] float64."""
    num_steps: np.ndarray
    """[S] float64, steps still to do."""
    option: np.ndarray
    """[S] plan of a running job, or -1."""
    finish_s: np.ndarray
    """[S] float64, predicted finish of a running job."""
    placed_s: np.ndarray
    """[S] float64, when a running job got its present cards."""


class Hold(NamedTuple):
    """The reservation: one job, the plan it will start with, when, and the nodes that are kept for it."""

    slot: np.ndarray
    """[1] int32 job, or -1."""
    option: np.ndarray
    """[1] int32."""
    start_s: np.ndarray
    """[1] float64, earliest start by the predicted finishes."""
    num_nodes: np.ndarray
    """[1] int32."""
    nodes: np.ndarray
    """[N] int32, the first num_nodes are valid."""


class Log(NamedTuple):
    """What a pass decides. int32; E: cards of the cluster."""

    placed: np.ndarray
    """[S + 1] job slots in the order in which they were started."""
    ends: np.ndarray
    """[S + 1] where the entries of each end, if they are listed."""
    nodes: np.ndarray
    """[E] node of an entry; while the pass runs, the nodes of one placement."""
    masks: np.ndarray
    """[E] cards of an entry; while the pass runs, how many cards of each node."""


@structref.register
class _StateType(types.StructRef):  # type: ignore[misc]
    """How kernels see a `State`."""

    def preprocess_fields(self, fields: tuple[tuple[str, types.Type], ...]) -> tuple[tuple[str, types.Type], ...]:
        """Field types as they are, without literal values."""
        return tuple((name, types.unliteral(kind)) for name, kind in fields)


class State(structref.StructRefProxy):  # type: ignore[misc]
    """All that an event works on, in one argument: unpacking its 47 arrays at every call took as long as the pass itself.

    Fields: cells, queue, held, log as above; open_classes bool [C]: classes that might fit; touched bool [P]: pools that
    gained cards. It refers to the arrays it was made of by `bundle`: make a new one when one of them is replaced.
    """


structref.define_proxy(State, _StateType, ["cells", "queue", "held", "log", "open_classes", "touched"])


@njit(nogil=True, cache=True)
def bundle(cells: Cells, queue: Queue, held: Hold, log: Log, open_classes: np.ndarray, touched: np.ndarray) -> State:
    """The arrays as one argument."""
    return State(cells, queue, held, log, open_classes, touched)


@njit(nogil=True, cache=True)
def enqueue(queue: Queue, slot: int) -> None:
    """Insert a job into its class by key, behind its equals, from the nearer end: new jobs go last, old ones first."""
    c, key = queue.class_of[slot], queue.key[slot]
    behind, ahead = queue.last[c], queue.first[c]
    if behind >= 0 and key - queue.key[ahead] < queue.key[behind] - key:
        while queue.key[ahead] <= key:
            ahead = queue.after[ahead]
        behind = queue.before[ahead]
    else:
        while behind >= 0 and queue.key[behind] > key:
            behind = queue.before[behind]
        ahead = queue.after[behind] if behind >= 0 else ahead
    queue.before[slot], queue.after[slot] = behind, ahead
    if behind >= 0:
        queue.after[behind] = slot
    else:
        queue.first[c] = slot
    if ahead >= 0:
        queue.before[ahead] = slot
    else:
        queue.last[c] = slot


@njit(nogil=True, cache=True)
def dequeue(queue: Queue, slot: int) -> None:
    """Take a waiting job out."""
    c, behind, ahead = queue.class_of[slot], queue.before[slot], queue.after[slot]
    if behind >= 0:
        queue.after[behind] = ahead
    else:
        queue.first[c] = ahead
    if ahead >= 0:
        queue.before[ahead] = behind
    else:
        queue.last[c] = behind


@njit(nogil=True, cache=True)
def _start(queue: Queue, slot: int, option: int, now_s: float) -> None:
    dequeue(queue, slot)
    queue.option[slot], queue.placed_s[slot] = option, now_s
    queue.finish_s[slot] = now_s + queue.num_steps[slot] * queue.option_step_s[queue.class_of[slot], option]


@njit(nogil=True, cache=True)
def measure_pool(tally: np.ndarray, pool: int, largest: np.ndarray, room: np.ndarray) -> None:
    """What a pool can still take: most free cards on one node, and cards in whole groups of each size.

    tally int32 [P, W + 1] as in `Cells`; writes largest int32 [P] and room int32 [P, W + 1].
    """
    largest[pool] = 0
    room[pool, :] = 0
    for free in range(1, tally.shape[1]):
        if tally[pool, free] > 0:
            largest[pool] = free
            for group in range(1, free + 1):
                room[pool, group] += tally[pool, free] * WHOLE[free, group - 1]


@njit(nogil=True, cache=True)
def _first_fit(queue: Queue, c: int, start: int, width: np.ndarray, largest: np.ndarray, room: np.ndarray) -> int:
    """The first plan of class `c`, from `start` on, that its pool can take now, or -1."""
    for k in range(start, queue.num_options[c]):
        pool, gpus = queue.option_pool[c, k], queue.option_gpus[c, k]
        if gpus <= width[pool]:
            if largest[pool] >= gpus:
                return k
        elif room[pool, queue.option_tp[c, k]] >= gpus:
            return k
    return -1


@njit(nogil=True, cache=True)
def drop_hold(cells: Cells, held: Hold) -> None:
    """End the reservation; its idle cards are free again."""
    for i in range(held.num_nodes[0]):
        unhold(cells, held.nodes[i])
    held.slot[0], held.num_nodes[0], held.start_s[0] = -1, 0, np.inf


@njit(nogil=True, cache=True)
def _take_reserved(cells: Cells, queue: Queue, held: Hold, now_s: float) -> bool:
    """Start the reserved job on its cards if all of them are idle."""
    for i in range(held.num_nodes[0]):
        node = held.nodes[i]
        if count_bits(cells.held[node]) < cells.promised[node]:
            return False
    slot, option = held.slot[0], held.option[0]
    cells.reserved_bytes[slot] = queue.option_bytes[queue.class_of[slot], option]
    for i in range(held.num_nodes[0]):
        node = held.nodes[i]
        add_entry(cells, slot, node, cells.held[node])
        cells.held[node], cells.promised[node] = 0, 0
    held.slot[0], held.num_nodes[0], held.start_s[0] = -1, 0, np.inf
    _start(queue, slot, option, now_s)
    return True


@njit(nogil=True, cache=True)
def _sift(heap: np.ndarray, size: int, root: int, key: np.ndarray) -> None:
    """Let heap[root] sink to where no child among the first `size` has a smaller key."""
    item = heap[root]
    while 2 * root + 1 < size:
        child = 2 * root + 1
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[child]] >= key[item]:
            break
        heap[root], root = heap[child], child
    heap[root] = item


@njit(nogil=True, cache=True)
def reserve(
    cells: Cells, queue: Queue, held: Hold, slot: int, largest: np.ndarray, room: np.ndarray, takes: np.ndarray
) -> bool:
    """Find the earliest start of a job by the predicted finishes of those that run, and keep its nodes.

    Running jobs are given back in order of finish on a copy of the free counts, until some plan fits. False if no plan
    ever fits, even on the empty cluster. largest, room: as `measure_pool` wrote them; they are used up.
    """
    c, free = queue.class_of[slot], cells.num_free.copy()
    heap = np.flatnonzero(queue.option >= 0)
    size = heap.shape[0]
    for root in range(size // 2 - 1, -1, -1):
        _sift(heap, size, root, queue.finish_s)
    start_s = -np.inf
    chosen = _first_fit(queue, c, 0, cells.width, largest, room)
    while chosen < 0 and size > 0:
        done, size = heap[0], size - 1
        heap[0] = heap[size]
        _sift(heap, size, 0, queue.finish_s)
        start_s = queue.finish_s[done]
        entry = cells.job_entry[done]
        while entry >= 0:
            node = cells.entry_node[entry]
            before, pool = free[node], cells.pool[node]
            free[node] += count_bits(cells.entry_mask[entry] & cells.usable[node])
            largest[pool] = max(largest[pool], free[node])
            for group in range(1, free[node] + 1):
                room[pool, group] += WHOLE[free[node], group - 1] - WHOLE[before, group - 1]
            entry = cells.entry_after[entry]
        chosen = _first_fit(queue, c, 0, cells.width, largest, room)
    if chosen < 0:
        return False
    held.slot[0], held.option[0], held.start_s[0] = slot, chosen, start_s
    _hold_nodes(cells, queue, held, free, takes)
    return True


@njit(nogil=True, cache=True)
def _hold_nodes(cells: Cells, queue: Queue, held: Hold, free: np.ndarray, takes: np.ndarray) -> None:
    """Promise nodes to the reserved job by HAS's rule on the free counts at its start."""
    c, k = queue.class_of[held.slot[0]], held.option[0]
    pool, gpus, group = queue.option_pool[c, k], queue.option_gpus[c, k], queue.option_tp[c, k]
    used = 0
    if gpus <= cells.width[pool]:
        best, least = -1, 1 << 30
        for node in range(free.shape[0]):
            if cells.pool[node] == pool and gpus <= free[node] < least:
                best, least = node, free[node]
        held.nodes[0], takes[0], used = best, gpus, 1
    else:
        rest = gpus
        for take in range(WHOLE[cells.width[pool], group - 1], 0, -group):
            for node in range(free.shape[0]):
                if rest == 0:
                    break
                if cells.pool[node] == pool and WHOLE[free[node], group - 1] == take:
                    held.nodes[used], takes[used] = node, min(take, rest)
                    rest -= takes[used]
                    used += 1
    held.num_nodes[0] = used
    for i in range(used):
        hold(cells, held.nodes[i], takes[i])


@njit(nogil=True, cache=True)
def _backfill(cells: Cells, queue: Queue, held: Hold, c: int, now_s: float, placed: np.ndarray, num: int) -> int:
    """Let jobs of one class that end before the reservation use its idle cards, one node each."""
    reserved_pool = cells.pool[held.nodes[0]]
    slot, depth, idle = queue.first[c], 0, _most_idle(cells, held)
    while slot >= 0 and depth < BACKFILL_DEPTH and idle > 0:
        following = queue.after[slot]
        depth += 1
        for k in range(queue.num_options[c]):
            gpus = queue.option_gpus[c, k]
            if slot == held.slot[0] or queue.option_pool[c, k] != reserved_pool or gpus > idle:
                continue
            if now_s + queue.num_steps[slot] * queue.option_step_s[c, k] > held.start_s[0]:
                continue
            best, least = -1, 1 << 30
            for i in range(held.num_nodes[0]):
                bits = count_bits(cells.held[held.nodes[i]])
                if gpus <= bits < least:
                    best, least = held.nodes[i], bits
            mask = lowest_bits(cells.held[best], gpus)
            cells.held[best] &= ~mask
            add_entry(cells, slot, best, mask)
            cells.reserved_bytes[slot] = queue.option_bytes[c, k]
            _start(queue, slot, k, now_s)
            placed[num] = slot
            num += 1
            idle = _most_idle(cells, held)
            break
        slot = following
    return num


@njit(nogil=True, cache=True)
def _most_idle(cells: Cells, held: Hold) -> int:
    """Idle reserved cards on the node that has most of them."""
    most = 0
    for i in range(held.num_nodes[0]):
        most = max(most, count_bits(cells.held[held.nodes[i]]))
    return most


@njit(nogil=True, cache=True)
def _measure(cells: Cells, largest: np.ndarray, room: np.ndarray) -> None:
    for pool in range(largest.shape[0]):
        measure_pool(cells.tally, pool, largest, room)


@njit(nogil=True, cache=True)
def _head_key(queue: Queue, c: int) -> float:
    """Priority of a class's first job, or infinity if none waits."""
    return queue.key[queue.first[c]] if queue.first[c] >= 0 else np.inf


@njit(nogil=True, cache=True)
def run_pass(
    cells: Cells,
    queue: Queue,
    held: Hold,
    open_classes: np.ndarray,
    now_s: float,
    patience_s: float,
    may_reserve: bool,
    log: Log,
) -> int:
    """Start what fits, best priority first; returns how many slots were written to `log.placed`.

    open_classes bool [C]: classes that might fit; cleared as they turn out not to. may_reserve: whether a blocked job
    that waited min(patience_s, 3 x its predicted run) gets the reservation, if there is none. What failed once in a
    pass, class or plan, is not tried again: free cards only shrink, except when a reservation is given up.
    """
    num, num_classes = 0, queue.first.shape[0]
    cursor, keys = np.zeros(num_classes, np.int32), np.empty(num_classes)
    largest, room = np.zeros(cells.width.shape[0], np.int32), np.zeros(cells.tally.shape, np.int32)
    if held.slot[0] >= 0:
        slot = held.slot[0]
        if _take_reserved(cells, queue, held, now_s):
            log.placed[num] = slot
            num += 1
            open_classes[:] = True
    _measure(cells, largest, room)
    for i in range(num_classes):
        keys[i] = _head_key(queue, i) if open_classes[i] else np.inf
        if held.slot[0] < 0 and not may_reserve and keys[i] < np.inf:
            # What fails now and asks for no reservation needs no turn; most classes do at most events.
            cursor[i] = _first_fit(queue, i, 0, cells.width, largest, room)
            if cursor[i] < 0:
                keys[i] = np.inf
    while True:
        c, least = -1, np.inf
        for i in range(num_classes):
            if keys[i] < least:
                c, least = i, keys[i]
        if c < 0:
            open_classes[:] = False
            return num
        slot = queue.first[c]
        option = _first_fit(queue, c, cursor[c], cells.width, largest, room)
        if option >= 0:
            cursor[c] = option
            pool = queue.option_pool[c, option]
            used = find(cells, pool, queue.option_gpus[c, option], queue.option_tp[c, option], log.nodes, log.masks)
            commit(cells, slot, used, log.nodes, log.masks, queue.option_bytes[c, option])
            measure_pool(cells.tally, pool, largest, room)
            _start(queue, slot, option, now_s)
            keys[c] = _head_key(queue, c)
            log.placed[num] = slot
            num += 1
            if slot == held.slot[0]:
                drop_hold(cells, held)
                cursor[:] = 0
                _measure(cells, largest, room)
                for i in range(num_classes):
                    keys[i] = _head_key(queue, i)
            continue
        keys[c] = np.inf
        if may_reserve and held.slot[0] < 0 and queue.num_options[c] > 0:
            patience = min(patience_s, 3.0 * queue.num_steps[slot] * queue.option_step_s[c, 0])
            if now_s - queue.submit_s[slot] >= patience:
                reserve(cells, queue, held, slot, largest, room, log.masks)
                _measure(cells, largest, room)
        if held.slot[0] >= 0 and queue.pools[c, cells.pool[held.nodes[0]]]:
            num = _backfill(cells, queue, held, c, now_s, log.placed, num)


@njit(nogil=True, cache=True)
def event_pass(state: State, now_s: float) -> int:
    """A pass over `open_classes` that makes no reservation and lists the cards of what it starts in `log`: one call for
    all that an event needs."""
    cells, log = state.cells, state.log
    num: int = run_pass(cells, state.queue, state.held, state.open_classes, now_s, np.inf, False, log)
    list_entries(cells, log.placed[:num], log.ends, log.nodes, log.masks)
    return num


@njit(nogil=True, cache=True)
def finish_pass(state: State, slot: int, now_s: float) -> int:
    """A job is gone: free its cards and start what may fit now in the pools it touched."""
    queue, open_classes, touched = state.queue, state.open_classes, state.touched
    touched[:] = False
    release(state.cells, slot, touched)
    queue.option[slot] = -1
    for c in range(open_classes.shape[0]):
        may = False
        for pool in range(touched.shape[0]):
            may = may or (touched[pool] and queue.pools[c, pool])
        open_classes[c] = may
    num: int = event_pass(state, now_s)
    return num


@njit(nogil=True, cache=True)
def node_pass(state: State, node: int, usable: int, hit: np.ndarray, now_s: float) -> int:
    """The cards of a node that may be given away change to the mask `usable`; start what may fit now.

    hit int32 [n]: the jobs that lose a card by it; all their cards go back and they queue again at their old place.
    """
    cells, queue = state.cells, state.queue
    set_usable(cells, node, usable)
    for slot in hit:
        release(cells, slot, state.touched)
        queue.option[slot] = -1
        enqueue(queue, slot)
    num: int = event_pass(state, now_s)
    return num
