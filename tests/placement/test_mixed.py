"""Splitting a batch by speed, and gangs over several types of card."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.catalogue import GIB, MIB
from placement.data_plans import ModuleProfile
from placement.errors import PlacementError
from placement.inventory import fake_card
from placement.mixed import drifted, mixed_plan, split_by_speed
from placement.peaks import Peak
from placement.plans import Knowledge

SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@given(SPEEDS, st.integers(0, 300))
def test_shares_are_proportional_to_speed_and_sum_to_the_batch(speeds, extra):
    batch = len(speeds) + extra
    split = split_by_speed(speeds, batch)
    assert sum(split) == batch
    assert min(split) >= 1
    for samples, speed in zip(split, speeds, strict=True):
        assert abs(samples - 1 - extra * speed / sum(speeds)) < 1 + 1e-9
    assert split == split_by_speed([4 * speed for speed in speeds], batch), "only ratios count"


def test_shares_by_hand():
    assert split_by_speed([1, 1, 1], 9) == (3, 3, 3)
    assert split_by_speed([1.0, 3.0], 10) == (3, 7)
    assert split_by_speed([1, 2, 5], 8) == (2, 2, 4)
    assert split_by_speed([1e-9, 1], 5) == (1, 4), "a slow rank still takes part"


@pytest.mark.parametrize("speeds", [[1.0, 0.0], [1.0, math.nan], [math.inf, 1.0], [-1.0, 1.0]])
def test_speeds_that_mean_nothing_are_refused(speeds):
    with pytest.raises(PlacementError, match="measure the ranks again"):
        split_by_speed(speeds, 8)
    with pytest.raises(PlacementError, match="use fewer cards"):
        split_by_speed([1.0] * 3, 2)


def test_a_split_is_renewed_when_a_rank_is_off_by_more_than_a_tenth_and_a_sample():
    assert not drifted((50, 50), (1.0, 1.09))
    assert drifted((50, 50), (1.0, 1.5))
    assert not drifted((2, 2, 4), (1, 2, 5)), "the rounding of a small batch is no drift"


def profile():
    small, large = Peak(parameters=MIB, gradients=MIB, activations=MIB, optimizer=2.0 * MIB), {}
    large = Peak(parameters=MIB, gradients=MIB, activations=16.0 * MIB, optimizer=2.0 * MIB)
    return ModuleProfile(
        family="f", variant="v", smallest={"none": small}, largest={"none": large}, most=16, step=small,
        gradient_bytes=MIB, largest_gradient_bytes=MIB / 2, reserved_over_allocated=1.0, flops_per_sample=1e9,
        tokens_per_sample=64,
    )  # fmt: skip


def mix(cards, num_gpus, batch=16):
    return mixed_plan(profile(), batch, cards, num_gpus=num_gpus, recompute=("none",), knowledge=Knowledge())


def test_case_19_each_type_runs_the_micro_batch_that_its_own_memory_holds():
    small, large = fake_card(12, 1), fake_card(64, 2)
    found = mix({"a": (small, 1), "b": (large, 2)}, 3)
    assert found.cards == {"a": 1, "b": 2}
    assert found.plan.gpu_type == "fake-12+fake-64"
    assert (found.plan.num_gpus, found.shares["b"].micro_batch) == (3, 16)
    assert 1 <= found.shares["a"].micro_batch < 16
    for share in found.shares.values():
        assert share.upper_bytes <= share.capacity_bytes
    assert found.shares["b"].speed > found.shares["a"].speed, "larger micro-batches run at a better rate"
    split = split_by_speed([found.shares["b"].speed] * 2 + [found.shares["a"].speed], 16)
    slowest = max(n / found.shares[node].speed for n, node in zip(split, "bba", strict=True))
    assert found.plan.step_time_s == pytest.approx(slowest)


def test_the_fastest_cards_are_taken_first_and_none_that_hold_no_sample():
    tiny, small, large = fake_card(4, 8), fake_card(12, 1), fake_card(64, 2)
    cards = {"t": (tiny, 8), "a": (small, 2), "b": (large, 2)}
    assert mix(cards, 3).cards == {"b": 2, "a": 1}
    assert mix(cards, 2).cards == {"b": 2}
    assert mix(cards, 5) is None, "the cards of 4 MiB do not count"
    assert mix(cards, 3, batch=2) is None
    assert mix({}, 1) is None
    assert mix({"x": (fake_card(GIB // MIB, 1), 1)}, 1).plan.gpu_type == "fake-1024"
