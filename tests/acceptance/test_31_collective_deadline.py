"""Row 31: a collective's limit is fixed, ignored or nameless. Here: it ends by ours and names who is missing."""

import time
from collections.abc import Mapping

import pytest

from actors.errors import WorkerTimeout
from actors.group import GroupState, WorkerGroup
from actors.worker import WorkerContext
from collectives.errors import CollectiveTimeout


def test_31_a_hung_rank_ends_the_collective_by_its_deadline_and_is_named(ray_cluster: Mapping[str, str]) -> None:
    def hang(context: WorkerContext) -> None:
        import torch

        context.transport.all_reduce("warm", torch.ones(8))
        if context.rank == 1:
            time.sleep(120)
        context.transport.all_reduce("gradients", torch.ones(1000))

    with WorkerGroup(3, collective_timeout_s=2.0) as group:
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeout) as caught:
            group.run(hang, timeout_s=60)
        assert time.monotonic() - begin < 30
        assert (caught.value.missing, caught.value.phase, caught.value.timeout_s) == ((1,), "gradients", 2.0)
        assert caught.value.expected_bytes == 4000
        assert {failure.rank for failure in group.failures} == {0, 2}
        assert group.state is GroupState.BROKEN


def test_31_a_run_ends_by_its_own_deadline_too(ray_cluster: Mapping[str, str]) -> None:
    def sleep(context: WorkerContext) -> int:
        if context.rank == 1:
            time.sleep(120)
        return context.rank

    with WorkerGroup(2) as group:
        with pytest.raises(WorkerTimeout) as caught:
            group.run(sleep, timeout_s=0.5)
        assert (caught.value.missing, caught.value.phase) == ((1,), "run")
