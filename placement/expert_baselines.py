"""Published placement rules that ours is compared with: static, SYMI, EPLB and LLEP.

Pure functions of integer counts; ties go to the lowest index. Sources: SYMI (arXiv 2504.19925), EPLB (DeepSeek, open-source
expert-parallel load balancer), LLEP (least-loaded expert parallelism).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.errors import ConfigError
from placement.errors import PlacementError
from placement.split import EMPTY, Int, Ranks, SlotMap, Split, empty_slots, require_slots


def static_hosts(num_experts: int, ranks: Ranks) -> SlotMap:
    """Slots count through the experts, again and again: rank n of equal ranks hosts n*s .. n*s+s-1 modulo E."""
    require_slots(num_experts, ranks)
    return _fill(np.arange(ranks.num_slots) % num_experts, ranks)


def symi_counts(popularity: Int, num_slots: int) -> Int:
    """Instances of each expert, proportional to the last step's popularity, at least one each (SYMI, algorithm 1).

    Guards that the paper leaves out: no popularity at all means equal counts; more experts than slots raises.
    """
    num_experts = len(popularity)
    if num_experts > num_slots:
        raise PlacementError(f"{num_experts} experts need as many slots; there are {num_slots}")
    total = int(popularity.sum())
    share = popularity / total if total else np.full(num_experts, 1 / num_experts)
    goal = share * num_slots
    count = np.floor(np.maximum(goal, 1.0)).astype(np.int64)
    excess = count - goal
    while count.sum() > num_slots:
        expert = int(excess.argmax())
        excess[expert] -= 1  # also when the count stays at one, so that others get their turn
        if count[expert] > 1:
            count[expert] -= 1
    while count.sum() < num_slots:
        expert = int(excess.argmin())
        count[expert] += 1
        excess[expert] += 1
    return count


def symi_hosts(popularity: Int, ranks: Ranks) -> SlotMap:
    """Instances in expert order, cut into ranks: replicas of one expert stay on neighbouring ranks (SYMI)."""
    return _fill(np.repeat(np.arange(len(popularity)), symi_counts(popularity, ranks.num_slots)), ranks)


def eplb_hosts(load: Int, ranks: Ranks, num_groups: int = 1, num_nodes: int = 1) -> SlotMap:
    """EPLB's hierarchical rule: groups to nodes, replicas inside a node, instances to ranks, equally many each."""
    num_experts, num_ranks = len(load), len(ranks)
    require_slots(num_experts, ranks)
    if len(set(ranks.slots)) > 1:
        raise ConfigError("EPLB needs the same number of slots on every rank; use robust for unequal ranks")
    if num_groups % num_nodes or num_experts % num_groups or num_ranks % num_nodes:
        num_groups, num_nodes = 1, 1
    weight = load.astype(np.float32)
    by_group = np.arange(num_experts).reshape(num_groups, -1)
    node, place = _pack(weight.reshape(num_groups, -1).sum(1), num_nodes)
    slots_per_node, ranks_per_node = ranks.num_slots // num_nodes, num_ranks // num_nodes
    order = np.empty((num_ranks, ranks.slots[0]), np.int32)
    for n in range(num_nodes):
        groups = np.flatnonzero(node == n)[np.argsort(place[node == n], kind="stable")]
        experts = by_group[groups].reshape(-1)
        instances = list(range(len(experts)))
        count = np.ones(len(experts), np.float32)
        while len(instances) < slots_per_node:
            most = int(np.argmax(weight[experts] / count))
            instances.append(most)
            count[most] += 1
        share = (weight[experts] / count)[instances]
        rank, slot = _pack(share, ranks_per_node)
        order[n * ranks_per_node + rank, slot] = experts[instances]
    return order


def _pack(weight: NDArray[np.float32], num_packs: int) -> tuple[Int, Int]:
    """Heaviest first onto the lightest pack that is not full; returns each item's pack and its place in it."""
    if len(weight) == num_packs:
        return np.arange(num_packs), np.zeros(num_packs, np.int64)
    room = len(weight) // num_packs
    total, used = np.zeros(num_packs, np.float32), np.zeros(num_packs, np.int64)
    pack, place = np.empty(len(weight), np.int64), np.empty(len(weight), np.int64)
    for item in np.argsort(-weight, kind="stable"):
        lightest = int(np.argmin(np.where(used < room, total, np.inf)))
        pack[item], place[item] = lightest, used[lightest]
        total[lightest] += weight[item]
        used[lightest] += 1
    return pack, place


def llep_split(w: Int, num_ranks: int, *, threshold: float = 1.3, slack: float = 1.0, min_chunk: int = 1024) -> Split:
    """Least-loaded expert parallelism: spill what exceeds a rank's cap to the least loaded ranks, weights included.

    Native layout: expert e on rank floor(e*N/E). Acts only when the native max/mean exceeds `threshold`; the cap is
    slack * floor(W/N); chunks below `min_chunk` pairs are not opened unless they finish the expert.
    """
    num_experts, total = len(w), int(w.sum())
    native = np.arange(num_experts) * num_ranks // num_experts
    x = np.zeros((num_ranks, num_experts), np.int64)
    pending = np.bincount(native, weights=w, minlength=num_ranks).astype(np.int64)
    if total == 0 or pending.max() * num_ranks <= threshold * total:
        x[native, np.arange(num_experts)] = w
        return Split(x, np.zeros(num_experts, np.int64), 0)
    cap = int(slack * (total // num_ranks))
    assigned, sends = np.zeros(num_ranks, np.int64), 0
    for expert in np.argsort(-w, kind="stable"):
        home, left = native[expert], int(w[expert])
        pending[home] -= left
        amount = min(left, max(0, cap - int(assigned[home] + pending[home])))
        x[home, expert] += amount
        assigned[home] += amount
        left -= amount
        while left:
            busy = assigned + pending
            for rank in np.argsort(busy, kind="stable"):
                amount = min(left, cap - int(busy[rank]))
                if amount > 0 and (amount >= min_chunk or amount == left):
                    break
            else:  # nobody has room for a chunk worth opening
                rank, amount = int(np.argmin(busy)), left
            sends += int(rank != home and x[rank, expert] == 0)
            x[rank, expert] += amount
            assigned[rank] += amount
            left -= amount
    return Split(x, np.zeros(num_experts, np.int64), sends)


def native_hosts(num_experts: int, ranks: Ranks) -> SlotMap:
    """LLEP's layout: expert e on rank floor(e*N/E)."""
    require_slots(num_experts, ranks)
    native = np.arange(num_experts) * len(ranks) // num_experts
    slots = empty_slots(ranks)
    for expert, rank in enumerate(native):
        free = np.flatnonzero(slots[rank] == EMPTY)
        if not len(free) or free[0] >= ranks.slots[rank]:
            raise PlacementError(f"rank {rank} has {ranks.slots[rank]} slots, too few for its native experts")
        slots[rank, free[0]] = expert
    return slots


def _fill(instances: Int, ranks: Ranks) -> SlotMap:
    """Lay instances out rank by rank."""
    slots = empty_slots(ranks)
    start = 0
    for rank, room in enumerate(ranks.slots):
        slots[rank, :room] = instances[start : start + room]
        start += room
    return slots
