"""Row 32: a stale rendezvous after a failed start. Here: every name holds the epoch, and a restart just works."""

import os
import signal
from collections.abc import Mapping

import pytest
import ray
from ray.util import placement_group_table

from actors.errors import WorkerLost
from actors.group import GroupState, WorkerGroup
from actors.worker import WorkerContext

NUM_CRASHES = 3


def crash_or_sum(victim: int) -> object:
    def body(context: WorkerContext) -> tuple[int, float]:
        import torch

        if context.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(3)
        context.transport.all_reduce("sum", total)
        return context.epoch, float(total[0])

    return body


def test_32_a_group_restarts_after_each_of_several_crashes(ray_cluster: Mapping[str, str]) -> None:
    with WorkerGroup(2, run_id="phoenix") as group:
        pids = set()
        for crash in range(NUM_CRASHES):
            pids |= {member.pid for member in group.members}
            with pytest.raises(WorkerLost) as caught:
                group.run(crash_or_sum(victim=crash % 2), timeout_s=30)  # type: ignore[arg-type]
            assert (caught.value.rank, caught.value.epoch) == (crash % 2, crash + 1)
            assert group.state is GroupState.BROKEN
            group.restart()
            assert group.run(crash_or_sum(victim=-1), timeout_s=30) == [(crash + 2, 2.0)] * 2  # type: ignore[arg-type]
        assert group.epoch == NUM_CRASHES + 1
        assert not pids & {member.pid for member in group.members}
        names = {row["name"]: row["state"] for row in placement_group_table().values() if "phoenix" in row["name"]}
        assert [name for name, state in names.items() if state == "CREATED"] == [f"zenray/phoenix/e{NUM_CRASHES + 1}"]
        assert ray.get_actor(f"zenray/phoenix/e{NUM_CRASHES + 1}/w0")
        with pytest.raises(ValueError, match="Failed to look up actor"):
            ray.get_actor("zenray/phoenix/e1/w0")
