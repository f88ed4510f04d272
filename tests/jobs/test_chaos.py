"""Failures drawn from seeds, their judgement, and twenty of them on real nodes: nothing lost, nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors.keeper import Phase
from jobs.chaos import PHASES, ChaosConfig, Outcome, draw, lost_steps, redone_steps, summarise
from jobs.chaos_rank import Fault, Kind

ROOT = Path(__file__).resolve().parents[2]


def test_schedules_are_repeatable_and_hold_every_kind_and_every_phase_of_a_kill() -> None:
    config = ChaosConfig()
    faults = [draw(seed, config) for seed in range(200)]
    assert faults == [draw(seed, config) for seed in range(200)]
    assert {fault.kind for fault in faults[:20]} == set(Kind)
    kills = [fault for fault in faults if fault.kind is Kind.KILL]
    assert len(kills) == 100
    assert {fault.phase for fault in kills} == set(PHASES)
    assert {fault.rank for fault in kills} == set(range(config.ranks))
    assert all(0 < fault.step < config.steps - 1 for fault in faults)
    assert all(fault.delay_s < config.heartbeat_s for fault in faults)
    only = ChaosConfig(kinds=["kill", "corrupt"])
    assert {draw(seed, only).kind for seed in range(40)} == {Kind.KILL, Kind.CORRUPT}


def test_steps_that_were_lost_or_computed_again_are_counted() -> None:
    commits = [{"epoch": 1, "start": -1}, *({"epoch": 1, "commit": step} for step in range(5))]
    assert lost_steps([*commits, {"epoch": 2, "start": 4}]) == 0
    assert lost_steps([*commits, {"epoch": 2, "start": 2}]) == 2
    applied = {0: [{"attempt": 0, "step": s} for s in (1, 2, 3)] + [{"attempt": 1, "step": s} for s in (3, 4)], 1: []}
    assert redone_steps(applied) == 1


def test_the_summary_counts_seeds_and_gives_percentiles_by_kind() -> None:
    fault = Fault(0, Kind.KILL, 0, Phase.REDUCE, 3)
    good = Outcome(fault, took_place=True, finished=True, bit_identical=True, recovery_s=1.0)
    slow = Outcome(fault, took_place=True, finished=True, recovery_s=3.0, redone_steps=1)
    summary = summarise([good, slow])
    assert (summary["finished"], summary["bit_identical"], summary["max_redone_steps"]) == (2, 1, 1)
    assert summary["kinds"][Kind.KILL] == {"n": 2, "recovery_p50_s": 2.0, "recovery_p95_s": pytest.approx(2.9)}


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("seeds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_faults_on_real_nodes_lose_nothing_and_leave_nothing(tmp_path: Path, seeds: int) -> None:
    """A job of its own, so that everything it started can be counted afterwards. The short form forks its workers."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "jobs.chaos", f"seeds={seeds}", "--out", str(tmp_path / "out")]
    command += [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"forked={str(seeds < 200).lower()}"]
    before = set(psutil.pids())
    job = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = job.communicate(timeout=400 + 15 * seeds)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(job.pid).children(recursive=True), job]:
            process.kill()
        raise
    assert job.returncode == 0, output[-3000:]
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())["metrics"]
    assert metrics["finished"] == metrics["bit_identical"] == metrics["faults_took_place"] == seeds, output[-3000:]
    assert metrics["lost_committed_steps"] == 0
    assert metrics["max_redone_steps"] <= 1
    assert set(metrics["kinds"]) == set(Kind)
    assert (tmp_path / "out" / "chaos.png").stat().st_size > 10_000
    assert not (tmp_path / ".ray").exists()
    assert not left_behind(before, str(tmp_path))


def left_behind(before: set[int], marker: str) -> list[list[str]]:
    """Command lines of processes that were not there before and carry `marker` in their environment."""
    left = []
    for pid in set(psutil.pids()) - before:
        try:
            if marker in " ".join(psutil.Process(pid).environ().values()):
                left.append(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
    return left
