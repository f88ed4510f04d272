"""Every way to leave a job ends its run, and its variants' runs, with the right status."""

import signal
import time
from contextlib import suppress

import pytest

from zenray.recorder import Recorder, owner_is_gone

PROGRAM = """
import sys, time
from zenray.recorder import Recorder
with Recorder() as recorder, recorder.job(sys.argv[1], config={}, params={}) as job, job.child(sys.argv[1] + " child"):
    recorder.flush(30.0)
    print("ready", flush=True)
    time.sleep(120)
"""

SIGNALS = {
    "SIGTERM": ("KILLED", 143),
    "SIGINT": ("KILLED", -signal.SIGINT),
    "SIGKILL": ("RUNNING", -signal.SIGKILL),
}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(None), "FINISHED"),
        (SystemExit(3), "FAILED"),
        (SystemExit("a message"), "FAILED"),
        (ValueError("the cause"), "FAILED"),
        (SystemExit(15), "KILLED"),  # how Ray's own SIGTERM handler leaves
        (KeyboardInterrupt(), "KILLED"),
    ],
    ids=repr,
)
def test_leaving_the_block(store_uri, runs_of, error, status):
    with suppress(BaseException if error is not None else ()), Recorder() as recorder:  # noqa: SIM117
        with recorder.job("job", config={}, params={}) as job, job.child("child"):
            if error is not None:
                raise error
    _, runs = runs_of(store_uri)
    assert [run.info.status for run in runs.values()] == [status, status]
    if isinstance(error, ValueError):
        assert runs["child"].data.tags["zenray.ending"] == "ValueError: the cause"


def test_signals(store_uri, runs_of, spawn):
    children = {how: spawn(PROGRAM, how) for how in SIGNALS}
    for child in children.values():
        assert child.stdout.readline() == "ready\n", child.communicate()
    for how, child in children.items():
        child.send_signal(getattr(signal, how))
        deadline = time.monotonic() + 90.0  # two seconds on a quiet machine
        while (status := runs_of(store_uri)[1][how].info.status) == "RUNNING" != SIGNALS[how][0]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert status == SIGNALS[how][0]
    for how, child in children.items():
        child.wait(timeout=90)
        assert child.returncode == SIGNALS[how][1], (how, child.communicate())
    client, runs = runs_of(store_uri)
    for how, (status, _) in SIGNALS.items():
        assert runs[f"{how} child"].info.status == status, how

    with Recorder() as recorder, recorder.job("next start", config={}, params={}):
        pass
    for name in ("SIGKILL", "SIGKILL child"):
        run = client.get_run(runs[name].info.run_id)
        assert run.info.status == "FAILED"
        assert "process is gone" in run.data.tags["zenray.ending"]
    assert client.get_run(runs["SIGTERM"].info.run_id).info.status == "KILLED"


def test_a_living_run_of_another_process_stays_running(store_uri, runs_of, spawn):
    child = spawn(PROGRAM, "alive")
    assert child.stdout.readline() == "ready\n"
    with Recorder() as recorder, recorder.job("next start", config={}, params={}):
        pass
    assert runs_of(store_uri)[1]["alive"].info.status == "RUNNING"


@pytest.mark.parametrize(("age_s", "gone"), [(10.0, False), (120.0, True)])
def test_another_host_is_judged_by_its_heartbeat(age_s, gone):
    assert owner_is_gone("another-host:1:0.0", 1000.0, 1000.0 + age_s) is gone
