"""The generators: analytic figures equal the published ones, samples equal the analytic ones."""

import numpy as np
import pytest

from jobs.workloads.zipf import TopKWorkload, solve_draws, workload, zipf_probabilities

# density, gamma at 8 / 16 / 128 workers, skew over 8 / 16 / 128 parts
EXPECTED = {
    "lstm": (0.0113, (3.3, 4.9, 15.5), (7.5, 14.4, 68.6)),
    "lstm_steep": (0.0113, (2.8, 3.9, 10.4), (7.8, 15.2, 75.6)),
    "nmt": (0.0247, (4.7, 7.6, 24.8), (5.8, 9.8, 32)),
    "bert": (0.0106, (5.5, 9.4, 38.5), (5.7, 9.9, 41)),
    "deepfm_a": (0.0280, (1.85, 2.8, 13.5), (7.1, 14.1, 35.7)),
    "deepfm_b": (0.0281, (4.7, 7.5, 23.3), (1.4, 2.4, 12)),
    "lstm20": (0.0113, (None, 4.95, None), (None, None, 68.3)),
    "nmt20": (0.0247, (None, 7.68, None), (None, None, 31.2)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_analytic_figures(name) -> None:
    model = workload(name)
    density, gammas, skews = EXPECTED[name]
    assert model.density() == pytest.approx(density, rel=0.01)
    for size, gamma, skew in zip((8, 16, 128), gammas, skews, strict=True):
        if gamma:
            assert model.gamma(size) == pytest.approx(gamma, rel=0.02)
        if skew:
            assert model.skew(size) == pytest.approx(skew, rel=0.03)


@pytest.mark.parametrize("name", ["lstm20", "nmt20", "bert", "deepfm_a"])
def test_samples_meet_the_formulas(name) -> None:
    """Mean of 20 steps: density, densification over 16 workers and skew over 8 parts within 3 %."""
    model, densities, unions, firsts = workload(name), [], [], []
    for step in range(20):
        sets = [model.rows(worker, step) for worker in range(16)]
        densities.append(np.mean([len(ids) for ids in sets]) / model.num_rows)
        unions.append(len(np.unique(np.concatenate(sets))) / model.num_rows)
        firsts.append(8 * np.mean(np.concatenate(sets) < model.num_rows // 8))
    assert np.mean(densities) == pytest.approx(model.density(), rel=0.03)
    assert np.mean(unions) / np.mean(densities) == pytest.approx(model.gamma(16), rel=0.03)
    assert np.mean(firsts) == pytest.approx(model.skew(8), rel=0.03)


def test_draws_are_solved_for_the_density() -> None:
    assert workload("lstm").draws == pytest.approx(923_090, rel=1e-3)
    p = zipf_probabilities(100, 1.0)
    draws = solve_draws(p, 0.5)
    assert np.mean(1 - (1 - p) ** draws) == pytest.approx(0.5, abs=1e-6)


def test_samples_depend_on_worker_step_and_seed_alone() -> None:
    model = workload("nmt20")
    assert model.rows(1, 2).tolist() == model.rows(1, 2).tolist()
    others = [model.rows(0, 2), model.rows(1, 3), model.rows(1, 2, seed=1)]
    assert all(model.rows(1, 2).tolist() != other.tolist() for other in others)


def test_top_k_keeps_exactly_its_share() -> None:
    model = TopKWorkload("small", num_lines=64, line=512)
    sets = [model.rows(worker) for worker in range(8)]
    assert [len(ids) for ids in sets] == [64 * 512 // 20] * 8
    assert all((np.diff(ids) > 0).all() for ids in sets)
    overlap = len(np.unique(np.concatenate(sets))) / len(sets[0])
    assert 4.5 < overlap < 7.5
