"""`RecoverableGroup`: a worker group that goes on after the loss of any worker, holder or worker node.

One holder a host keeps checkpoint copies in memory; standby workers with torch imported wait in bundles of their own.
After a failure the processes that are alive stay: they leave the old process group, lost ranks get a standby under the
same rank, all join the group of the next epoch and restore the last step that is complete in memory. The stages are
those of `placement.recovery`; decisions are made there, this file acts on them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.checkpoints import CheckpointStore
from actors.epoch import EpochRun, finished
from actors.errors import (
    CheckpointError,
    GroupStateError,
    HolderLost,
    Interrupted,
    WorkerLost,
    WorkerTimeout,
)
from actors.folder import ShardFolder
from actors.group import GroupState, Member, WorkerGroup, actor_options, create_actor, root_cause
from actors.journal import Journal
from actors.keeper import Assignment, Kept, NoProbe, Probe, RecoverableFunction
from actors.worker import GpuWorker, Report
from collectives.errors import CollectiveError, CollectiveMismatch
from placement.errors import PlacementError
from placement.groups import group_name, read_cluster, reserve
from placement.inventory import Place, Seat, Strategy
from placement.recovery import STAGES, CommitLedger, Fallback, Held, Restore, Stage, assign_holders, choose
from placement.replicas import Host

ANSWER_S = 2.0
"""How long a holder, a standby or a survivor may take for an answer in a recovery."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Storage:
    """Checkpoints on disk, in a folder that all nodes see: every `every_steps` committed steps, written by holders."""

    folder: Path
    every_steps: int
    keep: int = 2
    resume: bool = False
    config_sha256: str = ""

    def of(self, num_ranks: int) -> Path:
        """The folder of checkpoints by so many ranks."""
        return self.folder / f"ranks-{num_ranks}"

    def latest(self, most_ranks: int) -> tuple[int, int] | None:
        """(step, num_ranks) of the newest complete checkpoint, or None."""
        found = [
            (step, ranks)
            for ranks in range(1, most_ranks + 1)
            if (step := ShardFolder(self.of(ranks), 0, ranks).latest()) is not None
        ]
        return max(found, default=None)


@dataclass(frozen=True)
class Protection:
    """How a group protects itself."""

    copies: int = 2
    """m: holders of each shard, the own host's included."""
    spares: int = 1
    """Standby workers, each in a reserved bundle."""
    heartbeat_s: float = 2.0
    """H: a worker that is silent for so long is hung, and ended."""
    max_recoveries: int = 16
    """In one run; then the failure is raised."""
    replacement_s: float = 60.0
    """How long lost ranks wait for a replacement."""
    min_ranks: int | None = None
    """Elastic: without a replacement in time go on with fewer ranks, at least so many, and grow back when one comes.
    The result is then not the one of the full group. None: never."""
    memory_limit_bytes: int = 1 << 30
    """Of each holder."""


@dataclass
class Recovery:
    """One recovery, for the record. seconds: by stage, how long it took."""

    epoch: int
    cause: str
    lost_ranks: tuple[int, ...]
    began_s: float
    """time.time() at which the driver knew."""
    committed_before: int
    step: int = -1
    source: str = ""
    num_ranks: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class _Seated:
    """A worker process without a rank: starting, or ready once `seat` is known."""

    actor: Any
    bundle: int
    ready: Any
    seat: Seat | None = None
    pid: int = 0


@dataclass(frozen=True)
class _Plan:
    """From where the next epoch goes on. sources None: from nothing, or from storage."""

    step: int
    old_shards: int
    sources: tuple[tuple[str, ...], ...] | None = None
    storage: Path | None = None


RECOVERABLE = (WorkerLost, WorkerTimeout, CollectiveError, HolderLost, Interrupted, RayActorError)


class RecoverableGroup(WorkerGroup):
    """`num_workers` ranks and `protection.spares` standbys, each a bundle of one placement group.

    With the strategy SPREAD or STRICT_SPREAD every rank is on a host of its own, and so are the copies. `run` takes a
    function of (context, keeper), see `actors.keeper`. A context manager: leaves no actor, group or process.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        journal: Path,
        protection: Protection | None = None,
        strategy: Strategy = "SPREAD",
        **group_options: Any,
    ):
        self.protection = protection or Protection()
        super().__init__(num_workers + self.protection.spares, strategy=strategy, **group_options)
        self.num_ranks = num_workers
        self.journal_path = journal
        self.stage = Stage.DONE
        self.recoveries: list[Recovery] = []
        """Of the last run."""
        self.kept: list[Kept] = []
        """What each rank's keeper measured at each step of the last run."""
        self.events: list[str] = []
        self.holders: dict[str, Any] = {}
        """The live holder of each host (Ray node id)."""
        self._opening: dict[str, tuple[Any, Any]] = {}
        self._idle: list[_Seated] = []
        self._created = 0
        self._stage_began = 0.0
        self._writes: list[tuple[int, Any]] = []
        self._storage: Storage | None = None
        self._shared_function: Any = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Place workers, standbys and holders. Ranks are numbered and joined by `run`. Errors as `WorkerGroup.start`."""
        self._enter(GroupState.STARTING)
        self.epoch += 1
        try:
            self._reservation = reserve(self.gang, run_id=self.run_id, epoch=self.epoch, timeout_s=self.start_timeout_s)
            self.wait_whole(timeout_s=self.start_timeout_s)
        except BaseException:
            self._enter(GroupState.BROKEN)
            self._dissolve()
            raise
        self._enter(GroupState.READY)

    def run(  # type: ignore[override]
        self,
        function: RecoverableFunction,
        *,
        timeout_s: float,
        on_report: Callable[[Report], None] | None = None,
        on_commit: Callable[[int], None] = lambda step: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
        storage: Storage | None = None,
        probe: Probe | None = None,
    ) -> list[Any]:
        """Run `function(context, keeper)` on every rank through all failures; returns the results by rank.

        Raises the root cause when the function itself fails, when `max_recoveries` are spent, when no replacement came,
        or CheckpointError when a step is complete neither in memory nor on storage.
        """
        self._enter(GroupState.RUNNING)
        deadline = time.monotonic() + timeout_s
        self.recoveries, self.kept, self.events, self._writes = [], [], [], []
        self._storage, self._on_stage, self._on_commit = storage, on_stage, on_commit
        self._on_report = on_report or (lambda report: None)
        self._probe = probe or NoProbe()
        self._shared_function = ray.put(function)
        for standby in self._ready():
            standby.actor.warm.remote(self._shared_function)
        self.journal = Journal(self.journal_path)
        self._ledger = CommitLedger(self.epoch, self.num_ranks, 0)
        self._rules: tuple[tuple[str, ...], ...] = ()
        self.stage, self._stage_began = Stage.SEATING, time.monotonic()
        try:
            results = self._run_epochs(function, deadline)
        except BaseException:
            self._go(Stage.FAILED)
            self._enter(GroupState.BROKEN)
            raise
        finally:
            self.journal.close()
        self._go(Stage.DONE)
        self._enter(GroupState.READY)
        return results

    def wait_whole(self, *, timeout_s: float) -> None:
        """Return when every bundle has a warm worker and every host of one a holder; raises WorkerTimeout.

        A group need not be whole to run; whole, it recovers fastest.
        """
        self._order_standbys()
        deadline = time.monotonic() + timeout_s

        def is_whole() -> bool:
            seated = len(self.members) + len(self._ready())
            hosts = {s.seat.node_id for s in self._ready() if s.seat} | {m.place.seat.node_id for m in self.members}
            if len(self.members) + len(self._idle) < len(self.gang.bundles):
                self._order_standbys()
            return seated == len(self.gang.bundles) and hosts <= set(self.holders)

        self._await(is_whole, deadline, "start")
        finished([standby.actor.warm.remote(None) for standby in self._ready()], deadline - time.monotonic())

    def _run_epochs(self, function: RecoverableFunction, deadline: float) -> list[Any]:
        plan = self._first_plan()
        error: Exception | None = None
        for attempt in range(self.protection.max_recoveries + 1):
            try:
                if error is not None:
                    plan = self._fall_back(error, plan)
                return self._attempt(function, plan, attempt, deadline)
            except RECOVERABLE as caught:
                if isinstance(caught, CollectiveMismatch) or time.monotonic() > deadline:
                    raise
                error = caught
        assert error is not None
        raise error

    def _attempt(self, function: RecoverableFunction, plan: _Plan, attempt: int, deadline: float) -> list[Any]:
        """Seat, join and train one epoch; the results, or one of RECOVERABLE, or the function's own error."""
        if self.stage is not Stage.SEATING:
            self._go(Stage.SEATING)
        self._seat()
        self._go(Stage.JOINING)
        self._join_epoch()
        self._go(Stage.RESTORING)
        assignments = self._assign(plan, attempt)
        self.journal.start(self.epoch, plan.step if plan.old_shards else -1, len(self.members))
        if self.recoveries:
            self.recoveries[-1].num_ranks = len(self.members)
        run = EpochRun(
            self.members,
            self.epoch,
            self._ledger,
            self.journal,
            self.protection.heartbeat_s,
            on_report=self._on_report,
            on_commit=self._committed,
            wants_leave=self._can_grow,
            on_kept=self.kept.append,
        )
        if not run.train(function, assignments, deadline, self._poll):
            run.stop()
            self._lost = run.lost()
            self.failures = run.failures
            cause = root_cause(run.failures).error
            for failure in run.failures:
                self._metrics.add("zenray_peer_failures", error=type(failure.error).__name__)
            raise next((f.error for f in run.failures if isinstance(f.error, HolderLost)), cause)
        self._settle_writes(deadline)
        return [run.results[rank] for rank in range(len(self.members))]

    def _go(self, stage: Stage) -> None:
        if stage not in STAGES[self.stage]:
            raise GroupStateError(f"run {self.run_id} is {self.stage} and cannot become {stage}")
        now = time.monotonic()
        if self.recoveries:
            seconds = self.recoveries[-1].seconds
            seconds[self.stage] = seconds.get(self.stage, 0.0) + now - self._stage_began
        self.stage, self._stage_began = stage, now
        self._on_stage(stage)

    def _say(self, text: str) -> None:
        self.events.append(text)
        self.journal.event(text)

    # --- a failure: fence, survey, choose -----------------------------------------------------------------------------

    def _fall_back(self, error: Exception, before: _Plan) -> _Plan:
        """Begin the next epoch: end what is lost, let survivors leave, ask the holders, choose the step."""
        self._metrics.add("zenray_recoveries", cause=type(error).__name__)
        self.epoch += 1
        self.journal.fence(self.epoch)
        lost = set(self._lost) | ({error.rank} if isinstance(error, WorkerLost) else set())
        cause = str(error).splitlines()[0]
        self.recoveries.append(Recovery(self.epoch, cause, (), time.time(), self.journal.committed))
        self._go(Stage.FENCING)
        self._leave(lost)
        self.recoveries[-1].lost_ranks = tuple(sorted(lost))
        self._lost = frozenset()
        self._go(Stage.SURVEYING)
        reports = self._survey()
        plan = self._choose(reports, before)
        if plan.sources is not None and plan.step > self.journal.committed:
            self.journal.commit(self.epoch, plan.step)  # complete on the holders; only the line was missing
        self.recoveries[-1].step, self.recoveries[-1].source = plan.step, "storage" if plan.storage else "memory"
        finished([h.discard.remote(self.epoch, plan.step) for h in self.holders.values()], ANSWER_S)
        return plan

    def _leave(self, lost: set[int]) -> None:
        """Survivors leave their process group; whoever does not is lost as well. The lost are ended and forgotten."""
        alive = [member for member in self.members if member.place.rank not in lost]
        answers = finished([member.actor.leave.remote(self.epoch) for member in alive], ANSWER_S + self._join_timeout_s)
        lost |= {member.place.rank for member, answer in zip(alive, answers, strict=True) if answer is None}
        for member in self.members:
            if member.place.rank in lost:
                ray.kill(member.actor)
                if (holder := self.holders.get(member.place.seat.node_id)) is not None:
                    holder.end_process.remote(member.pid)
        self.members = tuple(member for member in self.members if member.place.rank not in lost)

    def _survey(self) -> dict[str, Sequence[Held]]:
        """Fence every holder and hear what it keeps; a holder that does not answer is replaced by an empty one."""
        hosts = list(self.holders)
        answers = finished([self.holders[host].fence.remote(self.epoch) for host in hosts], ANSWER_S)
        reports: dict[str, Sequence[Held]] = {}
        for host, answer in zip(hosts, answers, strict=True):
            if answer is None:
                ray.kill(self.holders.pop(host))
                self._say(f"the holder on host {host[:8]} is gone; its copies are made again elsewhere")
            else:
                reports[host] = answer[0]
        return reports

    def _choose(self, reports: Mapping[str, Sequence[Held]], before: _Plan) -> _Plan:
        committed = self.journal.committed
        decision = choose(reports, self.journal.history, self._ledger.announced(), committed, self._rules)
        if isinstance(decision, Restore):
            return _Plan(decision.step, decision.num_shards, decision.sources)
        if self._ledger.committed < 0 and before.sources is None:
            return before  # nothing of this run was ever committed: begin as before
        return self._after_loss(decision)

    def _after_loss(self, fallback: Fallback) -> _Plan:
        """The newest step that storage or memory still has, when the last committed one is lost."""
        hosts = ", ".join(host[:8] for host in fallback.hosts)
        text = f"shard(s) {list(fallback.shards)} of step {fallback.step} were lost with all of their holders ({hosts})"
        found = self._storage.latest(self.num_ranks) if self._storage else None
        older = fallback.older
        if older is not None and (found is None or found[0] <= older.step):
            self._say(f"{text}; going back to step {older.step}, which is still in memory")
            return _Plan(older.step, older.num_shards, older.sources)
        if self._storage is None or found is None:
            raise CheckpointError(f"{text}, and no checkpoint is on storage: start anew, with more copies or storage")
        self._say(f"{text}; going back to step {found[0]} on storage")
        return _Plan(found[0], found[1], None, self._storage.of(found[1]))

    def _first_plan(self) -> _Plan:
        """Where a run begins. A second run of the group begins a new epoch with empty holders."""
        self._lost = frozenset()
        if self.members:
            self.epoch += 1
            lost: set[int] = set()
            self._leave(lost)
        self.journal.fence(self.epoch)
        finished([holder.clear.remote(self.epoch) for holder in self.holders.values()], ANSWER_S)
        found = self._storage.latest(self.num_ranks) if self._storage and self._storage.resume else None
        if found is None or self._storage is None:
            return _Plan(0, 0)
        self._say(f"resumed at step {found[0]} from storage")
        return _Plan(found[0], found[1], None, self._storage.of(found[1]))

    # --- seats and ranks ----------------------------------------------------------------------------------------------

    def _seat(self) -> None:
        """Fill every rank: survivors keep theirs, the others get standbys, or the group shrinks if it may."""
        taken = {member.place.rank: member for member in self.members}
        missing = [rank for rank in range(self.num_ranks) if rank not in taken]
        least = self.protection.min_ranks
        patience_s = ANSWER_S if least is not None and len(taken) >= least else self.protection.replacement_s
        deadline = time.monotonic() + patience_s
        chosen: list[tuple[Any, Seat, int]] = []
        while missing[len(chosen) :]:
            standby = self._take_standby(deadline)
            if standby is None:
                break
            assert standby.seat is not None
            chosen.append((standby.actor, standby.seat, standby.pid))
        seated: dict[int, tuple[Any, Seat, int]] = {
            rank: (member.actor, member.place.seat, member.pid) for rank, member in taken.items()
        }
        seated |= dict(zip(missing, chosen, strict=False))
        if len(seated) < self.num_ranks:
            if least is None or len(seated) < least:
                raise PlacementError(
                    f"no replacement for rank(s) {missing[len(chosen) :]} came within {patience_s:g} s: add a node, or "
                    f"allow fewer ranks (min_ranks)"
                )
            self._say(f"going on with {len(seated)} of {self.num_ranks} ranks: no replacement came")
        self._old_ranks = sorted(seated)
        self.members = tuple(
            Member(seated[old][0], place, seated[old][2])
            for old, place in zip(self._old_ranks, places([seated[old][1] for old in self._old_ranks]), strict=True)
        )

    def _take_standby(self, deadline: float) -> _Seated | None:
        """A standby that answers, waited for until the deadline."""
        while True:
            self._poll()
            for standby in self._ready():
                self._idle.remove(standby)
                if finished([standby.actor.beat.remote()], ANSWER_S)[0] is not None:
                    finished([standby.actor.leave.remote(self.epoch)], ANSWER_S)
                    return standby
                ray.kill(standby.actor)
            self._order_standbys()
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)

    def _ready(self) -> list[_Seated]:
        return [standby for standby in self._idle if standby.seat is not None]

    def _order_standbys(self) -> None:
        """Start a worker in every bundle that has none. In a bundle whose node died Ray starts it when a node joins."""
        assert self._reservation is not None
        used = {member.place.seat.bundle for member in self.members} | {standby.bundle for standby in self._idle}
        actor_class = ray.remote(**actor_options(self.gang.bundles[0]))(GpuWorker)
        for bundle in set(range(len(self.gang.bundles))) - used:
            self._created += 1
            strategy = PlacementGroupSchedulingStrategy(self._reservation.group, placement_group_bundle_index=bundle)
            name = f"{group_name(self.run_id, self.epoch)}/w{bundle}.{self._created}"
            options = actor_class.options(name=name, scheduling_strategy=strategy)
            actor = create_actor(options, (self.run_id, self.epoch, bundle), time.monotonic() + self.start_timeout_s)
            self._actors.append(actor)
            self._idle.append(_Seated(actor, bundle, actor.sit.remote()))

    def _poll(self) -> None:
        """Take note of standbys and holders that have come up, and of finished writes."""
        for standby in [standby for standby in self._idle if standby.seat is None]:
            if not ray.wait([standby.ready], timeout=0)[0]:
                continue
            if (answer := finished([standby.ready], ANSWER_S)[0]) is not None:
                standby.seat, standby.pid = answer[0]
                if self._shared_function is not None:
                    standby.actor.warm.remote(self._shared_function)
            else:
                self._idle.remove(standby)  # died while it started; another is ordered when it is needed
        for seat in [s.seat for s in self._ready() if s.seat] + [m.place.seat for m in self.members]:
            if seat.node_id not in self.holders and seat.node_id not in self._opening:
                self._open_holder(seat.node_id)
        for host, (holder, ready) in list(self._opening.items()):
            if ray.wait([ready], timeout=0)[0]:
                del self._opening[host]
                if finished([holder.fence.remote(self.epoch)], ANSWER_S)[0] is not None:
                    self.holders[host] = holder
        self._note_writes(0)

    def _open_holder(self, host: str) -> None:
        limit = self.protection.memory_limit_bytes
        settings: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": {"control": 2, "disk": 1}}
        holder = (
            ray.remote(**settings)(CheckpointStore)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(host, soft=False))
            .remote(self.run_id, host[:8], limit)
        )
        self._actors.append(holder)
        self._opening[host] = (holder, holder.sit.remote())

    def _join_epoch(self) -> None:
        """A new process group of the members, in rank order."""
        deadline = time.monotonic() + self._join_timeout_s
        first = self.members[0].actor
        refs = [first.open_store.remote(len(self.members), self._join_timeout_s)]
        store = self._call_all("rendezvous", refs, deadline)[0]
        joins = [
            member.actor.join.remote(member.place, store, self._join_timeout_s, self.collective_timeout_s)
            for member in self.members
        ]
        self._call_all("join", joins, deadline)

    @property
    def _join_timeout_s(self) -> float:
        """A rank that dies while others join makes them wait for so long."""
        return min(10.0, self.start_timeout_s)

    # --- copies -------------------------------------------------------------------------------------------------------

    def _assign(self, plan: _Plan, attempt: int) -> list[Assignment]:
        """What each rank does; from now on the ledger is that of this epoch."""
        self._ledger = CommitLedger(self.epoch, len(self.members), plan.step)
        hosts = [member.place.seat.node_id for member in self.members]
        domains = {node.node_id: node.labels.get("zone", node.node_id) for node in read_cluster().nodes}
        limit = self.protection.memory_limit_bytes
        live = {host: Host(host, domains.get(host, host), limit, 0) for host in self.holders}
        self._rules = assign_holders(hosts, live, self.protection.copies)
        fewest = min(len(rule) for rule in self._rules)
        if fewest < self.protection.copies:
            self._say(f"only {fewest} of {self.protection.copies} copies: {len(live)} holders are alive")
        sources = tuple(
            tuple(self.holders[host] for host in kept if host in self.holders) for kept in plan.sources or ()
        )
        return [
            Assignment(
                run_id=self.run_id,
                epoch=self.epoch,
                attempt=attempt,
                step=plan.step,
                old_shards=plan.old_shards,
                own_shard=old if old < plan.old_shards else None,
                sources=sources,
                storage=plan.storage,
                holders=tuple((host, self.holders[host]) for host in self._rules[rank]),
                timeout_s=self.collective_timeout_s,
                heartbeat_s=self.protection.heartbeat_s,
                probe=self._probe,
            )
            for rank, old in enumerate(self._old_ranks)
        ]

    def _committed(self, step: int) -> None:
        if self.stage is Stage.RESTORING:
            self._go(Stage.TRAINING)
            for host, holder in self.holders.items():
                kept = frozenset(rank for rank, rule in enumerate(self._rules) if host in rule)
                holder.retain.remote(self.epoch, kept, len(self.members))
            self._order_standbys()
        self._metrics.set("zenray_committed_step", step)
        if self._storage is not None and step and step % self._storage.every_steps == 0:
            self._write(step, self._storage)
        self._on_commit(step)

    def _write(self, step: int, storage: Storage) -> None:
        """Have each shard written by the first of its holders, beside the training."""
        identity = {"run_id": self.run_id, "config_sha256": storage.config_sha256}
        size = len(self.members)
        for rank, rule in enumerate(self._rules):
            if rule:
                call = self.holders[rule[0]].write
                self._writes.append(
                    (step, call.remote(str(storage.of(size)), rank, (step, size), storage.keep, identity))
                )

    def _note_writes(self, timeout_s: float) -> None:
        """A write that failed turns the disk tier off, with an event; memory goes on."""
        if not self._writes:
            return
        refs = [ref for _, ref in self._writes]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        for step, ref in [write for write in self._writes if write[1] in ready]:
            self._writes.remove((step, ref))
            try:
                ray.get(ref, timeout=ANSWER_S)
            except RayActorError:
                continue  # the holder is gone: the ranks notice it by themselves
            except CheckpointError as error:
                if self._storage is not None:
                    self._storage = None
                    self._say(f"storage is off from step {step} on, memory goes on: {error}")

    def _settle_writes(self, deadline: float) -> None:
        while self._writes and time.monotonic() < deadline:
            self._note_writes(1.0)

    def _can_grow(self) -> bool:
        """Whether a smaller group has a standby to grow with."""
        grows = len(self.members) < self.num_ranks and bool(self._ready())
        if grows:
            self._say(f"growing from {len(self.members)} ranks: a replacement has come")
        return grows

    def _await(self, condition: Callable[[], bool], deadline: float, phase: str) -> None:
        while not condition():
            self._poll()
            if time.monotonic() > deadline:
                missing = [standby.bundle for standby in self._idle if standby.seat is None]
                raise WorkerTimeout(phase=phase, epoch=self.epoch, missing=missing, timeout_s=self.start_timeout_s)
            time.sleep(_POLL_S)

    def _dissolve(self) -> None:
        super()._dissolve()
        self.holders, self._opening, self._idle = {}, {}, []


def places(seats: Sequence[Seat]) -> tuple[Place, ...]:
    """Numbers for workers whose ranks are fixed by their order: a rank stays the same rank wherever it moves."""
    nodes = list(dict.fromkeys(seat.node_id for seat in seats))
    sizes = Counter(seat.node_id for seat in seats)
    seen: Counter[str] = Counter()
    numbered = []
    for rank, seat in enumerate(seats):
        local = seen[seat.node_id]
        seen[seat.node_id] += 1
        numbered.append(Place(rank, len(seats), nodes.index(seat.node_id), local, sizes[seat.node_id], seat))
    return tuple(numbered)
