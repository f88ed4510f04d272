"""Sia's integer program against brute force, and the price-based allocation against both."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.allocation import allocate
from placement.errors import PlacementError
from placement.ilp import UNALLOCATED_COST, assignment_gain, restart_factor, sia_costs, solve

TYPES = np.array([0, 0, 0, 1, 1], np.int32)
GPUS = np.array([1, 2, 4, 1, 2], np.int32)


def brute_force(value, capacity):
    """The best gain over all choices."""
    best = 0.0
    for choice in product(range(-1, len(GPUS)), repeat=len(value)):
        used = np.zeros(len(capacity))
        for k in choice:
            if k >= 0:
                used[TYPES[k]] += GPUS[k]
        if np.all(used <= capacity):
            best = max(best, sum(value[i, k] for i, k in enumerate(choice) if k >= 0))
    return best


def used_gpus(choice, types, gpus, num_types):
    chosen = choice[choice >= 0]
    return np.bincount(types[chosen], gpus[chosen], num_types)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 5), st.integers(0, 3))
def test_program_and_prices_against_brute_force(seed, num_jobs, first, second):
    costs = np.round(np.random.default_rng(seed).uniform(0.1, 1.5, (num_jobs, len(GPUS))), 2)
    capacity = np.array([first, second])
    best = brute_force(UNALLOCATED_COST - costs, capacity)
    exact = solve(costs, TYPES, GPUS, capacity)
    assert exact.gain == pytest.approx(best, abs=1e-3)
    assert exact.proven
    ours = allocate(UNALLOCATED_COST - costs, TYPES, GPUS, capacity)
    assert np.all(used_gpus(ours.choice, TYPES, GPUS, 2) <= capacity)
    assert ours.value == pytest.approx(assignment_gain(costs, ours.choice))
    assert ours.value <= best + 1e-9 <= ours.bound + 2e-9
    assert ours.value >= 0.85 * best


def random_program(num_jobs, num_gpus, seed):
    random = np.random.default_rng(seed)
    types = np.repeat(np.arange(3, dtype=np.int32), 6)
    gpus = np.tile(np.array([1, 2, 4, 8, 16, 24], np.int32), 3)
    costs = np.empty((num_jobs, 18))
    for i in range(num_jobs):
        goodput = random.lognormal(0, 0.6, 3)[types] * gpus / (1 + random.uniform(0.01, 0.3) * (gpus - 1))
        present = int(random.integers(-1, 18))
        costs[i] = sia_costs(goodput, gpus <= 2 ** random.integers(0, 6), present, random.uniform(0.5, 1))
    return costs, types, gpus, np.array([num_gpus // 2, num_gpus // 4, num_gpus // 4])


@pytest.mark.parametrize(("num_jobs", "num_gpus"), [(20, 64), (64, 256), (160, 1024)])
def test_prices_reach_95_percent_of_the_program(num_jobs, num_gpus):
    for seed in range(3):
        costs, types, gpus, capacity = random_program(num_jobs, num_gpus, seed)
        ours = allocate(UNALLOCATED_COST - costs, types, gpus, capacity)
        exact = solve(costs, types, gpus, capacity)
        assert np.all(used_gpus(ours.choice, types, gpus, 3) <= capacity)
        assert ours.value >= 0.95 * exact.gain
        assert ours.bound >= exact.gain - 1e-6
        again = allocate(UNALLOCATED_COST - costs, types, gpus, capacity)
        assert np.array_equal(ours.choice, again.choice)


def test_pinned_jobs_keep_their_configuration_in_both():
    costs = np.array([[0.1, 0.1, 0.1, 0.9, 0.9]] * 3)
    pinned = np.array([3, -1, -1], np.int32)
    for choice in (
        solve(costs, TYPES, GPUS, np.array([2, 1]), pinned).choice,
        allocate(UNALLOCATED_COST - costs, TYPES, GPUS, np.array([2, 1]), pinned).choice,
    ):
        assert choice.tolist() == [3, 0, 0]
    with pytest.raises(PlacementError, match="no allocation"):
        solve(costs, TYPES, GPUS, np.array([2, 0]), pinned)


def test_nothing_to_choose_from():
    nothing = np.zeros((3, 5))
    assert allocate(nothing, TYPES, GPUS, np.array([4, 4])).choice.tolist() == [-1, -1, -1]
    assert solve(np.full((3, 5), 100.0), TYPES, GPUS, np.array([4, 4])).choice.tolist() == [-1, -1, -1]
    assert allocate(np.zeros((0, 5)), TYPES, GPUS, np.array([4, 4])).choice.tolist() == []
    assert allocate(np.ones((2, 5)), TYPES, GPUS, np.array([0, 0])).choice.tolist() == [-1, -1]


def test_costs_by_hand():
    goodput = np.array([2.0, 8.0, 4.0, 0.0])
    feasible = np.array([True, True, True, True])
    assert sia_costs(goodput, feasible, -1, 1.0).tolist() == [1.0, 0.5, 0.71, 100.0]
    assert sia_costs(goodput, feasible, 0, 0.25).tolist() == [1.0, 1.0, 1.41, 100.0]
    assert sia_costs(goodput, feasible, 0, 0.0).tolist() == [1.0, 3000.0, 3000.0, 100.0]
    assert sia_costs(goodput, np.zeros(4, bool), -1, 1.0).tolist() == [100.0] * 4


def test_restart_factor_by_hand():
    assert restart_factor(20, 0, 30) == 1.0
    assert restart_factor(970, 0, 30) == pytest.approx(0.97)
    assert restart_factor(970, 10, 30) == pytest.approx(0.67)
    assert restart_factor(100, 10, 30) == 0.0
