"""Several Ray nodes on this host that can be added and removed while a job runs: for failure tests.

Placement and failures are real; the network is the loopback device. With a token, a short temporary folder, and nothing
left behind.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from jobs import nursery
from jobs.cluster import OBJECT_STORE_BYTES, ClusterError, end_processes, environment, reread_auth, wait_for_nodes
from placement.inventory import FAKE_LABEL, FAKE_RESOURCE

START_S = 120.0
_POLL_S = 0.02


@dataclass
class Nodes:
    """A running cluster of this host; the first node holds the head and the driver, and is never removed."""

    cluster: Any
    cpus_per_node: int
    worker_options: dict[str, Any] = field(default_factory=dict)
    """How Ray starts workers, where not as usual."""
    by_id: dict[str, Any] = field(default_factory=dict)
    """Ray node id -> node, of the nodes that may be removed."""

    def add(self) -> str:
        """Start one more node; returns its id."""
        return self._add(num_cpus=self.cpus_per_node)

    def add_fake_gpus(self, num_gpus: int, memory_mib: int) -> str:
        """Start a node with pretended cards of `memory_mib` each, a CPU for each and one more; returns its id.

        Workers enforce the memory, see `actors.monitor.FakeCard`.
        """
        return self._add(
            num_cpus=num_gpus + 1, resources={FAKE_RESOURCE: num_gpus}, labels={FAKE_LABEL: str(memory_mib)}
        )

    def add_without_waiting(self) -> str:
        """As `add`; the node may not be alive yet."""
        return self._add(num_cpus=self.cpus_per_node, wait=False)

    def _add(self, **options: Any) -> str:
        node = self.cluster.add_node(
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **self.worker_options,
            **options,
        )
        self.by_id[node.node_id] = node
        return str(node.node_id)

    def remove(self, node_id: str) -> None:
        """End a node as a power cut would, without a farewell."""
        self.cluster.remove_node(self.by_id.pop(node_id), allow_graceful=False)


@contextlib.contextmanager
def local_nodes(num_nodes: int, *, cpus_per_node: int = 1, forked: Sequence[str] = ()) -> Iterator[Nodes]:
    """A head without CPUs and `num_nodes` nodes with `cpus_per_node` each, this process connected as driver.

    forked: modules that `jobs.nursery` imports once for all workers; Ray's autoscaler and its monitor of logs are left out
    then, too. None: each worker starts as Ray starts it, on a cluster as Ray ships it.
    """
    folder = Path(tempfile.mkdtemp(prefix="zr-", dir="/tmp"))
    token = folder / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    (folder / "ray").mkdir()
    settings = {
        "RAY_TMPDIR": str(folder),  # else the head writes its address where other clusters' drivers look for theirs
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with environment(settings), contextlib.ExitStack() as stack:
        reread_auth()
        cluster: Any = None
        try:
            worker_options = stack.enter_context(_nursery(folder, forked)) if forked else {}
            cluster = _start_head(folder, {"include_log_monitor": False, "no_monitor": True} if forked else {})
            ray.init(address=cluster.address, log_to_driver=False)
            nodes = Nodes(cluster, cpus_per_node, worker_options)
            for _ in range(num_nodes):
                nodes.add_without_waiting()
            wait_for_nodes(num_nodes + 1, timeout_s=START_S)
            yield nodes
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            started = _started_since(before)
            stack.close()
            end_processes(started)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _nursery(folder: Path, modules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What makes Ray start workers there. It ends with this process, and listens before it imports."""
    path, log = folder / "nursery", folder / "nursery.log"
    command = [sys.executable, "-m", nursery.__name__, "serve", str(path), *modules]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output) as process,
        environment({nursery.ADDRESS: str(path)}),
    ):
        try:
            deadline = time.monotonic() + START_S
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ClusterError(f"the process that forks workers did not start: {log.read_text()}")
                time.sleep(_POLL_S)
            yield {"worker_path": nursery.__file__}
        finally:
            process.kill()


def _start_head(folder: Path, options: Mapping[str, Any]) -> Any:
    """The head, without CPUs; a second time where it did not come up on a busy machine."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    for attempt in (1, 2):
        arguments = {
            "num_cpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": str(folder / f"ray{attempt}"),
            **options,
        }
        try:
            return RayCluster(initialize_head=True, head_node_args=arguments)  # type: ignore[no-untyped-call]
        except Exception as error:  # Ray raises a bare one
            end_processes(_started_since(before))
            if attempt == 2:
                raise ClusterError(f"the Ray head did not come up in two attempts: {error}") from error


def _started_since(before: set[int]) -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
