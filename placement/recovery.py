"""Recovery from memory: which step to go back to, from where, who keeps copies, when a step counts. It decides only.

The protocol, after GEMINI (Wang et al., SOSP'23): step s is replicated to m holders while s + 1 is computed; once every
rank has its acknowledgements the step is committed, and only then may update s + 1 be applied. So at most one applied
step is ever uncommitted. Every start of the group has an epoch; what comes from an earlier one is dropped. A shard is
one rank's part of the state; a set of shards is known by its step and its number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from placement.errors import PlacementError
from placement.replicas import Host, place_replicas


class Stage(StrEnum):
    """Where a recoverable run stands. Every stage that is not final leads back to FENCING when something fails."""

    TRAINING = "training"
    FENCING = "fencing"
    """The next epoch is in the journal; survivors leave their collectives, lost processes are ended."""
    SURVEYING = "surveying"
    """Holders take the new epoch and report what they keep."""
    SEATING = "seating"
    """Lost ranks get a standby, or the group goes on without them."""
    JOINING = "joining"
    """A new process group."""
    RESTORING = "restoring"
    """Ranks load the chosen step and bring its copies back to m; ends with the first commit of the epoch."""
    DONE = "done"
    FAILED = "failed"


STAGES: Mapping[Stage, frozenset[Stage]] = {
    Stage.TRAINING: frozenset({Stage.FENCING, Stage.DONE, Stage.FAILED}),
    Stage.FENCING: frozenset({Stage.SURVEYING, Stage.FENCING, Stage.FAILED}),
    Stage.SURVEYING: frozenset({Stage.SEATING, Stage.FENCING, Stage.FAILED}),
    Stage.SEATING: frozenset({Stage.JOINING, Stage.FENCING, Stage.FAILED}),
    Stage.JOINING: frozenset({Stage.RESTORING, Stage.FENCING, Stage.FAILED}),
    Stage.RESTORING: frozenset({Stage.TRAINING, Stage.FENCING, Stage.FAILED}),
    Stage.DONE: frozenset(),
    Stage.FAILED: frozenset(),
}
"""The transition table; a run starts in SEATING (nothing to survey)."""


@dataclass(frozen=True)
class Held:
    """A verified copy that a holder reports: shard `rank` of `num_shards` of `step`, written in `epoch`."""

    rank: int
    num_shards: int
    step: int
    epoch: int
    digest: str


@dataclass(frozen=True)
class EpochStart:
    """An epoch that began to train: it went on from `step`, so later steps of earlier epochs are void."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Restore:
    """Go back to `step`; sources[shard] = hosts that keep the shard, in the order in which to ask them."""

    step: int
    num_shards: int
    sources: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Fallback:
    """The last committed `step` is not complete in memory: `shards` of it are lost with all of `hosts`.

    older: an earlier step that still is, if any; storage may hold a newer one.
    """

    step: int
    shards: tuple[int, ...]
    hosts: tuple[str, ...]
    older: Restore | None = None


def is_void(held: Held, history: Iterable[EpochStart]) -> bool:
    """Whether a later epoch went back to before this copy's step: the step was, or will be, computed anew."""
    return any(start.epoch > held.epoch and start.step < held.step for start in history)


def choose(
    reports: Mapping[str, Sequence[Held]],
    history: Sequence[EpochStart],
    announced: Mapping[tuple[int, int], str],
    committed: int,
    placed: Sequence[Sequence[str]],
) -> Restore | Fallback:
    """The highest step that live holders have for every shard, or which hosts took the last committed one with them.

    reports: by host, what its holder keeps. announced: digest by (step, rank) as far as the owners told; a copy that
    differs is not used. placed[rank]: hosts that were to keep the shard, for the message. A set is complete or not by
    itself, so two sets of one step with different numbers of shards do not mix; the larger one is preferred.
    """
    sets: dict[tuple[int, int], dict[int, list[tuple[int, str]]]] = {}
    for host, kept in sorted(reports.items()):
        for held in kept:
            said = announced.get((held.step, held.rank))
            if is_void(held, history) or (said is not None and said != held.digest):
                continue
            sets.setdefault((held.step, held.num_shards), {}).setdefault(held.rank, []).append((-held.epoch, host))
    complete = [key for key, shards in sets.items() if set(shards) == set(range(key[1]))]
    found: Restore | None = None
    if complete:
        step, num_shards = best = max(complete)
        sources = tuple(tuple(host for _, host in sorted(sets[best][rank])) for rank in range(num_shards))
        found = Restore(step, num_shards, sources)
        if step >= committed:
            return found
    kept_shards = {rank for (step, _), shards in sets.items() if step == committed for rank in shards}
    lost = tuple(rank for rank in range(len(placed)) if rank not in kept_shards)
    hosts = tuple(sorted({host for rank in lost for host in placed[rank]}))
    return Fallback(committed, lost, hosts, found)


def assign_holders(rank_hosts: Sequence[str], live: Mapping[str, Host], copies: int) -> tuple[tuple[str, ...], ...]:
    """result[rank] = hosts that keep the rank's shard, its own first where that has a holder.

    Hosts with ranks form groups (or groups and a ring) over different failure domains; spare hosts join only where
    fewer than `copies` hosts with ranks are left. With fewer live holders than `copies`, or where two slots of all kept
    shards do not fit into some host's memory, there are fewer copies. Raises PlacementError where not even one fits.
    """
    names = sorted({host for host in rank_hosts if host in live})
    names += [host for host in sorted(live) if host not in names][: max(0, copies - len(names))]
    if not names:
        return tuple(() for _ in rank_hosts)
    try:
        plan = place_replicas([live[name] for name in names], min(copies, len(names)))
    except PlacementError:
        if copies == 1:
            raise
        return assign_holders(rank_hosts, live, copies - 1)
    rule = {name: tuple(names[j] for j in kept) for name, kept in zip(names, plan.holders, strict=True)}
    return tuple(rule.get(host, rule[names[rank % len(names)]]) for rank, host in enumerate(rank_hosts))


@dataclass
class CommitLedger:
    """When a step of one epoch is committed. Acknowledgements of other epochs, and repeated ones, change nothing."""

    epoch: int
    num_ranks: int
    start: int
    """The restored step: the first to be committed, and the only one that has no step before it."""
    committed: int = -1
    acknowledged: dict[int, dict[int, str]] = field(default_factory=dict)
    """By step, digest by rank; only steps that are not committed, and the last one that is."""

    def acknowledge(self, epoch: int, rank: int, step: int, digest: str) -> int | None:
        """Note that all holders of `rank` have `step`; returns the step if that commits it."""
        due = self.start if self.committed < 0 else self.committed + 1
        if epoch != self.epoch or step < due or not 0 <= rank < self.num_ranks:
            return None
        assert step == due, f"rank {rank} acknowledged step {step} before step {due} was committed"
        ranks = self.acknowledged.setdefault(step, {})
        ranks[rank] = digest
        if len(ranks) < self.num_ranks:
            return None
        self.committed = step
        for old in [s for s in self.acknowledged if s < step]:
            del self.acknowledged[old]
        return step

    def announced(self) -> dict[tuple[int, int], str]:
        """Digests by (step, rank), as the owners told."""
        return {(step, rank): digest for step, ranks in self.acknowledged.items() for rank, digest in ranks.items()}
