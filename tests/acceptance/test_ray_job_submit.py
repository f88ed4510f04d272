"""A real `ray start --head`, the demo through a real `ray job submit`, and what MLflow says of jobs that ended otherwise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from zenray.recorder import Recorder
from zenray.tracking import Store

ROOT = Path(__file__).resolve().parents[2]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
DEMO = ["--config", "jobs/configs/demo.yaml", "steps=6", "warmup_steps=2", "block_steps=2", "batch=64"]
SMALL = ["stdlib_lm.rows=8192", "stdlib_lm.width=16", "stdlib_lm.negatives=128"]
RECORDED = """
from zenray.recorder import Recorder
import os, time
with Recorder() as recorder, recorder.job("{name}", config={{}}, params={{}}):
    recorder.flush(30.0)
    {body}
"""
STOPPED = RECORDED.format(name="stopped", body="time.sleep(300)")
CRASHED = RECORDED.format(name="crashed", body="raise RuntimeError('the cause')")
KILLED = RECORDED.format(name="gone", body="os.kill(os.getpid(), 9)")


def test_case_05_08_20_the_demo_as_a_ray_job_and_jobs_that_end_otherwise(
    jobs_head, store_uri, runs_of, tmp_path, wait_until
):
    head, variables = {**os.environ, **jobs_head}, {"MLFLOW_TRACKING_URI": store_uri}
    out = tmp_path / "it's a folder \u00fc"
    runtime = ["--runtime-env-json", json.dumps({"env_vars": variables}), "--working-dir", str(ROOT)]
    started = []
    Store(store_uri, "zenray").open()

    def submit(name, *entrypoint):
        command = [*RAY, "job", "submit", "--submission-id", name, *runtime, "--", *entrypoint]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=head, cwd=tmp_path, **pipes))
        return started[-1]

    def status(name):
        done = subprocess.run([*RAY, "job", "status", name], env=head, capture_output=True, text=True, timeout=60)
        return re.search(r"Job '\w+' (succeeded|failed|was stopped)", done.stdout + done.stderr)[1]

    def status_of_run(name):
        run = runs_of(store_uri)[1].get(name)
        return run and run.info.status

    try:
        demo = submit("demo", "python", "-m", "jobs.train", *DEMO, *SMALL, "--out", str(out))
        stopped = submit("stopped", "python", "-c", STOPPED)
        crashed = submit("crashed", "python", "-c", CRASHED)
        gone = submit("gone", "python", "-c", KILLED)
        if not wait_until(lambda: status_of_run("stopped") == "RUNNING" or stopped.poll() is not None, 120.0):
            stopped.kill()
        assert status_of_run("stopped") == "RUNNING", stopped.communicate()[0]
        subprocess.run([*RAY, "job", "stop", "--no-wait", "stopped"], env=head, check=True, timeout=60)
        assert wait_until(lambda: status_of_run("stopped") == "KILLED", 90.0)
        outputs = {job: job.communicate(timeout=200)[0] for job in (demo, stopped, crashed, gone)}
    finally:
        for job in started:
            if job.poll() is None:
                job.kill()
                job.communicate()

    assert demo.returncode == 0, outputs[demo]
    assert "links are not shaped" in outputs[demo]
    assert "times as fast as ddp_dense" in outputs[demo]
    assert "Job 'demo' succeeded" in outputs[demo]
    assert (out / "result.json").exists()
    assert crashed.returncode == 1, outputs[crashed]
    assert gone.returncode == 1, outputs[gone]
    assert stopped.returncode == 0, "why zenray submit exists: plain Ray calls a stopped job a success"
    assert [status(name) for name in ("demo", "stopped", "crashed")] == ["succeeded", "was stopped", "failed"]

    with Recorder() as recorder, recorder.job("next start", config={}, params={}):
        pass
    client, runs = runs_of(store_uri)
    assert {name: run.info.status for name, run in runs.items()} == {
        **dict.fromkeys(("train stdlib_lm", "zenray", "ddp_dense", "ddp_sparse", "next start"), "FINISHED"),
        **{"stopped": "KILLED", "crashed": "FAILED", "gone": "FAILED"},
    }
    assert runs["crashed"].data.tags["zenray.ending"] == "RuntimeError: the cause"
    parent = runs["train stdlib_lm"]
    assert parent.data.metrics["speedup"] > 0
    assert {"loss.png", "bytes.png", "time.png"} <= {item.path for item in client.list_artifacts(parent.info.run_id)}
    for name in ("zenray", "ddp_dense"):
        assert runs[name].data.tags["mlflow.parentRunId"] == parent.info.run_id
