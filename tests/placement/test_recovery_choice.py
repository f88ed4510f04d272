"""Which step is restored, from where, and who keeps copies: pure decisions."""

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from placement.errors import PlacementError
from placement.recovery import (
    STAGES,
    CommitLedger,
    EpochStart,
    Fallback,
    Held,
    Restore,
    Stage,
    assign_holders,
    choose,
    is_void,
)
from placement.replicas import Host, recovery_probability

PLACED = (("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"))


def held(rank: int, step: int, epoch: int = 1, num_shards: int = 4, sha: str = "") -> Held:
    return Held(rank, num_shards, step, epoch, sha or f"{rank}/{step}")


def everywhere(*steps: int) -> dict[str, list[Held]]:
    """Reports of hosts that all keep what PLACED says, at these steps."""
    return {
        host: [held(rank, step) for rank, hosts in enumerate(PLACED) if host in hosts for step in steps]
        for host in "abcd"
    }


def test_the_newest_step_that_is_complete_is_chosen_and_its_sources_named() -> None:
    reports = everywhere(6, 7)
    reports["a"] = [h for h in reports["a"] if (h.rank, h.step) != (0, 7)]
    assert choose(reports, [], {}, 6, PLACED) == Restore(7, 4, (("b",), ("a", "b"), ("c", "d"), ("c", "d")))
    reports["b"] = [h for h in reports["b"] if (h.rank, h.step) != (0, 7)]
    assert choose(reports, [], {}, 6, PLACED) == Restore(6, 4, (("a", "b"), ("a", "b"), ("c", "d"), ("c", "d")))


def test_losing_one_host_of_each_group_is_survived_and_a_whole_group_is_named() -> None:
    reports = everywhere(6)
    assert isinstance(choose({h: reports[h] for h in "ac"}, [], {}, 6, PLACED), Restore)
    assert choose({h: reports[h] for h in "cd"}, [], {}, 6, PLACED) == Fallback(6, (0, 1), ("a", "b"))
    assert choose({}, [], {}, 6, PLACED) == Fallback(6, (0, 1, 2, 3), ("a", "b", "c", "d"))


def test_an_older_step_that_is_still_complete_is_offered_beside_the_loss() -> None:
    reports = {host: [h for h in kept if (h.rank, h.step) != (0, 7)] for host, kept in everywhere(6, 7).items()}
    decision = choose(reports, [], {}, 7, PLACED)
    assert isinstance(decision, Fallback)
    assert (decision.step, decision.shards, decision.hosts) == (7, (0,), ("a", "b"))
    assert decision.older is not None
    assert decision.older.step == 6


def test_a_copy_that_is_not_what_its_owner_announced_is_not_used() -> None:
    reports = everywhere(6, 7)
    announced = {(7, 2): "something else"}
    assert choose(reports, [], announced, 6, PLACED).step == 6
    assert choose(reports, [], {(7, 2): "2/7"}, 6, PLACED).step == 7


def test_steps_that_a_later_epoch_went_back_behind_are_void() -> None:
    assert is_void(held(0, 7, epoch=1), [EpochStart(2, 6)])
    assert not is_void(held(0, 6, epoch=1), [EpochStart(2, 6)])
    assert not is_void(held(0, 7, epoch=2), [EpochStart(2, 6)])
    assert choose(everywhere(6, 7), [EpochStart(2, 6)], {}, 6, PLACED).step == 6


def test_sets_of_different_numbers_of_shards_do_not_mix() -> None:
    reports: Mapping[str, Sequence[Held]] = {
        "a": [held(0, 7, 2, 3), held(1, 7, 2, 3), *(held(r, 6) for r in range(4))],
    }
    assert choose(reports, [], {}, 6, PLACED) == Restore(6, 4, (("a",),) * 4)
    reports = {"a": [held(r, 7, 2, 3) for r in range(3)] + [held(r, 7) for r in range(4)]}
    assert choose(reports, [], {}, 6, PLACED).num_shards == 4


def host(name: str, domain: str = "", free: int = 1 << 30) -> Host:
    return Host(name, domain or name, free, 10)


def test_holders_form_groups_over_hosts_with_ranks_and_spares_help_only_where_needed() -> None:
    live = {name: host(name) for name in "abcde"}
    rules = assign_holders("abcd", live, 2)
    assert [rule[0] for rule in rules] == list("abcd")
    assert len({frozenset(rule) for rule in rules}) == 2  # two groups of two
    assert {name for rule in rules for name in rule} == set("abcd")
    assert assign_holders("aa", live, 2) == (("a", "b"), ("a", "b"))
    gone = {name: host(name) for name in "acd"}
    rules = assign_holders("abcd", gone, 2)
    assert all(len(set(rule)) == 2 and set(rule) <= set("acd") for rule in rules)
    assert rules[0][0] == "a"
    assert assign_holders("ab", {"a": host("a")}, 2) == (("a",), ("a",))
    assert assign_holders("ab", {}, 2) == ((), ())


def test_copies_lie_in_different_failure_domains() -> None:
    live = {name: host(name, "rack1" if name in "ab" else "rack2") for name in "abcd"}
    for rule in assign_holders("abcd", live, 2):
        assert len({live[name].domain for name in rule}) == 2


def test_too_little_memory_is_said_with_numbers() -> None:
    live = {"a": host("a", free=25), "b": host("b")}
    assert assign_holders("ab", live, 2) == (("a",), ("b",))  # room for one copy is used
    with pytest.raises(PlacementError, match="host a would keep 20 bytes"):
        assign_holders("ab", live | {"a": host("a", free=15)}, 2)


def test_the_ledger_commits_when_all_ranks_have_and_ignores_other_epochs() -> None:
    ledger = CommitLedger(3, 2, 5)
    assert ledger.acknowledge(2, 0, 5, "old") is None
    assert ledger.acknowledge(3, 0, 5, "x") is None
    assert ledger.acknowledge(3, 0, 5, "x") is None
    assert ledger.acknowledge(3, 1, 5, "y") == 5
    assert ledger.acknowledge(3, 1, 5, "y") is None
    assert ledger.acknowledge(3, 1, 6, "y6") is None
    assert ledger.announced() == {(5, 0): "x", (5, 1): "y", (6, 1): "y6"}
    assert ledger.acknowledge(3, 0, 6, "x6") == 6
    with pytest.raises(AssertionError, match="before step 7"):
        ledger.acknowledge(3, 0, 8, "x8")


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_but_the_last_two_can_fail_and_can_be_recovered_from(stage: Stage) -> None:
    if stage in (Stage.DONE, Stage.FAILED):
        assert not STAGES[stage]
    else:
        assert {Stage.FENCING, Stage.FAILED} <= STAGES[stage]


def test_the_table_leads_through_the_protocol_and_skips_nothing() -> None:
    order = [Stage.TRAINING, Stage.FENCING, Stage.SURVEYING, Stage.SEATING, Stage.JOINING, Stage.RESTORING]
    for before, after in itertools.pairwise([*order, Stage.TRAINING]):
        assert after in STAGES[before]
    forward = {(a, b) for a in STAGES for b in STAGES[a] if b not in (Stage.FENCING, Stage.FAILED, Stage.DONE)}
    assert forward == set(itertools.pairwise([*order[1:], Stage.TRAINING]))
    assert {b for a in STAGES for b in STAGES[a]} == set(Stage)


@pytest.mark.parametrize(("num_hosts", "copies", "num_lost"), [(4, 2, 2), (5, 2, 2), (16, 2, 3), (12, 3, 6)])
def test_random_losses_are_survived_as_often_as_the_placement_promises(
    num_hosts: int, copies: int, num_lost: int
) -> None:
    names = [f"h{i:02}" for i in range(num_hosts)]
    rules = assign_holders(names, {name: host(name) for name in names}, copies)
    indices = tuple(tuple(names.index(name) for name in rule) for rule in rules)
    expected = float(recovery_probability(indices, num_lost))
    chance = random.Random(num_hosts)
    num_trials = 2_000
    survived = 0
    for _ in range(num_trials):
        lost = set(chance.sample(names, num_lost))
        reports = {
            name: [held(rank, 3, num_shards=num_hosts) for rank, rule in enumerate(rules) if name in rule]
            for name in names
            if name not in lost
        }
        survived += isinstance(choose(reports, [], {}, 3, rules), Restore)
    sigma = (expected * (1 - expected) / num_trials) ** 0.5
    assert abs(survived / num_trials - expected) < 3 * sigma
