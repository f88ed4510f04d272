"""Ray clusters of our own: a token, loopback, nothing left behind; and one node per namespace of a shaped network."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from collectives.errors import ConfigError
from jobs.cluster import ClusterError, NamespaceCluster, connect, wait_for_nodes
from jobs.links import ShapedBed, unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
LOCAL = """
import json, os, psutil, sys
from jobs.cluster import connect
with connect(num_cpus=2, dashboard=True) as cluster:
    children = [p.pid for p in psutil.Process().children(recursive=True)]
    print("up " + json.dumps({**cluster.env, "url": cluster.dashboard_url, "pids": children}), flush=True)
    sys.stdin.read()
print("mode", os.environ.get("RAY_AUTH_MODE"), flush=True)
"""
DRIVER = """
import sys
from actors.group import WorkerGroup
from jobs.cluster import connect

def total(context):
    import torch
    data = torch.ones(4)
    context.transport.all_reduce("sum", data)
    context.report({"rank": context.rank})
    return context.node, context.node_rank, float(data[0])

if __name__ == "__main__":
    with connect(num_nodes=2) as cluster, WorkerGroup(2, strategy="STRICT_SPREAD") as group:
        results = group.run(total, timeout_s=60)
        open(sys.argv[1], "w").write(repr(results))
    sys.exit(7)
"""


def status(url: str, token: str | None) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_cluster_of_our_own_is_locked_and_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", LOCAL], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        facts = json.loads(next(line for line in process.stdout if line.startswith("up ")).removeprefix("up "))
        token_path = Path(facts["RAY_AUTH_TOKEN_PATH"])
        assert token_path.stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / ".ray").exists()
        assert re.fullmatch(r"127\.0\.0\.1:\d+", facts["url"])
        jobs_api = f"http://{facts['url']}/api/jobs/"
        assert status(jobs_api, None) == 401
        assert status(jobs_api, "0" * 64) in (401, 403)
        assert status(jobs_api, token_path.read_text()) == 200
        process.stdin.close()
        assert process.wait(60) == 0
        assert "mode None" in process.stdout.read()
        left = [pid for pid in facts["pids"] if psutil.pid_exists(pid)]
        assert left == []
        assert not token_path.parent.exists()
    finally:
        if process.poll() is None:
            for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                child.kill()
            process.wait(10)


def test_ray_client_is_refused_with_the_line_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="ray job submit --working-dir"), connect():
        pass


def test_a_cluster_that_stays_too_small_is_an_error(ray_cluster: Mapping[str, str]) -> None:
    wait_for_nodes(1, timeout_s=1)
    with pytest.raises(ClusterError, match="1 of 3 Ray nodes are alive"):
        wait_for_nodes(3, timeout_s=0.2)


@pytest.mark.network
@pytest.mark.skipif(unavailable_reason() is not None, reason=f"no shaped links: {unavailable_reason()}")
def test_one_ray_node_a_namespace_and_a_driver_in_the_first(tmp_path: Path) -> None:
    script, answer = tmp_path / "driver.py", tmp_path / "answer"
    script.write_text(DRIVER)
    with ShapedBed(2, 1e9) as bed:
        with NamespaceCluster(bed, 2) as cluster:
            folder = cluster._folder
            assert cluster.drive([sys.executable, str(script), str(answer)], timeout_s=120) == 7
            assert answer.read_text() == "[('10.77.0.1', 0, 2.0), ('10.77.0.2', 1, 2.0)]"
            with pytest.raises(ClusterError, match="did not end within 1 s"):
                cluster.drive(["sleep", "60"], timeout_s=1)
        for node in range(2):
            pids = subprocess.run(["ip", "netns", "pids", bed.namespace(node)], capture_output=True, check=True).stdout
            assert pids == b""
        assert not folder.exists()
