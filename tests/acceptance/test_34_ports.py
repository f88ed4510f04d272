"""Row 34: port already in use. Here: the system chooses it, the socket is kept, and two jobs share a host."""

import socket
from collections.abc import Mapping

from actors.group import WorkerGroup
from actors.rendezvous import open_store
from actors.worker import WorkerContext


def total(context: WorkerContext) -> tuple[str, float]:
    import torch

    data = torch.tensor([context.rank + 1.0])
    context.transport.all_reduce("sum", data)
    return context.run_id, float(data)


def test_34_the_port_is_bound_when_it_becomes_known(ray_cluster: Mapping[str, str]) -> None:
    first, second = open_store(2, 5.0), open_store(2, 5.0)
    assert first.port != second.port
    with socket.socket() as probe:
        assert probe.connect_ex((first.host, first.port)) == 0


def test_34_two_groups_run_on_one_host_at_once(ray_cluster: Mapping[str, str]) -> None:
    with WorkerGroup(2, run_id="left") as left, WorkerGroup(2, run_id="right") as right:
        assert left.run(total, timeout_s=30) == [("left", 3.0)] * 2
        assert right.run(total, timeout_s=30) == [("right", 3.0)] * 2
