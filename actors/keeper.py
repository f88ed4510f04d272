"""`Keeper`: what a rank uses to survive. It snapshots after each update, replicates in the background, holds the gate.

    step = keeper.restore(own, replicated)      # where to go on; 0 in a fresh run
    while step < steps:
        ...forward, backward...
        with keeper.busy():                     # copies travel when training leaves the network idle
            ...reduce...
        keeper.gate()                           # update s + 1 waits until s is committed
        optimizer.step(); step += 1
        keeper.prepare(step)                    # copied and sent while the next step computes
    keeper.finish()

What it does not do: decide. Where to restore from and who keeps copies is its `Assignment`, made by the driver.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import ray
import torch.distributed as dist
from ray.exceptions import RayError

from actors.delivery import Address, Delivery, give_way
from actors.errors import CheckpointError, HolderLost, Interrupted
from actors.folder import ShardFolder
from actors.frames import Bytes, Frame, parts, read, seal
from actors.pace import Pace
from actors.shards import Snapshot, restore, snapshot
from actors.state import StateProvider
from actors.worker import Aborted, WorkerContext
from collectives.errors import CollectiveError, WireFormatError, ZenrayError

SEND_ATTEMPTS = 3
"""A frame that a holder found damaged is sent again so often."""


class Phase(StrEnum):
    """Points of a step at which failure tests strike."""

    COMPUTE = "compute"
    REDUCE = "reduce"
    UPDATE = "update"
    SNAPSHOT = "snapshot"
    REPLICATE = "replicate"
    ACK = "ack"
    COMMIT = "commit"
    RECOVER = "recover"


class Probe(Protocol):
    """What a failure test hangs into a rank; pickled with the assignment."""

    def reached(self, phase: Phase, step: int, keeper: Keeper) -> None:
        """Called at every phase; may never return."""

    def sending(self, step: int, keeper: Keeper, data: Bytes) -> Bytes:
        """The bytes to send instead of `data`."""


class NoProbe:
    """The probe of ordinary runs."""

    def reached(self, phase: Phase, step: int, keeper: Keeper) -> None:
        """Nothing happens."""

    def sending(self, step: int, keeper: Keeper, data: Bytes) -> Bytes:
        """The data themselves."""
        return data


@dataclass(frozen=True)
class Committed:
    """From the driver: `step` of `epoch` is committed. leave: the group is about to change, end here."""

    epoch: int
    step: int
    leave: bool = False


@dataclass(frozen=True)
class Kept:
    """From a rank: all holders have `step`, which was applied at `applied_s` (time.time of that host)."""

    epoch: int
    rank: int
    step: int
    digest: str
    frame_bytes: int
    applied_s: float
    replicate_s: float
    gate_s: float
    """How long the gate before this step's update was closed: the lengthening of the step."""
    idle_s: float
    """From the start of the previous replication to the gate: the span in which it could hide."""
    needed_s: float | None
    """How much of such a span the plan of the traffic holds necessary; None while the first steps are measured."""
    predicted_s: float | None
    """The lengthening that the plan foresees; None as above."""
    num_resent: int


@dataclass(frozen=True)
class Holder:
    """Who keeps copies on one host."""

    host: str
    actor: Any
    address: Address


@dataclass(frozen=True)
class Assignment:
    """What one rank of one epoch is to do, by the driver."""

    run_id: str
    epoch: int
    attempt: int
    """0 at the start of a run, one more with each recovery."""
    step: int
    """Where to go on."""
    old_shards: int
    """Ranks that wrote that step; 0: nothing to restore."""
    own_shard: int | None
    """Whose own states this rank takes; None: it starts with fresh ones."""
    sources: tuple[tuple[Any, ...], ...] = ()
    """By shard, the holders to ask, in order."""
    storage: Path | None = None
    """Restore from this folder instead of from holders."""
    holders: tuple[Holder, ...] = ()
    """Everybody who keeps this rank's shard, own host first."""
    timeout_s: float = 30.0
    heartbeat_s: float = 2.0
    probe: Probe = field(default_factory=NoProbe)


class Keeper:
    """See the module. One per rank and epoch; used by the thread that trains."""

    def __init__(self, context: WorkerContext, assignment: Assignment):
        self.context, self.assignment = context, assignment
        self.own: Sequence[StateProvider] = ()
        self.replicated: Sequence[StateProvider] = ()
        self.committed = (assignment.step, assignment.old_shards)
        self._prepared: int | None = None
        self._confirmed: int | None = None
        """The step last committed in this epoch."""
        self._gate_s = self._idle_s = 0.0
        self._started = time.monotonic()
        self._outbox: queue.SimpleQueue[tuple[Snapshot, float, float, float] | None] = queue.SimpleQueue()
        self.pace = Pace(max(1, len(assignment.holders) - 1), assignment.timeout_s)
        self._buffer: Bytes | None = None
        """Where each snapshot is made: the one before has arrived everywhere once it is committed."""
        self._deliveries: dict[str, Delivery] = {}
        self._thread = threading.Thread(target=self._replicate_all, daemon=True, name="keeper")

    def restore(self, own: Sequence[StateProvider], replicated: Sequence[StateProvider]) -> int:
        """Load the assigned step into the providers and bring its copies back to m; returns the step.

        own: states of this rank alone. replicated: states that are the same bytes on every rank, whose tensors change in
        the update alone. A collective call.
        """
        assignment = self.assignment
        self.own, self.replicated = own, replicated
        self.reached(Phase.RECOVER, assignment.step)
        if assignment.old_shards:
            shards = [self._fetch(shard) for shard in range(assignment.old_shards)]
            restore(shards, assignment.own_shard, self.context.size, own, replicated)
        self._thread.start()
        self.prepare(assignment.step)
        return assignment.step

    def prepare(self, step: int) -> None:
        """Keep the state after update `step`. This rank's own is copied at once; the replicated tensors, which may not
        change until the next gate, are copied in the background, and all of it sent."""
        if self._confirmed != self._prepared:
            raise CheckpointError(f"step {step} was prepared before the gate let its update through: call gate() first")
        applied_s = time.time()
        self.reached(Phase.SNAPSHOT, step)
        context, assignment = self.context, self.assignment
        header = Frame(assignment.run_id, assignment.epoch, context.rank, context.size, step, self.committed, 0, 0, "")
        taken = snapshot(header, self.own, self.replicated, self._buffer)
        self._buffer = taken.data if taken.data.base is None else taken.data.base  # all of it, room to spare included
        self._prepared = step
        self.pace.begin()
        self._started = time.monotonic()
        self._outbox.put((taken, applied_s, self._gate_s, self._idle_s))

    def gate(self) -> None:
        """Return when the step prepared last is committed. Raises Interrupted when the group is to be rebuilt,
        HolderLost or CheckpointError when the copies could not be made; nothing has been applied then."""
        begin = time.monotonic()
        self._idle_s = begin - self._started
        self.pace.lift()
        while self._confirmed != self._prepared:
            left_s = begin + self.assignment.timeout_s - time.monotonic()
            try:
                message = self.context.inbox.get(timeout=max(0.0, left_s))
            except queue.Empty:
                raise CheckpointError(
                    f"rank {self.context.rank}: step {self._prepared} was not committed within "
                    f"{self.assignment.timeout_s:g} s: a holder or another rank is stuck"
                ) from None
            self._take(message)
        self._gate_s = time.monotonic() - begin

    def _take(self, message: object) -> None:
        if isinstance(message, Committed) and message.epoch == self.assignment.epoch:
            self._confirmed = message.step
            self.committed = (message.step, self.context.size)
            if message.leave:
                raise Interrupted(f"rank {self.context.rank} leaves after step {message.step}: the group changes")
        elif isinstance(message, Aborted) and message.epoch == self.assignment.epoch:
            raise Interrupted(f"rank {self.context.rank} was told to leave while it waited for a commit")
        elif isinstance(message, ZenrayError):
            raise message

    def busy(self) -> AbstractContextManager[None]:
        """To be held while training uses the network itself: copies wait as long as they can."""
        return self.pace.busy()

    def finish(self) -> None:
        """Wait for the last commit."""
        self.gate()

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self.pace.lift()
        self._outbox.put(None)

    def reached(self, phase: Phase, step: int) -> None:
        """Tell the probe; training loops call it for COMPUTE, REDUCE and UPDATE."""
        self.assignment.probe.reached(phase, step, self)

    def _fetch(self, shard: int) -> tuple[Mapping[str, Any], bytes]:
        """One shard of the assigned step, from the first source that has it undamaged."""
        assignment = self.assignment
        if assignment.storage is not None:
            folder = ShardFolder(assignment.storage, self.context.rank, assignment.old_shards)
            manifest, tensors = folder.read(assignment.step, shard)
            return manifest["values"], tensors
        causes = []
        key = (assignment.step, assignment.old_shards)
        for holder in assignment.sources[shard]:
            try:
                data = ray.get(holder.get.remote(shard, key), timeout=assignment.timeout_s)
                return parts(data, read(data, assignment.run_id, data.nbytes))
            except (RayError, WireFormatError) as error:
                causes.append(str(error).splitlines()[0])
        raise CheckpointError(f"shard {shard} of step {key[0]} came from none of its holders: {'; '.join(causes)}")

    # --- the background thread ----------------------------------------------------------------------------------------

    def _replicate_all(self) -> None:
        give_way()
        try:
            while (item := self._outbox.get()) is not None:  # ends: `close` puts None, however the function ended
                self._replicate(*item)
        except ZenrayError as error:
            self.context.inbox.put(error)
        except Exception as error:  # else the gate would wait in vain, and blame others
            self.context.inbox.put(CheckpointError(f"rank {self.context.rank}: copies cannot be made: {error!r}"))
            raise
        finally:
            for delivery in self._deliveries.values():
                delivery.close()

    def _replicate(self, taken: Snapshot, applied_s: float, gate_s: float, idle_s: float) -> None:
        begin = time.monotonic()
        taken.complete()
        data, frame = taken.data, seal(taken.data, taken.frame)
        holders = self.assignment.holders
        num_resent = 0
        for attempt in range(SEND_ATTEMPTS):
            sent = self.assignment.probe.sending(frame.step, self, data)
            for number, holder in enumerate(holders):
                if number:
                    self.reached(Phase.REPLICATE, frame.step)
                with self._noticing_loss(holder, frame.step):
                    self._send(holder, sent, is_remote=number > 0)
            if all([self._is_acknowledged(holder, frame) for holder in holders]):
                break
            num_resent = attempt + 1
        else:
            raise CheckpointError(f"step {frame.step} arrived damaged {SEND_ATTEMPTS} times at a holder")
        self.reached(Phase.ACK, frame.step)
        kept = Kept(
            epoch=frame.epoch,
            rank=frame.rank,
            step=frame.step,
            digest=frame.digest,
            frame_bytes=data.nbytes,
            applied_s=applied_s,
            replicate_s=time.monotonic() - begin,
            gate_s=gate_s,
            idle_s=idle_s,
            needed_s=self.pace.needed_s,
            predicted_s=None if self.pace.plan is None else self.pace.plan.exposed_s,
            num_resent=num_resent,
        )
        self.context.report({"kept": kept})

    def _send(self, holder: Holder, data: Bytes, is_remote: bool) -> None:
        """The whole frame; to another host at the pace that training leaves."""
        if holder.host not in self._deliveries:
            self._deliveries[holder.host] = Delivery(holder.address, self.assignment.heartbeat_s)
        delivery, begin, num_sent = self._deliveries[holder.host], time.monotonic(), 0
        delivery.begin(data.size)
        while num_sent < data.size:
            left = data.size - num_sent
            part = data[num_sent : num_sent + (self.pace.allow(left) if is_remote else left)]
            num_sent += self._patiently(holder, lambda part=part: delivery.send(part))  # type: ignore[misc]
        if is_remote:
            self._patiently(holder, delivery.wait)
            self.pace.delivered(data.size, time.monotonic() - begin)

    def _is_acknowledged(self, holder: Holder, frame: Frame) -> bool:
        """Whether a holder has the frame; False if it refused damaged bytes."""
        delivery = self._deliveries[holder.host]
        try:
            with self._noticing_loss(holder, frame.step):
                self._patiently(holder, delivery.wait)
                return delivery.answer() == frame.digest
        except WireFormatError:
            return False

    def _patiently(self, holder: Holder, call: Callable[[], int]) -> int:
        """Repeat `call` while the holder takes its time, but lives."""
        deadline = time.monotonic() + self.assignment.timeout_s
        while True:
            try:
                return call()
            except TimeoutError:
                alive = ray.wait([holder.actor.sit.remote()], timeout=self.assignment.heartbeat_s)[0]
                if not alive or time.monotonic() > deadline:
                    raise

    @contextmanager
    def _noticing_loss(self, holder: Holder, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            cause = "it does not answer." if isinstance(error, TimeoutError) else f"{error}."
            raise HolderLost(rank=self.context.rank, host=holder.host, step=step, cause=cause) from None


RecoverableFunction = Callable[[WorkerContext, Keeper], Any]


def run_rank(function: RecoverableFunction, assignment: Assignment, context: WorkerContext) -> Any:
    """What a worker runs: the user's function with its keeper. A failed collective of torch's own, such as DDP's, is a
    bare RuntimeError there; here it becomes a CollectiveError, which the group recovers from."""
    keeper = Keeper(context, assignment)
    try:
        return function(context, keeper)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise CollectiveError(f"rank {context.rank}: a collective of torch failed: {error}") from error
        raise
    finally:
        keeper.close()
