"""The sparse suite: exact targets at full size, and a verified run with real values at a small one."""

import json

import numpy as np
import pytest

from jobs.bench import sparse
from jobs.job import run_job
from jobs.workloads.zipf import workload


@pytest.fixture(scope="module")
def figures():
    """(workload, ranks, schemes) -> figures of the named schemes at full size."""
    kept = {}

    def count(name, ranks, schemes):
        model = workload(name)
        ids = kept.setdefault((name, ranks), [model.rows(worker) for worker in range(ranks)])
        return {s: sparse.scheme_figures(sparse.SCHEMES[s], ids, model.num_rows, model.width) for s in schemes}

    return count


@pytest.mark.parametrize(("name", "limit"), [("lstm", 1.06), ("nmt", 1.065), ("bert", 1.08)])
def test_near_optimality_and_balance_at_16_ranks(name, limit, figures) -> None:
    found = figures(name, 16, ["column", "hashed_rows", "hashed_blocks", "sparse_ps"])
    assert 1 <= found["column"]["ratio_to_lower_bound"] <= limit
    assert found["sparse_ps"]["imbalance"] >= 0.6 * 16
    assert found["hashed_blocks"]["ratio_to_lower_bound"] <= found["hashed_rows"]["ratio_to_lower_bound"]
    if name != "bert":
        assert found["hashed_rows"]["ratio_to_lower_bound"] <= 1.13
    assert all(f["metadata_bytes"] <= 0.005 * f["bottleneck_bytes"] for f in found.values())
    mean = found["hashed_rows"]["mean_bytes"] / found["hashed_rows"]["lower_bound_bytes"]
    assert mean <= 1.08


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("name", ["lstm", "nmt", "bert"])
def test_column_split_is_near_the_bound_as_the_formula_says(name, ranks, figures) -> None:
    """(1 + 1/(n-2)) (1 + 4n / ((1 + gamma) D v)): the gap of any two-phase scheme, and the ids."""
    model = workload(name)
    limit = (1 + 1 / (ranks - 2)) * (1 + 4 * ranks / ((1 + model.gamma(ranks)) * model.width * 4)) + 0.01
    assert 1 <= figures(name, ranks, ["column"])["column"]["ratio_to_lower_bound"] <= limit


@pytest.mark.parametrize("name", ["lstm", "nmt"])
def test_near_optimality_at_128_ranks(name, figures) -> None:
    assert figures(name, 128, ["column"])["column"]["ratio_to_lower_bound"] <= 1.02


def test_zen_meets_its_formula() -> None:
    model = sparse.TopKWorkload("small", num_lines=512, line=2048)
    ids = [model.rows(worker) for worker in range(16)]
    found = sparse.scheme_figures(sparse.SCHEMES["zen"], ids, model.num_rows, 1)
    assert found["ratio_to_formula"] == pytest.approx(1.0, abs=0.01)
    assert found["bottleneck_bytes"] <= 1.03 * found["formula_bytes"]


def test_the_lower_bound_at_its_ends() -> None:
    same, apart = [np.arange(10)] * 4, [np.arange(10 * w, 10 * w + 10) for w in range(4)]
    assert sparse.lower_bound_bytes(same, 10, 3) == 2 * 3 / 4 * 10 * 3 * 4
    assert sparse.lower_bound_bytes(apart, 40, 3) == 3 * 10 * 3 * 4


def test_a_verified_run_writes_result_and_picture(tmp_path) -> None:
    words = ["workload=nmt20", "ranks=4", "node_size=2", "verify=true", "kernels=false", "--out", str(tmp_path)]
    assert run_job("bench-sparse", sparse.Config, sparse.run, words, sparse.FILES) == 0
    metrics = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert set(metrics["schemes"]) == set(sparse.SCHEMES)
    for figures in metrics["schemes"].values():
        assert figures["max_relative_error"] < 1e-5
        assert figures["bottleneck_bytes"] > 0
        assert figures["ratio_to_lower_bound"] > 0
    assert (tmp_path / "sparse_bytes.png").stat().st_size > 1000


def test_a_workload_too_large_to_verify_is_refused(tmp_path, capsys) -> None:
    words = ["workload=lstm", "verify=true", "--out", str(tmp_path)]
    assert run_job("bench-sparse", sparse.Config, sparse.run, words, sparse.FILES) == 2
    assert "use lstm20" in capsys.readouterr().err


def test_kernel_figures_name_their_copy() -> None:
    figures = sparse.kernel_figures()
    assert set(figures) == {"row_scan", "gather", "scatter_add"}
    assert all(set(f) == {"gbps", "memcpy_gbps", "vs_memcpy"} for f in figures.values())
