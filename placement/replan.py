"""What to try after a job ran out of memory, or was about to: another plan, never one that was tried.

The ladder: a smaller micro-batch, then recomputation, then more cards of the same type or another type. The global batch
stays, so the numbers stay. What the failed attempts showed counts as a lower bound: a plan is only tried if its
prediction, scaled by the worst ratio of measured to predicted, still fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.data_plans import plan_key
from placement.plans import Plan
from placement.shapes import RECOMPUTE

MAX_REPLANS = 3


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One plan that ran out of memory, or would have."""

    key: str
    gpu_type: str
    data: int
    micro_batch: int
    recompute: str
    predicted_bytes: float
    measured_bytes: float
    """Highest seen; after an out-of-memory error the bytes that were asked for, a lower bound; after a warning what the
    trend would have come to."""


def attempt_of(plan: Plan, measured_bytes: float) -> Attempt:
    """The record of a failed plan."""
    return Attempt(
        key=plan_key(plan),
        gpu_type=plan.gpu_type,
        data=plan.data,
        micro_batch=plan.micro_batch,
        recompute=plan.recompute,
        predicted_bytes=plan.memory.nvml,
        measured_bytes=measured_bytes,
    )


def plans_after(
    plans: Sequence[Plan], attempts: Sequence[Attempt], capacity_bytes: Mapping[str, int]
) -> tuple[Plan, ...]:
    """The plans worth a try, in order of the ladder. capacity_bytes: of a card, by type. No attempt: all, as given."""
    if not attempts:
        return tuple(plans)
    tried = {attempt.key for attempt in attempts}
    ratio = max(1.0, *(attempt.measured_bytes / attempt.predicted_bytes for attempt in attempts))
    left = [
        plan
        for plan in plans
        if plan_key(plan) not in tried and plan.memory.nvml_upper * ratio <= capacity_bytes[plan.gpu_type]
    ]
    last = attempts[-1]
    return tuple(sorted(left, key=lambda plan: _rung(plan, last)))


def _rung(plan: Plan, last: Attempt) -> tuple[int, float]:
    """Which step of the ladder a plan is; within one, the fastest per card first."""
    speed = -plan.samples_per_weighted_gpu_s
    if plan.gpu_type != last.gpu_type or plan.data < last.data:
        return (3, speed)
    if plan.data > last.data:
        return (2, speed)
    return (int(RECOMPUTE.index(plan.recompute) > RECOMPUTE.index(last.recompute)), speed)  # type: ignore[arg-type]
