"""One epoch of a recoverable run, on the driver: streams of reports, heartbeats, commits; ends in results or failures.

It acts on what the ranks say and decides nothing about recovery. Three detectors: the actor's error (a closed
connection on the way), a collective that failed on another rank, and a heartbeat that stays away for `heartbeat_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from actors.errors import WorkerLost, WorkerTimeout
from actors.group import LEAVE_GRACE_S, Failure, Member, fetch
from actors.journal import Journal
from actors.keeper import Assignment, Committed, Kept, RecoverableFunction, run_rank
from actors.worker import Outcome, Report
from collectives.errors import CollectiveTimeout
from placement.recovery import CommitLedger

BEATS_PER_LIMIT = 4
"""Pings sent within the limit of a heartbeat."""


@dataclass
class EpochRun:
    """The ranks of one epoch while they train. `members` in rank order."""

    members: Sequence[Member]
    epoch: int
    ledger: CommitLedger
    journal: Journal
    heartbeat_s: float
    on_report: Callable[[Report], None]
    on_commit: Callable[[int], None]
    """Called with each committed step after its journal line and before the ranks hear of it."""
    wants_leave: Callable[[], bool]
    """Asked at each commit: whether the ranks are to stop at this step for a change of the group."""
    on_kept: Callable[[Kept], None]
    failures: list[Failure] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    streams: dict[int, Any] = field(default_factory=dict)
    _beats: dict[Any, tuple[int, float]] = field(default_factory=dict)
    """Unanswered pings: rank and when it was sent."""
    _next_beat: dict[int, float] = field(default_factory=dict)
    _started: float = 0.0

    def train(
        self,
        function: RecoverableFunction,
        assignments: Sequence[Assignment],
        deadline: float,
        poll: Callable[[], None],
    ) -> bool:
        """Run until all ranks have ended or the first has failed; True if all ended well. poll: called in between.

        Raises WorkerTimeout at the deadline.
        """
        self._started = time.monotonic()
        for member, assignment in zip(self.members, assignments, strict=True):
            self.streams[member.place.rank] = member.actor.run.remote(partial(run_rank, function, assignment))
        while self.streams and not self.failures:
            self._ping()
            self._collect(deadline)
            self._judge_silence()
            poll()
            if time.monotonic() > deadline:
                raise WorkerTimeout(
                    phase="run", epoch=self.epoch, missing=sorted(self.streams), timeout_s=deadline - self._started
                )
        return not self.failures

    def stop(self) -> None:
        """Make every rank that still runs leave; those that do not within the grace are added to the failures."""
        for rank in self.streams:
            self.members[rank].actor.abort.remote()
        deadline = time.monotonic() + LEAVE_GRACE_S
        while self.streams and time.monotonic() < deadline:
            self._ping()
            self._collect(deadline)
            self._judge_silence()
        for rank in list(self.streams):
            self._silent(rank, LEAVE_GRACE_S, "leave")

    def lost(self) -> frozenset[int]:
        """Ranks whose process is gone or hangs."""
        gone = {failure.rank for failure in self.failures if isinstance(failure.error, WorkerLost)}
        hung = {
            rank
            for failure in self.failures
            if isinstance(failure.error, WorkerTimeout)
            for rank in failure.error.missing
        }
        if not gone | hung:  # nobody died, yet a collective waited in vain: whom it waited for is stuck in his program
            hung = {
                rank
                for failure in self.failures
                if isinstance(failure.error, CollectiveTimeout)
                for rank in failure.error.missing
            }
        return frozenset(gone | hung)

    def _ping(self) -> None:
        now = time.monotonic()
        waiting = {rank for rank, _ in self._beats.values()}
        for rank in self.streams:
            if rank not in waiting and now >= self._next_beat.get(rank, 0.0):
                self._beats[self.members[rank].actor.beat.remote()] = (rank, now)
                self._next_beat[rank] = now + self.heartbeat_s / BEATS_PER_LIMIT

    def _collect(self, deadline: float) -> None:
        rank_of: dict[Any, int] = {stream: rank for rank, stream in self.streams.items()}
        wait_s = min(self.heartbeat_s / BEATS_PER_LIMIT, max(0.0, deadline - time.monotonic()))
        watched = [*rank_of, *self._beats]
        if not ray.wait(watched, timeout=wait_s, fetch_local=False)[0]:
            return
        ready: list[Any] = ray.wait(watched, num_returns=len(watched), timeout=0, fetch_local=False)[0]
        for ref in ready:
            if ref in rank_of:
                self._take(rank_of[ref], ref, deadline)
            else:
                self._beats.pop(ref, None)

    def _take(self, rank: int, stream: Any, deadline: float) -> None:
        """The next event of one rank."""
        try:
            event = fetch(next(stream), self.members[rank], self.epoch, deadline)
        except Exception as error:
            del self.streams[rank]
            self.failures.append(Failure(rank, error, time.monotonic() - self._started))
            return
        if isinstance(event, Outcome):
            del self.streams[rank]
            self.results[rank] = event.value
        elif isinstance(kept := event.metrics.get("kept"), Kept):
            self._acknowledge(kept)
        else:
            self.on_report(event)

    def _acknowledge(self, kept: Kept) -> None:
        self.on_kept(kept)
        step = self.ledger.acknowledge(kept.epoch, kept.rank, kept.step, kept.digest)
        if step is None:
            return
        self.journal.commit(self.epoch, step)
        self.on_commit(step)
        notice = Committed(self.epoch, step, leave=self.wants_leave())
        for member in self.members:
            member.actor.notify.remote(notice)

    def _judge_silence(self) -> None:
        now = time.monotonic()
        for rank, sent in list(self._beats.values()):
            if rank in self.streams and now - sent > self.heartbeat_s:
                self._silent(rank, self.heartbeat_s, "heartbeat")

    def _silent(self, rank: int, limit_s: float, phase: str) -> None:
        del self.streams[rank]
        error = WorkerTimeout(phase=phase, epoch=self.epoch, missing=[rank], timeout_s=limit_s)
        self.failures.append(Failure(rank, error, time.monotonic() - self._started))


def finished(refs: Sequence[Any], timeout_s: float) -> list[Any | None]:
    """The result of each call, None where it failed or is late; waits at most `timeout_s` for all."""
    results: list[Any | None] = [None] * len(refs)
    if not refs:
        return results
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    for ref in ready:
        try:
            results[refs.index(ref)] = (ray.get(ref, timeout=timeout_s),)
        except RayError:
            continue
    return results
