"""`Keeper`: what a rank uses to survive. It snapshots after each update, replicates in the background, holds the gate.

    step = keeper.restore(own, replicated)      # where to go on; 0 in a fresh run
    while step < steps:
        ...forward, backward, reduce...
        keeper.gate()                           # update s + 1 waits until s is committed
        optimizer.step(); step += 1
        keeper.prepare(step)                    # copied at once, sent while the next step computes
    keeper.finish()

What it does not do: decide. Where to restore from and who keeps copies is its `Assignment`, made by the driver.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.errors import CheckpointError, HolderLost, Interrupted
from actors.folder import ShardFolder
from actors.frames import Bytes, Frame, parts, read
from actors.shards import restore, snapshot
from actors.state import StateProvider
from actors.worker import Aborted, WorkerContext
from collectives.errors import WireFormatError, ZenrayError

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
    sha256: str
    frame_bytes: int
    applied_s: float
    replicate_s: float
    gate_s: float
    """How long the gate before this step's update was closed: the lengthening of the step."""
    idle_s: float
    """From the start of the previous replication to the gate: the span in which it could hide."""
    num_resent: int


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
    holders: tuple[tuple[str, Any], ...] = ()
    """(host, holder) of everybody who keeps this rank's shard, own host first."""
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
        self._outbox: queue.SimpleQueue[tuple[Bytes, Frame, float, float, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._replicate_all, daemon=True, name="keeper")

    def restore(self, own: Sequence[StateProvider], replicated: Sequence[StateProvider]) -> int:
        """Load the assigned step into the providers and bring its copies back to m; returns the step.

        own: states of this rank alone. replicated: states that are the same bytes on every rank. A collective call.
        """
        assignment = self.assignment
        self.own, self.replicated = own, replicated
        self.reached(Phase.RECOVER, assignment.step)
        if assignment.old_shards:
            shards = [self._fetch(shard) for shard in range(assignment.old_shards)]
            restore(shards, assignment.own_shard, own, replicated)
        self._thread.start()
        self.prepare(assignment.step)
        return assignment.step

    def prepare(self, step: int) -> None:
        """Copy the state after update `step` at once, and send the copy in the background."""
        applied_s = time.time()
        self.reached(Phase.SNAPSHOT, step)
        context, assignment = self.context, self.assignment
        header = Frame(assignment.run_id, assignment.epoch, context.rank, context.size, step, self.committed, 0, 0, "")
        data, frame = snapshot(header, self.own, self.replicated)
        self._prepared = step
        self._started = time.monotonic()
        self._outbox.put((data, frame, applied_s, self._gate_s, self._idle_s))

    def gate(self) -> None:
        """Return when the step prepared last is committed. Raises Interrupted when the group is to be rebuilt,
        HolderLost or CheckpointError when the copies could not be made; nothing has been applied then."""
        begin = time.monotonic()
        self._idle_s = begin - self._started
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

    def finish(self) -> None:
        """Wait for the last commit and stop sending."""
        self.gate()
        self._outbox.put(None)
        self._thread.join(self.assignment.timeout_s)

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
        while (item := self._outbox.get()) is not None:
            try:
                self._replicate(*item)
            except ZenrayError as error:
                self.context.inbox.put(error)
                return

    def _replicate(self, data: Bytes, frame: Frame, applied_s: float, gate_s: float, idle_s: float) -> None:
        begin = time.monotonic()
        num_resent = 0
        for attempt in range(SEND_ATTEMPTS):
            sent = ray.put(self.assignment.probe.sending(frame.step, self, data))
            calls = []
            for number, (host, holder) in enumerate(self.assignment.holders):
                if number:
                    self.reached(Phase.REPLICATE, frame.step)
                calls.append((host, holder, holder.put.remote(sent)))
            if all([self._acknowledged(*call, frame) for call in calls]):
                break
            num_resent = attempt + 1
        else:
            raise CheckpointError(f"step {frame.step} arrived damaged {SEND_ATTEMPTS} times at a holder")
        self.reached(Phase.ACK, frame.step)
        kept = Kept(
            epoch=frame.epoch,
            rank=frame.rank,
            step=frame.step,
            sha256=frame.sha256,
            frame_bytes=data.nbytes,
            applied_s=applied_s,
            replicate_s=time.monotonic() - begin,
            gate_s=gate_s,
            idle_s=idle_s,
            num_resent=num_resent,
        )
        self.context.report({"kept": kept})

    def _acknowledged(self, host: str, holder: Any, ref: Any, frame: Frame) -> bool:
        """Whether a holder has the frame; False if it refused damaged bytes. HolderLost if it is gone or hangs."""
        deadline = time.monotonic() + self.assignment.timeout_s
        limit_s = self.assignment.heartbeat_s
        try:
            while not ray.wait([ref], timeout=limit_s)[0]:
                if not ray.wait([holder.sit.remote()], timeout=limit_s)[0] or time.monotonic() > deadline:
                    raise HolderLost(rank=frame.rank, host=host, step=frame.step, cause="it does not answer.")
            return bool(ray.get(ref, timeout=limit_s) == frame.sha256)
        except RayActorError as error:
            cause = str(error).strip().splitlines()[0]
            raise HolderLost(rank=frame.rank, host=host, step=frame.step, cause=cause) from None
        except RayTaskError as error:
            if isinstance(error.cause, WireFormatError):
                return False
            if isinstance(error.cause, ZenrayError):
                raise error.cause from None
            raise CheckpointError(f"the holder on host {host} failed: {error}") from error


RecoverableFunction = Callable[[WorkerContext, Keeper], Any]


def run_rank(function: RecoverableFunction, assignment: Assignment, context: WorkerContext) -> Any:
    """What a worker runs: the user's function with its keeper."""
    return function(context, Keeper(context, assignment))
