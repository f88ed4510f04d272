"""Trends of memory: what is calm, what is worth a note, and what will not end well."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.watch import FIRST_STEPS, MIN_POINTS, Alarm, Limits, growth, judge

LIMITS = Limits(upper_bytes=900, capacity_bytes=1000)


def line(start: int, slope: int, steps: int, first: int = 0) -> list[tuple[int, int]]:
    return [(first + i, start + slope * i) for i in range(steps)]


def test_flat_memory_is_calm_and_above_the_bound_is_a_note() -> None:
    assert judge(line(800, 0, 10), LIMITS, first_step=0, checkpoint_step=10).alarm is Alarm.NONE
    assert judge(line(950, 0, 10), LIMITS, first_step=0, checkpoint_step=10).alarm is Alarm.ABOVE_UPPER


def test_the_crossing_step_is_the_first_that_exceeds_the_capacity() -> None:
    verdict = judge(line(900, 10, 6), LIMITS, first_step=0, checkpoint_step=50)
    assert (verdict.alarm, verdict.slope_bytes, verdict.crossing_step) == (Alarm.CROSSING, 10, 11)
    assert verdict.projected_bytes == 900 + 10 * 49
    assert 900 + 10 * 10 <= 1000 < 900 + 10 * 11


@pytest.mark.parametrize(("checkpoint_step", "alarm"), [(11, Alarm.ABOVE_UPPER), (12, Alarm.CROSSING)])
def test_a_crossing_after_the_next_checkpoint_can_wait(checkpoint_step: int, alarm: Alarm) -> None:
    assert judge(line(900, 10, 6), LIMITS, first_step=0, checkpoint_step=checkpoint_step).alarm is alarm


def test_the_first_steps_of_a_process_are_no_trend() -> None:
    peaks = line(100, 400, FIRST_STEPS, first=7) + line(850, 0, 3, first=7 + FIRST_STEPS)
    assert judge(peaks, LIMITS, first_step=7, checkpoint_step=100).alarm is Alarm.NONE
    assert judge(peaks, LIMITS, first_step=0, checkpoint_step=100).slope_bytes > 0


def test_one_odd_step_does_not_move_the_trend() -> None:
    peaks = line(500, 0, 8)
    peaks[5] = (5, 990)
    assert growth(peaks) == 0


@given(st.integers(0, 50), st.integers(0, 1000), st.integers(MIN_POINTS, 8))
def test_a_line_has_its_slope(slope: int, start: int, steps: int) -> None:
    assert growth(line(start, slope, steps)) == slope
    assert growth(line(start, slope, MIN_POINTS - 1)) == 0
