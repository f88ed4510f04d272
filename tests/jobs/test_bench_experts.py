"""`jobs.bench experts` on a made trace, and the published anchors on recorded expert counts."""

import json
from pathlib import Path

import numpy as np
import pytest

from jobs.bench import experts
from jobs.data import data_path
from jobs.job import run_job

RECORDED = data_path("moe/olmoe_mixtral_expert_counts.csv")


def bench(tmp_path: Path, *argv: str) -> dict:
    assert run_job("bench-experts", experts.Config, experts.run, [*argv, "--out", str(tmp_path)], experts.FILES) == 0
    return json.loads((tmp_path / "result.json").read_text())["metrics"]


def test_a_slowly_drifting_trace(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    start, end = rng.dirichlet(np.full(32, 0.5), (2, 1))
    mix = np.linspace(0, 1, 140)[:, None, None]
    counts = np.stack([rng.multinomial(60_000, load) for load in ((1 - mix) * start + mix * end)[:, 0]])[:, None]
    np.savez(tmp_path / "trace.npz", counts=counts, iters=np.arange(140))
    metrics = bench(tmp_path, "--counts", str(tmp_path / "trace.npz"), "ranks=16", "slots=4", "staleness=5")
    robust, symi = metrics["policies"]["robust"], metrics["policies"]["symi_dropless"]
    assert robust["max_over_mean_mean"] <= 1.01
    assert robust["max_over_mean_p95"] <= 1.05
    assert symi["max_over_mean_mean"] > 1.2
    assert robust["early"]["max_over_mean_mean"] >= 1
    assert (tmp_path / "imbalance.png").stat().st_size > 10_000


def test_bad_counts_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--counts", str(tmp_path / "none.npz"), "--out", str(tmp_path)]
    assert run_job("bench-experts", experts.Config, experts.run, argv, experts.FILES) == 2
    assert "no expert counts at" in capsys.readouterr().err


@pytest.mark.skipif(not RECORDED.exists(), reason=f"no recorded counts at {RECORDED}")
@pytest.mark.parametrize(
    ("ranks", "slots", "symi_own", "eplb_own", "drift", "shift"),
    [
        (8, 9, 1.361, 1.009, 1.021, 1.366),
        (8, 16, 1.115, 1.005, 1.000, 1.004),
        (16, 6, 1.296, 1.022, 1.003, 1.505),
        (16, 8, 1.174, 1.013, 1.002, 1.035),
    ],
)
def test_anchors_on_recorded_domains(
    tmp_path: Path, ranks: int, slots: int, symi_own: float, eplb_own: float, drift: float, shift: float
) -> None:
    metrics = bench(tmp_path, f"ranks={ranks}", f"slots={slots}", "policies=robust,symi_dropless,eplb")
    assert metrics["domain_vectors"] == 18
    assert metrics["own"]["symi_dropless"]["max_over_mean_mean"] == pytest.approx(symi_own, abs=0.005)
    assert metrics["own"]["eplb"]["max_over_mean_mean"] == pytest.approx(eplb_own, abs=0.005)
    assert metrics["own"]["robust"]["max_over_mean_mean"] <= 1.001
    assert metrics["drift"]["robust"]["max_over_mean_mean"] <= drift + 0.005
    assert metrics["shift"]["robust"]["max_over_mean_mean"] <= shift + 0.005
