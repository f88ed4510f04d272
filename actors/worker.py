"""`GpuWorker`: one rank, with its device and its transport, that runs one function after another for its group.

A plain class; `actors.group` wraps it with `ray.remote`. The function runs on a thread of its own, so that its reports
stream to the driver and `abort` reaches a worker that waits in a collective. A worker lives for one epoch of one run,
or, where its group recovers, leaves one process group and joins that of the next epoch.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from actors.errors import Interrupted, WorkerError, WorkerTimeout
from actors.rendezvous import connect_store, group_timeout, node_address, open_store, pin_gloo_to
from collectives import nccl
from collectives.torch_transport import TorchTransport
from collectives.transport import Transport
from placement.inventory import Place, Seat

_MEET_POLL_S = 0.01
_PROBE_TAG = (1 << 31) - 1
"""A tag under which nobody sends, apart from those that transports use."""


@dataclass(frozen=True)
class Report:
    """What one rank reported: `sequence` counts its reports within one run of a function."""

    rank: int
    sequence: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How the function ended: its return value, or the exception it raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Aborted:
    """Left in the inbox of a function that is to end because its group failed."""

    epoch: int


@dataclass
class WorkerContext:
    """What a function finds on its rank. The torch process group of the same ranks is the default group."""

    run_id: str
    epoch: int
    rank: int
    size: int
    node_rank: int
    local_rank: int
    local_size: int
    node: str
    """Address of this worker's node."""
    node_id: str
    device: torch.device
    transport: Transport
    inbox: queue.SimpleQueue[object]
    """What the driver sends to this rank while the function runs, in order."""
    _events: queue.SimpleQueue[Report | Outcome] = field(repr=False)
    _num_reports: int = 0

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Send `metrics` (plain values, small) to the driver, in order. Any rank may report; no rank waits."""
        self._events.put(Report(self.rank, self._num_reports, dict(metrics)))
        self._num_reports += 1


RankFunction = Callable[[WorkerContext], Any]


class GpuWorker:
    """One rank. Call order: `sit`, on one worker `open_store`, on all `join`, then `run` any number of times.

    To join again: `leave`, then as before.
    """

    def __init__(self, run_id: str, epoch: int, bundle: int):
        self.run_id, self.epoch, self.bundle = run_id, epoch, bundle
        self.gpu_ids = assigned_gpus()
        if not self.gpu_ids:
            hide_gpus()
        torch.set_num_threads(1)  # two threads a rank on few cores are many times slower than one
        self.store: Store | None = None
        self.place: Place | None = None
        self.transport: Transport | None = None
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._is_aborted = self._is_warm = False

    @ray.method(concurrency_group="control")
    def sit(self) -> tuple[Seat, int]:
        """Where this worker came to run, and its process id."""
        return Seat(self.bundle, ray.get_runtime_context().get_node_id(), node_address(), self.gpu_ids), os.getpid()

    @ray.method
    def open_store(self, size: int, timeout_s: float) -> tuple[str, int]:
        """Open the rendezvous of `size` ranks on a port that the system chooses and that stays bound from here on."""
        store = open_store(size, timeout_s)
        self.store = store
        return store.host, store.port

    @ray.method
    def join(self, place: Place, store: tuple[str, int], start_timeout_s: float, collective_timeout_s: float) -> None:
        """Become rank `place.rank` of a new process group; returns when all ranks have joined."""
        if self.store is None:
            self.store = connect_store(*store, place.size, start_timeout_s)
        pin_gloo_to(node_address())
        if self.gpu_ids:
            torch.cuda.set_device(0)
        meeting = PrefixStore(f"{self.run_id}/e{self.epoch}", self.store)
        self._await_all(meeting, place, start_timeout_s)
        torch_has_nccl = dist.is_nccl_available()
        dist.init_process_group(
            "nccl" if self.gpu_ids and torch_has_nccl else "gloo",
            store=meeting,
            rank=place.rank,
            world_size=place.size,
            timeout=group_timeout(collective_timeout_s),
        )
        if self.gpu_ids and not torch_has_nccl:
            card = torch.device("cuda", 0)
            self.transport = nccl.join(meeting, place.rank, place.size, card, timeout_s=collective_timeout_s)
        else:
            self.transport = TorchTransport(timeout_s=collective_timeout_s)
        self.place = place

    def _await_all(self, meeting: PrefixStore, place: Place, timeout_s: float) -> None:
        """Return when all ranks have come: torch's own wait, which comes next, cannot be told that one died."""
        meeting.set(f"here/{place.rank}", "")
        deadline = time.monotonic() + timeout_s
        while not meeting.check([f"here/{rank}" for rank in range(place.size)]):
            if self._is_aborted:
                raise Interrupted(f"rank {place.rank} was told to leave while it joined")
            if time.monotonic() > deadline:
                missing = [rank for rank in range(place.size) if not meeting.check([f"here/{rank}"])]
                raise WorkerTimeout(phase="join", epoch=self.epoch, missing=missing, timeout_s=timeout_s)
            time.sleep(_MEET_POLL_S)

    @ray.method
    def leave(self, epoch: int) -> None:
        """Forget the process group, after every function has ended; the next `join` belongs to `epoch`."""
        self.transport = self.place = self.store = None
        self.inbox = queue.SimpleQueue()
        self._is_aborted = False
        if dist.is_initialized():
            dist.destroy_process_group()
        self.epoch = epoch

    @ray.method(num_returns="streaming")
    def run(self, function: RankFunction) -> Iterator[Report | Outcome]:
        """Run `function(context)`; yields its reports as they come and its `Outcome` last, or raises its exception."""
        events: queue.SimpleQueue[Report | Outcome] = queue.SimpleQueue()
        context = self._context(events)
        threading.Thread(target=_execute, args=(function, context, events), daemon=True, name="rank").start()
        while True:
            event = events.get()  # ends: `_execute` puts an Outcome last, whatever happens
            if isinstance(event, Outcome) and event.error is not None:
                raise event.error
            yield event
            if isinstance(event, Outcome):
                return

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Make the collectives that the running function waits in, and all later ones, raise; also a join under way."""
        self._is_aborted = True
        self.inbox.put(Aborted(self.epoch))
        if self.transport is not None:
            self.transport.abort()
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:  # made by the function, such as a hook's own group
                    close_connections(group)

    @ray.method
    def warm(self, function: object) -> None:
        """Load what training needs beyond torch itself: receiving `function` imports its modules, and the first backward
        pass and optimizer import parts of torch that take longer than a recovery. A third of that is the collector of
        garbage, which walks through all modules again and again: it rests meanwhile, and leaves them alone afterwards."""
        if self._is_warm:
            return
        gc.disable()
        try:
            weight = torch.nn.Parameter(torch.ones(1))
            optimizer = torch.optim.Adam([weight])
            (weight * weight).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        finally:
            gc.enable()
        gc.freeze()
        self._is_warm = True

    @ray.method(concurrency_group="control")
    def beat(self) -> None:
        """Answers as long as this process can run Python."""

    @ray.method(concurrency_group="control")
    def notify(self, message: object) -> None:
        """Put a message into the running function's inbox."""
        self.inbox.put(message)

    def _context(self, events: queue.SimpleQueue[Report | Outcome]) -> WorkerContext:
        place, transport = self.place, self.transport
        if place is None or transport is None:
            raise WorkerError("this worker has not joined a group; call join first")
        return WorkerContext(
            run_id=self.run_id,
            epoch=self.epoch,
            rank=place.rank,
            size=place.size,
            node_rank=place.node_rank,
            local_rank=place.local_rank,
            local_size=place.local_size,
            node=place.seat.address,
            node_id=place.seat.node_id,
            device=torch.device("cuda", 0) if self.gpu_ids else torch.device("cpu"),
            transport=transport,
            inbox=self.inbox,
            _events=events,
        )


def _execute(function: RankFunction, context: WorkerContext, events: queue.SimpleQueue[Report | Outcome]) -> None:
    try:
        torch.set_num_threads(1)
        events.put(Outcome(value=function(context)))
    except Exception as error:
        events.put(Outcome(error=error))
    except BaseException as error:  # SystemExit would end the actor without a word to its group
        events.put(Outcome(error=WorkerError(f"rank {context.rank}: the function ended the process with {error!r}")))


def close_connections(group: dist.ProcessGroup) -> None:
    """End every pending operation of this rank in `group`. Gloo's own abort does not: a timed-out receive does."""
    try:
        if dist.get_world_size(group) == 1:
            return
        if dist.get_backend(group) == "gloo":
            pending = dist.irecv(torch.empty(1), group=group, tag=_PROBE_TAG)
            assert pending is not None
            pending.wait(timedelta(milliseconds=1))
        else:
            group.abort()
    except RuntimeError:
        return


def assigned_gpus() -> tuple[str, ...]:
    """The GPU ids that Ray gave to this actor; empty for an actor without GPUs."""
    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def hide_gpus() -> None:
    """Hide all GPUs from this process. Ray leaves them visible to actors with num_gpus=0, which then may use them.

    Call it before anything initialises CUDA.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
