"""Which rank hosts which expert: window-fill, our default `robust`, and the registry of all rules.

Pure functions of integer counts; ties go to the lowest index, so all ranks compute the same plan. Window-fill and robust
are ours, inspired by LRMoE's aim of moving experts instead of dropping tokens; `expert_baselines` holds published rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from collectives.errors import ConfigError
from placement.errors import PlacementError
from placement.expert_baselines import eplb_hosts, llep_split, native_hosts, static_hosts, symi_hosts
from placement.split import Int, Ranks, SlotMap, Split, empty_slots, even_split, exact_split, hosted, require_slots


class PlacementPolicy(Protocol):
    """Hosts between steps, split within a step."""

    @property
    def name(self) -> str:
        """The key in POLICIES."""

    def hosts(self, counts: Int, ranks: Ranks, previous: SlotMap | None) -> SlotMap:
        """counts: int64 [steps, E], the newest last. Every expert gets at least one slot."""

    def split(self, slots: SlotMap, w: Int, ranks: Ranks) -> Split:
        """w: this micro-batch's exact int64 [E]."""


# --- ours -------------------------------------------------------------------------------------------------------------


def window_fill(w: Int, num_ranks: int, slots: int) -> tuple[Int, SlotMap]:
    """Perfect balance, max load ceil(W/N), on equal ranks whenever N*s >= E + N - 1; returns X [N, E] and the hosts.

    Rank by rank, take the run of small-to-large experts whose sum just reaches the rank's share, cut the last one, and
    put the rest of it back: s - 1 experts leave whole with each rank, so what remains always fits.
    """
    num_experts = len(w)
    if num_ranks * slots < num_experts + num_ranks - 1:
        raise PlacementError(
            f"window-fill needs {num_experts + num_ranks - 1} slots for {num_experts} experts on {num_ranks} ranks; "
            f"there are {num_ranks * slots}"
        )
    x, hosts = _window_fill(np.asarray(w, np.int64), num_ranks, slots)
    return x, hosts


@njit(nogil=True, cache=True)
def _window_fill(w, num_ranks, slots):  # type: ignore[no-untyped-def]
    num_experts = len(w)
    x = np.zeros((num_ranks, num_experts), np.int64)
    hosts = np.full((num_ranks, slots), -1, np.int32)
    expert = np.argsort(w, kind="mergesort")
    load = w[expert]
    size = num_experts
    for rank in range(num_ranks):
        target = load[:size].sum() // (num_ranks - rank)
        first, last = 0, size  # the run [first, last) leaves whole
        if rank < num_ranks - 1:
            width = min(slots, size)
            window = load[:width].sum()
            if window >= target:
                last, window = 0, 0
                while last < width and window + load[last] <= target:
                    window += load[last]
                    last += 1
            else:
                while window < target:  # slide until the run of `width` crosses the target
                    window += load[first + width] - load[first]
                    first += 1
                last = first + width - 1
        used, taken = 0, 0
        for item in range(first, last):
            x[rank, expert[item]] += load[item]
            hosts[rank, used] = expert[item]
            used += 1
            taken += load[item]
        split_expert, split_rest = -1, 0
        if rank < num_ranks - 1 and taken < target:
            split_expert, split_rest = expert[last], load[last] - (target - taken)
            x[rank, split_expert] += target - taken
            hosts[rank, used] = split_expert
            last += 1
        moved = last - first
        for item in range(last, size):
            expert[item - moved], load[item - moved] = expert[item], load[item]
        size -= moved
        if split_rest > 0:
            item = size
            while item > 0 and (load[item - 1], expert[item - 1]) > (split_rest, split_expert):
                load[item], expert[item] = load[item - 1], expert[item - 1]
                item -= 1
            load[item], expert[item] = split_rest, split_expert
            size += 1
    return x, hosts


@njit(nogil=True, cache=True)
def _use_spare_slots(slots, w, room):  # type: ignore[no-untyped-def]
    """Fill free slots in place: the expert with fewest hosts (then most pairs), on the rank least tied to its hosts.

    What survives drift is not how much a replica helps today but how many ways load can flow between ranks tomorrow.
    """
    num_ranks = len(slots)
    num_experts = len(w)
    on = np.zeros((num_ranks, num_experts), np.bool_)
    count = np.zeros(num_experts, np.int64)
    used = np.zeros(num_ranks, np.int64)
    for rank in range(num_ranks):
        for slot in range(room[rank]):
            if slots[rank, slot] >= 0:
                on[rank, slots[rank, slot]] = True
                count[slots[rank, slot]] += 1
                used[rank] += 1
    shared = np.zeros((num_ranks, num_ranks), np.int64)
    for a in range(num_ranks):
        for b in range(num_ranks):
            for expert in range(num_experts):
                if on[a, expert] and on[b, expert]:
                    shared[a, b] += 1
    while True:
        best_expert = -1
        for expert in range(num_experts):
            if best_expert >= 0 and (count[expert], -w[expert]) >= (count[best_expert], -w[best_expert]):
                continue
            for rank in range(num_ranks):
                if not on[rank, expert] and used[rank] < room[rank]:
                    best_expert = expert
                    break
        if best_expert < 0:
            return
        best_rank, best_key = -1, (0, 0)
        for rank in range(num_ranks):
            if on[rank, best_expert] or used[rank] >= room[rank]:
                continue
            tied = 0
            for host in range(num_ranks):
                if on[host, best_expert]:
                    tied += shared[rank, host]
            key = (tied, used[rank])
            if best_rank < 0 or key < best_key:
                best_rank, best_key = rank, key
        slots[best_rank, used[best_rank]] = best_expert
        used[best_rank] += 1
        count[best_expert] += 1
        for host in range(num_ranks):
            if on[host, best_expert]:
                shared[best_rank, host] += 1
                shared[host, best_rank] += 1
        on[best_rank, best_expert] = True
        shared[best_rank, best_rank] += 1


def spread_hosts(w: Int, ranks: Ranks, unreplicated: Int | None = None) -> SlotMap:
    """EPLB's replication without duplicates on a rank, packed by speed: longest first onto the least busy rank.

    `unreplicated` experts stay single.
    """
    require_slots(len(w), ranks)
    count = np.ones(len(w), np.int64)
    single = np.zeros(len(w), bool) if unreplicated is None else np.isin(np.arange(len(w)), unreplicated)
    for _ in range(ranks.num_slots - len(w)):
        share = np.where((count < len(ranks)) & ~single, w / count, -1.0)
        if share.max() < 0:
            break
        count[int(share.argmax())] += 1
    slots = empty_slots(ranks)
    cost = np.asarray(ranks.seconds_per_pair)
    busy, used = np.zeros(len(ranks)), np.zeros(len(ranks), np.int64)
    room, share = np.asarray(ranks.slots), w / count
    copies = np.repeat(np.arange(len(w)), count)
    for expert in copies[np.argsort(-share[copies], kind="stable")]:
        free = (used < room) & ~(slots == expert).any(1)
        if not free.any():
            continue  # only a replica can fit nowhere: there are as many slots as copies
        rank = int(np.argmin(np.where(free, busy + share[expert] * cost, np.inf)))
        slots[rank, used[rank]] = expert
        used[rank] += 1
        busy[rank] += share[expert] * cost[rank]
    return slots


def robust_hosts(w: Int, ranks: Ranks) -> SlotMap:
    """Balance exactly where the slots allow it, then spend every spare slot on surviving drift.

    Window-fill if there are slots enough and to spare; otherwise the spread rule, improved by swaps on the exact split
    (small problems from several starts: with one spare slot, which expert gets it decides).
    """
    require_slots(len(w), ranks)
    num_ranks, per_rank = len(ranks), ranks.slots[0]
    equal = len(set(ranks.slots)) == 1 and len(set(ranks.seconds_per_pair)) == 1
    perfect = equal and ranks.num_slots >= len(w) + num_ranks - 1
    if perfect and ranks.num_slots >= 2 * len(w):
        return _filled(window_fill(w, num_ranks, per_rank)[1], w, ranks)
    if not perfect:
        largest_first = np.argsort(-w, kind="stable")
        starts = [largest_first[:skip] for skip in range(4 if len(w) * num_ranks <= 64 else 1)]
        cost = np.asarray(ranks.seconds_per_pair)
        found = [improve_hosts(_filled(spread_hosts(w, ranks, start), w, ranks), w, ranks) for start in starts]
        return min(found, key=lambda candidate: _slowest(exact_split(candidate, w, ranks), cost))
    slots = _filled(spread_hosts(w, ranks), w, ranks)
    bound = -(-int(w.sum()) // num_ranks)
    if exact_split(slots, w, Ranks.equal(num_ranks, per_rank)).sum(1).max() <= 1.001 * bound:
        return slots
    return _filled(window_fill(w, num_ranks, per_rank)[1], w, ranks)


def _filled(slots: SlotMap, w: Int, ranks: Ranks) -> SlotMap:
    _use_spare_slots(slots, np.asarray(w, np.int64), np.asarray(ranks.slots, np.int64))
    return slots


def improve_hosts(slots: SlotMap, w: Int, ranks: Ranks) -> SlotMap:
    """Hill-climb on the slowest rank of the exact split: swap experts, or copy one over somebody's replica.

    Stops at the lower bound, at a local optimum, or after a number of trials that shrinks with the size of the problem,
    so that a plan takes milliseconds at any size.
    """
    slots, cost = slots.copy(), np.asarray(ranks.seconds_per_pair)
    x = exact_split(slots, w, ranks)
    best, trials = _slowest(x, cost), min(1000, (1 << 15) // (len(ranks) * len(w)))
    spread = 1 + ranks.num_slots - len(w)  # hosts that the most loaded expert can have at most
    bound = max(w.sum() / (1 / cost).sum(), w.max() / np.sort(1 / cost)[-spread:].sum())
    while best[0] > bound + cost.max():
        hottest_first = np.argsort(-x.sum(1) * cost, kind="stable")
        for candidate in (map_ for hot in hottest_first for map_ in _neighbours(slots, x, int(hot))):
            if trials == 0:
                return slots
            trials -= 1
            try:
                split = exact_split(candidate, w, ranks)
            except PlacementError:
                continue
            value = _slowest(split, cost)
            if value < best:
                slots, x, best = candidate, split, value
                break
        else:
            return slots
    return slots


def _slowest(x: Int, cost: NDArray[np.float64]) -> tuple[float, float]:
    """Time of the slowest rank, then the squared times: a step that relieves one of several hot ranks counts."""
    seconds = x.sum(1) * cost
    return float(seconds.max()), float((seconds * seconds).sum())


def _neighbours(slots: SlotMap, x: Int, hot: int) -> Iterator[SlotMap]:
    """Slot maps one move away that can relieve rank `hot`, the most promising first."""
    for rank, slot, own, expert in _moves(slots, x, hot):
        candidate = slots.copy()
        if own >= 0:
            candidate[hot, own] = slots[rank, slot]
        candidate[rank, slot] = expert
        yield candidate


@njit(nogil=True, cache=True)
def _moves(slots, x, hot):  # type: ignore[no-untyped-def]
    """int64 [moves, 4]: rank, its slot, the slot of `hot` that takes what was there (-1: none), the expert that comes."""
    num_ranks, width = slots.shape
    load, count = x.sum(1), np.zeros(x.shape[1], np.int64)
    hosts = np.zeros(x.shape, np.bool_)
    for rank in range(num_ranks):
        for expert in slots[rank]:
            if expert >= 0:
                hosts[rank, expert] = True
                count[expert] += 1
    most = 2 * num_ranks * width * width
    move, cost, size = np.empty((most, 4), np.int64), np.empty(most, np.int64), 0
    for own in range(width):
        mine = slots[hot, own]
        if mine < 0:
            continue
        for rank in range(num_ranks):
            if rank == hot or hosts[rank, mine]:
                continue
            for slot in range(width):
                theirs = slots[rank, slot]
                if theirs < 0:
                    continue
                if count[theirs] > 1:  # a copy of mine over their replica
                    move[size] = np.array((rank, slot, -1, mine))
                    cost[size] = load[rank]
                    size += 1
                if not hosts[hot, theirs]:  # swap
                    move[size] = np.array((rank, slot, own, mine))
                    cost[size] = abs(load[hot] - load[rank] - 2 * (x[hot, mine] - x[rank, theirs]))
                    size += 1
    return move[np.argsort(cost[:size], kind="mergesort")]


def relabel(slots: SlotMap, previous: SlotMap | None, ranks: Ranks, num_experts: int) -> SlotMap:
    """Permute the rows among interchangeable ranks so that as few experts as possible move: nodes first, then ranks."""
    if previous is None or previous.shape != slots.shape:
        return slots
    overlap = hosted(slots, num_experts).astype(np.int64) @ hosted(previous, num_experts).T.astype(np.int64)
    result = slots.copy()
    kinds = list(zip(ranks.slots, ranks.seconds_per_pair, ranks.max_pairs, strict=True))
    for kind in sorted(set(kinds)):
        members = np.array([rank for rank in range(len(ranks)) if kinds[rank] == kind])
        by_node = [members[[ranks.nodes[rank] == node for rank in members]] for node in sorted(set(ranks.nodes))]
        by_node = [node for node in by_node if len(node)]
        if len({len(node) for node in by_node}) > 1:
            by_node = [members]
        gain = np.array([[_best_overlap(overlap, new, old)[0] for old in by_node] for new in by_node])
        for new, old in zip(*linear_sum_assignment(-gain), strict=True):
            _, rows, columns = _best_overlap(overlap, by_node[new], by_node[old])
            result[by_node[old][columns]] = slots[by_node[new][rows]]
    return result


def _best_overlap(overlap: Int, new: Int, old: Int) -> tuple[int, Int, Int]:
    rows, columns = linear_sum_assignment(-overlap[np.ix_(new, old)])
    return int(overlap[np.ix_(new, old)][rows, columns].sum()), rows, columns


def num_moves(slots: SlotMap, previous: SlotMap, num_experts: int) -> int:
    """(Expert, rank) pairs that are hosted now and were not before: each costs one transfer of an expert's weights."""
    return int((hosted(slots, num_experts) & ~hosted(previous, num_experts)).sum())


# --- the registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A placement policy made of a rule for hosts and a rule for the split."""

    name: str
    place: Callable[[Int, Ranks], SlotMap]
    divide: Callable[[SlotMap, Int, Ranks], Split]

    def hosts(self, counts: Int, ranks: Ranks, previous: SlotMap | None = None) -> SlotMap:
        """See PlacementPolicy."""
        if counts.ndim != 2 or (counts < 0).any():
            raise ConfigError(f"counts must be non-negative [steps, experts], not {counts.shape}")
        return relabel(self.place(counts, ranks), previous, ranks, counts.shape[1])

    def split(self, slots: SlotMap, w: Int, ranks: Ranks) -> Split:
        """See PlacementPolicy."""
        return self.divide(slots, w, ranks)


def _whole(x: Int) -> Split:
    return Split(x, np.zeros(x.shape[1], np.int64), 0)


def _exact(slots: SlotMap, w: Int, ranks: Ranks) -> Split:
    return _whole(exact_split(slots, w, ranks))


def _even(slots: SlotMap, w: Int, ranks: Ranks) -> Split:
    return _whole(even_split(slots, w))


def _even_capped(slots: SlotMap, w: Int, ranks: Ranks) -> Split:
    """SYMI with capacity factor 1: an expert computes at most its instances' share of all pairs."""
    instances = np.bincount(slots[slots >= 0], minlength=len(w))
    kept = np.minimum(w, instances * int(w.sum()) // ranks.num_slots)
    return Split(even_split(slots, kept), w - kept, 0)


def _llep(slots: SlotMap, w: Int, ranks: Ranks) -> Split:
    return llep_split(w, len(ranks))


POLICIES: dict[str, PlacementPolicy] = {
    rule.name: rule
    for rule in (
        Rule("static", lambda counts, ranks: static_hosts(counts.shape[1], ranks), _even),
        Rule("symi_cap", lambda counts, ranks: symi_hosts(counts[-1], ranks), _even_capped),
        Rule("symi_dropless", lambda counts, ranks: symi_hosts(counts[-1], ranks), _even),
        Rule("eplb", lambda counts, ranks: eplb_hosts(counts[-1], ranks), _even),
        Rule("window_fill", lambda c, r: _filled(window_fill(c[-1], len(r), min(r.slots))[1], c[-1], r), _exact),
        Rule("robust", lambda counts, ranks: robust_hosts(counts[-1], ranks), _exact),
        Rule("llep", lambda counts, ranks: native_hosts(counts.shape[1], ranks), _llep),
    )
}
