"""Helpers for the tracking cases: a store that is initialised once, programs that end in many ways, a real server."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
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
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
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


@pytest.fixture(scope="session")
def jobs_head(tmp_path_factory):
    """A real `ray start --head` with a dashboard, 2 CPUs and a token; yields the environment that reaches it."""
    folder = Path(tempfile.mkdtemp(prefix="zr-", dir="/tmp"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text("5" * 64)
    dashboard, agent, client = (str(port) for port in free_ports(3))
    settings = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path_factory.mktemp("home")), "MLFLOW_DISABLE_TELEMETRY": "true",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": "", "RAY_ROTATION_MAX_BYTES": "1000000", "RAY_ROTATION_BACKUP_COUNT": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}/ray", "--num-cpus=2"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
    command += ["--object-store-memory=200000000", "--disable-usage-stats"]
    environment = {**os.environ, **settings}
    environment.pop("RAY_ADDRESS", None)
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{dashboard}"
    try:
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in (folder / "head.log").read_text() or not _answers(f"{address}/api/version"):
            assert head.poll() is None, (folder / "head.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "head.log").read_text()[-3000:]
            time.sleep(0.2)
        yield {**settings, "RAY_ADDRESS": address}
    finally:
        started = [head, *psutil.Process(head.pid).children(recursive=True)]
        head.terminate()
        _, alive = psutil.wait_procs([psutil.Process(p.pid) for p in started if psutil.pid_exists(p.pid)], timeout=8)
        for process in alive:
            process.kill()
        head.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(url):
    """Whether a server is there, also one that asks for a token."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return True


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def jobs_client(jobs_head, monkeypatch):
    """A JobSubmissionClient of `jobs_head`, as `zenray submit` makes it; this process has its token meanwhile."""
    from jobs.cluster import reread_auth
    from zenray.head import connect_head

    for name, value in jobs_head.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("zenray.submission.POLL_S", 0.2)
    reread_auth()
    yield connect_head(None)
    monkeypatch.undo()
    reread_auth()
