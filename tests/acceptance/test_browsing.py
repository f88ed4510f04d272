"""The record in a real browser: MLflow's own pages from a real server, and the page of `zenray report`.

Screenshots go to $ZENRAY_ARTIFACTS, or to the test's folder.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zenray.comparison import TrainingLog
from zenray.environment import NodeLoad
from zenray.plots import plot_bytes, plot_losses, plot_time
from zenray.recorder import Recorder
from zenray.report import write_report
from zenray.tracking import TrackingError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 60_000
OWN_404 = "users/current"
"""MLflow's pages ask a server without logins who is logged in, and log that it does not know."""

EVIL = "<script>document.title='taken over'</script>"


def fill(uri, folder):
    """One finished job with two variants, as `jobs.train` records it; returns its run id."""
    log = TrainingLog(["zenray", "ddp_dense"])
    for variant, speed, sent in (("zenray", 0.1, 1_000_000), ("ddp_dense", 0.5, 57_000_000)):
        for first in range(0, 30, 10):
            losses = [5.0 / (1 + 0.1 * step) for step in range(first, first + 10)]
            block = {"variant": variant, "first_step": first, "warmup": first == 0, "wire_bytes": None}
            timed = {"losses": losses, "step_s": [speed] * 10, "block_s": 10 * speed}
            log.take(0, {"kind": "block", **block, **timed})
            log.take(0, {"kind": "traffic", **block, "sent_bytes": {"push": 10 * sent}, "num_steps": 10})
    figures = [folder / name for name in ("loss.png", "bytes.png", "time.png")]
    plot_losses(log, figures[0])
    plot_bytes(log, figures[1])
    plot_time({"zenray": 0.1, "ddp_dense": 0.5}, [("embed.weight", "column", 20.0, 18.0)], figures[2])
    with (
        Recorder("zenray", uri, folder / "spool") as recorder,
        recorder.job("train stdlib_lm", config={"lr": 0.05, "note": EVIL}, params={"ranks": 2, "lr": 0.05}) as job,
    ):
        for variant in log.variants:
            with job.child(variant, {"variant": variant, "sparse": variant == "zenray"}) as child:
                for step, loss in enumerate(log.losses(variant)):
                    child.metrics({"loss": loss}, step)
                child.metrics({"steps_per_s": log.steps_per_s(variant), "dp_grad/ratio": 2.0}, 30)
        comparison = log.compare("zenray", "ddp_dense")
        job.metrics({name: getattr(comparison, name) for name in ("speedup", "bytes_ratio", "loss_gap")})
        load = NodeLoad()
        for beat in range(5):
            time.sleep(0.1)
            job.metrics(load.figures(), beat)
        job.document("schemes.json", [{"tensor": "embed.weight", "scheme": "column", "reason": EVIL}])
        for figure in figures:
            job.file(figure)
        return recorder.run_id(job)


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the development extra")
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """open_page() -> (page, complaints, shoot): what the console and the network complained about, and a camera."""
    shots = Path(os.environ.get("ZENRAY_ARTIFACTS", tmp_path)) / "screenshots"
    shots.mkdir(parents=True, exist_ok=True)

    def make():
        page = browser.new_page(viewport={"width": 1500, "height": 950})
        page.set_default_timeout(PATIENCE_MS)
        complaints = []

        def on_console(message):
            if message.type == "error" and OWN_404 not in message.location.get("url", ""):
                complaints.append(message.text)

        page.on("console", on_console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url) if not request.failure else None)
        return page, complaints, lambda name: page.screenshot(path=shots / f"{name}.png", full_page=True)

    return make


def test_mlflow_pages_show_runs_their_comparison_and_pictures(tmp_path, monkeypatch, tracking_server, open_page):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    address, _ = tracking_server()
    run_id = fill(address, tmp_path)
    client = MlflowClient(address)
    experiment = client.get_run(run_id).info.experiment_id
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")
    page, complaints, shoot = open_page()

    page.goto(f"{address}/#/experiments/{experiment}/runs")
    page.get_by_role("link", name="train stdlib_lm").first.wait_for()
    shoot("mlflow-runs")

    ids = json.dumps([child.info.run_id for child in children])
    page.goto(f'{address}/#/compare-runs?runs={ids}&experiments=["{experiment}"]')
    page.get_by_text("Comparing 2 Runs from 1 Experiment").first.wait_for()
    for text in ("zenray", "ddp_dense", "steps_per_s"):
        page.get_by_text(text, exact=True).first.wait_for()
    page.locator(".js-plotly-plot").first.wait_for()
    shoot("mlflow-compare")

    page.goto(f"{address}/#/experiments/{experiment}/runs/{run_id}/artifacts/loss.png")
    page.wait_for_function("[...document.images].some(image => image.naturalWidth > 1000)")
    shoot("mlflow-artifact")

    page.goto(f"{address}/#/experiments/{experiment}/runs/{run_id}/system-metrics")
    page.get_by_text(re.compile("cpu_utilization_percentage")).first.wait_for()
    shoot("mlflow-system-metrics")
    assert not complaints


def test_the_report_is_one_page_that_asks_for_nothing(store_uri, tmp_path, open_page):
    fill(store_uri, tmp_path)
    command = [sys.executable, "-m", "zenray", "report", "train stdlib_lm", "--out", "report.html"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "report: report.html\n"), done.stderr
    (tmp_path / "mlartifacts").rename(tmp_path / "gone")

    page, complaints, shoot = open_page()
    requests = []
    page.on("request", lambda request: requests.append(request.url.partition(":")[0]))
    page.goto((tmp_path / "report.html").as_uri())
    shoot("report")
    assert requests == ["file"]
    assert not complaints
    assert page.title() == "train stdlib_lm", "what was recorded is text, never markup"
    assert page.evaluate("[...document.images].map(image => image.naturalWidth > 500)") == [True] * 4
    text = page.inner_text("body")
    for wanted in ("5.00x", "57.0x", "FINISHED", "embed.weight", "ddp_dense", EVIL):
        assert wanted in text
    page.get_by_text("Environment").click()
    assert '"packages"' in page.inner_text("body")


def test_a_run_that_is_not_there_is_answered_with_the_nearest(store_uri, tmp_path):
    run_id = fill(store_uri, tmp_path)
    with pytest.raises(TrackingError, match="There is: train stdlib_lm"):
        write_report("train stdlib", None, store_uri)
    with pytest.raises(TrackingError, match="no run has the id"):
        write_report("0" * 32, None, store_uri)
    assert write_report(run_id, None, store_uri) == Path("runs", f"report-{run_id[:8]}.html")


def test_the_load_of_the_node_is_recorded_while_a_job_runs(store_uri, runs_of, monkeypatch):
    monkeypatch.setattr("zenray.recorder.HEARTBEAT_S", 0.2)
    with Recorder() as recorder, recorder.job("job", config={}, params={}) as job, job.child("child"):
        time.sleep(2.0)
    client, runs = runs_of(store_uri)
    names = [name for name in runs["job"].data.metrics if name.startswith(f"system/{socket.gethostname()}/")]
    assert {name.rpartition("/")[2] for name in names} >= {"cpu_utilization_percentage", "network_receive_megabytes"}
    values = [entry.value for entry in client.get_metric_history(runs["job"].info.run_id, names[0])]
    assert len(values) >= 2
    assert not any(name.startswith("system/") for name in runs["child"].data.metrics)
