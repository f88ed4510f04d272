"""`NcclTransport` against an NCCL of threads and host memory: grouping, bytes, order, deadlines, failures."""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from collectives import nccl
from collectives.codecs import Int8Block
from collectives.errors import CollectiveError, CollectiveTimeout, ConfigError, PeerLost
from collectives.nccl import NcclTransport
from collectives.reduce import two_shot
from collectives.transport import Parcel, all_gather_records, run_local

CPU = torch.device("cpu")


class FakeNccl:
    """One process-wide NCCL: messages wait in queues by (source, destination); groups send first, then receive."""

    def __init__(self, size: int):
        self.size = size
        self.mail = {(a, b): queue.Queue[bytes]() for a in range(size) for b in range(size)}
        self.start, self.local = threading.Barrier(size), threading.local()
        self.num_groups, self.failing, self.hanging = 0, False, threading.Event()

    def get_unique_id(self) -> tuple[int, ...]:
        return tuple(range(128))

    def groupStart(self) -> None:
        self.num_groups += 1
        self.local.calls = []

    def groupEnd(self) -> None:
        for call in sorted(self.local.calls, key=lambda call: call[0]):
            call[1]()

    def NcclCommunicator(self, size: int, unique_id: tuple[int, ...], rank: int) -> Any:
        assert unique_id == self.get_unique_id()
        self.start.wait(5)

        def send(address: int, count: int, dtype: int, peer: int, stream: int) -> None:
            assert (dtype, stream) == (nccl.UINT8, 77)
            self.local.calls.append((0, lambda: self.mail[rank, peer].put(ctypes.string_at(address, count))))

        def take(address: int, count: int, peer: int) -> None:
            data = self.mail[peer, rank].get(timeout=5)
            assert len(data) == count
            ctypes.memmove(address, data, count)

        def recv(address: int, count: int, dtype: int, peer: int, stream: int) -> None:
            self.local.calls.append((1, lambda: take(address, count, peer)))

        def check_async_error() -> None:
            if self.failing:
                raise RuntimeError("remote process exited")

        return SimpleNamespace(
            send=send, recv=recv, check_async_error=check_async_error, abort=self.hanging.set, allReduce=print
        )


class FakeStream:
    cuda_stream = 77

    def __init__(self, log: list[str]):
        self.log = log

    def wait_stream(self, other: Any) -> None:
        self.log.append("transfers wait for the caller")

    def wait_event(self, event: Any) -> None:
        self.log.append("the caller waits for the transfers")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeNccl]:
    """fake(size): install it, and streams that do nothing."""

    def install(size: int) -> FakeNccl:
        found, log = FakeNccl(size), list[str]()
        found.log, found.done = log, True  # type: ignore[attr-defined]
        event = SimpleNamespace(record=lambda stream: None, query=lambda: found.done)  # type: ignore[attr-defined]
        monkeypatch.setattr(nccl, "load_nccl", lambda: found)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(log))
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        return found

    return install


def on_all(fake: FakeNccl, body: Callable[[NcclTransport], Any], timeout_s: float = 5.0) -> list[Any]:
    def rank(number: int) -> Any:
        return body(NcclTransport(nccl.new_unique_id(), number, fake.size, CPU, timeout_s=timeout_s))

    with ThreadPoolExecutor(fake.size) as pool:
        return list(pool.map(rank, range(fake.size)))


def test_collectives_run_on_it_unchanged(fake: Callable[[int], FakeNccl]) -> None:
    inputs = [torch.randn(3000, generator=torch.Generator().manual_seed(r)) for r in range(3)]

    def reduce(transport: Any) -> tuple[bytes, np.ndarray, int]:
        x = inputs[transport.rank].clone()
        two_shot(x, Int8Block(), transport, op="mean")
        return x.numpy().tobytes(), all_gather_records(transport, "m", [transport.rank]), transport.traffic.sent_bytes()

    found, expected = on_all(fake(3), reduce), run_local(3, reduce)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        assert ours[1].tolist() == [[0], [1], [2]]
        assert ours[2] == theirs[2]


def test_the_unique_id_travels_through_a_store(fake: Callable[[int], FakeNccl]) -> None:
    fake(3)
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda rank: nccl.join(store, rank, 3, CPU, timeout_s=5.0), range(3)))
    assert [transport.rank for transport in made] == [0, 1, 2]


def test_an_exchange_is_one_group_between_two_fences(fake: Callable[[int], FakeNccl]) -> None:
    installed = fake(2)

    def swap(transport: NcclTransport) -> int:
        peer, inbox = 1 - transport.rank, torch.zeros(4)
        with transport.exchange("x", [Parcel(peer, inbox), Parcel(peer, torch.empty(0))]) as exchange:
            exchange.send(peer, torch.full((4,), float(transport.rank)))
            exchange.send(peer, torch.empty(0))
            next(exchange.arrivals())
            with pytest.raises(CollectiveError, match="precede"):
                exchange.send(peer, torch.zeros(1))
        return int(inbox[0])

    assert on_all(installed, swap) == [1, 0]
    assert installed.num_groups == 2, "one for each rank"
    log = installed.log  # type: ignore[attr-defined]
    assert sorted(log) == ["the caller waits for the transfers"] * 2 + ["transfers wait for the caller"] * 2


def test_a_rank_that_stays_away_ends_the_start_in_time(fake: Callable[[int], FakeNccl]) -> None:
    fake(2)
    with pytest.raises(CollectiveTimeout, match="rank 0: no answer from rank"):
        NcclTransport(nccl.new_unique_id(), 0, 2, CPU, timeout_s=0.2)


@pytest.mark.parametrize(("failing", "error"), [(False, CollectiveTimeout), (True, PeerLost)])
def test_a_transfer_that_does_not_end_aborts(
    failing: bool, error: type[Exception], fake: Callable[[int], FakeNccl]
) -> None:
    installed = fake(1)
    transport = NcclTransport(nccl.new_unique_id(), 0, 1, CPU, timeout_s=0.2)
    transport.size = 2
    installed.done, installed.failing = False, failing  # type: ignore[attr-defined]
    with pytest.raises(error):
        transport.run("push", 64, lambda: None)
    assert installed.hanging.is_set(), "the communicator was aborted"
    with pytest.raises(CollectiveError, match="broken group"):
        transport.exchange("next", [])


def test_types_that_nccl_cannot_add_are_refused(fake: Callable[[int], FakeNccl]) -> None:
    fake(1)
    transport = NcclTransport(nccl.new_unique_id(), 0, 1, CPU)
    with pytest.raises(ConfigError, match="cannot add"):
        transport.all_reduce("dense", torch.zeros(4, dtype=torch.float8_e4m3fn))


def test_missing_nccl_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ConfigError, match="cuda12 or cuda13"):
        nccl.load_nccl()
