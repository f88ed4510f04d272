"""Which rank computes how many pairs of which expert, once the hosts of each expert are fixed.

A pair is one token routed to one expert. All functions take and return integer arrays, break ties by the lowest index,
and give the same answer on every rank and machine, so nothing needs to be broadcast.

Shapes: E experts, N ranks, s slots; slots int32 [N, s], -1 = empty slot; w int64 [E] pairs of each expert;
A int64 [N, E] pairs by the rank of the token (sum over N = w); X int64 [N, E] pairs by the rank that computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placement.errors import PlacementError

Int = NDArray[np.int64]
SlotMap = NDArray[np.int32]
UNLIMITED = np.int64(1) << 62
EMPTY = np.int32(-1)


@dataclass(frozen=True)
class Ranks:
    """The ranks of one expert-parallel group, by index."""

    slots: tuple[int, ...]
    """Expert instances that fit on each rank."""
    nodes: tuple[int, ...]
    """The machine of each rank; traffic inside a machine is cheap."""
    seconds_per_pair: tuple[float, ...]
    """Measured forward time of one pair; only the ratios matter."""
    max_pairs: tuple[int, ...]
    """Pairs whose activations fit into each rank's memory."""

    @classmethod
    def equal(cls, num_ranks: int, slots: int, ranks_per_node: int = 1) -> Ranks:
        """Ranks of one kind: the same slots and speed, no memory limit."""
        nodes = tuple(rank // ranks_per_node for rank in range(num_ranks))
        return cls((slots,) * num_ranks, nodes, (1.0,) * num_ranks, (int(UNLIMITED),) * num_ranks)

    @property
    def num_slots(self) -> int:
        """Instances that fit in all."""
        return sum(self.slots)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Split:
    """What each rank computes in one micro-batch."""

    pairs: Int
    """int64 [N, E]: pairs of expert e computed on rank n."""
    dropped: Int
    """int64 [E]: pairs that nobody computes (only with a capacity limit)."""
    weight_sends: int
    """Expert weights sent for this micro-batch only (LLEP)."""


def require_slots(num_experts: int, ranks: Ranks) -> None:
    """Raise PlacementError where experts outnumber slots."""
    if num_experts > ranks.num_slots:
        raise PlacementError(
            f"{num_experts} experts do not fit into {ranks.num_slots} slots on {len(ranks)} ranks: add ranks or slots"
        )


def empty_slots(ranks: Ranks) -> SlotMap:
    """No expert anywhere, int32 [N, s]."""
    return np.full((len(ranks), max(ranks.slots)), EMPTY, np.int32)


def hosted(slots: SlotMap, num_experts: int) -> NDArray[np.bool_]:
    """bool [N, E]: does rank n host expert e."""
    mask = np.zeros((len(slots), num_experts), bool)
    rank, slot = np.nonzero(slots >= 0)
    mask[rank, slots[rank, slot]] = True
    return mask


def even_split(slots: SlotMap, w: Int) -> Int:
    """Instance j of the r instances of an expert, in slot order, gets floor((j+1)w/r) - floor(jw/r) pairs."""
    x = np.zeros((len(slots), len(w)), np.int64)
    count = np.bincount(slots[slots >= 0], minlength=len(w))
    seen = np.zeros(len(w), np.int64)
    for rank, expert in zip(*_instances(slots), strict=True):
        j, r = seen[expert], count[expert]
        x[rank, expert] += (j + 1) * w[expert] // r - j * w[expert] // r
        seen[expert] += 1
    return x


def _instances(slots: SlotMap) -> tuple[Int, Int]:
    rank, slot = np.nonzero(slots >= 0)
    return rank, slots[rank, slot].astype(np.int64)


def exact_split(slots: SlotMap, w: Int, ranks: Ranks) -> Int:
    """The integer split that makes the slowest rank as fast as these hosts allow; X.sum(0) == w.

    Maximum flow from experts through their hosts into ranks of capacity floor(T / seconds_per_pair), capped by
    max_pairs. T starts at the bound of the whole group and rises by discrete Newton steps on the minimum cut, so the
    result is exact.
    Raises PlacementError when the memory limits leave no split, or an expert with pairs has no host.
    """
    hosts = hosted(slots, len(w))
    homeless = np.flatnonzero((w > 0) & ~hosts.any(0))
    if len(homeless):
        raise PlacementError(f"expert {homeless[0]} has {w[homeless[0]]} pairs and no host in the slot map")
    speed = 1.0 / np.asarray(ranks.seconds_per_pair)
    caps = np.asarray(ranks.max_pairs, np.int64)
    cut_load, cut_ranks = int(w.sum()), np.ones(len(ranks), bool)
    while True:
        time = _shortest_time(cut_load, speed[cut_ranks], caps[cut_ranks])
        if time is None:
            raise PlacementError(
                f"{cut_load} pairs must run on rank(s) {np.flatnonzero(cut_ranks).tolist()}, whose memory holds "
                f"{int(caps[cut_ranks].sum())}: host their experts on more ranks or use a smaller micro-batch"
            )
        capacity = np.minimum(np.floor(time * speed * (1 + 1e-12)), caps).astype(np.int64)
        x, left, reached_experts, reached_ranks = _max_flow(hosts, w, capacity)
        if left == 0:
            return np.asarray(x)
        cut_load, cut_ranks = int(w[reached_experts].sum()), reached_ranks


def _shortest_time(load: int, speed: NDArray[np.float64], caps: Int) -> float | None:
    """Smallest T with sum(min(floor(T * speed), caps)) >= load, or None where the caps forbid it."""
    if load == 0:
        return 0.0
    if np.all(speed == speed[0]) and np.all(caps >= -(-load // len(caps))):
        return float(-(-load // len(caps)) / speed[0])
    if int(np.minimum(caps, UNLIMITED // len(caps)).sum()) < load:
        return None
    low, high = 0.0, load / float(speed.min()) + 1.0
    while True:  # the answer is one of the times at which some rank finishes a whole pair
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        if int(np.minimum(np.floor(middle * speed * (1 + 1e-12)), caps).sum()) >= load:
            high = middle
        else:
            low = middle


@njit(nogil=True, cache=True)
def _max_flow(hosts, w, capacity):  # type: ignore[no-untyped-def]
    """Augmenting paths over the alternating graph expert -> host -> expert computed there -> another host of that one.

    Returns X [N, E], the pairs that found no place, and the experts and ranks on the source's side of the minimum cut.
    """
    num_ranks, num_experts = hosts.shape
    x = np.zeros((num_ranks, num_experts), np.int64)
    room = capacity.copy()
    left = w.copy()
    for expert in range(num_experts):  # a greedy start: fewest augmentations later
        for rank in range(num_ranks):
            if hosts[rank, expert] and left[expert] > 0 and room[rank] > 0:
                amount = min(left[expert], room[rank])
                x[rank, expert] += amount
                room[rank] -= amount
                left[expert] -= amount
    rank_from = np.empty(num_ranks, np.int64)
    expert_from = np.empty(num_experts, np.int64)
    queue = np.empty(num_experts, np.int64)
    seen_expert = np.zeros(num_experts, np.bool_)
    seen_rank = np.zeros(num_ranks, np.bool_)
    while True:
        seen_expert[:] = False
        seen_rank[:] = False
        head, tail, goal = 0, 0, -1
        for expert in range(num_experts):
            if left[expert] > 0:
                seen_expert[expert] = True
                expert_from[expert] = -1
                queue[tail] = expert
                tail += 1
        while head < tail and goal < 0:
            expert = queue[head]
            head += 1
            for rank in range(num_ranks):
                if hosts[rank, expert] and not seen_rank[rank]:
                    seen_rank[rank] = True
                    rank_from[rank] = expert
                    if room[rank] > 0:
                        goal = rank
                        break
                    for other in range(num_experts):
                        if x[rank, other] > 0 and not seen_expert[other]:
                            seen_expert[other] = True
                            expert_from[other] = rank
                            queue[tail] = other
                            tail += 1
        if goal < 0:
            return x, left.sum(), seen_expert, seen_rank
        amount, rank = room[goal], goal
        while True:
            expert = rank_from[rank]
            if expert_from[expert] < 0:
                amount = min(amount, left[expert])
                break
            rank = expert_from[expert]
            amount = min(amount, x[rank, expert])
        room[goal] -= amount
        rank = goal
        while True:
            expert = rank_from[rank]
            x[rank, expert] += amount
            if expert_from[expert] < 0:
                left[expert] -= amount
                break
            rank = expert_from[expert]
            x[rank, expert] -= amount


def token_map(a: Int, x: Int, ranks: Ranks) -> Int:
    """R[m, n, e]: pairs of expert e that rank m sends to rank n. Own rank first, then own node, then in rank order.

    Both ends of every transfer derive the same table from A and X. Sums: over n = A, over m = X.
    """
    return np.asarray(_token_map(a, x, np.asarray(ranks.nodes, np.int64)))


@njit(nogil=True, cache=True)
def _token_map(a, x, nodes):  # type: ignore[no-untyped-def]
    num_ranks, num_experts = a.shape
    r = np.zeros((num_ranks, num_ranks, num_experts), np.int64)
    for expert in range(num_experts):
        have = a[:, expert].copy()
        need = x[:, expert].copy()
        for distance in range(3):  # 0: own rank, 1: own node, 2: anywhere
            for source in range(num_ranks):
                for target in range(num_ranks):
                    if have[source] == 0:
                        break
                    if distance == 0 and source != target:
                        continue
                    if distance == 1 and nodes[source] != nodes[target]:
                        continue
                    amount = min(have[source], need[target])
                    r[source, target, expert] += amount
                    have[source] -= amount
                    need[target] -= amount
    return r
