"""Hosts, forward split and backward quotas of one expert layer, planned together.

The time of a layer is that of the slowest rank forward plus that of the slowest rank backward. The forward must compute
every pair; how far the backward may be shortened is said by the variance that sampling may add. `joint_plan` is for use:
hosts, then the exact split, then the shortest common backward time. `exact_joint_plan` is a mixed-integer program for
small cases, against which the other is judged. Inspired by LRMoE's joint planning; the model is ours.

Shapes: E experts, N ranks; scores: one float64 array [w_e] > 0 an expert, as of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from placement.errors import PlacementError
from placement.experts import robust_hosts
from placement.quotas import Float, PairMemory, common_target, inclusion, sampling_variance
from placement.split import Int, Ranks, SlotMap, empty_slots, exact_split


@dataclass(frozen=True)
class JointPlan:
    """What each rank hosts, computes and keeps."""

    slots: SlotMap
    pairs: Float
    """[N, E] forward pairs; whole numbers from `joint_plan`."""
    kept: Float
    """[N, E] pairs in the backward; from `joint_plan` each rank's sum is a whole number."""
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Of the layer, forward and backward."""
        return self.forward_s + self.backward_s


def joint_plan(
    w: Int,
    scores: Sequence[Float],
    ranks: Ranks,
    backward_s: Float,
    max_variance: float,
    memory: Sequence[PairMemory] | None = None,
) -> JointPlan:
    """The plan for use; milliseconds. backward_s: [N] seconds per retained pair.

    max_variance: what sampling may add to the squared error of the expert gradients, in units of score squared. Raises
    PlacementError where the memory holds no forward split.
    """
    if memory is not None:
        room = [max(0, _max_forward(m, s)) for m, s in zip(memory, ranks.slots, strict=True)]
        ranks = replace(ranks, max_pairs=tuple(min(a, b) for a, b in zip(ranks.max_pairs, room, strict=True)))
    slots = robust_hosts(w, ranks)
    pairs = exact_split(slots, w, ranks)
    x, hosted = pairs.sum(1), (slots >= 0).sum(1)
    limits = x
    if memory is not None:
        fits = [m.max_kept(int(h), int(n)) for m, h, n in zip(memory, hosted, x, strict=True)]
        limits = np.minimum(x, np.maximum(fits, np.minimum(x, 1)))
    own = _scores_by_rank(pairs, scores)
    values = [np.concatenate(parts) if parts else np.zeros(0) for parts in own]
    _, quota = common_target(values, backward_s, limits, max_variance)
    kept = np.zeros(pairs.shape)
    for rank, (parts, value) in enumerate(zip(own, values, strict=True)):
        pi = inclusion(value, int(quota[rank]))
        ends = np.cumsum([len(part) for part in parts])
        kept[rank] = [chunk.sum() for chunk in np.split(pi, ends[:-1])]
    cost = np.asarray(ranks.seconds_per_pair)
    return JointPlan(slots, pairs.astype(np.float64), kept, float((x * cost).max()), float((quota * backward_s).max()))


def _max_forward(memory: PairMemory, slots: int) -> int:
    """Pairs that a rank with all slots in use can compute, keeping one for the backward."""
    free = memory.free_bytes - memory.resident_bytes(slots, 0)
    one_kept = free - memory.passing_bytes(0, 1)
    return min(one_kept // memory.forward_bytes, free // (memory.forward_bytes + memory.output_bytes))


def _scores_by_rank(pairs: Int, scores: Sequence[Float]) -> list[list[Float]]:
    """Each rank's scores by expert: ranks draw in turn from an expert's sorted scores, so all see its whole range."""
    own: list[list[Float]] = [[] for _ in pairs]
    for expert, value in enumerate(scores):
        falling = np.sort(value)[::-1]
        share = pairs[:, expert]
        # pair k of a rank with x pairs stands at (k + 1/2) / x of the expert's range
        place = np.concatenate([(np.arange(x) + 0.5) / max(1, x) for x in share])
        rank = np.repeat(np.arange(len(pairs)), share)[np.argsort(place, kind="stable")]
        for n in range(len(pairs)):
            own[n].append(falling[rank == n])
    return own


def exact_joint_plan(
    w: Int,
    scores: Sequence[Float],
    ranks: Ranks,
    backward_s: Float,
    max_variance: float,
    memory: Sequence[PairMemory] | None = None,
    num_chords: int = 30,
) -> JointPlan:
    """The optimum, with fractional pairs and each expert's variance as a piecewise linear function; seconds.

    Raises PlacementError where the program has no solution.
    """
    num_ranks, num_experts = len(ranks), len(w)
    cells = num_ranks * num_experts
    # variables: y [N, E], x [N, E], q [N, E], v [E], T_f, T_b
    y, x, q, v = 0, cells, 2 * cells, 3 * cells
    forward, backward = v + num_experts, v + num_experts + 1
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: dict[int, float], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    def cell(block: int, rank: int, expert: int) -> int:
        return block + rank * num_experts + expert

    for e in range(num_experts):
        add({cell(x, n, e): 1.0 for n in range(num_ranks)}, w[e], w[e])
        add({cell(y, n, e): 1.0 for n in range(num_ranks)}, 1, np.inf)
        if w[e]:
            add({cell(q, n, e): 1.0 for n in range(num_ranks)}, 1, np.inf)
            for slope, offset in _chords(scores[e], num_chords):
                add({v + e: 1.0} | {cell(q, n, e): -slope for n in range(num_ranks)}, offset, np.inf)
        for n in range(num_ranks):
            add({cell(x, n, e): 1.0, cell(y, n, e): -float(w[e])}, -np.inf, 0)
            add({cell(q, n, e): 1.0, cell(x, n, e): -1.0}, -np.inf, 0)
    add({v + e: 1.0 for e in range(num_experts)}, -np.inf, max_variance)
    for n in range(num_ranks):
        experts = range(num_experts)
        add({cell(y, n, e): 1.0 for e in experts}, 0, ranks.slots[n])
        add({cell(x, n, e): ranks.seconds_per_pair[n] for e in experts} | {forward: -1.0}, -np.inf, 0)
        add({cell(q, n, e): float(backward_s[n]) for e in experts} | {backward: -1.0}, -np.inf, 0)
        if memory is not None:
            m = memory[n]
            hosted = {cell(y, n, e): float(m.instance_bytes) for e in experts}
            computed = {cell(x, n, e): float(m.forward_bytes) for e in experts}
            leaving = {cell(x, n, e): float(m.forward_bytes + m.output_bytes) for e in experts}
            kept_too = {cell(q, n, e): float(m.retained_bytes) for e in experts}
            add(hosted | leaving, -np.inf, m.free_bytes)
            add(hosted | computed | kept_too, -np.inf, m.free_bytes - m.chunk_bytes)
    num_variables = backward + 1
    cost = np.zeros(num_variables)
    cost[[forward, backward]] = 1
    index = [(r, c, value) for r, row in enumerate(rows) for c, value in row.items()]
    r, c, value = (np.array(column) for column in zip(*index, strict=True))
    upper = np.full(num_variables, np.inf)
    upper[:cells] = 1
    found = milp(
        cost,
        constraints=LinearConstraint(csr_array((value, (r, c)), shape=(len(rows), num_variables)), low, high),
        integrality=np.arange(num_variables) < cells,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 1e-4},
    )
    if found.x is None:
        raise PlacementError(f"no joint plan for {num_experts} experts on {num_ranks} ranks: {found.message}")
    slots = empty_slots(ranks)
    for n, hosted in enumerate(found.x[:cells].reshape(num_ranks, num_experts) > 0.5):
        slots[n, : hosted.sum()] = np.flatnonzero(hosted)
    x_value, q_value = (found.x[b : b + cells].reshape(num_ranks, num_experts) for b in (x, q))
    return JointPlan(slots, x_value, q_value, float(found.x[forward]), float(found.x[backward]))


def _chords(scores: Float, count: int) -> list[tuple[float, float]]:
    """(slope, offset) of lines between neighbouring points of V(q), q from 1 to all; none above a constant V."""
    at = np.unique(np.rint(np.geomspace(1, len(scores), count + 1)).astype(int))
    value = [sampling_variance(scores, int(q)) for q in at]
    lines = []
    for a, b, va, vb in zip(at[:-1], at[1:], value[:-1], value[1:], strict=True):
        slope = (vb - va) / (b - a)
        lines.append((slope, va - slope * a))
    return lines
