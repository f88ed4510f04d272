"""Row 33: one rank dies and the others wait for 600 s. Here: all survivors leave the collective within 1 s."""

import os
import signal
import time
from collections.abc import Mapping

import pytest

from actors.errors import WorkerLost
from actors.group import WorkerGroup
from actors.worker import WorkerContext

LIMIT_S = 1.0
GRACE = 3
"""A loaded machine is granted three times what a user would accept."""


@pytest.mark.parametrize("where", ["ring", "hook"])
def test_33_survivors_leave_after_a_kill(ray_cluster: Mapping[str, str], where: str) -> None:
    """A rank dies while the others wait in Gloo's ring, where most have no link to it, or in a prepared model's hook."""

    def body(context: WorkerContext) -> None:
        import torch

        import zenray
        from collectives.transport import all_gather_records

        model = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 1))
        prepared = zenray.prepare_model(model) if where == "hook" else model
        all_gather_records(context.transport, "ready", [0])
        context.report({"pid": os.getpid()})
        if context.rank == 1:
            time.sleep(120)
        if where == "ring":
            context.transport.all_reduce("wait", torch.ones(1 << 16))
        else:
            prepared(torch.tensor([context.rank])).sum().backward()

    killed: list[float] = []

    def kill(report: object) -> None:
        if getattr(report, "rank", None) == 1:
            time.sleep(0.3)  # the others are waiting by then
            os.kill(report.metrics["pid"], signal.SIGKILL)  # type: ignore[attr-defined]
            killed.append(time.monotonic())

    with WorkerGroup(4, collective_timeout_s=120) as group:
        begin = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            group.run(body, timeout_s=90, on_report=kill)
        assert caught.value.rank == 1
        assert sorted(failure.rank for failure in group.failures) == [0, 1, 2, 3]
        left = max(failure.after_s for failure in group.failures) - (killed[0] - begin)
        assert left < LIMIT_S * GRACE
