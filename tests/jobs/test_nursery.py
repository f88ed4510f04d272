"""Workers that are forked rather than started: processes of their own, which die alone and leave nothing."""

import os
import signal
import time

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from jobs.nodes import local_nodes


class Fork:
    """An actor that says what process it is."""

    def facts(self) -> tuple[int, int, float, bool]:
        import sys

        return os.getpid(), os.getppid(), float(np.random.random()), "torch" in sys.modules


@pytest.mark.timeout(180)
def test_forked_workers_are_processes_of_their_own_with_the_imports_of_one() -> None:
    before = set(psutil.pids())
    with local_nodes(1, cpus_per_node=2, forked=("torch", "numpy")):
        actors = [ray.remote(num_cpus=1, max_restarts=0)(Fork).remote() for _ in range(2)]
        facts = ray.get([actor.facts.remote() for actor in actors], timeout=60.0)
        (first, parent, number, has_torch), (second, other_parent, other_number, _) = facts
        assert first != second
        assert parent == other_parent  # the process that imported
        assert "serve" in psutil.Process(parent).cmdline()
        assert has_torch
        assert number != other_number
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RayActorError):
            ray.get(actors[0].facts.remote(), timeout=30.0)
        assert ray.get(actors[1].facts.remote(), timeout=30.0)[0] == second
    deadline = time.monotonic() + 10.0
    while any(psutil.pid_exists(pid) for pid in (first, second, parent)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not {first, second, parent} & set(psutil.pids())
    assert {first, second, parent}.isdisjoint(before)
