"""MLFLOW_RUN_ID names somebody else's run: neither it nor our parent is overwritten by a child."""

from zenray.recorder import Recorder


def test_children_get_runs_of_their_own(store_uri, runs_of, monkeypatch):
    with Recorder() as recorder, recorder.job("victim", config={}, params={"lr": 1}) as job:
        victim = recorder.run_id(job)
    monkeypatch.setenv("MLFLOW_RUN_ID", victim)
    with (
        Recorder() as recorder,
        recorder.job("parent", config={}, params={"lr": 2}) as job,
        job.child("child", {"lr": 3}) as child,
    ):
        ids = {recorder.run_id(job), recorder.run_id(child)}
    assert len(ids | {victim}) == 3
    _, runs = runs_of(store_uri)
    assert {name: run.data.params["lr"] for name, run in runs.items()} == {"victim": "1", "parent": "2", "child": "3"}
