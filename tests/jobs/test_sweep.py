"""Sweeps: what counts as better, what a space means, the journal; and eight trials on two CPUs through a SIGKILL."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from collectives.errors import ConfigError
from jobs.job import run_job
from jobs.sweep import distributions_of, max_concurrent, policy_text, prepare_study, scheduler_of, sweep
from jobs.sweep_config import SweepConfig, check, codec_facts, effective, grid, reference_point, train_config, widest
from jobs.sweep_trial import bundles_of
from jobs.train import policy_of
from jobs.train_cluster import TrainCluster
from jobs.train_config import TrainConfig
from placement.errors import PlacementError
from zenray.config import load
from zenray.sweeps import FLOORS, Outcome, SweepJournal, TrialLog, figures_of, gain_text, pareto_front, score_of

ROOT = Path(__file__).resolve().parents[2]
TINY = """
train:
  workload: gpt
  gpt: {layers: 1, width: 32, heads: 2, context: 16}
  ranks: 1
  steps: 8
  warmup_steps: 2
  block_steps: 2
  batch: 1
  optimizer: adamw
  lr: 0.001
  dense_steps: 2
space:
  policy: [off, int8b, topk]
  density: {low: 0.01, high: 0.1, log: true}
  ranks: [1, 2]
trials: 8
grace_steps: 4
reduction: 2
"""
QUICK = (
    *("space.ranks=[1]", "train.workload=click_log", "train.optimizer=adagrad", "train.batch=8"),
    *("train.click_log.cap=50", "train.click_log.width=4", "train.click_log.hidden=8"),
)
"""Where processes count, not the model: two trials at a time, whose ranks have nothing to read."""


def config(**changes) -> SweepConfig:
    return SweepConfig.model_validate(yaml.safe_load(TINY) | changes)


# --- what counts as better ---------------------------------------------------------------------------------------------


def figures(losses, target=None, step=10, steps=100):
    return figures_of(step=step, steps=steps, losses=losses, s_per_step=0.5, target_loss=target)


def test_time_to_loss_is_known_projected_or_that_of_all_steps():
    assert figures([(5, 3.0), (10, 2.0)])["time_to_loss_s"] == 50.0
    reached = figures([(5, 3.0), (10, 2.0), (15, 2.5)], target=2.2)
    assert (reached["time_to_loss_s"], reached["reached"], reached["loss"]) == (5.0, 1.0, 2.5)
    missed = figures([(5, 3.0)], target=2.0)
    assert (missed["time_to_loss_s"], missed["reached"]) == (75.0, 0.0)


def test_the_score_has_no_units_and_a_diverged_trial_is_last():
    base = {"time_to_loss_s": 8.0, "wire_bytes_per_step": 1e6, "loss": 2.0, "codec_s_per_step": 0.01}
    weights = {"time_to_loss_s": 1.0, "wire_bytes_per_step": 0.5}
    gain = score_of(base, weights) - score_of(base | {"time_to_loss_s": 4.0}, weights)
    assert gain == pytest.approx(0.6931, abs=1e-4)
    assert score_of(base, weights) - score_of(base | {"wire_bytes_per_step": 0.0}, weights) == pytest.approx(
        3.454, abs=1e-3
    )
    assert score_of(base | {"loss": float("nan")}, {"loss": 1.0}) == float("inf")


points = st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, 3.0, float("nan")])] * 3), max_size=12)


@given(points)
def test_the_front_is_exactly_what_nothing_beats(found):
    front = pareto_front(found)
    finite = [index for index, point in enumerate(found) if all(value == value for value in point)]
    for index in finite:
        beaten = any(
            all(a <= b for a, b in zip(found[other], found[index], strict=True)) and found[other] != found[index]
            for other in finite
        )
        assert (index in front) is not beaten
    assert set(front) <= set(finite)


# --- spaces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {}}, "space is empty"),
        ({"space": {"polcy": ["off"]}}, "did you mean 'policy'"),
        ({"space": {"density": [2.0]}}, r"space\.density = 2\.0: .*less than or equal to 1"),
        (
            {"space": {"policy": ["off", "int9"]}},
            r"space\.policy = 'int9': unknown policy 'int9'; did you mean 'int8b'",
        ),
        ({"space": {"scheme": ["auto", "colum"]}}, r"space\.scheme = 'colum': "),
        (
            {"space": {"workload": ["gpt", "click_log"]}},
            r"space\.workload = 'click_log': optimizer=adamw takes no sparse",
        ),
        ({"space": {"gpt.heads": [2, 3]}}, r"space\.gpt\.heads = 3: "),
        ({"space": {"policy": ["int8b"], "link": [1e9]}}, "all trials of a sweep share link"),
        ({"space": {"gpt.nothing.here": [1]}}, "names no key"),
        ({"space": {"density": {"low": 0.1, "high": 0.01}}}, "make no range"),
        ({"space": {"density": {"low": 0.01, "high": 0.1}}, "search": "grid"}, "cannot enumerate"),
        ({"weights": {"speed": 1.0}}, "give a weight"),
        ({"weights": {"loss": 0.0}}, "give a weight"),
    ],
)
def test_senseless_sweeps_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(config(**changes))


def test_values_that_exclude_each_other_are_no_error_where_each_has_a_use():
    check(config(space={"policy": ["column", "int8b"], "scheme": ["auto", "column"]}))
    check(config(space={"workload": ["click_log", "gpt"], "optimizer": ["adagrad", "adamw"]}))


def test_a_wrong_value_is_exit_2_before_anything_is_started_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nobody is there to be joined
    code = run_job("sweep", SweepConfig, sweep, ["space.policy=off,int9", "--out", str(tmp_path / "runs" / "out")])
    assert code == 2
    assert "space.policy = 'int9'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_gain_inside_the_noise_of_the_reference_is_not_called_one():
    def trial(score, *paces):
        reports = [report(step, score, block_s_per_step=pace) for step, pace in enumerate(paces)]
        done = reports[-1] | {"held_out_loss": 1.0}
        return TrialLog(0, "key", {}, "", [report(0, 9.0), *reports, done], Outcome.DONE)

    weights = {"time_to_loss_s": 2.0, "loss": 1.0}
    reference = trial(1.0, 0.10, 0.11, 0.10)  # 2 ln 1.1 = 0.191
    assert "differ by 0.191: that shows no gain" in gain_text(trial(0.85, 0.1), reference, weights)
    assert (
        gain_text(trial(0.7, 0.1), reference, weights)
        == " (score 0.300 below the reference's, whose own blocks differ by 0.191)"
    )
    assert "shows no gain" not in gain_text(trial(0.85, 0.1), reference, {"loss": 1.0})
    assert "too few blocks" in gain_text(trial(0.5, 0.1), trial(1.0, 0.1), weights)
    assert "no trial was better" in gain_text(reference, reference, weights)


def test_the_ranks_of_a_trial_each_have_a_bundle_behind_that_of_its_own_process():
    assert bundles_of(config(), {"CPU": 1.0}, {"ranks": 2}) == [{}, {"CPU": 1.0}, {"CPU": 1.0}]


def test_a_space_from_the_command_line_and_off_in_yaml(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(TINY)
    loaded = load(SweepConfig, file, ["space.policy=off,int4b", "space.error_feedback=true,false", "trials=3"])
    check(loaded)
    assert loaded.space["policy"] == ["off", "int4b"]
    assert loaded.space["error_feedback"] == [True, False]
    assert reference_point(loaded) == {"policy": "off", "density": 0.01, "ranks": 1, "error_feedback": True}
    assert widest(loaded) == 2
    check(load(SweepConfig, ROOT / "jobs" / "configs" / "sweep.yaml"))


def test_a_point_is_a_training_job_with_every_setting_in_its_policy():
    point = {
        "policy": "topk",
        "scheme": "column",
        "density": 0.05,
        "error_feedback": False,
        "bucket_mib": 4,
        "ranks": 2,
    }
    settings = train_config(config().train, point)
    policy = policy_of(settings)
    assert (policy.scheme, policy.density, policy.error_feedback, policy.fixed) == ("column", 0.05, False, True)
    assert policy.codecs == (("dp_grad", ("topk",)),)
    assert (settings.bucket_mib, settings.ranks, settings.gpt.width) == (4, 2, 32)
    assert codec_facts("int4b") == {"codec": "int4b", "bits": 4, "block": 32}


def test_a_grid_leaves_out_what_makes_no_difference():
    space = {"policy": ["off", "int8b", "topk"], "density": [0.01, 0.1], "error_feedback": [True, False]}
    found = grid(config(space=space, search="grid", trials=99))
    assert found[0] == {"policy": "off", "density": 0.01, "error_feedback": True}
    named = [effective(config().train, point) for point in found]
    assert len(found) == 1 + 2 + 4
    assert {"policy": "int8b", "error_feedback": False} in named
    assert len(grid(config(space=space, search="grid", trials=3))) == 3


# --- the journal -------------------------------------------------------------------------------------------------------


def report(step, score, **more):
    return dict.fromkeys(FLOORS, 1.0) | {"step": step, "score": score, "s_per_step": 0.1} | more


def test_case_18_a_journal_goes_on_after_a_kill_also_where_it_was_moved_to(tmp_path):
    first = SweepJournal(tmp_path / "sweep.jsonl", "digest")
    done, cut = (first.begin({"policy": name}, name) for name in ("off", "int8b"))
    first.report(done, report(4, 1.0))
    first.report(done, report(8, 0.5, held_out_loss=1.0))
    first.end(done, Outcome.DONE)
    first.report(cut, report(4, 0.7))
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "sweep.jsonl"
    moved.write_bytes((tmp_path / "sweep.jsonl").read_bytes() + b'{"trial": 1, "rep')  # killed in the middle of a line

    second = SweepJournal(moved, "digest")
    assert second.goes_on
    assert second.key == first.key
    assert [trial.number for trial in second.ended()] == [0]
    again = second.begin({"policy": "int8b"}, "int8b")
    assert (again.key, again.reports, again.recorded_step) == (cut.key, [], 4)
    assert second.begin({"policy": "int8b"}, "int8b").number == 2, "the same point twice is two trials"
    second.report(again, report(8, 0.1))
    second.end(again, Outcome.STOPPED)
    third = SweepJournal(moved, "digest")
    assert [(trial.number, trial.outcome) for trial in third.trials] == [(0, "done"), (1, "stopped"), (2, None)]
    assert [entry["step"] for entry in third.trials[1].reports] == [8]
    with pytest.raises(ConfigError, match="another configuration"):
        SweepJournal(moved, "other digest")


def test_what_is_known_counts_and_what_was_cut_comes_first(tmp_path):
    settings = config(space={"policy": ["off", "int8b", "topk"]}, trials=5)
    journal = SweepJournal(tmp_path / "sweep.jsonl", "digest")
    storage = optuna.storages.InMemoryStorage()
    assert prepare_study(settings, journal, storage) == 5
    assert [t.system_attrs["fixed_params"] for t in storage.get_all_trials(0)] == [{"policy": "off"}]

    for name, score in (("off", 1.0), ("int8b", 2.0)):
        trial = journal.begin({"policy": name}, name)
        journal.report(trial, report(4, score))
        journal.end(trial, Outcome.STOPPED)
    journal.end(journal.begin({"policy": "topk"}, "topk"), Outcome.FAILED, "out of memory")
    journal.begin({"policy": "topk"}, "topk")
    for objective, values in (("composite", [[1.0], [2.0]]), ("pareto", [[1.0] * 3] * 2)):
        storage = optuna.storages.InMemoryStorage()
        changed = settings.model_copy(update={"objective": objective})
        assert prepare_study(changed, SweepJournal(journal.path, "digest"), storage) == 2
        known = storage.get_all_trials(0)
        assert [trial.state.name for trial in known] == ["COMPLETE", "COMPLETE", "FAIL", "WAITING"]
        assert [trial.values for trial in known[:2]] == values
        assert known[3].system_attrs["fixed_params"] == {"policy": "topk"}
    asha = scheduler_of(settings, journal)
    assert sorted(value for _, rung in asha._brackets[0]._rungs for value in rung.values()) == [-2.0, -1.0]
    assert set(distributions_of(settings)) == {"policy"}


def test_the_best_policy_is_a_configuration_of_jobs_train(tmp_path):
    best = TrialLog(3, "key", {"policy": "topk", "density": 0.05, "ranks": 2}, "", [report(8, -1.0)], Outcome.DONE)
    journal = SweepJournal(tmp_path / "sweep.jsonl", "digest")
    (tmp_path / "policy.yaml").write_text(policy_text(config(), best, journal))
    loaded = load(TrainConfig, tmp_path / "policy.yaml")
    assert (loaded.policy, loaded.density, loaded.ranks, loaded.baseline) == ("topk", 0.05, 2, True)
    assert loaded.gpt.width == 32


# --- eight trials on two CPUs --------------------------------------------------------------------------------------------


def client_of(folder):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def follow(job, pattern, seen):
    for line in job.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return
    raise AssertionError("".join(seen) + job.stderr.read())


def test_case_07_09_15_16_18_27_eight_trials_on_two_cpus_survive_a_stop_and_a_kill(ray_cluster, tmp_path, wait_until):
    from ray._private.state import actors
    from ray._private.state import jobs as ray_jobs
    from ray.util import placement_group, placement_group_table, remove_placement_group

    rest = placement_group([{"CPU": 6}])  # leaves two of the eight
    assert rest.wait(60)
    (tmp_path / "sweep.yaml").write_text(TINY)
    command = [sys.executable, "-m", "jobs.sweep", "--config", "sweep.yaml", "--out", "out", *QUICK]
    environment = {**os.environ, **ray_cluster, "PYTHONPATH": str(ROOT)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    jobs, num_ray_jobs = [], len(ray_jobs())

    def start():
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
        return jobs[-1]

    def statuses():
        runs = client_of(tmp_path).search_runs(["1"])
        return {int(r.data.tags["trial"]) if "trial" in r.data.tags else r.info.run_name: r.info.status for r in runs}

    def held():
        groups = {name for name, row in placement_group_table().items() if row["state"] != "REMOVED"}
        return groups | {name for name, actor in actors().items() if actor["State"] != "DEAD"}

    before = held()  # an actor of Ray's own, which a test of Ray Train leaves, lives as long as the cluster

    def leftovers():
        return held() - before

    try:
        stopped = start()
        follow(stopped, r"8 trials, 2 at a time", [])
        follow(stopped, r"^trial 1: policy", [])
        stopped.send_signal(signal.SIGTERM)
        output, errors = stopped.communicate(timeout=60)
        assert stopped.returncode == 128 + signal.SIGTERM, errors + output
        assert wait_until(lambda: not leftovers(), 60.0)
        assert statuses() == {"sweep click_log": "KILLED", 0: "KILLED", 1: "KILLED"}

        killed = start()
        follow(killed, r"^trial 2: policy", [])  # so one of the first two has ended
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=120)
        assert wait_until(lambda: not leftovers(), 120.0)

        last = start()
        output, errors = last.communicate(timeout=240)
        assert last.returncode == 0, errors + output
        assert wait_until(lambda: not leftovers(), 120.0)
    finally:
        remove_placement_group(rest)
        for job in jobs:
            if job.poll() is None:
                job.kill()
            job.communicate()

    assert len(ray_jobs()) == num_ray_jobs + 3, "one job a start"
    result = json.loads((tmp_path / "out" / "result.json").read_text())["metrics"]
    assert [trial["trial"] for trial in result["trials"]] == list(range(8))
    assert "policy=off ranks=1" in [trial["settings"] for trial in result["trials"][:2]]
    assert re.search(r"going on with .*: [12] trials have ended already", output)
    assert {trial["outcome"] for trial in result["trials"]} <= {"done", "stopped"}
    assert result["best"] in result["pareto"]
    loaded = load(TrainConfig, tmp_path / "out" / "policy.yaml")
    assert loaded.policy == result["trials"][result["best"]]["point"]["policy"]
    assert (tmp_path / "out" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out" / "tune").exists()

    client = client_of(tmp_path)
    experiment = client.get_experiment_by_name("zenray").experiment_id
    everything = client.search_runs([experiment])
    [parent] = [run for run in everything if run.info.run_name == "sweep click_log"]
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert len(children) == 8
    assert len(everything) == 9
    assert {run.info.status for run in everything} == {"FINISHED"}
    assert sorted(int(run.data.tags["trial"]) for run in children) == list(range(8))
    for run in children:
        steps = [entry.step for entry in client.get_metric_history(run.info.run_id, "loss")]
        assert steps == sorted(set(steps)), "no step is recorded twice"
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} >= {
        *("config.json", "environment.json", "trials.json", "policy.yaml", "pareto.png")
    }


def test_case_15_a_sweep_that_could_never_run_is_refused_at_its_start(ray_cluster, wait_until):
    cluster = TrainCluster("of eight CPUs", None, {"CPU": 1.0}, "PACK")
    # what an earlier test held is free only when its processes have left
    assert wait_until(lambda: max_concurrent(config(space={"ranks": [1, 2]}), cluster) == 4, 90.0)
    with pytest.raises(PlacementError, match=r"a trial with 99 ranks of {'CPU': 1\.0} can never run on this cluster"):
        max_concurrent(config(space={"ranks": [1, 99]}), cluster)
