"""Fixtures shared by all rooms: one Ray cluster for the whole session, which test files join one after the other."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import json, sys
from jobs.cluster import connect
with connect(num_cpus=8) as cluster:
    print("cluster " + json.dumps(dict(cluster.env)), flush=True)
    sys.stdin.read()
"""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a command in the background, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that passes today passes tomorrow. `make test-slow` draws new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("drawn", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("ZENRAY_TEST_EXAMPLES", "fixed"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool], float], bool]:
    """wait_until(condition, timeout_s): whether the condition came true in time."""
    return _wait


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A Ray head with 8 declared CPUs in a process of its own, with its own HOME; yields the environment to join it."""
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert head.stdin is not None
    assert head.stdout is not None
    try:
        line = next(line for line in head.stdout if line.startswith("cluster "))
        yield json.loads(line.removeprefix("cluster "))
        started = psutil.Process(head.pid).children(recursive=True)
        assert started
        head.stdin.close()
        assert head.wait(30) == 0
        _, left = psutil.wait_procs(started, timeout=5)
        assert not left
        assert not (home / ".ray").exists(), "a token was written into the home folder"
    finally:
        if head.poll() is None:
            for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
                process.kill()
            head.wait(10)


@pytest.fixture(scope="module")
def ray_cluster(ray_head: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """This process as a driver on `ray_head`; afterwards no placement group and no actor of the module is left."""
    from ray._private.state import actors
    from ray.util import placement_group_table

    from jobs.cluster import connect

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_head.items():
            patch.setenv(name, value)
        with connect():
            yield ray_head

            def leftovers() -> list[str]:
                groups = [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]
                named = [actor["Name"] for actor in actors().values() if actor["State"] != "DEAD"]
                return groups + [name for name in named if name.startswith("zenray/")]  # not those of Ray's libraries

            assert _wait(lambda: not leftovers(), 15.0), leftovers()
