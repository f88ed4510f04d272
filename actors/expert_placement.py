"""`ExpertPlacementActor`: one actor of a training job that turns expert counts into versioned plans, off the critical path.

Rank 0 hands counts over and asks for plans without ever waiting (`PlanClient`); no tensor passes through here. The actor
may die at any time: ranks go on with the plan they have and, after a while, plan for themselves, all alike. One that Ray
starts anew continues from the newest version that the ranks name with their counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from actors.errors import WorkerError
from actors.metrics import Metrics
from placement.expert_plans import KEPT_PLANS, ExpertPlan, make_plan
from placement.experts import POLICIES
from placement.split import Int, Ranks

HISTORY_STEPS = 4
MAX_PENDING = 2
"""Counts on their way to the planner; later ones are dropped rather than queued."""
ASK_AGAIN_STEPS = 10
"""Polls between two attempts to reach a planner that did not answer."""


class ExpertPlacementActor:
    """Plans from the last counts. A plain class; `start` makes the actor."""

    def __init__(self, run_id: str, policy: str, ranks: Ranks):
        self.policy, self.ranks = POLICIES[policy], ranks
        self.history: deque[Int] = deque(maxlen=HISTORY_STEPS)
        self.published: deque[ExpertPlan] = deque(maxlen=KEPT_PLANS)
        self.version, self.last_step = 0, -1
        self._metrics = Metrics(run=run_id)

    def note(self, step: int, counts: Int, newest: int) -> int:
        """counts: int64 [layers, E] of `step`; newest: the ranks' version. Publishes the next plan; returns its version.

        Counts that come late or twice change nothing.
        """
        if step <= self.last_step:
            return self.version
        self.last_step, self.version = step, max(self.version, newest) + 1
        self.history.append(counts)
        previous = self.published[-1].slots if self.published else None
        plan = make_plan(self.policy, np.stack(self.history), self.ranks, previous, self.version, step + 1)
        self.published.append(plan)
        self._metrics.set("zenray_imbalance", self.expected_imbalance(), kind="rank pairs")
        return self.version

    def plans(self, newest: int) -> list[ExpertPlan]:
        """Published plans after version `newest`, oldest first; at most the last few."""
        return [plan for plan in self.published if plan.version > newest]

    def plan(self, version: int) -> ExpertPlan | None:
        """One of the last plans, or None."""
        return next((plan for plan in self.published if plan.version == version), None)

    def expected_imbalance(self) -> float:
        """Hottest rank over the mean under the newest plan, on the newest counts, mean over layers; 1 before any."""
        if not self.published:
            return 1.0
        loads = [
            self.policy.split(slots, w, self.ranks).pairs.sum(1)
            for slots, w in zip(self.published[-1].slots, self.history[-1], strict=True)
        ]
        return float(np.mean([load.max() / load.mean() if load.any() else 1.0 for load in loads]))


def start(run_id: str, policy: str, ranks: Ranks) -> Any:
    """The planner of a run as a named actor without a CPU of its own; Ray restarts it where it dies.

    It lives as long as the returned handle and the process that holds it.
    """
    actor = ray.remote(ExpertPlacementActor).options(name=actor_name(run_id), num_cpus=0, max_restarts=-1)
    return actor.remote(run_id, policy, ranks)


def actor_name(run_id: str) -> str:
    """Its name on the cluster."""
    return f"zenray/{run_id}/expert_placement"


class PlanClient:
    """What a rank holds of the planner. No method waits or raises; `on_event` hears once when the planner is lost."""

    def __init__(self, actor: Any, on_event: Callable[[str], None] | None = None):
        self.actor, self.on_event = actor, on_event
        self._notes: list[Any] = []
        self._answer: Any = None
        self._silent = 0
        self.lost = False

    def submit(self, step: int, counts: Int, newest: int) -> None:
        """See `zenray.moe.PlanSource`."""
        self._notes = [ref for ref in self._notes if not self._done(ref)]
        if len(self._notes) < MAX_PENDING and not (self.lost and step % ASK_AGAIN_STEPS):
            self._notes.append(self.actor.note.remote(step, counts.copy(), newest))

    def poll(self, newest: int) -> list[ExpertPlan]:
        """See `zenray.moe.PlanSource`."""
        plans: list[ExpertPlan] = []
        if self._answer is not None and self._done(self._answer):
            try:
                plans = [plan for plan in ray.get(self._answer, timeout=0) if plan.version > newest]
                self.lost = False
            except RayError as error:
                self._lose(error)
            self._answer = None
        self._silent += 1
        if self._answer is None and (not self.lost or self._silent % ASK_AGAIN_STEPS == 0):
            self._answer = self.actor.plans.remote(max([newest, *(plan.version for plan in plans)]))
        return plans

    def _done(self, ref: Any) -> bool:
        return bool(ray.wait([ref], timeout=0)[0])

    def _lose(self, error: RayError) -> None:
        if not self.lost and self.on_event is not None:
            self.on_event(f"the expert planner does not answer ({type(error).__name__}); ranks plan for themselves")
        self.lost = True


def client(run_id: str, on_event: Callable[[str], None] | None = None) -> PlanClient:
    """The client of a rank in the run. Raises WorkerError where no planner was started."""
    try:
        return PlanClient(ray.get_actor(actor_name(run_id)), on_event)
    except ValueError:
        raise WorkerError(f"run {run_id} has no expert planner; call actors.expert_placement.start first") from None
