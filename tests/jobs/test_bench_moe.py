"""The layer's benchmark, as short as it can be: keys and their meaning, not figures."""

import json

import pytest

from jobs.bench.moe import FULL, Config, variants_of
from jobs.bench.moe import run as bench
from jobs.job import run_job

TINY = [
    *("model.layers=1", "model.width=16", "model.heads=2", "model.context=32", "model.experts=4", "model.hidden=16"),
    *("model.evaluation_bytes=1024", "slots=4", "steps=3", "batch=4", "seeds=2", "timed_tokens=64", "timed_width=16"),
    "planned_cases=3",
]


def test_keys(tmp_path) -> None:
    assert run_job("bench-moe", Config, bench, ["--out", str(tmp_path), *TINY]) == 0
    document = json.loads((tmp_path / "result.json").read_text())
    metrics = document["metrics"]
    assert set(metrics["retention"]) == {"0.5", "0.75"}
    assert set(metrics["retention"]["0.5"]) >= {"loss_minus_full", "uniform_loss_minus_full", "top_q_loss_minus_full"}
    assert len(metrics["retention"]["0.75"]["loss_minus_full_by_seed"]) == 2
    assert set(metrics["layer"]["keep"]) == set(metrics["layer"]["recompute"]) == {"1.0", "0.75", "0.5", "0.25"}
    assert metrics["layer"]["keep"]["1.0"] == 1.0
    assert 0.95 < metrics["joint_plan"]["over_optimum_mean"] <= metrics["joint_plan"]["over_optimum_worst"] < 1.15
    assert document["baseline"]["full_backward_loss"] == pytest.approx(metrics["full_loss"])


def test_the_full_backward_comes_first() -> None:
    names = [variant.name for variant in variants_of(Config(retention=[0.3], contrast=[]))]
    assert names == [FULL, "0.3 scored"]


@pytest.mark.slow
def test_half_of_the_pairs_costs_little_and_the_largest_scores_much(tmp_path) -> None:
    assert run_job("bench-moe", Config, bench, ["--out", str(tmp_path), "timed_tokens=0"]) == 0
    found = json.loads((tmp_path / "result.json").read_text())["metrics"]["retention"]
    assert found["0.75"]["loss_minus_full"] <= 0.025
    assert found["0.5"]["loss_minus_full"] <= 0.035
    assert found["0.5"]["uniform_loss_minus_full"] > found["0.5"]["loss_minus_full"]
    assert found["0.5"]["top_q_loss_minus_full"] >= 0.2
