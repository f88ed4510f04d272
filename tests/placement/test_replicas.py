"""Golden values of the placement rules, counted exhaustively; Monte Carlo against them; failure domains."""

import random
from fractions import Fraction
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.errors import ConfigError
from placement.errors import PlacementError
from placement.replicas import (
    Host,
    Hosts,
    best_conceivable,
    fatal_sets,
    group,
    group_recovery_probability,
    mixed,
    place_replicas,
    recovery_lower_bound,
    recovery_probability,
    ring,
)


@pytest.mark.parametrize(
    ("shape", "exact", "bound", "ring_exact"),
    [
        ((4, 2, 2), Fraction(2, 3), Fraction(2, 3), Fraction(1, 3)),
        ((16, 2, 2), Fraction(14, 15), Fraction(14, 15), Fraction(13, 15)),
        ((16, 2, 3), Fraction(4, 5), Fraction(4, 5), Fraction(22, 35)),
        ((16, 2, 4), Fraction(8, 13), Fraction(3, 5), Fraction(33, 91)),
        ((12, 3, 3), Fraction(54, 55), Fraction(54, 55), Fraction(52, 55)),
        ((12, 3, 6), Fraction(9, 14), Fraction(7, 11), Fraction(47, 154)),
    ],
)
def test_group_and_ring_golden_values(
    shape: tuple[int, int, int], exact: Fraction, bound: Fraction, ring_exact: Fraction
) -> None:
    hosts, copies, lost = shape
    assert recovery_probability(group(hosts, copies), lost) == exact
    assert group_recovery_probability(hosts, copies, lost) == exact
    assert recovery_lower_bound(hosts // copies, hosts, copies, lost) == bound
    assert recovery_probability(ring(hosts, copies), lost) == ring_exact


@pytest.mark.parametrize(
    ("shape", "mixed_exact", "ring_exact", "best"),
    [
        ((5, 2, 2), Fraction(3, 5), Fraction(1, 2), Fraction(7, 10)),
        ((7, 2, 2), Fraction(16, 21), Fraction(2, 3), Fraction(17, 21)),
        ((11, 3, 3), Fraction(158, 165), Fraction(14, 15), Fraction(161, 165)),
    ],
)
def test_mixed_golden_values(
    shape: tuple[int, int, int], mixed_exact: Fraction, ring_exact: Fraction, best: Fraction
) -> None:
    hosts, copies, lost = shape
    assert recovery_probability(mixed(hosts, copies), lost) == mixed_exact
    assert recovery_probability(ring(hosts, copies), lost) == ring_exact
    assert best_conceivable(hosts, copies) == best
    assert len(fatal_sets(mixed(hosts, copies))) == hosts // copies - 1 + copies + hosts % copies


@given(st.integers(1, 14), st.integers(1, 5))
def test_every_host_keeps_and_sends_the_same_number(num_hosts: int, copies: int) -> None:
    if copies > num_hosts:
        with pytest.raises(ConfigError):
            mixed(num_hosts, copies)
        return
    for rule in (ring, mixed):
        hosts = rule(num_hosts, copies)
        assert all(kept[0] == owner and len(set(kept)) == copies for owner, kept in enumerate(hosts))
        kept_by = [sum(host in kept for kept in hosts) for host in range(num_hosts)]
        assert kept_by == [copies] * num_hosts


@pytest.mark.parametrize(("hosts", "num_lost"), [(group(12, 3), 5), (mixed(11, 3), 4), (ring(9, 2), 3)])
def test_monte_carlo_agrees_with_the_exact_probability(hosts: Hosts, num_lost: int) -> None:
    rng, draws = random.Random(7), 20_000
    deadly = fatal_sets(hosts)
    survived = 0
    for _ in range(draws):
        lost = set(rng.sample(range(len(hosts)), num_lost))
        survived += not any(kept <= lost for kept in deadly)
    exact = float(recovery_probability(hosts, num_lost))
    assert abs(survived / draws - exact) < 3 * sqrt(exact * (1 - exact) / draws)


def test_members_of_a_group_lie_in_different_domains_where_that_is_possible() -> None:
    domains = ["a"] * 4 + ["b"] * 2 + ["c"] * 2
    hosts = [Host(f"h{i}", domain, 100, 10) for i, domain in enumerate(domains)]
    plan = place_replicas(hosts, 2)
    assert plan.shared_domains == ()
    assert all(kept[0] == owner for owner, kept in enumerate(plan.holders))
    assert plan.kept_bytes == (40,) * 8
    crowded = place_replicas([Host(f"h{i}", "a" if i < 5 else "b", 100, 10) for i in range(8)], 2)
    assert len(crowded.shared_domains) == 2, "five hosts of one domain in four groups: one group must repeat it"


@pytest.mark.parametrize(("sizes", "copies"), [((2, 2, 1), 2), ((3, 2, 2), 2), ((2, 2, 2, 1, 1), 3), ((2, 2, 2, 1), 3)])
def test_the_closing_ring_also_meets_each_domain_once(sizes: tuple[int, ...], copies: int) -> None:
    hosts = [Host(f"{d}{i}", str(d), 1000, 1) for d, size in enumerate(sizes) for i in range(size)]
    plan = place_replicas(hosts, copies)
    assert plan.shared_domains == ()


def test_a_host_without_room_is_named_with_the_bytes() -> None:
    hosts = [Host("small", "a", 30, 10), Host("large", "b", 100, 10)]
    with pytest.raises(PlacementError, match=r"host small would keep 40 bytes .* has 30 free"):
        place_replicas(hosts, 2)


def test_counting_refuses_what_it_cannot_finish() -> None:
    with pytest.raises(ConfigError, match="too many"):
        recovery_probability(ring(64, 2), 12)
    assert recovery_lower_bound(32, 64, 2, 1) == 1
