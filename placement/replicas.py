"""Where the copies of each checkpoint shard live, and how likely memory alone survives the loss of k hosts.

The rules are those of GEMINI (Wang et al., SOSP'23): hosts in groups of m when m divides N, otherwise groups and one
closing ring ("mixed"); a plain ring for comparison. H(i) is the set of hosts that keep host i's shard, i among them.
In each rule every host sends and receives m - 1 shards; they differ in how many distinct sets it is fatal to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb

from collectives.errors import ConfigError
from placement.errors import PlacementError

MAX_COUNTED_SETS = 2_000_000
"""Loss sets that `recovery_probability` is willing to enumerate."""

Hosts = tuple[tuple[int, ...], ...]
"""hosts[i] = H(i), the owner first."""


def group(num_hosts: int, copies: int) -> Hosts:
    """Consecutive groups of `copies` hosts, each keeping all shards of its group. Needs copies to divide num_hosts."""
    _check(num_hosts, copies)
    if num_hosts % copies:
        raise ConfigError(f"{copies} copies do not divide {num_hosts} hosts into groups; use mixed()")
    return tuple(tuple(i - i % copies + (i + j) % copies for j in range(copies)) for i in range(num_hosts))


def ring(num_hosts: int, copies: int) -> Hosts:
    """Each shard on its owner and on the next `copies` - 1 hosts."""
    _check(num_hosts, copies)
    return tuple(tuple((i + j) % num_hosts for j in range(copies)) for i in range(num_hosts))


def mixed(num_hosts: int, copies: int) -> Hosts:
    """Groups, and the last copies + (num_hosts mod copies) hosts as one ring; only groups if nothing is left over."""
    _check(num_hosts, copies)
    rest = num_hosts % copies
    if rest == 0:
        return group(num_hosts, copies)
    start = (num_hosts // copies - 1) * copies
    tail = ring(num_hosts - start, copies)
    head = group(start, copies) if start else ()
    return head + tuple(tuple(start + host for host in hosts) for hosts in tail)


def fatal_sets(hosts: Hosts) -> frozenset[frozenset[int]]:
    """The distinct sets of hosts whose joint loss takes every copy of some shard."""
    return frozenset(frozenset(kept) for kept in hosts)


def recovery_probability(hosts: Hosts, num_lost: int) -> Fraction:
    """Exact share of the sets of `num_lost` hosts that leave at least one copy of every shard.

    Counts the sets, so it is quick up to about 16 hosts; raises ConfigError above MAX_COUNTED_SETS sets (use
    `group_recovery_probability`, or `recovery_lower_bound`, there).
    """
    num_sets = comb(len(hosts), num_lost)
    if num_sets > MAX_COUNTED_SETS:
        raise ConfigError(f"{num_sets} sets of {num_lost} of {len(hosts)} hosts are too many to count")
    fatal = [sum(1 << host for host in kept) for kept in fatal_sets(hosts)]
    masks = (sum(1 << host for host in lost) for lost in combinations(range(len(hosts)), num_lost))
    survived = sum(all(mask & deadly != deadly for deadly in fatal) for mask in masks)
    return Fraction(survived, num_sets)


def group_recovery_probability(num_hosts: int, copies: int, num_lost: int) -> Fraction:
    """Closed form of `recovery_probability(group(...), num_lost)`: inclusion and exclusion over wholly lost groups."""
    groups = num_hosts // copies
    survived = sum(
        (-1) ** j * comb(groups, j) * comb(num_hosts - j * copies, num_lost - j * copies)
        for j in range(num_lost // copies + 1)
    )
    return Fraction(survived, comb(num_hosts, num_lost))


def recovery_lower_bound(num_fatal: int, num_hosts: int, copies: int, num_lost: int) -> Fraction:
    """Union bound for any rule with `num_fatal` fatal sets of `copies` hosts; exact for num_lost = copies."""
    if num_lost < copies:
        return Fraction(1)
    fatal = num_fatal * comb(num_hosts - copies, num_lost - copies)
    return max(Fraction(0), 1 - Fraction(fatal, comb(num_hosts, num_lost)))


def best_conceivable(num_hosts: int, copies: int) -> Fraction:
    """No rule survives the loss of `copies` hosts more often: at least ceil(N/m) sets are fatal."""
    return 1 - Fraction(-(-num_hosts // copies), comb(num_hosts, copies))


@dataclass(frozen=True)
class Host:
    """A machine that can keep copies: RAM for them in `free_bytes`, and its failure domain (rack, zone or name)."""

    name: str
    domain: str
    free_bytes: int
    shard_bytes: int
    """What the ranks on this host own together; kept twice (two slots) on each of its holders."""


@dataclass(frozen=True)
class ReplicaPlan:
    """holders[i] = indices into the given hosts that keep host i's shard, the owner first."""

    holders: Hosts
    shared_domains: tuple[int, ...]
    """Hosts whose copies do not all lie in different failure domains; empty where the domains allow it."""
    kept_bytes: tuple[int, ...]
    """RAM that each host gives to copies: two slots of every shard it keeps."""


def place_replicas(hosts: Sequence[Host], copies: int) -> ReplicaPlan:
    """Choose the holders of every shard: groups (or groups and a ring) whose members lie in different failure domains.

    Raises PlacementError, naming the host and the bytes, where two slots of all kept shards do not fit.
    """
    order = _spread_domains([host.domain for host in hosts], copies)
    holders: list[tuple[int, ...]] = [()] * len(hosts)
    for position, kept in enumerate(mixed(len(hosts), copies)):
        holders[order[position]] = tuple(order[place] for place in kept)
    shared = tuple(i for i, kept in enumerate(holders) if len({hosts[j].domain for j in kept}) < copies)
    kept_bytes = [0] * len(hosts)
    for owner, kept in enumerate(holders):
        for holder in kept:
            kept_bytes[holder] += 2 * hosts[owner].shard_bytes
    for host, need in zip(hosts, kept_bytes, strict=True):
        if need > host.free_bytes:
            raise PlacementError(
                f"host {host.name} would keep {need} bytes of checkpoints in memory (two slots, {copies} copies) "
                f"but has {host.free_bytes} free: use fewer copies, more hosts, or keep checkpoints on storage only"
            )
    return ReplicaPlan(tuple(holders), shared, tuple(kept_bytes))


def _spread_domains(domains: Sequence[str], copies: int) -> list[int]:
    """Order hosts so that each group of `copies`, and the closing ring, meets a domain once wherever it can.

    The ring takes one host of each of the largest domains, again and again. The rest is dealt, largest domain first,
    one host to each group, so no group gets two of a domain that has at most as many hosts as there are groups.
    """
    queues: dict[str, list[int]] = {}
    for host, domain in enumerate(domains):
        queues.setdefault(domain, []).append(host)
    rest = len(domains) % copies
    num_groups = len(domains) // copies - (1 if rest else 0)
    tail: list[int] = []
    while len(tail) < (copies + rest if rest else 0):
        largest_first = sorted((d for d in queues if queues[d]), key=lambda d: (-len(queues[d]), d))
        tail += [queues[domain].pop(0) for domain in largest_first[: copies + rest - len(tail)]]
    dealt = [host for domain in sorted(queues, key=lambda d: (-len(queues[d]), d)) for host in queues[domain]]
    return [host for group_index in range(num_groups) for host in dealt[group_index::num_groups]] + tail


def _check(num_hosts: int, copies: int) -> None:
    if not 1 <= copies <= max(1, num_hosts):
        raise ConfigError(f"{copies} copies on {num_hosts} hosts: need 1 <= copies <= hosts")
