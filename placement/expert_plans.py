"""Versioned placements of all expert layers, and the rule by which ranks adopt one together or not at all.

A planner publishes plans at its own pace; ranks hear of them at different times. With its counts every rank shows which
version it holds; all see the same table and draw the same conclusion, so no rank ever waits for the planner, and a plan
that one rank lacks is never applied. A planner that falls silent leaves ranks that plan for themselves, all alike.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.errors import PlacementError
from placement.experts import PlacementPolicy
from placement.split import Int, Ranks, SlotMap

KEPT_PLANS = 4
STALE_LIMIT_STEPS = 20
"""Steps without a newer version after which ranks plan for themselves."""


@dataclass(frozen=True)
class ExpertPlan:
    """Hosts of every layer's experts, int32 [layers, N, s], to be used from step `valid_from` on."""

    version: int
    valid_from: int
    slots: SlotMap

    @property
    def digest(self) -> int:
        """int64 that stands for the whole plan, version included."""
        text = f"{self.version} {self.valid_from} {self.slots.shape} ".encode() + self.slots.tobytes()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def make_plan(
    policy: PlacementPolicy, history: Int, ranks: Ranks, previous: SlotMap | None, version: int, valid_from: int
) -> ExpertPlan:
    """The plan that follows from the last steps' counts: a pure function. history: int64 [steps, layers, E]."""
    layers = range(history.shape[1])
    hosts = [policy.hosts(history[:, i], ranks, None if previous is None else previous[i]) for i in layers]
    return ExpertPlan(version, valid_from, np.stack(hosts))


@dataclass
class PlanBook:
    """What one rank knows: the plan in use, newer ones it has heard of, and for how long nothing new was adopted."""

    current: ExpertPlan
    stale_limit: int = STALE_LIMIT_STEPS
    num_stale: int = 0
    _held: deque[ExpertPlan] = field(default_factory=lambda: deque(maxlen=KEPT_PLANS))

    def __post_init__(self) -> None:
        self._held.append(self.current)

    @property
    def newest(self) -> int:
        """The newest version held here."""
        return self._held[-1].version

    def hear(self, plans: Sequence[ExpertPlan]) -> None:
        """Note published plans, oldest first; those known already are ignored."""
        for plan in plans:
            if plan.version > self.newest:
                self._held.append(plan)

    def record(self) -> list[int]:
        """What to show to the other ranks: newest version, then its digest and those before it; 0 for one not held."""
        held = {plan.version: plan.digest for plan in self._held}
        return [self.newest, *(held.get(self.newest - age, 0) for age in range(KEPT_PLANS))]

    def settle(self, table: Int, step: int) -> bool:
        """table: int64 [N, 1 + KEPT_PLANS], every rank's `record`. Take up the newest plan that all hold, if due at `step`.

        Returns whether ranks must plan for themselves. Raises PlacementError, on all ranks, where ranks hold different
        plans under one version.
        """
        common = int(table[:, 0].min())
        age = table[:, 0] - common
        shown = np.where(age < KEPT_PLANS, table[np.arange(len(table)), 1 + np.minimum(age, KEPT_PLANS - 1)], 0)
        if len(set(shown[shown != 0].tolist())) > 1:
            raise PlacementError(
                f"ranks hold different expert plans under version {common} (digests by rank: {shown.tolist()}): two "
                f"planners serve one job; end one of them"
            )
        found = next((plan for plan in self._held if plan.version == common), None)
        if common > self.current.version and shown.all() and found is not None and found.valid_from <= step:
            self.current, self.num_stale = found, 0
        else:
            self.num_stale += 1
        return self.num_stale >= self.stale_limit

    def take_local(self, slots: SlotMap, step: int) -> None:
        """Use a plan that every rank made for itself; its version stays that of the last adopted one."""
        self.current = ExpertPlan(self.current.version, step, slots)
