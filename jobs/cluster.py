"""Real Ray clusters for jobs and tests: one on this host, or one node in each namespace of a shaped network.

`connect` is what a job calls: inside `ray job submit` (RAY_ADDRESS is set) it joins, otherwise it starts a cluster of
its own, with a token, a short temporary folder and nothing left behind. `NamespaceCluster` starts one Ray node per
namespace and runs the job again as a driver inside the first one, where `connect` joins in the same way.

What always holds: only processes started here are ended, by their ids (never `ray stop`, which aims at every Ray of the
machine); a shaped cluster has no route out, which is the one reason for its being without a token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil
import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from collectives.errors import ZenrayError
from zenray.head import check_cluster_address
from zenray.stopping import keep_handler

if TYPE_CHECKING:
    from jobs.links import ShapedBed

ROOT = Path(__file__).resolve().parents[1]
OBJECT_STORE_BYTES = 200_000_000
HEAD_PORT = 6399
LOG_LIMITS = {"RAY_ROTATION_MAX_BYTES": str(32 << 20), "RAY_ROTATION_BACKUP_COUNT": "2"}
"""For each log of a process; Ray keeps 3 GiB by default."""
STAGGER_S = 1.0
NODE_START_S = 30.0
LEAVE_S = 3.0
_POLL_S = 0.1


class ClusterError(ZenrayError):
    """A Ray cluster did not start, or did not become complete, in time."""


@dataclass(frozen=True)
class Cluster:
    """A cluster this process is connected to. `env` makes a child process join it, dashboard_url may be empty."""

    address: str
    dashboard_url: str
    env: Mapping[str, str]


@contextlib.contextmanager
def connect(
    *, num_cpus: int | None = None, dashboard: bool = False, num_nodes: int = 1, timeout_s: float = 60.0
) -> Iterator[Cluster]:
    """Join the cluster of RAY_ADDRESS, or start one on this host; disconnect, and end what was started, on leaving.

    num_cpus: CPUs that a started cluster declares (None: those of the host). num_nodes: wait until so many are alive.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    check_cluster_address(address)
    with _joined(address) if address else _started(num_cpus, dashboard) as cluster:
        wait_for_nodes(num_nodes, timeout_s=timeout_s)
        yield cluster


def wait_for_nodes(num_nodes: int, *, timeout_s: float) -> None:
    """Return when `num_nodes` nodes are alive; raises ClusterError with those that are."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        if len(alive) >= num_nodes:
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{len(alive)} of {num_nodes} Ray nodes are alive after {timeout_s:g} s ({', '.join(alive)}); "
                f"look into the logs of the others, or start fewer"
            )
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[Cluster]:
    reread_auth()
    with keep_handler():
        context = ray.init(address=address)
    try:
        yield Cluster(address, context.dashboard_url or "", {"RAY_ADDRESS": address})
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _started(num_cpus: int | None, dashboard: bool) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="zr-", dir="/tmp"))  # unix socket paths end at 107 bytes
    token = folder / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        **LOG_LIMITS,
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    with environment(settings):
        reread_auth()
        try:
            with keep_handler():
                context = ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=dashboard,
                    dashboard_host="127.0.0.1",
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder / "ray"),
                )
            address = ray.get_runtime_context().gcs_address
            auth = {name: settings[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
            yield Cluster(address, context.dashboard_url or "", {"RAY_ADDRESS": address, **auth})
        finally:
            started = _descendants(str(folder))
            ray.shutdown()
            end_processes(started)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put back what was there."""
    before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
        os.environ.update(before)


def reread_auth() -> None:
    """Ray reads its mode at import and the token at first use; let it see what the environment says now."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _descendants(marker: str) -> list[psutil.Process]:
    """Children of this process whose command line names `marker`, and all of theirs."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(marker in word for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Wait for processes that were told to leave, then terminate and at last kill them."""
    _, alive = psutil.wait_procs(processes, timeout=LEAVE_S)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(process)
        _, alive = psutil.wait_procs(alive, timeout=LEAVE_S)


class NamespaceCluster:
    """One Ray node in each of the first `num_nodes` namespaces of `bed`; a context manager.

    Node i declares `cpus_per_node` CPUs and one unit of the resource `node<i>`; `env` is added to everybody's
    environment. A node that does not come up is started
    once more, which `retried` reports, and then raises ClusterError with the end of its log.
    """

    def __init__(self, bed: ShapedBed, num_nodes: int, *, cpus_per_node: int = 2, env: Mapping[str, str] | None = None):
        self.bed, self.num_nodes, self.cpus_per_node = bed, num_nodes, cpus_per_node
        self.address = f"{bed.address(0)}:{HEAD_PORT}"
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            **(env or {}),
        }
        self.retried: list[str] = []
        """What made a node start twice, one line each; empty after a clean start."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="zr-", dir="/tmp"))
        try:
            for node in range(self.num_nodes):
                if node > 1:
                    time.sleep(STAGGER_S)
                self._start_node(node)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def drive(self, command: Sequence[str], *, timeout_s: float) -> int:
        """Run `command` as a driver inside namespace 0, with its output on ours; returns its exit code.

        It finds RAY_ADDRESS set, so `connect` joins there. Raises ClusterError at the deadline, after ending it.
        """
        driver = subprocess.Popen(
            [*self.bed.exec_prefix(0), *command],
            env={**self.env, "RAY_ADDRESS": self.address},
            start_new_session=True,
        )
        try:
            return driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"the driver did not end within {timeout_s:g} s: {' '.join(command)}") from None
        finally:
            _end_session(driver)

    def _start_node(self, node: int) -> None:
        for attempt in (1, 2):
            log = self._folder / f"node{node}-{attempt}.log"
            process = self._spawn(node, attempt, log)
            if _wait_for_line(process, log, "Ray runtime started", NODE_START_S):
                return
            _end_session(process)
            reason = "exited" if process.returncode not in (None, -signal.SIGTERM, -signal.SIGKILL) else "hung"
            tail = log.read_text(errors="replace")[-2000:]
            if attempt == 2:
                raise ClusterError(f"Ray node {node} {reason} twice at its start; the end of its log:\n{tail}")
            self.retried.append(f"Ray node {node} {reason} at its first start: {tail.strip().splitlines()[-1:]}")

    def _spawn(self, node: int, attempt: int, log: Path) -> subprocess.Popen[bytes]:
        role = ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"]
        if node > 0:
            role = [f"--address={self.address}"]
        command = [
            *self.bed.exec_prefix(node),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *role),
            f"--node-ip-address={self.bed.address(node)}",
            f"--temp-dir={self._folder}/{node}{'ab'[attempt - 1]}",
            f"--num-cpus={self.cpus_per_node}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f'--resources={{"node{node}": 1}}',
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--block",
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, env=self.env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._processes.append(process)
        return process

    def _leave(self) -> None:
        """End the nodes, workers first, then whatever else still runs in our namespaces."""
        for process in reversed(self._processes):
            _end_session(process)
        for node in range(self.num_nodes):
            for pid in _namespace_pids(self.bed.namespace(node)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait_for_line(process: subprocess.Popen[bytes], log: Path, line: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if line in log.read_text(errors="replace"):
            return True
        time.sleep(_POLL_S)
    return False


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own session: ask, wait, then kill all of its group."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LEAVE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(LEAVE_S)


def _namespace_pids(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=10, check=False)
    return [int(pid) for pid in listed.stdout.split()]
