"""How a Gloo group fails: deadlines, who is to blame, and tearing the connections down.

Gloo closes a dead peer's connections, but a rank that waits for a third, healthy one notices nothing; a wait knows that
it timed out but not on account of whom; and neither `abort`, `shutdown` nor `destroy_process_group` closes a socket
while somebody still holds the group (torch 2.13). Three means close these gaps, all through public calls:

Tear-down: a point-to-point wait that times out closes every connection of its group, so a receive that nobody answers,
waited for 1 ms, is a working abort. The peers see closed connections and do the same: an error spreads in milliseconds.

Farewell: two int64 into receives that were posted at the start. A rank that leaves says what it knows: this rank is at
fault, or I gave up waiting for that rank. A closed connection without farewell is a dead process.

Watch: a thread that says the farewell of a rank whose deadline has passed shortly before its wait times out (which
closes the connections). Live ranks give up at about the same time and say so; the hung one stays silent.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost

RESERVED_TAG = 0x7FF00000
"""Tags from here on are the watch's own."""
_FAREWELL, _PROBE, _TEAR_DOWN = RESERVED_TAG, RESERVED_TAG + 1, RESERVED_TAG + 2

GRACE_S = 0.4
"""From the deadline to closing the connections: time in which the farewells of all live ranks arrive."""

_AT_FAULT, _GAVE_UP = 0, 1
_UNKNOWN = -1


class GlooWatch:
    """Deadlines and failures of one rank of a Gloo group; one per group and process, whoever uses it. See `of`.

    It must outlive the transports: a farewell that met an abandoned receive would stall its connection. So it lives as
    long as the group, which it refers to weakly. Waits of one group must not run in two threads at once.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group_reference = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [peer for peer in range(self.size) if peer != self.rank]
        self.num_exchanges = 0
        self.shortest_timeout_s = math.inf
        self.deadline: float | None = None
        self.awaited = _UNKNOWN
        self.gave_up = False
        self.said_farewell = False
        self.broken: str | None = None
        self.heard: dict[int, tuple[int, int] | None] = {}
        self.farewells: dict[int, tuple[Tensor, dist.Work]] = {}
        for peer in self.peers:
            words = torch.empty(2, dtype=torch.int64)
            self.farewells[peer] = (words, post_recv(group, peer, words, _FAREWELL))
        self.goodbyes: list[dist.Work] = []
        self.wake = threading.Event()
        if self.peers:
            weakref.finalize(self, self.wake.set)
            thread = threading.Thread(
                target=_watch, args=(weakref.ref(self), self.wake), name="gloo-watch", daemon=True
            )
            thread.start()

    @staticmethod
    def of(group: dist.ProcessGroup, timeout_s: float) -> GlooWatch:
        """The watch of this group, made at first use. timeout_s: the shortest deadline the caller will wait for."""
        watch = _watches.get(group)
        if watch is None:
            watch = _watches[group] = GlooWatch(group)
        if timeout_s < watch.shortest_timeout_s:
            watch.shortest_timeout_s = timeout_s
            watch.wake.set()
        return watch

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; whoever calls the watch holds it."""
        group = self.group_reference()
        assert group is not None
        return group

    def wait(self, work: dist.Work, timeout_s: float, awaited: int = _UNKNOWN) -> None:
        """Wait for `work`, which depends on rank `awaited`. RuntimeError at the latest GRACE_S after the deadline."""
        self.awaited = awaited
        self.deadline = deadline = time.monotonic() + timeout_s
        try:
            work.wait(timedelta(seconds=timeout_s + GRACE_S))
        except RuntimeError as error:
            # Inside a collective the group's own limit may be the shorter one.
            self.gave_up = time.monotonic() >= deadline or "timed out" in str(error).lower()
            raise
        finally:
            self.deadline = None

    def had_completed(self, work: dist.Work) -> bool:
        """Whether this Work, not waited for before, was complete. Closes the connections if it was not."""
        try:
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return False
        return True

    def diagnose(
        self, phase: str, awaited: Sequence[int], num_bytes: int, timeout_s: float, error: RuntimeError
    ) -> CollectiveError:
        """The error to raise when waiting for the ranks `awaited` ended in `error`; leaves the group torn down.

        awaited is empty where any rank may be the cause. num_bytes: still outstanding in this phase.
        """
        text = str(error).splitlines()[0]
        if self.broken is not None:
            return CollectiveError(f"rank {self.rank}: phase '{phase}' was ended: {self.broken}")
        if self.gave_up:
            return self._timed_out(phase, awaited, num_bytes, timeout_s)
        closed = [peer for peer in self.peers if self._is_closed(peer)]
        at_fault = [peer for peer in closed if self._hear(peer) is None]
        at_fault += [words[1] for peer in closed if (words := self._hear(peer)) and words[0] == _AT_FAULT]
        if not closed:
            self.tear_down(f"phase '{phase}' failed: {text}")
            return CollectiveError(
                f"rank {self.rank}: phase '{phase}' with {num_bytes} bytes outstanding failed: {text}"
            )
        if not at_fault:
            return self._timed_out(phase, closed, num_bytes, timeout_s)
        peer = at_fault[0]
        if self._hear(peer) is None:
            cause = "its connection closed" if peer in closed else f"reported by rank {closed[0]}"
        else:
            cause = "it left the group after an error of its own"
        self.tear_down(f"rank {peer} was lost in phase '{phase}'", at_fault=peer)
        return PeerLost(rank=self.rank, phase=phase, peer=peer, expected_bytes=num_bytes, cause=cause)

    def _timed_out(self, phase: str, awaited: Sequence[int], num_bytes: int, timeout_s: float) -> CollectiveError:
        self.say_farewell(_GAVE_UP, self.awaited)
        silent = [peer for peer in self.peers if self._hear(peer) is None]
        missing = [peer for peer in awaited if peer in silent]
        if not missing and awaited:
            last = self._last_of_chain(awaited[0])
            missing = [last] if last in silent else silent if last is None else []
        elif not awaited:
            missing = silent
        if missing:
            self.tear_down(f"rank(s) {missing} did not answer in phase '{phase}'")
            return CollectiveTimeout(
                rank=self.rank, phase=phase, missing=missing, expected_bytes=num_bytes, timeout_s=timeout_s
            )
        self.tear_down(f"the ranks wait for each other in phase '{phase}'")
        return CollectiveMismatch(
            f"rank {self.rank}: nothing moved in phase '{phase}' for {timeout_s:g} s although all ranks concerned "
            f"are alive ({num_bytes} bytes outstanding with rank(s) {', '.join(map(str, awaited)) or 'unknown'}). The "
            f"ranks disagree about sizes or about the order of their calls."
        )

    def _last_of_chain(self, peer: int) -> int | None:
        """Follow who waits for whom: a silent rank, a rank that closes the circle, or None where it is not known."""
        seen = {self.rank}
        while peer not in seen:
            seen.add(peer)
            words = self._hear(peer)
            if words is None:
                return peer
            peer = words[1]
            if peer == _UNKNOWN:
                return None
        return peer

    def _is_closed(self, peer: int) -> bool:
        try:
            post_recv(self.group, peer, torch.empty(1, dtype=torch.uint8), _PROBE)
        except RuntimeError:
            return True
        return False

    def _hear(self, peer: int) -> tuple[int, int] | None:
        """The farewell of a peer, None if there is none. Each Work is waited for once; closes the connections."""
        if peer == self.rank:
            return None
        if peer not in self.heard:
            words, work = self.farewells[peer]
            said = self.had_completed(work)
            self.heard[peer] = (int(words[0]), int(words[1])) if said else None
        return self.heard[peer]

    def say_farewell(self, kind: int, rank: int) -> None:
        """Tell all peers that can still be reached, once."""
        if self.said_farewell:
            return
        self.said_farewell = True
        for peer in self.peers:
            try:
                self.goodbyes.append(post_send(self.group, peer, torch.tensor([kind, rank]), _FAREWELL))
            except RuntimeError:
                continue

    def tear_down(self, reason: str, at_fault: int | None = None) -> None:
        """Close all connections of the group in this process. Idempotent; safe from another thread."""
        if self.broken is not None:
            return
        self.broken = reason
        self.say_farewell(_AT_FAULT, self.rank if at_fault is None else at_fault)
        num_contexts = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1 if self.peers else 0
        for context in range(num_contexts):
            try:
                work = dist.irecv(torch.empty(1, dtype=torch.uint8), group=self.group, tag=_TEAR_DOWN + context)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, GlooWatch] = weakref.WeakKeyDictionary()


def _watch(reference: weakref.ref[GlooWatch], wake: threading.Event) -> None:
    """Say farewell for a wait whose deadline has passed.

    Sleeps for the shortest time limit when nothing waits: a wait that starts meanwhile cannot end before that.
    """
    while (watch := reference()) is not None and watch.broken is None:
        deadline = watch.deadline
        sleep_s = watch.shortest_timeout_s if deadline is None else deadline - time.monotonic()
        if sleep_s <= 0:
            watch.say_farewell(_GAVE_UP, watch.awaited)
            return
        sleep_s = min(sleep_s, watch.shortest_timeout_s, threading.TIMEOUT_MAX)
        del watch
        wake.wait(sleep_s)
        wake.clear()


def post_send(group: dist.ProcessGroup, peer: int, data: Tensor, tag: int) -> dist.Work:
    """Start sending to rank `peer` of the group."""
    return group.send([data], peer, tag)


def post_recv(group: dist.ProcessGroup, peer: int, data: Tensor, tag: int) -> dist.Work:
    """Post a receive from rank `peer` of the group."""
    return group.recv([data], peer, tag)
