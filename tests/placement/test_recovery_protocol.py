"""The protocol without Ray: real slots, ledger and chooser; a transport that delays, reorders and loses; random deaths.

After each event: the last committed step is complete for every rank on live holders, unless all holders of some shard
died. After each recovery: no committed step lost, at most one applied step computed again, the restored bytes are those
of the undisturbed run. Late messages of earlier epochs keep arriving.
"""

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from actors.checkpoints import Slots
from actors.errors import CheckpointError
from actors.frames import HEADER_BYTES, Frame, digest_of, parts, read, seal
from placement.recovery import CommitLedger, EpochStart, Fallback, Restore, assign_holders, choose
from placement.replicas import Host

RUN, STEPS, LIMIT = "run", 12, 1 << 20


def state(rank: int, step: int) -> bytes:
    """What the undisturbed run holds; of a length that changes from step to step."""
    return hashlib.sha256(f"{rank}/{step}".encode()).digest() * (1 + step % 3)


def frame_of(rank: int, step: int, epoch: int, num_ranks: int, base: tuple[int, int]) -> np.ndarray:
    payload = b"{}      " + state(rank, step)
    data = np.empty(HEADER_BYTES + len(payload), np.uint8)
    data[HEADER_BYTES:] = np.frombuffer(payload, np.uint8)
    seal(data, Frame(RUN, epoch, rank, num_ranks, step, base, 8, len(payload) - 8, ""))
    return data


def put(slots: Slots, data: np.ndarray) -> None:
    """A frame arrives whole."""
    slots.receive(data[:HEADER_BYTES], lambda out: np.copyto(out, data[HEADER_BYTES:]))


@dataclass
class Rank:
    """One worker of the present epoch."""

    host: str
    alive: bool = True
    applied: int = 0
    reduced: int = 0
    committed: tuple[int, int] = (0, 0)
    confirmed: int = -1
    acks: dict[int, int] = field(default_factory=dict)


class World:
    """Driver, ranks, holders and everything in flight, moved by one random generator."""

    def __init__(self, seed: int, num_ranks: int, copies: int):
        self.chance = random.Random(seed)
        self.copies, self.num_ranks = copies, num_ranks
        self.num_hosts = num_ranks
        self.holders = {f"h{i}": Slots(RUN, f"h{i}", LIMIT) for i in range(num_ranks)}
        self.flight: list[tuple] = []
        self.history: list[EpochStart] = []
        self.epoch, self.committed, self.base = 0, -1, (0, 0)
        self.copies_of: dict[int, set[Slots]] = {}
        """Holders that acknowledged the last committed step, by rank."""
        self.acknowledged: dict[tuple[int, int], set[Slots]] = {}
        self.most_applied = 0
        self.ranks = [Rank(f"h{i}") for i in range(num_ranks)]
        self.ledger = CommitLedger(0, num_ranks, 0)
        self.redone, self.recoveries, self.fatal = 0, 0, False
        self.begin(0, (0, 0))

    def begin(self, step: int, base: tuple[int, int]) -> None:
        """An epoch starts: every rank prepares the restored step."""
        live = {name: Host(name, name, LIMIT, 0) for name in self.holders}
        self.rules = assign_holders([rank.host for rank in self.ranks], live, self.copies)
        self.ledger = CommitLedger(self.epoch, self.num_ranks, step)
        self.acknowledged = {}
        for number in range(self.num_ranks):
            self.ranks[number] = Rank(self.ranks[number].host, True, step, step, base)
            self.prepare(number)

    def prepare(self, number: int) -> None:
        rank = self.ranks[number]
        data = frame_of(number, rank.applied, self.epoch, self.num_ranks, rank.committed)
        for host in self.rules[number]:
            self.flight.append(("put", self.epoch, number, rank.applied, host, data))

    def event(self) -> None:
        """One thing happens."""
        able = [n for n, rank in enumerate(self.ranks) if rank.alive]
        choice = self.chance.random()
        if choice < 0.55 and self.flight:
            self.deliver(self.flight.pop(self.chance.randrange(len(self.flight))))
        elif able and choice < 1 - 0.012 / self.num_ranks:
            self.compute(self.chance.choice(able))
        else:
            self.kill()

    def compute(self, number: int) -> None:
        """Reduce the next step with all others, or apply it if the gate is open."""
        rank = self.ranks[number]
        if rank.reduced == rank.applied < STEPS:
            if all(other.alive and other.applied >= rank.applied for other in self.ranks):
                rank.reduced += 1
        elif rank.reduced > rank.applied and rank.confirmed == rank.applied:
            rank.applied += 1
            self.most_applied = max(self.most_applied, rank.applied)
            self.prepare(number)

    def deliver(self, message: tuple) -> None:
        kind, epoch, number, step, *rest = message
        rank = self.ranks[number]
        current = epoch == self.epoch and rank.alive
        if kind == "put":
            host, data = rest
            if host not in self.holders:
                return
            if self.chance.random() < 0.02:  # damaged on the way: refused, sent again
                bad = data.copy()
                bad[self.chance.randrange(bad.size)] ^= 1
                with pytest.raises(Exception, match=r"damaged|frame|shard|epoch"):
                    put(self.holders[host], bad)
                self.flight.append(message)
                return
            try:
                put(self.holders[host], data)
            except CheckpointError:
                assert epoch < self.epoch
                return
            self.flight.append(("ack", epoch, number, step, self.holders[host]))
        elif kind == "ack" and current:
            self.acknowledged.setdefault((number, step), set()).add(rest[0])
            rank.acks[step] = rank.acks.get(step, 0) + 1
            if rank.acks[step] == len(self.rules[number]):
                self.flight.append(("kept", epoch, number, step))
        elif kind == "kept":
            digest = digest_of(np.frombuffer(b"{}      " + state(number, step), np.uint8))
            if self.ledger.acknowledge(epoch, number, step, digest) is not None:
                self.committed, self.base = step, (step, self.num_ranks)
                self.copies_of = {n: self.acknowledged[n, step] for n in range(self.num_ranks)}
                self.flight += [("notice", epoch, n, step) for n in range(self.num_ranks)]
        elif kind == "notice" and current:
            rank.confirmed, rank.committed = step, (step, self.num_ranks)

    def kill(self) -> None:
        """A worker, a holder or a host dies."""
        what = self.chance.choice(["worker", "worker", "holder", "host"])
        number = self.chance.randrange(self.num_ranks)
        host = self.ranks[number].host
        if what in ("worker", "host"):
            for rank in self.ranks:
                if rank.host == host and (what == "host" or rank is self.ranks[number]):
                    rank.alive = False
        if what in ("holder", "host"):
            self.holders.pop(host, None)
        if self.chance.random() < 0.7:
            self.recover()

    def recover(self) -> None:
        """Fence, survey, choose, restore; the recovery itself may be cut off and start again."""
        self.recoveries += 1
        self.epoch += 1
        reports = {name: slots.fence(self.epoch) for name, slots in self.holders.items()}
        if self.chance.random() < 0.2:  # somebody dies in the middle of it
            self.holders.pop(self.chance.choice([*self.holders, "nobody"]), None)
            self.recover()
            return
        decision: Restore | Fallback = choose(
            reports, self.history, self.ledger.announced(), self.committed, self.rules
        )
        if self.committed < 0 and isinstance(decision, Fallback):
            step = 0
            base = (0, 0)
        else:
            if isinstance(decision, Fallback):
                assert any(not (copies & set(self.holders.values())) for copies in self.copies_of.values())
                self.fatal = True
                return
            step, base = self.restore(decision)
        if step > self.committed and base != (0, 0):
            self.committed, self.base = step, base
        self.redone = max(self.redone, self.most_applied - step)
        self.most_applied = step
        if base != (0, 0):
            self.history.append(EpochStart(self.epoch, step))
        for slots in self.holders.values():
            slots.discard(self.epoch, step)
        self.refill()
        self.begin(step, base)

    def restore(self, decision: Restore) -> tuple[int, tuple[int, int]]:
        assert decision.step >= self.committed
        key = (decision.step, decision.num_shards)
        for number, sources in enumerate(decision.sources):
            assert sources
            for source in sources:
                data = self.holders[source].get(number, key)
                assert parts(data, read(data, RUN, LIMIT))[1] == state(number, decision.step)
        self.copies_of = {n: {self.holders[s] for s in sources} for n, sources in enumerate(decision.sources)}
        return decision.step, key

    def refill(self) -> None:
        """Ranks of lost hosts get a new host; a host without a holder gets an empty one, sometimes later."""
        for number, rank in enumerate(self.ranks):
            if rank.host not in self.holders and self.chance.random() < 0.8:
                self.holders[rank.host] = Slots(RUN, rank.host, LIMIT)
                self.holders[rank.host].fence(self.epoch)
            if not rank.alive:
                name = f"h{self.num_hosts}"
                self.num_hosts += 1
                self.holders[name] = Slots(RUN, name, LIMIT)
                self.holders[name].fence(self.epoch)
                self.ranks[number] = Rank(name)
        if not self.holders:
            self.holders["spare"] = Slots(RUN, "spare", LIMIT)
            self.holders["spare"].fence(self.epoch)

    def check(self, every_byte: bool) -> None:
        """The invariant."""
        applied = [rank.applied for rank in self.ranks]
        assert max(applied) <= max(self.committed, 0) + 1
        if self.committed < 0:
            return
        live = set(self.holders.values())
        for number, copies in self.copies_of.items():
            if not copies & live:
                return  # every holder of this shard died: storage is all that is left
            for slots in copies & live:
                data = slots.get(number, self.base)
                assert not every_byte or parts(data, read(data, RUN, LIMIT))[1] == state(number, self.committed)


@pytest.mark.parametrize(("num_ranks", "copies"), [(2, 2), (3, 2), (4, 2), (5, 3), (1, 1)])
def test_no_schedule_loses_a_committed_step(num_ranks: int, copies: int) -> None:
    finished = fatal = recoveries = 0
    for seed in range(120):
        world = World(seed, num_ranks, copies)
        for number in range(220 * num_ranks):
            world.event()
            if world.fatal:
                break
            world.check(every_byte=number % 20 == 0)
        assert world.redone <= 1
        finished += world.committed == STEPS
        fatal += world.fatal
        recoveries += world.recoveries
    assert recoveries > 120
    assert finished > 20
    assert copies == 1 or fatal < finished
