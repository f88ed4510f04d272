"""`RecoverableGroup`: a worker group that goes on after the loss of any worker, holder or worker node.

One holder a host keeps checkpoint copies in memory; standby workers with torch imported wait in bundles of their own.
After a failure the processes that are alive stay: they leave the old process group, lost ranks get a standby under the
same rank, all join the group of the next epoch and restore the last step that is complete in memory. The stages are
those of `placement.recovery`; decisions are made there, this file acts on them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.crew import ANSWER_S, Crew, Standby
from actors.epoch import EpochRun, finished
from actors.errors import (
    CheckpointError,
    GroupStateError,
    HolderLost,
    Interrupted,
    WorkerLost,
    WorkerTimeout,
)
from actors.group import GroupState, Member, WorkerGroup, root_cause
from actors.journal import Journal
from actors.keeper import Assignment, Holder, Kept, NoProbe, Probe, RecoverableFunction
from actors.protection import Plan, Protection, Recovery
from actors.storage import Storage, StorageTier
from actors.worker import Report
from collectives.errors import CollectiveError, CollectiveMismatch
from placement.errors import PlacementError
from placement.groups import read_cluster, reserve
from placement.inventory import Place, Seat, Strategy
from placement.recovery import STAGES, CommitLedger, Fallback, Held, Restore, Stage, assign_holders, choose
from placement.replicas import Host

HOLDERS_S = 20.0
"""How long a group waits for new holders when fewer are left than there are to be copies."""
MAX_KEPT = 4096
_POLL_S = 0.02


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
        self.kept: deque[Kept] = deque(maxlen=MAX_KEPT)
        """What each rank's keeper measured at each of the latest steps of the last run."""
        self.events: list[str] = []
        self.crew = Crew(self.run_id, self.gang, self.protection.memory_limit_bytes)
        self.storage = StorageTier(None, self.run_id, self._say)
        self._stage_began = 0.0

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
        self.recoveries, self.events = [], []
        self.kept.clear()
        self.storage = StorageTier(storage, self.run_id, self._say)
        self._on_stage, self._on_commit = on_stage, on_commit
        self._on_report = on_report or (lambda report: None)
        self._probe = probe or NoProbe()
        self.crew.warm(ray.put(function))
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

    def wait_whole(self, *, timeout_s: float, spares: int | None = None) -> None:
        """Return when every bundle has a warm worker and every host of one a holder; raises WorkerTimeout.

        spares: standbys that suffice; None: all. A group need not be whole to run; whole, it recovers fastest.
        """
        deadline = time.monotonic() + timeout_s
        enough = self.num_ranks + (self.protection.spares if spares is None else spares)
        while True:
            self._fill()
            self._poll()
            hosts = {standby.seat.node_id for standby in self.crew.up if standby.seat} | self._rank_hosts()
            if len(self.members) + len(self.crew.up) >= enough and hosts <= set(self.crew.holders):
                break
            if time.monotonic() > deadline:
                missing = [standby.bundle for standby in self.crew.standbys if standby.seat is None]
                raise WorkerTimeout(phase="start", epoch=self.epoch, missing=missing, timeout_s=timeout_s)
            time.sleep(_POLL_S)
        self.crew.wait_warm(deadline - time.monotonic())

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

    def _attempt(self, function: RecoverableFunction, plan: Plan, attempt: int, deadline: float) -> list[Any]:
        """Seat, join and train one epoch; the results, or one of RECOVERABLE, or the function's own error."""
        if self.stage is not Stage.SEATING:
            self._go(Stage.SEATING)
        self._seat()
        self._go(Stage.JOINING)
        self._join_epoch()
        self._await_holders()
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
        self.storage.settle(deadline)
        return [run.results[rank] for rank in range(len(self.members))]

    def _go(self, stage: Stage) -> None:
        if stage not in STAGES[self.stage]:
            raise GroupStateError(f"run {self.run_id} is {self.stage} and cannot become {stage}")
        now = time.monotonic()
        if self.recoveries:
            seconds = self.recoveries[-1].seconds
            seconds[self.stage] = seconds.get(self.stage, 0.0) + now - self._stage_began
            if self.stage is not Stage.TRAINING:
                self._metrics.add("zenray_recovery_seconds", now - self._stage_began, stage=self.stage)
        self.stage, self._stage_began = stage, now
        self._on_stage(stage)

    def _say(self, text: str) -> None:
        self.events.append(text)
        self.journal.event(text)

    # --- a failure: fence, survey, choose -----------------------------------------------------------------------------

    def _fall_back(self, error: Exception, before: Plan) -> Plan:
        """Begin the next epoch: end what is lost, let survivors leave, ask the holders, choose the step."""
        self._metrics.add("zenray_recoveries", cause=type(error).__name__)
        self.epoch += 1
        self.journal.fence(self.epoch)
        lost = set(self._lost) | ({error.rank} if isinstance(error, WorkerLost) else set())
        if self.stage is Stage.JOINING:
            for member in self.members:
                member.actor.abort.remote()
        cause = str(error).splitlines()[0]
        self.recoveries.append(Recovery(self.epoch, cause, (), time.time(), self.journal.committed))
        self._go(Stage.FENCING)
        self._leave(lost)
        self.recoveries[-1].lost_ranks = tuple(sorted(lost))
        self._lost = frozenset()
        self._go(Stage.SURVEYING)
        reports, gone = self.crew.fence(self.epoch)
        for host in gone:
            self._say(f"the holder on host {host[:8]} is gone; its copies are made again elsewhere")
        plan = self._choose(reports, before)
        if plan.sources is not None and plan.step > self.journal.committed:
            self.journal.commit(self.epoch, plan.step)  # complete on the holders; only the line was missing
        self.recoveries[-1].step, self.recoveries[-1].source = plan.step, "storage" if plan.storage else "memory"
        finished([h.discard.remote(self.epoch, plan.step) for h in self.crew.holders.values()], ANSWER_S)
        return plan

    def _leave(self, lost: set[int]) -> None:
        """Survivors leave their process group; whoever does not is lost as well. The lost are ended and forgotten."""
        alive = [member for member in self.members if member.place.rank not in lost]
        answers = finished([member.actor.leave.remote(self.epoch) for member in alive], ANSWER_S + self._join_timeout_s)
        lost |= {member.place.rank for member, answer in zip(alive, answers, strict=True) if answer is None}
        for member in self.members:
            if member.place.rank in lost:
                self.crew.end_worker(member.actor, member.place.seat.node_id, member.pid)
        self.members = tuple(member for member in self.members if member.place.rank not in lost)

    def _choose(self, reports: Mapping[str, Sequence[Held]], before: Plan) -> Plan:
        committed = self.journal.committed
        decision = choose(reports, self.journal.history, self._ledger.announced(), committed, self._rules)
        if isinstance(decision, Restore):
            return Plan(decision.step, decision.num_shards, decision.sources)
        if self._ledger.committed < 0 and before.sources is None:
            return before  # nothing of this run was ever committed: begin as before
        return self._after_loss(decision)

    def _after_loss(self, fallback: Fallback) -> Plan:
        """The newest step that storage or memory still has, when the last committed one is lost."""
        hosts = ", ".join(host[:8] for host in fallback.hosts)
        text = f"shard(s) {list(fallback.shards)} of step {fallback.step} were lost with all of their holders ({hosts})"
        found = self.storage.latest(self.num_ranks)
        older = fallback.older
        if older is not None and (found is None or found[0] <= older.step):
            self._say(f"{text}; going back to step {older.step}, which is still in memory")
            return Plan(older.step, older.num_shards, older.sources)
        if found is None:
            raise CheckpointError(
                f"{text}, and no checkpoint is on storage. Go on from an earlier result if you have one, else start anew; "
                f"to survive this, keep more than {self.protection.copies} copies on more hosts, or give the run a storage"
            )
        self._say(f"{text}; going back to step {found[0]} on storage")
        return Plan(found[0], found[1], None, found[2])

    def _first_plan(self) -> Plan:
        """Where a run begins. A second run of the group begins a new epoch with empty holders."""
        self._lost = frozenset()
        if self.members:
            self.epoch += 1
            lost: set[int] = set()
            self._leave(lost)
        self.journal.fence(self.epoch)
        finished([holder.clear.remote(self.epoch) for holder in self.crew.holders.values()], ANSWER_S)
        storage = self.storage.storage
        found = self.storage.latest(self.num_ranks) if storage is not None and storage.resume else None
        if found is None:
            return Plan(0, 0)
        self._say(f"resumed at step {found[0]} from storage")
        return Plan(found[0], found[1], None, found[2])

    # --- seats and ranks ----------------------------------------------------------------------------------------------

    def _seat(self) -> None:
        """Fill every rank: survivors keep theirs, the others get standbys, or the group shrinks if it may."""
        taken = {member.place.rank: member for member in self.members}
        missing = [rank for rank in range(self.num_ranks) if rank not in taken]
        least = self.protection.min_ranks
        may_shrink = least is not None and len(taken) >= least
        patience_s = self.protection.shrink_after_s if may_shrink else self.protection.replacement_s
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

    def _take_standby(self, deadline: float) -> Standby | None:
        """A standby that answers, waited for until the deadline."""
        while True:
            self._poll()
            if (standby := self.crew.take(self.epoch)) is not None:
                return standby
            self._fill()
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)

    def _fill(self) -> None:
        assert self._reservation is not None
        self.crew.fill(self._reservation.group, [m.place.seat.bundle for m in self.members], self.epoch)

    def _poll(self) -> None:
        self.crew.poll(self._rank_hosts(), self.epoch)
        self.storage.note()

    def _rank_hosts(self) -> set[str]:
        return {member.place.seat.node_id for member in self.members}

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

    def _await_holders(self) -> None:
        """Wait for as many holders as there are copies, or hosts in use; go on with fewer, but not with none."""
        deadline = time.monotonic() + HOLDERS_S
        hosts = self._rank_hosts() | {standby.seat.node_id for standby in self.crew.up if standby.seat}
        while len(self.crew.holders) < min(self.protection.copies, len(hosts)) and time.monotonic() < deadline:
            self._poll()
            time.sleep(_POLL_S)
        if not self.crew.holders:
            raise CheckpointError(f"no holder of copies came up within {HOLDERS_S:g} s; look at the logs of the hosts")

    # --- copies -------------------------------------------------------------------------------------------------------

    def _assign(self, plan: Plan, attempt: int) -> list[Assignment]:
        """What each rank does; from now on the ledger is that of this epoch."""
        self._ledger = CommitLedger(self.epoch, len(self.members), plan.step)
        hosts = [member.place.seat.node_id for member in self.members]
        domains = {node.node_id: node.labels.get("zone", node.node_id) for node in read_cluster().nodes}
        limit, shard_bytes = self.protection.memory_limit_bytes, self._shard_bytes()
        live = {
            host: Host(host, domains.get(host, host), limit, hosts.count(host) * shard_bytes)
            for host in self.crew.holders
        }
        self._rules = assign_holders(hosts, live, self.protection.copies)
        fewest = min(len(rule) for rule in self._rules)
        if fewest < self.protection.copies:
            self._say(
                f"only {fewest} of {self.protection.copies} copies: {len(live)} holders are alive, each with room for "
                f"{limit} bytes; a shard has {shard_bytes or 'a still unknown number of'} bytes"
            )
        sources = tuple(
            tuple(self.crew.holders[host] for host in kept if host in self.crew.holders) for kept in plan.sources or ()
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
                holders=tuple(
                    Holder(host, self.crew.holders[host], self.crew.addresses[host]) for host in self._rules[rank]
                ),
                timeout_s=self.collective_timeout_s,
                heartbeat_s=self.protection.heartbeat_s,
                probe=self._probe,
            )
            for rank, old in enumerate(self._old_ranks)
        ]

    def _shard_bytes(self) -> int:
        """What one rank's shard will take, by the latest ones; 0 before the first."""
        latest = {kept.rank: kept.frame_bytes for kept in self.kept}
        return sum(latest.values()) // len(self.members)

    def _committed(self, step: int) -> None:
        if self.stage is Stage.RESTORING:
            self._go(Stage.TRAINING)
            for host, holder in self.crew.holders.items():
                kept = frozenset(rank for rank, rule in enumerate(self._rules) if host in rule)
                holder.retain.remote(self.epoch, kept, len(self.members))
            self._fill()
        self._metrics.set("zenray_committed_step", step)
        self.storage.write_if_due(step, [self.crew.holders.get(rule[0]) if rule else None for rule in self._rules])
        self._on_commit(step)

    def _can_grow(self) -> bool:
        """Whether a smaller group has a standby to grow with."""
        grows = len(self.members) < self.num_ranks and bool(self.crew.up)
        if grows:
            self._say(f"growing from {len(self.members)} ranks: a replacement has come")
        return grows

    def _dissolve(self) -> None:
        self._actors = self.crew.actors
        super()._dissolve()
        self.crew = Crew(self.run_id, self.gang, self.protection.memory_limit_bytes)


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
