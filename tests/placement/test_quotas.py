"""Sampling without bias: exact counts, minimal variance, repeatable draws, memory limits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import PlacementError
from placement.quotas import (
    PairMemory,
    Retention,
    budgets,
    common_target,
    floor_scores,
    inclusion,
    sampling_variance,
    select,
    systematic,
    thin,
    top_q,
)

SCORES = np.array([8.0, 4.0, 2.0, 1.0, 1.0])


def test_published_vector() -> None:
    pi = inclusion(SCORES, 3)
    assert pi.tolist() == [1, 1, 0.5, 0.25, 0.25]
    assert sampling_variance(SCORES, 3) == pytest.approx(10)
    assert np.flatnonzero(systematic(pi, np.arange(5), 0.6)).tolist() == [0, 1, 3]


positive = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60).map(lambda v: np.array(v))


@given(positive, st.data())
def test_the_draw_has_exactly_the_quota(scores: np.ndarray, data: st.DataObject) -> None:
    quota = data.draw(st.integers(0, len(scores)))
    pi = inclusion(scores, quota)
    assert pi.sum() == pytest.approx(quota)
    assert (pi <= 1).all()
    order = np.array(data.draw(st.permutations(range(len(scores)))))
    assert systematic(pi, order, data.draw(st.floats(0, 1, exclude_max=True))).sum() == quota


@settings(max_examples=50)
@given(positive, st.integers(1, 20), st.integers(0, 1000))
def test_each_experts_count_is_floor_or_ceiling_of_its_share(scores: np.ndarray, quota: int, seed: int) -> None:
    expert = np.random.default_rng(seed).integers(0, 4, len(scores))
    kept = select(scores, expert, 4, quota, [seed, 0])
    assert len(kept.index) == min(quota, len(scores))
    floored, _ = floor_scores(scores, expert, 4)
    share = np.bincount(expert, weights=inclusion(floored, quota), minlength=4)
    counts = np.bincount(expert[kept.index], minlength=4)
    assert (counts >= np.floor(share - 1e-6)).all()
    assert (counts <= np.ceil(share + 1e-6)).all()


def test_the_estimate_is_unbiased_and_reports_its_own_variance() -> None:
    rng = np.random.default_rng(1)
    num_pairs, quota, draws = 200, 60, 4000
    scores, expert = rng.pareto(1.5, num_pairs) + 0.01, rng.integers(0, 5, num_pairs)
    values = rng.normal(size=num_pairs) * scores
    sums, variances = [], []
    for draw in range(draws):
        kept = select(scores, expert, 5, quota, [7, draw])
        sums.append((values[kept.index] * kept.weight).sum())
        variances.append(kept.variance)
    error = abs(np.mean(sums) - values.sum())
    assert error < 4 * np.std(sums) / np.sqrt(draws)
    floored, _ = floor_scores(scores, expert, 5)
    assert np.mean(variances) == pytest.approx(sampling_variance(floored, quota), rel=0.1)


def test_the_same_key_draws_the_same_pairs_and_another_key_others() -> None:
    scores, expert = np.ones(100), np.zeros(100, np.int64)
    first = select(scores, expert, 1, 30, [3, 5, 0, 1, 2])
    again = select(scores, expert, 1, 30, [3, 5, 0, 1, 2])
    other = select(scores, expert, 1, 30, [3, 6, 0, 1, 2])
    assert (first.index == again.index).all()
    assert (first.index != other.index).any()


def test_nonfinite_scores_are_counted_and_never_dropped_silently() -> None:
    scores = np.array([np.nan, 1.0, 2.0, np.inf, 0.0])
    floored, bad = floor_scores(scores, np.array([0, 0, 1, 1, 1]), 2)
    assert bad == 2
    assert floored[0] == floored[3] == 2
    assert floored[4] > 0
    assert floor_scores(np.zeros(3), np.zeros(3, np.int64), 1)[0].tolist() == [1, 1, 1]
    assert select(np.zeros(0), np.zeros(0, np.int64), 2, 4, [0]).index.tolist() == []


def test_thinning_keeps_the_limit_and_the_mean() -> None:
    kept = select(np.ones(80), np.zeros(80, np.int64), 1, 40, [1])
    capped = thin(kept, 10, [1])
    assert len(capped.index) == 10
    assert capped.weight.sum() == pytest.approx(kept.weight.sum())
    assert thin(kept, 50, [1]) is kept


def test_top_q_is_the_biased_control() -> None:
    kept = top_q(SCORES, 2)
    assert kept.index.tolist() == [0, 1]
    assert kept.weight.tolist() == [1, 1]


def test_budgets_follow_time_and_memory() -> None:
    memory = [PairMemory.of(free_bytes, 16, 32, 4) for free_bytes in (10**9, 70_000)]
    pairs, hosted = np.array([100, 100]), np.array([2, 2])
    quota = budgets(pairs, hosted, np.array([1.0, 2.0]), 60.0, memory)
    assert quota.tolist() == [60, 30]
    assert budgets(pairs, hosted, np.ones(2), 1e9, memory).tolist() == [100, memory[1].max_kept(2, 100)]
    assert memory[1].peak_bytes(2, 100, memory[1].max_kept(2, 100)) <= 70_000
    assert budgets(np.array([0, 3]), hosted, np.ones(2), 0.0, memory).tolist() == [0, 1]
    with pytest.raises(PlacementError, match=r"rank 1: 2000 pairs .* 70000 are free"):
        budgets(np.array([1, 2000]), hosted, np.ones(2), 1.0, memory)


def test_the_common_target_is_the_smallest_that_keeps_the_variance() -> None:
    rng = np.random.default_rng(0)
    scores = [rng.pareto(2.0, n) + 0.1 for n in (300, 100, 0)]
    cost, limits = np.array([1.0, 2.0, 1.0]), np.array([10**6] * 3)
    allowed = 50.0
    target, quota = common_target(scores, cost, limits, allowed)
    total = sum(sampling_variance(s, int(q)) for s, q in zip(scores, quota, strict=True) if len(s))
    assert total <= allowed
    tighter = np.floor((target - 1.0) / cost).astype(int)
    worse = sum(sampling_variance(s, int(q)) for s, q in zip(scores, tighter, strict=True) if len(s))
    assert worse > allowed
    assert quota[2] == 0
    everything = common_target(scores, cost, limits, 0.0)[1]
    assert everything.tolist() == [300, 100, 0]


def test_retention_follows_the_variance() -> None:
    state = Retention.for_run(500)
    for _ in range(10):
        state = state.update(0.0, 1.0)
    assert state.rho == 1.0, "the first 2 % keep everything"
    for _ in range(100):
        state = state.update(0.15, 1.0)
    assert state.rho == pytest.approx(0.95**20)
    far_below = state
    for _ in range(5):
        far_below = far_below.update(0.03, 1.0)
    assert far_below.rho == pytest.approx(state.rho * 0.95**3)
    assert state.update(0.0, 1.0, spike=True).rho == 1.0
    for _ in range(300):
        state = state.update(0.0, 1.0)
    assert state.rho == state.lowest
    for _ in range(5):
        state = state.update(1.0, 1.0)
    assert state.rho == pytest.approx(state.lowest / 0.95)
