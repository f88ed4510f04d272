"""Whether the memory of a running job stays where it was predicted: peaks of its steps in, a verdict out.

The trend is the median of the slopes between all pairs of the last peaks (Theil and Sen's estimator): one odd step does
not move it. The first steps are left out, since optimizer state appears in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from statistics import median

FIRST_STEPS = 2
"""Steps of a process that are no part of a trend."""
MIN_POINTS = 3
WINDOW = 8


class Alarm(StrEnum):
    """What a verdict asks for: nothing, a note, or another plan."""

    NONE = "none"
    ABOVE_UPPER = "above the predicted upper bound"
    CROSSING = "will cross the capacity before the next checkpoint"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes of one card: what the plan reserved, and what there is."""

    upper_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`crossing_step` is the first step whose peak would exceed the capacity, None if the trend never does."""

    alarm: Alarm
    peak_bytes: int
    slope_bytes: float
    """Growth per step."""
    crossing_step: int | None = None
    projected_bytes: int = 0
    """Peak that the trend leads to in the last step before the next checkpoint."""


def judge(peaks: Sequence[tuple[int, int]], limits: Limits, *, first_step: int, checkpoint_step: int) -> Verdict:
    """Judge (step, peak bytes) pairs, ascending, of a process that began at `first_step`; the next checkpoint is due
    before step `checkpoint_step`."""
    steady = [pair for pair in peaks[-WINDOW:] if pair[0] >= first_step + FIRST_STEPS]
    last_step, last_bytes = peaks[-1]
    slope = growth(steady)
    crossing = None
    if slope > 0:
        crossing = last_step + max(1, int((limits.capacity_bytes - last_bytes) // slope) + 1)
    alarm = Alarm.ABOVE_UPPER if last_bytes > limits.upper_bytes else Alarm.NONE
    return Verdict(
        alarm=Alarm.CROSSING if crossing is not None and crossing < checkpoint_step else alarm,
        peak_bytes=last_bytes,
        slope_bytes=slope,
        crossing_step=crossing,
        projected_bytes=last_bytes + int(max(0.0, slope) * max(0, checkpoint_step - 1 - last_step)),
    )


def growth(peaks: Sequence[tuple[int, int]]) -> float:
    """Bytes per step by which peaks grow; 0 for fewer than MIN_POINTS."""
    if len(peaks) < MIN_POINTS:
        return 0.0
    return median((late[1] - early[1]) / (late[0] - early[0]) for early, late in combinations(peaks, 2))
