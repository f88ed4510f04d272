"""The joint plan against the mixed-integer program, and its limits."""

from dataclasses import replace

import numpy as np
import pytest

from placement.errors import PlacementError
from placement.joint_plan import JointPlan, exact_joint_plan, joint_plan
from placement.quotas import PairMemory, sampling_variance
from placement.split import UNLIMITED, Ranks


def case(seed: int, num_ranks: int, slots: int, num_experts: int) -> tuple[np.ndarray, list[np.ndarray], Ranks]:
    rng = np.random.default_rng(seed)
    w = rng.multinomial(240, rng.dirichlet(np.full(num_experts, 0.7))).astype(np.int64) + 1
    scores = [np.exp(rng.normal(0, 1, count)) for count in w]
    return w, scores, Ranks.equal(num_ranks, slots)


def total_variance(w: np.ndarray, scores: list[np.ndarray], share: float) -> float:
    return sum(sampling_variance(s, max(1, int(share * n))) for s, n in zip(scores, w, strict=True))


def check(plan: JointPlan, w: np.ndarray, ranks: Ranks) -> None:
    np.testing.assert_allclose(plan.pairs.sum(0), w)
    assert (plan.kept <= plan.pairs + 1e-9).all()
    for rank, row in enumerate(plan.slots):
        hosted = set(row[row >= 0].tolist())
        assert len(hosted) <= ranks.slots[rank]
        assert set(np.flatnonzero(plan.pairs[rank] > 1e-9).tolist()) <= hosted


def test_the_plan_for_use_is_near_the_optimum() -> None:
    gaps = []
    for seed in range(8):
        w, scores, ranks = case(seed, 3, 3, 6)
        backward = np.full(3, 2.0)
        limit = total_variance(w, scores, 0.5)
        ours, best = (solve(w, scores, ranks, backward, limit) for solve in (joint_plan, exact_joint_plan))
        check(ours, w, ranks)
        check(best, w, ranks)
        assert ours.seconds >= best.seconds * 0.98, "the program over-estimates the variance a little, not more"
        gaps.append(ours.seconds / best.seconds)
    assert np.mean(gaps) < 1.06
    assert max(gaps) < 1.12


def test_a_looser_variance_shortens_the_backward_and_none_keeps_everything() -> None:
    w, scores, ranks = case(1, 4, 4, 8)
    backward = np.full(4, 2.0)
    seconds = [joint_plan(w, scores, ranks, backward, total_variance(w, scores, s)).backward_s for s in (0.9, 0.5, 0.2)]
    assert seconds == sorted(seconds, reverse=True)
    full = joint_plan(w, scores, ranks, backward, 0.0)
    np.testing.assert_array_equal(full.kept, full.pairs)


def test_unequal_ranks_get_unequal_shares() -> None:
    w, scores, ranks = case(2, 3, 5, 6)
    ranks = replace(ranks, seconds_per_pair=(1.0, 1.0, 3.0), max_pairs=(int(UNLIMITED),) * 3)
    backward = np.array([2.0, 2.0, 6.0])
    limit = total_variance(w, scores, 0.5)
    ours, best = (solve(w, scores, ranks, backward, limit) for solve in (joint_plan, exact_joint_plan))
    assert ours.kept[2].sum() < 0.5 * ours.kept[0].sum()
    assert ours.seconds <= 1.12 * best.seconds


def test_memory_limits_both_passes() -> None:
    w, scores, ranks = case(3, 3, 4, 6)
    backward, limit = np.full(3, 2.0), total_variance(w, scores, 0.6)
    free = joint_plan(w, scores, ranks, backward, limit)
    unit = PairMemory(0, instance_bytes=100, forward_bytes=14, retained_bytes=20)
    tight = [replace(unit, free_bytes=unit.peak_bytes(4, int(w.sum()) // 3 + 2, 20))] * 3
    ours = joint_plan(w, scores, ranks, backward, limit, tight)
    for rank in range(3):
        hosted, kept = int((ours.slots[rank] >= 0).sum()), round(ours.kept[rank].sum())
        assert unit.peak_bytes(hosted, round(ours.pairs[rank].sum()), kept) <= tight[rank].free_bytes
    assert ours.kept.sum() < free.kept.sum()
    with pytest.raises(PlacementError):
        joint_plan(w, scores, ranks, backward, limit, [replace(unit, free_bytes=500)] * 3)


def test_experts_without_pairs() -> None:
    w = np.array([0, 12, 0, 3], np.int64)
    scores = [np.ones(int(n)) for n in w]
    plan = joint_plan(w, scores, Ranks.equal(2, 3), np.ones(2), 1.0)
    check(plan, w, Ranks.equal(2, 3))
    assert plan.kept[:, [0, 2]].sum() == 0
