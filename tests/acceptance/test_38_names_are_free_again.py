"""Row 38: an actor name is already taken. Here: a rerun right after SIGKILL of the driver works, with the same run id."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import ray, sys, time
from actors.group import WorkerGroup
ray.init(namespace="shared", log_to_driver=False)
with WorkerGroup(2, run_id="same") as group:
    print("ready", *(member.pid for member in group.members), flush=True)
    print("sum", *group.run(lambda context: context.size, timeout_s=30), flush=True)
    if sys.argv[1] == "stay":
        time.sleep(120)
"""


def test_38_a_rerun_right_after_a_kill_of_the_driver_works(
    ray_head: Mapping[str, str], wait_until: Callable[[Callable[[], bool], float], bool]
) -> None:
    env = {**os.environ, **ray_head, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER]
    first = subprocess.Popen([*command, "stay"], env=env, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    try:
        pids = next(line.split()[1:] for line in first.stdout if line.startswith("ready"))
        assert next(line for line in first.stdout if line.startswith("sum")) == "sum 2 2\n"
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait(10)
    second = subprocess.run([*command, "leave"], env=env, capture_output=True, text=True, timeout=90, check=True)
    assert "sum 2 2" in second.stdout
    begin = time.monotonic()
    assert wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids), 15), f"{time.monotonic() - begin}"
