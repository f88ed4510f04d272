"""Several Ray nodes on this host that can be added and removed while a job runs: for failure tests.

Placement and failures are real; the network is the loopback device. With a token, a short temporary folder, and nothing
left behind.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from jobs.cluster import OBJECT_STORE_BYTES, ClusterError, end_processes, environment, reread_auth, wait_for_nodes
from placement.inventory import FAKE_LABEL, FAKE_RESOURCE

START_S = 120.0


@dataclass
class Nodes:
    """A running cluster of this host; the first node holds the head and the driver, and is never removed."""

    cluster: Any
    cpus_per_node: int
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

    def _add(self, **options: Any) -> str:
        node = self.cluster.add_node(
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **options,
        )
        self.by_id[node.node_id] = node
        return str(node.node_id)

    def remove(self, node_id: str) -> None:
        """End a node as a power cut would, without a farewell."""
        self.cluster.remove_node(self.by_id.pop(node_id), allow_graceful=False)


@contextlib.contextmanager
def local_nodes(num_nodes: int, *, cpus_per_node: int = 1) -> Iterator[Nodes]:
    """A head without CPUs and `num_nodes` nodes with `cpus_per_node` each, this process connected as driver."""
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
    with environment(settings):
        reread_auth()
        cluster: Any = None
        try:
            cluster = _start_head(folder, before)
            ray.init(address=cluster.address, log_to_driver=False)
            nodes = Nodes(cluster, cpus_per_node)
            for _ in range(num_nodes):
                nodes.add()
            wait_for_nodes(num_nodes + 1, timeout_s=START_S)
            yield nodes
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            _end_started(before)
            shutil.rmtree(folder, ignore_errors=True)


def _start_head(folder: Path, before: set[int]) -> Any:
    """The head, without CPUs; a second time where it did not come up on a busy machine."""
    for attempt in (1, 2):
        arguments = {
            "num_cpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": str(folder / f"ray{attempt}"),
        }
        try:
            return RayCluster(initialize_head=True, head_node_args=arguments)  # type: ignore[no-untyped-call]
        except Exception as error:  # Ray raises a bare one
            _end_started(before)
            if attempt == 2:
                raise ClusterError(f"the Ray head did not come up in two attempts: {error}") from error


def _end_started(before: set[int]) -> None:
    end_processes([p for p in psutil.Process().children(recursive=True) if p.pid not in before])
