"""Sampling without bias: exact counts, minimal variance, repeatable draws, memory limits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import ConfigError
from placement.errors import PlacementError
from placement.quotas import (
    SHARES,
    PairMemory,
    PairTimes,
    Retention,
    budgets,
    by_source,
    common_target,
    floor_scores,
    inclusion,
    neighbours,
    sampling_variance,
    select,
    systematic,
    thin,
    top_q,
    walk_of,
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


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(positive, st.integers(1, 20), st.integers(0, 1000))
def test_so_is_that_of_any_run_of_places(scores: np.ndarray, quota: int, seed: int) -> None:
    place = np.random.default_rng(seed).integers(0, 1 << 12, len(scores))
    kept = select(scores, np.zeros(len(scores), np.int64), 1, quota, [seed, 0], place)
    floored, _ = floor_scores(scores, np.zeros(len(scores), np.int64), 1)
    pi = inclusion(floored, min(quota, len(scores)))
    for start, stop in [(0, 1000), (1000, 3000), (2000, 4096)]:
        share = pi[(place >= start) & (place < stop)].sum()
        count = ((place[kept.index] >= start) & (place[kept.index] < stop)).sum()
        assert np.floor(share - 1e-6) <= count <= np.ceil(share + 1e-6)


def test_neighbours_are_of_one_expert_and_one_lag_apart() -> None:
    expert, place = np.array([1, 0, 1, 0, 1]), np.array([5, 9, 3, 2, 4])
    walk = walk_of(expert, place)
    assert [pair.tolist() for pair in neighbours(walk, 1)] == [[3, 2, 4], [1, 4, 0]]
    assert [pair.tolist() for pair in neighbours(walk, 2)] == [[2], [0]]
    assert [len(pair) for pair in neighbours(walk, 9)] == [0, 0]
    assert len(neighbours(walk_of(np.zeros(5000, np.int64), None), 1)[0]) <= 2 * 512


def test_the_estimate_is_unbiased_and_so_is_its_variance() -> None:
    rng = np.random.default_rng(1)
    num_pairs, quota, draws = 200, 60, 4000
    scores, expert = rng.pareto(1.5, num_pairs) + 0.01, rng.integers(0, 5, num_pairs)
    values = rng.normal(size=num_pairs) * scores
    sums, variances = [], []
    for draw in range(draws):
        kept = select(scores, expert, 5, quota, [7, draw])
        sums.append((values[kept.index] * kept.weight).sum())
        variances.append((scores[kept.index] ** 2 * (kept.weight - 1) * kept.weight).sum())
    error = abs(np.mean(sums) - values.sum())
    assert error < 4 * np.std(sums) / np.sqrt(draws)
    floored, _ = floor_scores(scores, expert, 5)
    assert floored.tolist() == scores.tolist()
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
    assert floored[0] == floored[3] > 1e6 * floored[1]
    assert floored[4] > 0
    for draw in range(50):
        assert {0, 3} <= set(select(scores, np.array([0, 0, 1, 1, 1]), 2, 2, [draw]).index.tolist())
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


def test_kept_pairs_are_shared_out_exactly_and_each_source_gets_its_share_on_average() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 5, 8):
        pairs = rng.integers(0, 40, (size, size)) * rng.integers(0, 2, (size, size))
        computed = pairs.sum(0)
        kept = np.array([rng.integers(0, total + 1) for total in computed])
        draws = np.zeros((size, size))
        for number in range(int(computed.max(initial=1))):
            start = np.array([number % max(1, total) for total in computed])
            drawn = by_source(kept, pairs, start)
            assert (drawn.sum(0) == kept).all()
            assert ((drawn >= 0) & (drawn <= pairs)).all()
            draws += drawn * (number < computed)
        np.testing.assert_allclose(draws, kept * pairs, err_msg="over all starts")


def test_budgets_follow_time_and_memory() -> None:
    memory = [PairMemory.of(free_bytes, 16, 32, 4) for free_bytes in (10**9, 50_000)]
    pairs, hosted = np.array([100, 100]), np.array([2, 2])
    quota = budgets(pairs, hosted, np.array([1.0, 2.0]), 60.0, memory)
    assert quota.tolist() == [60, 30]
    assert budgets(pairs, hosted, np.ones(2), 1e9, memory).tolist() == [100, memory[1].max_kept(2, 100)]
    assert memory[1].peak_bytes(2, 100, memory[1].max_kept(2, 100)) <= 50_000
    assert budgets(np.array([0, 3]), hosted, np.ones(2), 0.0, memory).tolist() == [0, 1]
    with pytest.raises(PlacementError, match=r"rank 1: 2000 pairs .* 50000 are free"):
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


def chosen(times: PairTimes, sampling: float, squared_norm: float = 1.0) -> Retention:
    """After one choice, where V_s(share) is `sampling` * (1 / share - 1)."""
    state = Retention.for_run(100)
    while not state.is_due:
        assert state.rho == 1.0
        state = state.update(times)
    return state.update(times, sampling * (1 / np.array(SHARES) - 1), squared_norm)


def test_the_share_is_the_one_with_the_least_time_to_a_loss() -> None:
    times = PairTimes(1.0, 2.0, 0.0)
    # (1 + 2 rho) (1 + a (1 / rho - 1)) is least at sqrt(a / (2 - 2 a))
    assert chosen(times, 0.3).rho == pytest.approx(round(np.sqrt(0.3 / 1.4) * 20) / 20)
    assert chosen(times, 0.3).extra_steps == pytest.approx(0.3 * (1 / 0.45 - 1))
    assert chosen(times, 0.6, 2.0).rho == chosen(times, 0.3).rho
    assert chosen(times, 0.0).rho == SHARES[0]
    assert chosen(times, 5.0).rho == 1.0
    assert chosen(PairTimes(1.0, 2.0, 3.0), 0.1).rho == 1.0, "where selection costs more than it saves, all are kept"


def test_a_choice_is_smoothed_and_a_spike_keeps_everything() -> None:
    times = PairTimes()
    state = chosen(times, 0.3)
    assert state.update(times, spike=True).rho == 1.0
    assert state.update(times).rho == state.rho
    assert state.update(times, np.full(len(SHARES), np.nan), 1.0).rho == state.rho
    assert state.update(times, np.zeros(len(SHARES)), 0.0).rho == state.rho
    again = state.update(times, np.zeros(len(SHARES)), 3.0)
    assert again.squared_norm == 2.0
    np.testing.assert_allclose(again.variance, np.array(state.variance) / 2)
    assert Retention.for_run(1000).every == 20
    with pytest.raises(ConfigError, match="rho"):
        Retention(10, rho=0.0)


def test_the_first_steps_keep_everything() -> None:
    assert not Retention(1000, step=4, every=5).is_due
    assert Retention(1000, step=24, every=5).is_due
