"""Helpers for the tracking cases: a store that is initialised once, programs that end in many ways, a real server."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

PATIENCE = 3.0
"""A test grants this many times the seconds that a user is promised; the machine may be loaded."""


@pytest.fixture(scope="session")
def _initialised_store(tmp_path_factory):
    """One sqlite file with all migrations done; each test copies it (a second instead of three)."""
    from zenray.tracking import Store

    folder = tmp_path_factory.mktemp("store")
    Store(f"sqlite:///{folder}/mlflow.db", "template").open()
    return folder / "mlflow.db"


@pytest.fixture
def store_uri(_initialised_store, tmp_path, monkeypatch):
    """A private, initialised sqlite store in the current directory of the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(_initialised_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def runs_of():
    """runs_of(uri, project) -> {run name: MLflow run}, and the client that read them."""

    def read(uri, project="zenray"):
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(project)
        return client, {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}

    return read


@pytest.fixture
def spawn(tmp_path):
    """spawn(source, *arguments) -> Popen of a Python program in the test's folder; all are ended afterwards, by pid."""
    children: list[subprocess.Popen[str]] = []

    def start(source, *arguments, **environment):
        child = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture
def tracking_server(tmp_path):
    """start() -> (address, stop): a real `mlflow server` on one port and one sqlite file, as often as wanted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    servers: list[subprocess.Popen[bytes]] = []

    def stop():
        server = servers[-1]
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)  # its own session: the server and its worker
        server.wait()

    def start():
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
        command += ["--artifacts-destination", str(tmp_path / "artifacts")]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (tmp_path / "server.log").open("ab") as log:
            servers.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    return f"http://127.0.0.1:{port}", stop
            except OSError:
                assert servers[-1].poll() is None, (tmp_path / "server.log").read_text()[-2000:]
                time.sleep(0.2)
        raise AssertionError("the server did not come up in 90 s")

    yield start
    if servers:
        stop()
