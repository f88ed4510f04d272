"""`jobs.moe` and its parts: the drifting model, the figures of time to loss, and a short run of the whole job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from collectives.errors import ConfigError
from collectives.policy import SyncPolicy
from collectives.transport import LocalTransport, run_local
from jobs.links import unavailable_reason
from jobs.moe import SUBJECT, plan_of
from jobs.moe_config import MoeConfig
from jobs.moe_rank import MoePlan, MoeTrainer, MoeVariant
from jobs.moe_report import Curve, figures, spent_until
from jobs.workloads.moe_lm import DOMAINS, MoeLm, MoeLmConfig, domains
from placement.quotas import PairTimes
from zenray.config import load

ROOT = Path(__file__).resolve().parents[2]
SMALL = MoeLmConfig(layers=1, width=16, heads=2, context=32, experts=6, hidden=16, evaluation_bytes=2048)
TINY = [
    *("model.layers=1", "model.width=16", "model.heads=2", "model.context=32", "model.experts=6", "model.hidden=16"),
    *("model.evaluation_bytes=2048", "steps=12", "batch=8", "block_steps=4", "evaluate_every=4"),
]


def test_the_batch_does_not_depend_on_the_number_of_ranks_and_the_mix_drifts() -> None:
    workload = MoeLm(MoeLmConfig(drift=1.0), 8, seed=3, steps=100)
    whole = workload.batch(5, 0, 1)[0]
    parts = [workload.batch(5, rank, 3)[0] for rank in range(3)]
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part, whole[rank::3])
    assert len(workload.batch(0, 9, 12)[0]) == 0
    assert [int(np.argmax(workload.mix(step))) for step in (0, 50, 99)] == [0, 1, 2]
    assert all(workload.mix(step).sum() == pytest.approx(1.0) for step in range(0, 100, 9))
    assert np.ptp(MoeLm(MoeLmConfig(drift=0.0), 8, 3, 100).mix(0)) < 1e-12


def test_held_out_text_is_of_all_domains_and_none_is_trained_on() -> None:
    assert len(domains()) == len(DOMAINS) == 3
    for corpus in domains():
        probe = corpus.held_out[len(corpus.held_out) // 2 :][:400].tobytes()
        assert probe not in corpus.train.tobytes()
    ids, targets = MoeLm(SMALL, 8, 0, 10).held_out
    assert ids.shape == targets.shape == (63, 32)
    torch.testing.assert_close(ids[:, 1:], targets[:, :-1])


def test_training_is_the_same_at_one_two_and_four_ranks() -> None:
    dense: list[torch.Tensor] = []  # threads share the global generator, so one of them draws the weights

    def body(transport: LocalTransport) -> tuple[list[float], list[float], float]:
        plan = MoePlan((MoeVariant("robust", "robust"),), (0,), 6, 6, 8, 3e-3, 6, 6, SyncPolicy("off"))
        trainer = MoeTrainer(plan.variants[0], MoeLm(SMALL, 8, 0, 6), plan, transport)
        dense.extend(p.detach().clone() for p in trainer.dense if transport.size == 1)
        for parameter, values in zip(trainer.dense, dense, strict=True):
            parameter.data.copy_(values)
        record = trainer.block(range(6))["steps"]
        losses = [trainer.balancer.layers[0].state.total(loss) / transport.size for loss in record["loss"]]
        return losses, record["norm"], trainer.evaluate()

    one = run_local(1, body)[0]
    for size in (2, 4):
        for losses, norms, held_out in run_local(size, body):
            np.testing.assert_allclose(losses, one[0], rtol=1e-4)
            np.testing.assert_allclose(norms, one[1], rtol=1e-3)
            assert held_out == pytest.approx(one[2], rel=1e-4)


def test_more_ranks_than_sequences() -> None:
    def body(transport: LocalTransport) -> tuple[list[float], float]:
        plan = MoePlan((MoeVariant("lrmoe", "robust", 0.5),), (0,), 6, 3, 2, 3e-3, 3, 3, SyncPolicy("off"))
        trainer = MoeTrainer(plan.variants[0], MoeLm(SMALL, 2, 0, 3), plan, transport)
        return trainer.block(range(3))["steps"]["norm"], trainer.evaluate()

    results = run_local(3, body)
    assert all(result == results[0] for result in results)
    assert all(np.isfinite(results[0][0]))


def curve(losses: dict[int, float], seconds: float, pairs: int, kept: int) -> Curve:
    made = Curve()
    steps = max(losses)
    block = {
        "first_step": 0,
        "steps": {
            "moe_s": [seconds] * steps,
            "sent_bytes": [{"moe_dispatch": 100}] * steps,
            "pairs": [[[pairs, pairs // 2]]] * steps,
            "kept": [[[kept, kept // 2]]] * steps,
            "counts": [[[pairs, pairs // 2]]] * steps,
            "rho": [kept / pairs] * steps,
            "dropped": [0] * steps,
            "peak_bytes": [pairs] * steps,
            "moves": [1] * steps,
            "together": [0] * steps,
            "loss": [1.0] * steps,
        },
        "evaluations": {str(step): loss for step, loss in losses.items()},
    }
    made.take(1, {"first_step": 0, "steps": {"moe_s": [2 * seconds] * steps, "sent_bytes": [{"a": 50}] * steps}})
    made.take(0, block)
    return made


def test_time_to_loss_by_hand() -> None:
    full = curve({0: 5.0, 5: 4.0, 10: 3.0}, 1.0, pairs=100, kept=100)
    fast = curve({0: 5.0, 5: 4.5, 10: 3.6}, 0.5, pairs=100, kept=50)
    times = PairTimes(forward_s=0.01, backward_s=0.02, selection_s=0.001)
    assert full.modelled_s(times, 800.0) == pytest.approx([1 + 2 + 1] * 10)
    assert fast.modelled_s(times, 800.0) == pytest.approx([1 + 1 + 0.1 + 1] * 10)
    assert full.measured_s() == pytest.approx([2.0] * 10)
    assert spent_until(np.array([1.0, 2.0]), 1.5) == 2.0
    curves = {("full", 0): full, ("fast", 0): fast}
    row = figures(curves, "full", [0], "full", times, 800.0)
    assert row["steps_to_loss"] == pytest.approx(6.0)
    assert row["moe_time_to_loss_s_50"] == pytest.approx(20.0)
    row = figures(curves, "fast", [0], "full", times, 800.0)
    assert row["steps_to_loss"] == pytest.approx(5 + 5 * 0.7 / 0.9)
    assert row["moe_time_to_loss_s"] == pytest.approx((5 + 5 * 0.7 / 0.9) * 3.1)
    assert row["reached"]
    assert not row["reached_75"], "its last loss is above the target at three quarters"
    assert row["moe_time_to_loss_s_75"] is None


def test_a_reference_is_added_where_none_is_asked_for() -> None:
    names = [variant.name for variant in plan_of(MoeConfig(policies=["lrmoe", "symi_cap"])).variants]
    assert names == ["lrmoe", "symi_cap", "symi_dropless"]
    assert [v.name for v in plan_of(MoeConfig(policies=["robust", "lrmoe"])).variants] == ["robust", "lrmoe"]
    with pytest.raises(ConfigError, match="policies is empty"):
        plan_of(MoeConfig(policies=[]))
    assert load(MoeConfig, ROOT / "jobs/configs/moe_lm.yaml").slots == 8


def run_job(tmp_path: Path, environment: dict[str, str], *overrides: str) -> tuple[dict, str]:
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        env.pop(name, None)
    command = [sys.executable, "-m", "jobs.moe", "--out", "out", "seeds=1", *TINY, *overrides]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / "out" / "result.json").read_text())["metrics"], done.stdout


def test_the_whole_job(ray_head, tmp_path) -> None:
    policies = ["lrmoe", "symi_cap", "symi_dropless", "llep", "lrmoe_topq"]
    metrics, output = run_job(tmp_path, ray_head, "ranks=2", "slots=4", "codecs=auto", f"policies={','.join(policies)}")
    assert set(metrics["policies"]) == set(policies)
    for row in metrics["policies"].values():
        for key in ("moe_time_to_loss_s", "moe_wall_to_loss_s", "steps_to_loss"):
            assert {key, f"{key}_50", f"{key}_75"} <= set(row)
        assert row["final_eval_loss"] > 0
        assert row["peak_expert_bytes"] > 0
    assert metrics["policies"]["symi_dropless"]["reached"], "the reference reaches its own loss"
    assert metrics["policies"]["symi_cap"]["dropped_share"] > 0
    assert metrics["policies"][SUBJECT]["dropped_share"] == 0
    assert metrics["times"]["forward_s"] > 0
    assert "browse the record" in output
    for name in ("time_to_loss.png", "load.png", "balance.png"):
        assert (tmp_path / "out" / name).stat().st_size > 10_000
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("zenray")
    recorded = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(policies) < set(recorded)
    parent = recorded["moe"]
    assert parent.data.metrics["moe_dispatch/raw_bytes"] == metrics["roles"]["moe_dispatch"]["raw_bytes"] > 0
    assert all(recorded[p].data.tags["mlflow.parentRunId"] == parent.info.run_id for p in policies)
    assert len(client.get_metric_history(recorded["lrmoe"].info.run_id, "loss")) == 12
    counts = np.load(tmp_path / "out" / "loads.npz")["counts"]
    assert counts.shape == (12, 1, 6)
    assert (counts.sum(2) == 8 * 32 * 2).all()


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason() is not None, reason=f"no shaped links: {unavailable_reason()}")
def test_across_nodes_behind_links(tmp_path) -> None:
    metrics, _ = run_job(tmp_path, {}, "ranks=4", "slots=3", "link=1gbit", "policies=lrmoe,symi_dropless")
    assert metrics["nodes"] == [0, 1, 2, 3]
    assert metrics["link_bits_per_s"] == 1e9
    for rank, (sent, wire) in enumerate(zip(metrics["sent_bytes_by_rank"], metrics["wire_bytes_by_rank"], strict=True)):
        assert sent["to"][rank] == 0
        assert all(count > 0 for other, count in enumerate(sent["to"]) if other != rank)
        assert wire > sent["all"]
    assert metrics["policies"]["lrmoe"]["moves_per_step"] > 0
    assert metrics["policies"]["lrmoe"]["replicas_together"] == 0, "each replica lies on a node of its own"
