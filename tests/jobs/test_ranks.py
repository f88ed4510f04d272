"""The launcher of rank processes: results by rank, the cause of a failure, and no process left behind."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.errors import ConfigError
from collectives.torch_transport import TorchTransport
from jobs.ranks import RankFailed, RankProcesses, load_target, run_ranks

HERE = str(Path(__file__))


def describe(transport: TorchTransport, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": transport.rank,
        "size": transport.size,
        "threads": torch.get_num_threads(),
        "config": config,
        "env": os.environ.get("ZENRAY_TEST"),
    }


def fail_or_follow(transport: TorchTransport, config: dict[str, Any]) -> None:
    if transport.rank == 1:
        raise ValueError("the cause")
    transport.all_reduce("dense", torch.ones(10))


def sleep(transport: TorchTransport, config: dict[str, Any]) -> None:
    Path(config["folder"], f"{transport.rank}").touch()
    time.sleep(100)


def test_results_come_by_rank() -> None:
    results = run_ranks(2, f"{HERE}:describe", {"rate": 0.5}, timeout_s=60, env={"ZENRAY_TEST": "yes"})
    expected = {"size": 2, "threads": 1, "config": {"rate": 0.5}, "env": "yes"}
    assert results == [{"rank": 0} | expected, {"rank": 1} | expected]


def test_the_first_failure_is_the_one_reported() -> None:
    """Rank 0 fails as well, on account of rank 1."""
    with RankProcesses(2, f"{HERE}:fail_or_follow", {}, timeout_s=60) as ranks:
        with pytest.raises(RankFailed, match="ValueError: the cause") as caught:
            ranks.wait()
        pids = [ranks.pid(rank) for rank in range(2)]
    assert (caught.value.rank, caught.value.num_ranks) == (1, 2)
    assert not any(is_running(pid) for pid in pids)


def test_killed_ranks_and_late_ranks_are_told_apart_and_none_stays(tmp_path: Path) -> None:
    with RankProcesses(2, f"{HERE}:sleep", {"folder": str(tmp_path)}, timeout_s=60) as ranks:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        pids = [ranks.pid(rank) for rank in range(2)]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was ended by SIGKILL"):
            ranks.wait()
        os.kill(pids[0], signal.SIGSTOP)
        ranks.deadline = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank 0 of 2 .* did not finish within 60 s"):
            ranks.wait([0])
        folder = ranks.folder
    assert not any(is_running(pid) for pid in pids)
    assert not folder.exists()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("target", ["jobs.ranks", "jobs.ranks:nothing", f"{HERE}:HERE"])
def test_targets_that_name_no_function_are_refused(target: str) -> None:
    with pytest.raises(ConfigError):
        load_target(target)
