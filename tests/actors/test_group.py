"""The worker group: its state machine, which failure is raised, and real workers that leave nothing behind."""

import itertools
import os
from collections.abc import Callable, Mapping

import psutil
import pytest
import ray
from ray.util import placement_group_table

from actors.errors import GroupStateError, WorkerError, WorkerLost
from actors.group import TRANSITIONS, Failure, GroupState, WorkerGroup, root_cause
from actors.worker import Report, WorkerContext
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost
from placement.errors import PlacementError

LOST = WorkerLost(rank=2, epoch=1, node="n", pid=1, cause="killed.")


def timeout(rank: int, *missing: int) -> CollectiveTimeout:
    return CollectiveTimeout(rank=rank, phase="p", missing=missing, expected_bytes=1, timeout_s=1)


@pytest.mark.parametrize(("before", "after"), itertools.product(GroupState, GroupState))
def test_only_the_listed_transitions_are_possible(before: GroupState, after: GroupState) -> None:
    group = WorkerGroup(1)
    group.state = before
    if after in TRANSITIONS[before]:
        group._enter(after)
        assert group.state is after
    else:
        with pytest.raises(GroupStateError, match=f"is {before} and cannot become {after}"):
            group._enter(after)


def test_every_state_is_reachable_and_all_but_closed_can_be_left() -> None:
    assert set(TRANSITIONS) == set(GroupState)
    assert {state for targets in TRANSITIONS.values() for state in targets} == set(GroupState) - {GroupState.NEW}
    assert [state for state in GroupState if not TRANSITIONS[state]] == [GroupState.CLOSED]


def test_a_group_that_never_started_closes_and_refuses_to_run() -> None:
    group = WorkerGroup(2)
    with pytest.raises(GroupStateError):
        group.run(lambda context: None, timeout_s=1)
    with pytest.raises(GroupStateError, match="cannot be restarted"):
        group.restart()
    group.shutdown()
    group.shutdown()
    assert group.state is GroupState.CLOSED


def test_without_ray_a_start_says_what_to_do_and_starts_no_cluster() -> None:
    if ray.is_initialized():
        pytest.skip("another test of this process is connected")
    with pytest.raises(PlacementError, match=r"call ray.init\(\) first"):
        WorkerGroup(1).start()
    assert not ray.is_initialized()


def test_gpus_are_whole() -> None:
    with pytest.raises(WorkerError, match="whole GPUs"):
        WorkerGroup(1, resources_per_worker={"GPU": 0.5})


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([Failure(0, CollectiveError("aborted"), 0.1), Failure(2, LOST, 0.4)], 2),
        ([Failure(0, timeout(0, 1), 0.1), Failure(1, ValueError("boom"), 0.2)], 1),
        ([Failure(0, CollectiveError("aborted"), 0.1), Failure(1, timeout(1, 2), 0.5)], 1),
        ([Failure(0, timeout(0, 1), 0.1), Failure(3, CollectiveMismatch("differ"), 0.2)], 3),
        ([Failure(0, timeout(0, 1, 2), 0.1), Failure(2, timeout(2, 1), 0.2)], 2),
        ([Failure(0, ValueError("first"), 0.1), Failure(1, ValueError("second"), 0.2)], 0),
    ],
)
def test_the_failure_that_explains_the_others_is_raised(failures: list[Failure], cause: int) -> None:
    assert root_cause(failures).rank == cause
    assert root_cause(failures[::-1]).rank == cause


def test_peer_lost_is_a_consequence_of_a_lost_worker() -> None:
    peer = PeerLost(rank=0, phase="p", peer=2, expected_bytes=1, cause="closed")
    assert root_cause([Failure(0, peer, 0.1), Failure(2, LOST, 0.3)]).error is LOST


def test_results_reports_errors_and_an_empty_cluster_afterwards(
    ray_cluster: Mapping[str, str], wait_until: Callable[[Callable[[], bool], float], bool]
) -> None:
    def body(context: WorkerContext) -> dict[str, object]:
        import torch
        import torch.distributed as dist

        for step in range(3):
            context.report({"step": step, "loss": float("nan")})
        total = torch.ones(2) * context.rank
        context.transport.all_reduce("sum", total)
        dist.all_reduce(total)  # the default group is there for torch's own calls
        return {
            "place": (context.rank, context.size, context.node_rank, context.local_rank, context.local_size),
            "names": (context.run_id, context.epoch, str(context.device)),
            "sum": total.tolist(),
            "threads": torch.get_num_threads(),
            "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        }

    def fail(context: WorkerContext) -> None:
        if context.rank == 1:
            raise ValueError("boom")
        context.transport.exchange("never", []).__enter__()

    def leave(context: WorkerContext) -> None:
        raise SystemExit(3)

    reports: list[Report] = []
    with WorkerGroup(3, run_id="full", strategy="STRICT_PACK") as group:
        results = group.run(body, timeout_s=60, on_report=reports.append)
        assert [r["place"] for r in results] == [(rank, 3, 0, rank, 3) for rank in range(3)]
        for result in results:
            assert result["names"] == ("full", 1, "cpu")
            assert result["sum"] == [9.0, 9.0]
            assert (result["threads"], result["gpus"]) == (1, "")
        for rank in range(3):
            mine = [report for report in reports if report.rank == rank]
            assert [(report.sequence, report.metrics["step"]) for report in mine] == [(0, 0), (1, 1), (2, 2)]
        assert group.state is GroupState.READY
        assert group.run(lambda context: context.rank, timeout_s=60) == [0, 1, 2]
        with pytest.raises(ValueError, match="boom"):
            group.run(fail, timeout_s=60)
        assert group.state is GroupState.BROKEN
        with pytest.raises(GroupStateError):
            group.run(body, timeout_s=60)
        pids = [member.pid for member in group.members]
        assert all(psutil.pid_exists(pid) for pid in pids)
        group.restart()
        with pytest.raises(WorkerError, match="the function ended the process"):
            group.run(leave, timeout_s=60)
        pids += [member.pid for member in group.members]
    assert group.state is GroupState.CLOSED
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 15)
    states = {row["state"] for row in placement_group_table().values() if row["name"].startswith("zenray/full/")}
    assert states <= {"REMOVED"}


def test_an_exception_in_the_progress_callback_ends_the_run(ray_cluster: Mapping[str, str]) -> None:
    def body(context: WorkerContext) -> None:
        import torch

        context.report({})
        if context.rank == 0:
            context.transport.all_reduce("wait", torch.ones(1))
        while True:
            context.transport.exchange("spin", [])

    def stop(report: Report) -> None:
        raise KeyboardInterrupt

    with WorkerGroup(2, collective_timeout_s=60) as group:
        with pytest.raises(KeyboardInterrupt):
            group.run(body, timeout_s=60, on_report=stop)
        assert group.state is GroupState.BROKEN
    assert ray.is_initialized()
