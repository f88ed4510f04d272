"""Sixteen trials of two programs write to one sqlite file: no error, no metric lost."""

PROGRAM = """
import sys, threading
from zenray.recorder import Recorder
def trial(job, index):
    with job.child(f"{sys.argv[1]}.{index}") as run:
        for step in range(200):
            run.metrics({"loss": float(step), "accuracy": 1.0}, step)
with Recorder() as recorder, recorder.job(sys.argv[1], config={}, params={}) as job:
    threads = [threading.Thread(target=trial, args=(job, index)) for index in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_no_metric_is_lost(store_uri, spawn, runs_of):
    children = [spawn(PROGRAM, f"sweep{index}") for index in range(2)]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert (child.returncode, errors) == (0, "")
    client, runs = runs_of(store_uri)
    assert len(runs) == 2 + 16
    for name, run in runs.items():
        assert run.info.status == "FINISHED"
        if "." in name:
            history = client.get_metric_history(run.info.run_id, "loss")
            assert sorted((m.step, m.value) for m in history) == [(step, float(step)) for step in range(200)]
