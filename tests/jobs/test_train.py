"""The main job on a real Ray cluster with two workers: records, tables, equal loss curves, resume, stop, full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from actors.journal import read_journal
from collectives.errors import ConfigError
from collectives.policy import SyncPolicy
from jobs.job import Run
from jobs.links import unavailable_reason
from jobs.train import plan_of, workload_of
from jobs.train_cluster import shapes_links
from jobs.train_config import TrainConfig
from jobs.workloads.stdlib_lm import StdlibLm, StdlibLmConfig
from zenray.comparison import STEP_SCHEMA, TrainingLog
from zenray.config import load
from zenray.engine import CheckpointPlan, TrainPlan, Variant, train_rank

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["stdlib_lm.rows=8192", "stdlib_lm.width=16", "stdlib_lm.negatives=128", "batch=64", "lr=0.05"]
COMMAND = [sys.executable, "-m", "jobs.train", "--out", "out", "ranks=2", "block_steps=2", "warmup_steps=2", *SMALL]


@pytest.fixture
def start(ray_head, tmp_path):
    """start(*overrides) -> Popen of the job, joined to the session's cluster; ended afterwards by pid."""
    jobs = []

    def spawn(*overrides, **environment):
        env = {**os.environ, **ray_head, "PYTHONPATH": str(ROOT), **environment}
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
            env.pop(name, None)
        jobs.append(
            subprocess.Popen(
                [*COMMAND, *overrides],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return jobs[-1]

    yield spawn
    for job in jobs:
        if job.poll() is None:
            job.kill()
        job.communicate()


def runs(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("zenray")
    return client, {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def test_the_whole_job(start, tmp_path):
    job = start("steps=8", "rivals=sparse")
    output, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert "times as fast as ddp_dense" in output
    assert "times as fast as ddp_sparse" in output
    assert "mlflow ui --backend-store-uri" in output

    result = json.loads((tmp_path / "out" / "result.json").read_text())
    comparison = result["metrics"]["comparison"]
    assert comparison["loss_gap"] < 1e-4
    assert comparison["num_pairs"] == 3
    assert comparison["bytes_ratio"] > 2
    against_sparse = result["metrics"]["rivals"]["ddp_sparse"]
    assert against_sparse["loss_gap"] < 1e-4
    assert against_sparse["bytes_ratio"] is None  # torch does not count what its sparse all-reduce sends
    assert result["metrics"]["all_reduce_probe"]["payload_bytes"] == 16 << 20
    assert result["baseline"]["steps_per_s"] > 0
    schemes = {row["tensor"]: row for row in result["metrics"]["schemes"]}
    assert {"embed.weight", "output.weight"} <= set(schemes)
    for tensor in ("embed.weight", "output.weight"):
        assert schemes[tensor]["observed_bytes"] > 0

    steps = pq.read_table(tmp_path / "out" / "steps.parquet")
    assert steps.schema.equals(STEP_SCHEMA)
    assert sorted(zip(steps["variant"].to_pylist(), steps["step"].to_pylist(), strict=True)) == [
        (variant, step) for variant in ("ddp_dense", "ddp_sparse", "zenray") for step in range(8)
    ]
    assert pq.read_table(tmp_path / "out" / "calls.parquet").num_rows >= 16
    for name in ("loss.png", "bytes.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")

    client, found = runs(tmp_path)
    assert sorted(found) == ["ddp_dense", "ddp_sparse", "train stdlib_lm", "zenray"]
    parent = found["train stdlib_lm"]
    assert parent.data.metrics["speedup_over_ddp_sparse"] == against_sparse["speedup"]
    assert parent.data.metrics["speedup"] == comparison["speedup"]
    assert parent.data.metrics["bytes_ratio"] == comparison["bytes_ratio"]
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} >= {
        *("config.json", "plan.json", "schemes.json", "steps.parquet", "loss.png", "bytes.png")
    }
    for name in ("zenray", "ddp_dense"):
        assert found[name].data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert found[name].info.status == "FINISHED"
        assert len(client.get_metric_history(found[name].info.run_id, "loss")) == 8


def test_sigterm_closes_the_record(start, tmp_path):
    job = start("steps=100000")
    for line in job.stdout:
        if "step     4" in line:
            break
    sent_ms = time.time() * 1000
    job.send_signal(signal.SIGTERM)
    job.wait(timeout=30)
    assert job.returncode == 128 + signal.SIGTERM
    _, found = runs(tmp_path)
    assert {run.info.status for run in found.values()} == {"KILLED"}
    assert max(run.info.end_time for run in found.values()) - sent_ms < 9000  # 3 s on a quiet machine


def test_plain_ddp_as_the_subject_ends_well_and_counts_nothing(start, tmp_path):
    job = start("steps=3", "policy=off", "recovery.copies=0")
    output, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert "only 2 of 2 warm-up" not in output
    assert "too few for a ratio" in output
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())["metrics"]
    assert metrics["variants"]["zenray"]["sent_bytes_per_step"] == 0
    assert metrics["comparison"]["bytes_ratio"] is None


def test_a_bad_key_or_policy_has_its_exit_code(start):
    wrong_policy = start("policy=colum", "link=200mbit")
    output, errors = wrong_policy.communicate(timeout=60)
    assert wrong_policy.returncode == 2
    assert "unknown policy 'colum'; did you mean 'column'" in errors
    assert "links" not in output  # said before any is built
    wrong_key = start("polcy=auto")
    _, errors = wrong_key.communicate(timeout=60)
    assert wrong_key.returncode == 2
    assert "did you mean 'policy'" in errors


@pytest.mark.network
def test_behind_shaped_links_the_wire_agrees_with_the_counters(tmp_path):
    if reason := unavailable_reason():
        pytest.skip(f"links cannot be shaped: {reason}")
    command = [
        *COMMAND,
        "steps=6",
        "link=200mbit",
        "stdlib_lm.rows=32768",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())["metrics"]
    assert metrics["self_check"]["verdict"] in ("ok", "void")  # void: the machine was too busy to vouch for times
    assert metrics["cluster"]["links"]["shaping"]["rate_bits_per_s"] == 2e8
    dense = metrics["variants"]["ddp_dense"]
    assert dense["sent_bytes_per_step"] < dense["wire_bytes_per_step"] < 1.15 * dense["sent_bytes_per_step"]
    assert {run.info.status for run in runs(tmp_path)[1].values()} == {"FINISHED"}


# --- the engine, on one group of two workers ---------------------------------------------------------------------------

WORKLOAD = StdlibLm(StdlibLmConfig(rows=4096, width=8, negatives=64), batch=32, seed=0)


@pytest.fixture(scope="module")
def train(ray_cluster):
    """train(plan, workload) -> (log, results by rank), on a group that is started once."""
    from actors.group import WorkerGroup

    with WorkerGroup(2, start_timeout_s=120.0) as group:

        def run(plan, workload=WORKLOAD):
            log = TrainingLog([variant.name for variant in plan.variants])
            results = group.run(
                partial(train_rank, plan, workload),
                timeout_s=120.0,
                on_report=lambda report: log.take(report.rank, report.metrics),
            )
            return log, results

        yield run


def plan(steps, checkpoint=None, policy="column", baseline=False):
    variants = [Variant("zenray", True, SyncPolicy.of(policy))]
    variants += [Variant("ddp_dense", False, None)] if baseline else []
    return TrainPlan(tuple(variants), steps, 1, 2, "adagrad", 0.05, "digest", checkpoint)


def test_resumed_training_is_bit_identical(train, tmp_path):
    _, whole = train(plan(9, baseline=True))
    first = CheckpointPlan(tmp_path, every_steps=3, keep=2, resume=False)
    train(plan(5, first, baseline=True))
    log, resumed = train(plan(9, CheckpointPlan(tmp_path, every_steps=3, keep=2, resume=True), baseline=True))
    assert log.events == ["resumed at step 5"]
    assert [block.first_step for block in log.blocks if block.variant == "zenray"] == [5, 7]
    for rank in range(2):
        for variant in ("zenray", "ddp_dense"):
            assert resumed[rank][variant]["parameters_sha256"] == whole[rank][variant]["parameters_sha256"]
    assert resumed[0]["zenray"]["parameters_sha256"] == resumed[1]["zenray"]["parameters_sha256"]


def test_a_disk_that_fails_turns_checkpoints_off_and_training_goes_on(train, tmp_path):
    (tmp_path / "file").touch()
    log, results = train(plan(5, CheckpointPlan(tmp_path / "file" / "inside", every_steps=1, keep=2, resume=False)))
    assert len(log.losses("zenray")) == 5
    assert [event.partition(":")[0] for event in log.events] == ["checkpoints are off from here on"] * 2
    assert len(results) == 2


def test_every_policy_gives_the_same_curve(train):
    curves = {}
    for policy in ("column", "agsparse", "dense", "off"):
        log, _ = train(plan(5, policy=policy))
        curves[policy] = log.losses("zenray")
    for curve in curves.values():
        assert curve == pytest.approx(curves["column"], rel=1e-5)


# --- plans ---------------------------------------------------------------------------------------------------------------


def test_the_learning_rate_is_constant_or_rises_and_falls_to_a_tenth(tmp_path: Path) -> None:
    plan = TrainPlan((), 120, 1, 1, "sgd", 2.0, "", schedule="cosine")
    rates = [plan.lr_at(step) for step in range(121)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[19] == rates[20] == 2.0
    assert rates[120] == pytest.approx(0.2)
    assert sorted(rates[20:], reverse=True) == rates[20:]
    assert {replace(plan, schedule="constant").lr_at(step) for step in (0, 60, 119)} == {2.0}
    with pytest.raises(ConfigError, match="unknown schedule 'linear'"):
        replace(plan, schedule="linear")
    digests = {
        (schedule, steps): plan_of(TrainConfig(schedule=schedule, steps=steps), tmp_path).config_sha256
        for schedule in ("constant", "cosine")
        for steps in (60, 90)
    }
    assert digests["constant", 60] == digests["constant", 90], "a longer run may go on from a checkpoint"
    assert digests["cosine", 60] != digests["cosine", 90]


def test_blocks_cover_all_steps_once():
    for steps, warmup, block, done in [
        (10, 2, 3, 0),
        (10, 0, 4, 0),
        (5, 4, 1, 0),
        (9, 1, 2, 5),
        (9, 1, 2, 6),
        (4, 1, 9, 4),
    ]:
        made = TrainPlan((), steps, warmup, block, "sgd", 0.1, "").blocks(done)
        assert [step for part in made for step in part] == list(range(done, steps))
        assert all(part.stop <= warmup or part.start >= warmup for part in made)


@pytest.mark.parametrize(("steps", "warmup", "block"), [(1, 1, 1), (5, -1, 1), (5, 0, 0)])
def test_senseless_plans_are_refused(steps, warmup, block):
    with pytest.raises(ConfigError, match="warm-up"):
        TrainPlan((), steps, warmup, block, "sgd", 0.1, "")


def test_resuming_with_other_settings_changes_the_digest_but_more_steps_do_not(tmp_path):
    base = plan_of(load(TrainConfig, None, SMALL), tmp_path).config_sha256
    assert plan_of(load(TrainConfig, None, [*SMALL, "steps=99", "checkpoint.keep=3"]), tmp_path).config_sha256 == base
    assert plan_of(load(TrainConfig, None, [*SMALL, "lr=0.06"]), tmp_path).config_sha256 != base
    assert workload_of(load(TrainConfig, None, ["workload=click_log"])).facts()["fields"] == 26


def test_links_are_refused_without_the_means_and_beside_another_cluster(monkeypatch):
    config = load(TrainConfig, None, ["link=1gbit"])
    lines = []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    with pytest.raises(ConfigError, match="names a cluster to join"):
        shapes_links(config, lines.append)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("jobs.train_cluster.unavailable_reason", lambda: "not root")
    with pytest.raises(ConfigError, match="not root"):
        shapes_links(config, lines.append)
    assert not shapes_links(load(TrainConfig, None, ["link=1gbit", "link_required=off"]), lines.append)
    assert "not root" in lines[0]
    monkeypatch.setattr("jobs.train_cluster.unavailable_reason", lambda: None)
    assert shapes_links(config, lines.append)
    assert not shapes_links(load(TrainConfig, None, []), Run("train", Path(), {}).say)


def test_what_is_trained_again_after_a_recovery_counts_once():
    log = TrainingLog(["v"])
    block = {"kind": "block", "variant": "v", "first_step": 4, "warmup": False, "block_s": 2.0}
    traffic = {"kind": "traffic", "variant": "v", "first_step": 4, "warmup": False, "num_steps": 2, "wire_bytes": None}
    for seconds in (2.0, 9.0):
        log.take(0, block | {"losses": [0.5, 0.4], "step_s": [1.0, 1.0], "block_s": seconds})
        for rank in range(2):
            log.take(rank, traffic | {"sent_bytes": {"dense": 100}})
    assert len(log.blocks) == 1
    assert log.steps_per_s("v") == 1.0
    assert log.losses("v") == [0.5, 0.4]
    assert log.bytes_by_phase("v") == {"dense": 50.0}


# --- a worker that is killed -----------------------------------------------------------------------------------------------

LETHAL = """
import os, signal, sys
from pathlib import Path
import jobs.train
from jobs.workloads.stdlib_lm import StdlibLm

mark, kill_at_call = Path(os.environ["MARK"]), int(os.environ["KILL_AT_CALL"])

class Lethal(StdlibLm):
    calls = 0

    def batch(self, step, rank):
        self.calls += (step, rank) == (7, 1)
        if self.calls == kill_at_call and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, rank)

    def __reduce__(self):
        return (Lethal, (self.config, self.batch_size, self.seed))

jobs.train.workload_of = lambda config: Lethal(config.stdlib_lm, config.batch, config.seed)
sys.exit(jobs.train.main())
"""


@pytest.mark.parametrize("baseline", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_worker_costs_neither_the_job_nor_a_bit(train, ray_head, tmp_path, baseline):
    """One variant: each update is kept. A comparison, struck in its second variant: whole rounds are, and none counts twice.

    Ends with the bits and the losses of the undisturbed run, each step once, and a record of the recovery.
    """
    keys = [*SMALL, "ranks=2", "steps=10", "block_steps=4", "warmup_steps=2", "policy=column", f"baseline={baseline}"]
    config = load(TrainConfig, None, keys)
    log, calm = train(plan_of(config, tmp_path), workload_of(config))
    env = {**os.environ, **ray_head, "PYTHONPATH": str(ROOT), "MARK": str(tmp_path / "mark")}
    env["KILL_AT_CALL"] = "2" if baseline else "1"
    done = subprocess.run(
        [sys.executable, "-c", LETHAL, "--out", "out", *keys, "recovery.spares=1"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "mark").exists()
    assert "recovered in" in done.stdout
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())["metrics"]
    for name in log.variants:
        assert metrics["variants"][name]["parameters_sha256"] == calm[0][name]["parameters_sha256"]
    steps = pq.read_table(tmp_path / "out" / "steps.parquet").to_pylist()
    for name in log.variants:
        found = sorted((row["step"], row["loss"]) for row in steps if row["variant"] == name)
        assert found == list(enumerate(log.losses(name)))
    commits = {entry["commit"] for entry in read_journal(tmp_path / "out" / "journal.jsonl") if "commit" in entry}
    assert sorted(commits) == list(range(4 if baseline else 11))
    client, found = runs(tmp_path)
    parent = found["train stdlib_lm"]
    assert parent.data.metrics["recoveries"] == 1
    assert parent.data.metrics["recovery/total_s"] > 0
    assert "recoveries.json" in {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {run.info.status for run in found.values()} == {"FINISHED"}


ELASTIC = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import jobs.train
from jobs.workloads.stdlib_lm import StdlibLm

killed, grown = Path("killed").resolve(), Path("grown").resolve()

class Elastic(StdlibLm):
    def batch(self, step, rank):
        if (step, rank) == (7, 1) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if killed.exists():
            if rank == 1:
                grown.touch()
            elif not grown.exists():
                time.sleep(0.4)  # else the other rank would end before a replacement comes
        return super().batch(step, rank)

    def __reduce__(self):
        return (Elastic, (self.config, self.batch_size, self.seed))

jobs.train.Protection = partial(jobs.train.Protection, shrink_after_s=0.0)  # however quickly a replacement comes
jobs.train.workload_of = lambda config: Elastic(config.stdlib_lm, config.batch, config.seed)
sys.exit(jobs.train.main())
"""


@pytest.mark.slow
def test_an_elastic_job_goes_on_with_fewer_ranks_and_grows_back(ray_head, tmp_path):
    """Without a standby the job goes on with one rank, takes the second back, and trains every step once."""
    keys = [*SMALL, "ranks=2", "steps=60", "block_steps=4", "warmup_steps=2", "policy=column", "baseline=false"]
    done = subprocess.run(
        [sys.executable, "-c", ELASTIC, "--out", "out", *keys, "recovery.spares=0", "recovery.min_ranks=1"],
        cwd=tmp_path, env={**os.environ, **ray_head, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on with 1 of 2 ranks: no replacement came" in done.stdout, done.stdout
    assert "growing from 1 ranks: a replacement has come" in done.stdout
    steps = pq.read_table(tmp_path / "out" / "steps.parquet").to_pylist()
    assert sorted(row["step"] for row in steps) == list(range(60))
    losses = [row["loss"] for row in sorted(steps, key=lambda row: row["step"])]
    assert sum(losses[-10:]) < sum(losses[:10])
    starts = [entry for entry in read_journal(tmp_path / "out" / "journal.jsonl") if "start" in entry]
    assert [entry["num_ranks"] for entry in starts] == [2, 1, 2]
    _, found = runs(tmp_path)
    assert found["train stdlib_lm"].data.metrics["recoveries"] == 2
    assert {run.info.status for run in found.values()} == {"FINISHED"}
