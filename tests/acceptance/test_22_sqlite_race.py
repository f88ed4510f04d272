"""Eight processes open a fresh database at the same moment: no migration fails (22), one experiment results (21)."""

import time

PROGRAM = """
import sys, time
from zenray.recorder import Recorder
import zenray.tracking, mlflow
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
with Recorder("race") as recorder, recorder.job(sys.argv[2], config={"a": 1}, params={"a": 1}) as job:
    for step in range(10):
        job.metrics({"loss": 1.0 / (step + 1)}, step)
"""


def test_eight_of_eight_succeed_in_one_experiment(tmp_path, monkeypatch, spawn, runs_of):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    start_at = time.time() + 8.0
    children = [spawn(PROGRAM, start_at, f"job {index}") for index in range(8)]
    for child in children:
        output, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
        assert errors == "", errors
        assert output == ""
    client, runs = runs_of(f"sqlite:///{tmp_path}/mlflow.db", "race")
    assert sorted(runs) == [f"job {index}" for index in range(8)]
    assert [experiment.name for experiment in client.search_experiments()].count("race") == 1
    for run in runs.values():
        assert run.info.status == "FINISHED"
        assert len(client.get_metric_history(run.info.run_id, "loss")) == 10
