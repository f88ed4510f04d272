"""The planning actor: what it publishes, and what its death costs (nothing but fresh plans)."""

import time

import numpy as np
import pytest
import ray

from actors.errors import WorkerError
from actors.expert_placement import ExpertPlacementActor, PlanClient, actor_name, client, start
from placement.split import Ranks, hosted

RANKS = Ranks.equal(2, 4)


def counts(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 40, (2, 5)).astype(np.int64)


def test_versions_follow_the_ranks_and_late_counts_change_nothing() -> None:
    planner = ExpertPlacementActor("r", "robust", RANKS)
    assert planner.expected_imbalance() == 1.0
    assert [planner.note(step, counts(step), 0) for step in (0, 1, 2)] == [1, 2, 3]
    assert planner.note(1, counts(9), 0) == 3
    assert [plan.version for plan in planner.plans(1)] == [2, 3]
    newest = planner.plan(3)
    assert newest is not None
    assert newest.valid_from == 3
    assert all(hosted(slots, 5).any(0).all() for slots in newest.slots)
    assert 1.0 <= planner.expected_imbalance() < 1.1
    assert planner.plan(99) is None
    restarted = ExpertPlacementActor("r", "robust", RANKS)
    assert restarted.note(7, counts(7), newest=3) == 4


@pytest.mark.usefixtures("ray_cluster")
def test_ranks_hear_plans_without_waiting_and_go_on_when_the_planner_dies(wait_until) -> None:
    events: list[str] = []
    with pytest.raises(WorkerError, match="no expert planner"):
        client("nobody")
    actor = start("moe-test", "robust", RANKS)
    first, second = PlanClient(actor, events.append), client("moe-test")
    newest, heard = 0, []

    def hear() -> bool:
        first.submit(len(heard), counts(len(heard)), newest)
        heard.append(first.poll(0))
        return bool(heard[-1])

    assert wait_until(hear, 30.0)
    assert wait_until(lambda: bool(second.poll(0)), 30.0)
    newest = heard[-1][-1].version
    ray.get(actor.note.remote(10**6, counts(1), newest), timeout=30)
    asked = PlanClient(actor)
    asked.poll(newest)  # is answered with the plan just made
    assert wait_until(lambda: asked._done(asked._answer), 30.0)
    assert asked.poll(10**6) == [], "an answer to an older question brings nothing that is known by now"
    ray.kill(actor, no_restart=False)
    started, polls = time.monotonic(), 0
    while not events and time.monotonic() - started < 30:
        first.poll(newest)
        time.sleep(0.01)
    again: list[int] = []

    def hear_again() -> bool:
        nonlocal polls
        polls += 1
        first.submit(1000 + polls * 10, counts(polls), newest)
        again.extend(plan.version for plan in first.poll(newest))
        return bool(again)

    assert wait_until(hear_again, 30.0)
    assert min(again) > newest, "a planner that starts anew continues the ranks' numbering"
    ray.kill(actor)
    assert wait_until(lambda: not _exists(actor_name("moe-test")), 15.0)
    for step in range(5):
        first.submit(step, counts(step), newest)
        assert not [plan for plan in first.poll(10**6)]


def _exists(name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True
