"""`JobPlacer`: which cards each job of the queue holds or waits for: the scheduler core, its plans, and the nodes.

Decides and remembers, but starts nothing and stores nothing: every call returns grants, and the scheduler acts on them.
Not thread-safe: the scheduler holds its own lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.job_planner import JobPlanner
from actors.job_run import Grant
from placement.inventory import GpuNode
from placement.jobs import JobClass, JobSpec, PlanOption, Start
from placement.live import LiveScheduler
from placement.mixed import Share
from placement.plans import Plan
from placement.queue import JobEntry
from placement.resize import propose_moves


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What became of a job that was to be planned: its grant, what it waits for, or why no plan can ever run."""

    grants: list[Grant] = field(default_factory=list)
    waits: str = ""
    refused: str = ""


class JobPlacer:
    """patience_s: a job that waited so long gets the next cards reserved. residence_s: how long it keeps its plan at least
    before it is resized."""

    def __init__(self, planner: JobPlanner, patience_s: float, residence_s: float):
        self.planner, self.patience_s, self.residence_s = planner, patience_s, residence_s
        self.nodes: dict[str, GpuNode] = {}
        self._core: LiveScheduler | None = None
        self._class_of: dict[str, str] = {}
        self._plans: dict[str, Sequence[Plan]] = {}
        self._shares: dict[str, Mapping[str, Share]] = {}
        self._version = 0

    @property
    def ready(self) -> bool:
        """Whether there is any card."""
        return self._core is not None

    def knows(self, job_id: str) -> bool:
        """Whether the job holds cards or waits for them by a plan."""
        return job_id in self._class_of

    def tell(self, job_id: str) -> str:
        """For people: what a waiting job lacks. Empty if it is not waiting by a plan."""
        return self._core.tell(job_id, time.time()) if self._core is not None and self.knows(job_id) else ""

    def tick(self) -> list[Grant]:
        """The full pass: what fits starts, the reservation is renewed."""
        core = self._core
        return [] if core is None else self._grants([core.start_of(int(slot)) for slot in core.tick(time.time())])

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def plan(self, entry: JobEntry) -> Planned:
        """Give a job its class of plans and queue it, or say what is missing."""
        core, job_id = self._core, entry.job_id
        assert core is not None
        listed = self.planner.plans(entry, self.nodes.values())
        mixable = self.planner.needs(entry).mixed and not entry.attempts
        refused = listed.nearest
        if listed.plans:
            name = f"{self.planner.program.class_key(entry.request)}.{self._version}"
            if entry.attempts:
                name += f".{job_id}.{len(entry.attempts)}"
            if not core.knows(name):
                core.add_class(JobClass(name, listed.options()))
                self._plans[name] = listed.plans
            self._class_of[job_id] = name
            grants = self._grants(core.submit(self._spec(entry, name), time.time()))
            told = core.explain(job_id)
            if told.nearest or told.state != "INFEASIBLE":
                return Planned(grants=grants)
            self.drop(job_id)
            best = listed.plans[0]
            refused = f"needs {best.num_gpus} x {best.gpu_type} at once, more than the cluster has"
        everything = {name: node.spec.num_gpus for name, node in self.nodes.items()}
        if mixable and (found := self.planner.mix(entry, self.nodes, everything)):
            return Planned(waits=f"waits for idle cards of several types, at most {found.plan.num_gpus}")
        return Planned(refused=refused)

    def mix(self, entry: JobEntry) -> list[Grant]:
        """Start a waiting job that may run on several types of card at once on cards that nobody waits for, if enough
        are idle."""
        core = self._core
        assert core is not None
        found = self.planner.mix(entry, self.nodes, core.idle_cards())
        if found is None:
            return []
        self.drop(entry.job_id)
        name = f"{entry.job_id}.{entry.starts}.mixed"
        self._shares[name] = found.shares
        return [self._restore(entry, name, found.plan, found.cards)]

    def drop(self, job_id: str) -> list[Grant]:
        """A job ended, was cancelled or has to be planned anew: its cards go back; what may now fit starts."""
        if self._core is None or not self.knows(job_id):
            return []
        starts = self._core.finish(job_id, time.time())
        self._shares.pop(self._class_of.pop(job_id), None)
        return self._grants(starts)

    def moves(self, restart_s: Mapping[str, float], finish_s: Mapping[str, float]) -> list[tuple[str, PlanOption]]:
        """Running jobs that should go on with another plan. By job: seconds of a restart, and the finish as measured."""
        core = self._core
        if core is None:
            return []
        for job_id, end_s in finish_s.items():
            core.expect(job_id, end_s)
        whole = {job_id: s for job_id, s in restart_s.items() if self._class_of.get(job_id) not in self._shares}
        return propose_moves(core, time.time(), whole, self.residence_s)

    def resize(self, job_id: str, option: PlanOption) -> Grant:
        """The cards of a job whose workers have ended, for its new plan; those it had if the new ones are gone."""
        assert self._core is not None
        return self._grants([self._core.resize(job_id, option, time.time())])[0]

    # --- nodes --------------------------------------------------------------------------------------------------------

    def lose(self, name: str) -> tuple[list[str], list[Grant]]:
        """A node is gone: the jobs that lost all their cards and wait again, and what starts on those that came free."""
        if self._core is None:
            return [], []
        jobs, starts = self._core.node_lost(name, time.time())
        mixed = [job_id for job_id in jobs if self._class_of[job_id] in self._shares]  # its shares name the lost node
        grants = self._grants([start for start in starts if start.job_id not in mixed])
        return jobs, grants + [grant for job_id in mixed for grant in self.drop(job_id)]

    def adopt(self, now: dict[str, GpuNode], running: Iterable[tuple[JobEntry, Grant, float]]) -> list[Grant]:
        """The nodes of this moment; a new kind of card makes all plans anew. running: what holds cards, and its steps left."""
        came = [node for name, node in now.items() if name not in self.nodes]
        self.nodes = now
        core = self._core
        if not came:
            return []
        if core is not None and all(self._same_kind(node) for node in came):
            return [grant for node in came for grant in self._grants(core.add_node(node.spec, time.time()))]
        self._rebuild(running)
        return []

    def _same_kind(self, node: GpuNode) -> bool:
        assert self._core is not None
        known = (node.spec.gpu_type, node.spec.memory_bytes) in self._core.ledger.pools
        return known and node.spec.num_gpus <= self._core.ledger.cells.owner.shape[1]

    def _rebuild(self, running: Iterable[tuple[JobEntry, Grant, float]]) -> None:
        """New tables for the present nodes; running jobs keep their cards, waiting ones are planned anew."""
        self._version += 1
        self._class_of.clear()
        self._plans.clear()
        self._shares.clear()
        self._core = LiveScheduler([node.spec for node in self.nodes.values()], self.patience_s) if self.nodes else None
        for entry, grant, steps_left in running:
            if all(node in self.nodes for node in grant.nodes):
                cards = {node: grant.nodes.count(node) for node in dict.fromkeys(grant.nodes)}
                name = f"{entry.job_id}.{self._version}.running"
                if grant.shares:
                    self._shares[name] = grant.shares
                self._restore(entry, name, grant.plan, cards, steps_left)

    def replan(self, job_ids: Iterable[str]) -> None:
        """Waiting jobs get plans by what was learned when they are next looked at."""
        self._version += 1
        for job_id in job_ids:
            if self._core is not None and self.knows(job_id):
                self._core.finish(job_id, time.time())
                del self._class_of[job_id]

    def _restore(
        self, entry: JobEntry, name: str, plan: Plan, cards: Mapping[str, int], steps_left: float | None = None
    ) -> Grant:
        """A job on given cards, as a class of its own; the core knows a mixed gang by its type of largest memory."""
        core = self._core
        assert core is not None
        largest = max((self.nodes[node].gpu for node in cards), key=lambda gpu: gpu.memory_bytes)
        option, spec = replace(plan.option(), gpu_type=largest.name), self._spec(entry, name)
        core.add_class(JobClass(name, (option,)))
        self._class_of[entry.job_id], self._plans[name] = name, (plan,)
        steps = spec.num_steps if steps_left is None else steps_left
        return self._grants([core.restore(spec, option, cards, time.time() + steps * option.step_time_s)])[0]

    def _spec(self, entry: JobEntry, class_name: str) -> JobSpec:
        needs = self.planner.needs(entry)
        steps = max(1, needs.steps - entry.done_steps)
        return JobSpec(entry.job_id, class_name, float(steps), entry.submit_s, needs.boost_s)

    def _grants(self, starts: Sequence[Start]) -> list[Grant]:
        found = []
        for start in starts:
            name = self._class_of[start.job_id]
            shares = self._shares.get(name, {})
            plan = next(p for p in self._plans[name] if shares or p.option() == start.option)
            nodes = tuple(share.node for share in start.shares for _ in share.gpus)
            found.append(Grant(job_id=start.job_id, plan=plan, nodes=nodes, shares=shares))
        return found
