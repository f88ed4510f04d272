"""`WorkerGroup`: a gang of workers as one thing that is placed, numbered, run, restarted in a new epoch, and removed.

A small state machine (`GroupState`, `TRANSITIONS`). One run id, one epoch a start: both are part of every name on the
cluster, so nothing of an earlier attempt can be mistaken for the present one. When a worker fails, the others are told
to leave their collectives at once, and the failure that caused the rest is raised. What this file does not do: carry
state over a restart.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.errors import GroupStateError, WorkerError, WorkerLost, WorkerTimeout
from actors.metrics import Metrics
from actors.worker import GpuWorker, Outcome, RankFunction, Report
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, ZenrayError
from placement.groups import Reservation, borrow, group_name, release, reserve
from placement.inventory import Gang, Place, Strategy, number_ranks

LEAVE_GRACE_S = 3.0
"""How long survivors of a failure may take to leave their collectives before they are killed; they need far less."""
_FETCH_S = 10.0
"""The least time granted for fetching a result that exists already, even when a run's deadline has come."""


class GroupState(StrEnum):
    """The life of a group."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    BROKEN = "broken"
    CLOSED = "closed"


TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.NEW: frozenset({GroupState.STARTING, GroupState.CLOSED}),
    GroupState.STARTING: frozenset({GroupState.READY, GroupState.BROKEN}),
    GroupState.READY: frozenset({GroupState.RUNNING, GroupState.STARTING, GroupState.CLOSED}),
    GroupState.RUNNING: frozenset({GroupState.READY, GroupState.BROKEN}),
    GroupState.BROKEN: frozenset({GroupState.STARTING, GroupState.CLOSED}),
    GroupState.CLOSED: frozenset(),
}


@dataclass(frozen=True)
class Member:
    """One worker of the present epoch."""

    actor: Any
    place: Place
    pid: int


@dataclass(frozen=True)
class Failure:
    """A rank that did not finish, and how long after the start of the run the driver knew."""

    rank: int
    error: Exception
    after_s: float


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others: a lost worker, then a rank's own error, then what collectives report.

    Of several time-outs the one that blames fewest ranks which themselves reported: those are alive, only late.
    """
    reported = {failure.rank for failure in failures}

    def order(failure: Failure) -> tuple[int, int, float]:
        error, wrongly_blamed = failure.error, 0
        if isinstance(error, WorkerLost):
            weight = 0
        elif isinstance(error, CollectiveMismatch):
            weight = 2
        elif isinstance(error, CollectiveTimeout):
            weight, wrongly_blamed = 3, len(reported & set(error.missing))
        else:
            weight = 4 if isinstance(error, CollectiveError) else 1
        return (weight, wrongly_blamed, failure.after_s)

    return min(failures, key=order)


class WorkerGroup:
    """`num_workers` ranks with equal resources. A context manager: leaves no actor, placement group or process.

    resources_per_worker: amounts by Ray's names, such as {"CPU": 1, "GPU": 1}; whole GPUs only.
    selectors: empty, or one label selector a worker (see `placement.inventory.Gang`).
    inside: use the placement group that this process runs in, one bundle a worker, instead of reserving another.
    start_timeout_s bounds placing and joining, collective_timeout_s each wait inside a collective.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        strategy: Strategy = "PACK",
        selectors: Sequence[Mapping[str, str]] = (),
        inside: bool = False,
        run_id: str | None = None,
        start_timeout_s: float = 60.0,
        collective_timeout_s: float = 60.0,
    ):
        resources = {"CPU": 1.0} if resources_per_worker is None else dict(resources_per_worker)
        if resources.get("GPU", 0) % 1:
            raise WorkerError(f"a rank takes whole GPUs, not {resources['GPU']:g}")
        self.gang = Gang((resources,) * num_workers, strategy, tuple(selectors))
        self.run_id, self.inside = run_id or secrets.token_hex(4), inside
        self.start_timeout_s, self.collective_timeout_s = start_timeout_s, collective_timeout_s
        self.epoch = 0
        self.state = GroupState.NEW
        self.members: tuple[Member, ...] = ()
        self.failures: list[Failure] = []
        """What went wrong in the last run, by the order in which the driver knew."""
        self._metrics = Metrics(run=self.run_id)
        self._reservation: Reservation | None = None
        self._actors: list[Any] = []

    def start(self) -> None:
        """Place the workers, number them by (node, GPU) and join them, in a new epoch.

        Raises PlacementError or WorkerTimeout; then nothing is left on the cluster and the group is broken.
        """
        self._enter(GroupState.STARTING)
        self.epoch += 1
        self._metrics.add("zenray_epochs")
        deadline = time.monotonic() + self.start_timeout_s
        try:
            self._reservation = (
                borrow(self.gang)
                if self.inside
                else reserve(self.gang, run_id=self.run_id, epoch=self.epoch, timeout_s=self.start_timeout_s)
            )
            self._create_actors(deadline)
            self._join(deadline)
        except BaseException:
            self._enter(GroupState.BROKEN)
            self._dissolve()
            raise
        self._enter(GroupState.READY)

    def run(
        self, function: RankFunction, *, timeout_s: float, on_report: Callable[[Report], None] | None = None
    ) -> list[Any]:
        """Run `function(context)` on every rank; returns the results by rank.

        on_report is called on this thread for each report as it arrives. When a rank fails, the others leave and the
        root cause is raised: WorkerLost, WorkerTimeout, the ZenrayError of the rank, or the function's own exception.
        The group is broken then: `restart` it.
        """
        self._enter(GroupState.RUNNING)
        self.failures = []
        started = time.monotonic()
        shared = ray.put(function)
        streams = {member.place.rank: member.actor.run.remote(shared) for member in self.members}
        results: dict[int, Any] = {}
        try:
            while streams and not self.failures:
                self._collect(streams, results, on_report, started, started + timeout_s)
                if time.monotonic() > started + timeout_s and streams and not self.failures:
                    raise WorkerTimeout(phase="run", epoch=self.epoch, missing=sorted(streams), timeout_s=timeout_s)
        except BaseException:
            self._break(streams, started)
            raise
        if self.failures:
            self._break(streams, started)
            raise root_cause(self.failures).error
        self._enter(GroupState.READY)
        return [results[rank] for rank in range(len(self.members))]

    def restart(self) -> None:
        """End what is left of the present epoch and start the next one, with new processes and a new rendezvous."""
        if self.state not in (GroupState.READY, GroupState.BROKEN):
            raise GroupStateError(f"a group that is {self.state} cannot be restarted")
        self._dissolve()
        self.start()

    def shutdown(self) -> None:
        """Kill the workers and remove the placement group. Idempotent; also after a failed start or run."""
        if self.state is GroupState.CLOSED:
            return
        self._enter(GroupState.CLOSED)
        self._dissolve()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _enter(self, state: GroupState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise GroupStateError(f"group {self.run_id} is {self.state} and cannot become {state}")
        self.state = state

    def _create_actors(self, deadline: float) -> None:
        reservation = self._reservation
        assert reservation is not None
        actor_class = ray.remote(**actor_options(self.gang.bundles[0]))(GpuWorker)
        for bundle in range(len(self.gang.bundles)):
            strategy = PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=bundle)
            options = actor_class.options(
                name=f"{group_name(self.run_id, self.epoch)}/w{bundle}", scheduling_strategy=strategy
            )
            self._actors.append(create_actor(options, (self.run_id, self.epoch, bundle), deadline))

    def _join(self, deadline: float) -> None:
        seats = self._call_all("start", [actor.sit.remote() for actor in self._actors], deadline)
        places = number_ranks([seat for seat, _ in seats])
        self.members = tuple(
            Member(self._actors[place.seat.bundle], place, seats[place.seat.bundle][1]) for place in places
        )
        first = self.members[0].actor
        store = self._call_all("rendezvous", [first.open_store.remote(len(places), self.start_timeout_s)], deadline)[0]
        joins = [
            member.actor.join.remote(member.place, store, self.start_timeout_s, self.collective_timeout_s)
            for member in self.members
        ]
        self._call_all("join", joins, deadline)

    def _call_all(self, phase: str, refs: Sequence[Any], deadline: float) -> list[Any]:
        """The results of one call to each worker, in order; raises on the first failure or at the deadline."""
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                missing = [i for i, ref in enumerate(refs) if ref in pending]
                raise WorkerTimeout(phase=phase, epoch=self.epoch, missing=missing, timeout_s=self.start_timeout_s)
            self._get(done[0], refs.index(done[0]), deadline)
        return [self._get(ref, index, deadline) for index, ref in enumerate(refs)]

    def _collect(
        self,
        streams: dict[int, Any],
        results: dict[int, Any],
        on_report: Callable[[Report], None] | None,
        started: float,
        deadline: float,
    ) -> None:
        """Handle the next event of any rank, or return at the deadline."""
        rank_of: dict[Any, int] = {stream: rank for rank, stream in streams.items()}
        ready: list[Any]
        ready, _ = ray.wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
        for stream in ready:
            rank = rank_of[stream]
            try:
                event = self._get(next(stream), rank, deadline)
            except Exception as error:
                del streams[rank]
                self.failures.append(Failure(rank, error, time.monotonic() - started))
                continue
            if isinstance(event, Outcome):
                del streams[rank]
                results[rank] = event.value
            elif on_report is not None:
                on_report(event)

    def _get(self, ref: Any, rank: int, deadline: float) -> Any:
        """See `fetch`."""
        member = self.members[rank] if rank < len(self.members) else None
        return fetch(ref, member, self.epoch, deadline, rank)

    def _break(self, streams: dict[int, Any], started: float) -> None:
        """Make every rank that still runs leave its collectives; kill those that do not within the grace."""
        self._enter(GroupState.BROKEN)
        for rank in streams:
            self.members[rank].actor.abort.remote()
        deadline = time.monotonic() + LEAVE_GRACE_S
        while streams and time.monotonic() < deadline:
            self._collect(streams, {}, None, started, deadline)
        for rank in streams:
            ray.kill(self.members[rank].actor)
        for failure in self.failures:
            self._metrics.add("zenray_peer_failures", error=type(failure.error).__name__)

    def _dissolve(self) -> None:
        """Leave nothing of the present epoch on the cluster."""
        actors, reservation = self._actors, self._reservation
        self._actors, self._reservation, self.members = [], None, ()
        for actor in actors:
            ray.kill(actor)
        if reservation is not None:
            release(reservation)


def fetch(ref: Any, member: Member | None, epoch: int, deadline: float, rank: int = -1) -> Any:
    """One finished result; the worker's exception in its own type, and a lost worker as WorkerLost.

    member: whose call it was, None while the workers are not numbered yet; then `rank` is its position.
    """
    fetch_s = max(_FETCH_S, deadline - time.monotonic())
    rank = rank if member is None else member.place.rank
    try:
        return ray.get(ref, timeout=fetch_s)
    except RayActorError as error:
        node, pid = ("?", 0) if member is None else (member.place.seat.address, member.pid)
        cause = str(error).strip().splitlines()[0]
        raise WorkerLost(rank=rank, epoch=epoch, node=node, pid=pid, cause=cause) from None
    except RayTaskError as error:
        if isinstance(error.cause, ZenrayError):
            raise error.cause from None
        raise
    except GetTimeoutError:
        raise WorkerTimeout(phase="fetch", epoch=epoch, missing=[rank], timeout_s=fetch_s) from None


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray spells CPU, GPU and memory as options of their own."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "memory": resources.get("memory"),
        "resources": own,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_pending_calls": 16,
        "concurrency_groups": {"control": 2},
    }


def create_actor(actor_class: Any, arguments: tuple[Any, ...], deadline: float) -> Any:
    """Create a named actor. A run that was killed keeps its names for a moment: wait for that, not for a live run."""
    while True:
        try:
            return actor_class.remote(*arguments)
        except ActorAlreadyExistsError as error:
            if time.monotonic() > deadline:
                raise WorkerError(f"{error}. Another live job uses this run id: end it, or choose another.") from None
            time.sleep(0.05)
