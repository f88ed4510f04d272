"""A recoverable group on a real Ray: kills, lost memory, storage, fewer ranks and more again, and its own errors."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from actors.errors import CheckpointError, GroupStateError
from actors.journal import read_journal
from actors.keeper import Keeper, NoProbe, Phase
from actors.protection import Protection
from actors.recovery import RecoverableGroup, places
from actors.state import DataPosition, ModelState, OptimizerState, RandomState
from actors.storage import Storage
from actors.worker import WorkerContext
from collectives.replicas import digest
from placement.inventory import Seat
from placement.recovery import STAGES, Stage

STEPS = 6


@dataclass(frozen=True)
class Train:
    """STEPS steps; or, with `until_attempt`, as many as it takes until so many recoveries have happened, and two more."""

    until_attempt: int = 0
    fail_at: int | None = None

    def __call__(self, context: WorkerContext, keeper: Keeper) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        torch.manual_seed(context.rank)
        position = DataPosition()
        start = keeper.restore(
            [RandomState({}), position], [ModelState(model), OptimizerState(optimizer, model)]
        )  # fmt: skip
        step = start
        while (
            step < STEPS
            if not self.until_attempt
            else step < start + 2 or keeper.assignment.attempt < self.until_attempt
        ):
            step += 1
            keeper.reached(Phase.COMPUTE, step)
            if step == self.fail_at:
                raise ValueError("a bug of the user's")
            if self.until_attempt:
                time.sleep(0.05)
            optimizer.zero_grad()
            torch.autograd.backward([model(torch.randn(4, 8)).square().sum()])
            for parameter in model.parameters():
                assert parameter.grad is not None
                context.transport.all_reduce("gradient", parameter.grad)
            keeper.gate()
            optimizer.step()
            position.consumed += 1
            keeper.prepare(step)
        keeper.finish()
        return {"digest": digest(model.weight), "size": context.size, "consumed": position.consumed, "pid": os.getpid()}


@dataclass
class Strike(NoProbe):
    """Kill rank 1 before `step`, its holder first if `holder`."""

    step: int
    holder: bool = False

    def reached(self, phase: Phase, step: int, keeper: Keeper) -> None:
        if (phase, step, keeper.context.rank, keeper.assignment.attempt) == (Phase.COMPUTE, self.step, 1, 0):
            if self.holder:
                time.sleep(1.0)  # the step before is committed and written
                os.kill(ray.get(keeper.assignment.holders[0].actor.sit.remote(), timeout=10), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def digests(results: list[Any]) -> set[str]:
    return {result["digest"] for result in results}


def test_a_group_survives_what_memory_or_storage_allows(
    ray_cluster: Mapping[str, str], tmp_path: Path, wait_until: Callable[[Callable[[], bool], float], bool]
) -> None:
    stages: list[Stage] = []
    with RecoverableGroup(2, journal=tmp_path / "journal.jsonl", strategy="PACK", start_timeout_s=120) as group:
        undisturbed = group.run(Train(), timeout_s=60)
        assert len(digests(undisturbed)) == 1
        assert group.recoveries == []
        (event,) = group.events
        assert event.startswith("only 1 of 2 copies: 1 holders are alive")  # one host: said, not hidden
        assert [e["commit"] for e in read_journal(group.journal_path) if "commit" in e] == list(range(STEPS + 1))

        survivor = group.members[0].pid
        killed = group.run(Train(), timeout_s=60, probe=Strike(4), on_stage=stages.append)
        assert digests(killed) == digests(undisturbed)
        assert killed[0]["pid"] == survivor  # only the lost process was replaced
        (recovery,) = group.recoveries
        assert (recovery.lost_ranks, recovery.source, recovery.num_ranks) == ((1,), "memory", 2)
        assert recovery.committed_before <= recovery.step <= recovery.committed_before + 1
        once = [Stage.SEATING, Stage.JOINING, Stage.RESTORING, Stage.TRAINING]
        assert stages == [*once[1:], Stage.FENCING, Stage.SURVEYING, *once, Stage.DONE]

        group.wait_whole(timeout_s=60)
        joining = itertools.count()

        def kill_who_joins(stage: Stage) -> None:
            if stage is Stage.JOINING and next(joining) == 1:
                os.kill(group.members[1].pid, signal.SIGKILL)

        twice = group.run(Train(), timeout_s=90, probe=Strike(4), on_stage=kill_who_joins)
        assert digests(twice) == digests(undisturbed)
        assert [recovery.lost_ranks for recovery in group.recoveries] == [(1,), (1,)]
        seconds = group.recoveries[1].seconds
        assert (
            seconds[Stage.JOINING] + seconds[Stage.FENCING] < group._join_timeout_s
        )  # the survivor did not wait for it

        group.wait_whole(timeout_s=60)
        storage = Storage(tmp_path / "checkpoints", every_steps=2)
        fallen = group.run(Train(), timeout_s=60, probe=Strike(5, holder=True), storage=storage)
        assert digests(fallen) == digests(undisturbed)
        assert group.recoveries[-1].source == "storage"
        assert any("were lost with all of their holders" in e and "step 4 on storage" in e for e in group.events)

        resumed = group.run(Train(), timeout_s=60, storage=Storage(tmp_path / "checkpoints", 2, resume=True))
        assert digests(resumed) == digests(undisturbed)
        assert f"resumed at step {STEPS} from storage" in group.events

        group.wait_whole(timeout_s=60)
        with pytest.raises(CheckpointError, match=r"shard\(s\) \[.*\] of step .* no checkpoint is on storage.*copies"):
            group.run(Train(), timeout_s=60, probe=Strike(5, holder=True))
        with pytest.raises(GroupStateError):
            group.run(Train(), timeout_s=60)
        pids = [member.pid for member in group.members]
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 15)


def test_the_group_takes_every_transition_of_the_table_and_no_other(tmp_path: Path) -> None:
    group = RecoverableGroup(2, journal=tmp_path / "journal.jsonl")
    seen: list[Stage] = []
    group._on_stage = seen.append
    for before, after in itertools.product(Stage, Stage):
        group.stage = before
        if after in STAGES[before]:
            group._go(after)
            assert (group.stage, seen[-1]) == (after, after)
        else:
            with pytest.raises(GroupStateError, match=f"is {before} and cannot become {after}"):
                group._go(after)
            assert group.stage is before
    assert len(seen) == sum(len(afters) for afters in STAGES.values())


def test_an_error_of_the_function_is_raised_at_once(ray_cluster: Mapping[str, str], tmp_path: Path) -> None:
    group = RecoverableGroup(
        2,
        journal=tmp_path / "journal.jsonl",
        protection=Protection(copies=1, spares=0),
        strategy="PACK",
        start_timeout_s=120,
    )
    with group, pytest.raises(ValueError, match="a bug of the user's"):
        group.run(Train(fail_at=3), timeout_s=60)
    assert group.recoveries == []


def test_an_elastic_group_goes_on_with_fewer_ranks_and_grows_back(
    ray_cluster: Mapping[str, str], tmp_path: Path
) -> None:
    group = RecoverableGroup(
        3,
        journal=tmp_path / "journal.jsonl",
        protection=Protection(copies=1, spares=0, min_ranks=2, shrink_after_s=0.0),
        strategy="PACK",
        start_timeout_s=120,
    )
    with group:
        results = group.run(Train(until_attempt=2), timeout_s=90, probe=Strike(4))
    assert [result["size"] for result in results] == [3, 3, 3]
    assert len(digests(results)) == 1
    assert len({result["consumed"] for result in results}) == 1  # also of the rank that joined
    assert [recovery.num_ranks for recovery in group.recoveries] == [2, 3]
    assert group.recoveries[1].lost_ranks == ()
    assert group.recoveries[1].step == group.recoveries[1].committed_before  # nothing was computed again
    assert "going on with 2 of 3 ranks: no replacement came" in group.events
    assert "growing from 2 ranks: a replacement has come" in group.events
    assert group.events == [e["event"] for e in read_journal(group.journal_path) if "event" in e]


def test_ranks_keep_their_numbers_wherever_they_move() -> None:
    seats = [Seat(4, "n2", "b"), Seat(0, "n1", "a"), Seat(1, "n2", "b")]
    numbered = places(seats)
    assert [place.rank for place in numbered] == [0, 1, 2]
    assert [place.node_rank for place in numbered] == [0, 1, 0]
    assert [(place.local_rank, place.local_size) for place in numbered] == [(0, 2), (0, 1), (1, 2)]
    assert [place.seat for place in numbered] == seats
