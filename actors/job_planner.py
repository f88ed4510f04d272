"""Plans of queued jobs from what is stored: profiles, plans that failed, and what recorded peaks taught.

Between the pure planning of `placement` and the scheduler: it looks things up and stores what was learned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from actors.job_run import Ending, JobNeeds, JobProgram, JobRun
from actors.job_store import JobStore
from placement.catalogue import GpuType
from placement.correction import Observation, moved
from placement.data_plans import ModuleProfile, correction_key, data_plans, front, predicted, too_large
from placement.inventory import GpuNode
from placement.mixed import Mix, mixed_plan
from placement.plans import Knowledge, Plan, PlanList
from placement.queue import JobEntry
from placement.replan import plans_after

FETCH_S = 10.0
STALE_FACTOR = 0.01
"""Relative change of a correction beyond which waiting jobs are planned anew."""
MAX_PLANS = 32


class JobPlanner:
    """image: software of the workers, part of the key of what is learned."""

    def __init__(self, store: JobStore, program: JobProgram, image: str):
        self.store, self.program, self.image = store, program, image
        self._needs: dict[str, JobNeeds] = {}

    def needs(self, entry: JobEntry) -> JobNeeds:
        """What the job file asks for."""
        if entry.job_id not in self._needs:
            self._needs[entry.job_id] = self.program.check(entry.request)
        return self._needs[entry.job_id]

    def profile(self, entry: JobEntry) -> ModuleProfile:
        """The profile of the job's module; it must have been stored."""
        return ModuleProfile.from_json(self.store.profiles[self.program.profile_key(entry.request)])

    def too_large(self, entry: JobEntry, nodes: Iterable[GpuNode]) -> str:
        """Why no card can hold the job, where that is certain without a trace; else empty."""
        needs, gpus = self.needs(entry), types_of(nodes)
        allowed = [gpu for gpu in gpus.values() if not needs.gpu_types or gpu.name in needs.gpu_types]
        if not allowed:
            return _no_type(needs) if gpus else ""
        return too_large(self.program.floor_bytes(entry.request), allowed)

    def plans(self, entry: JobEntry, nodes: Iterable[GpuNode]) -> PlanList:
        """What to queue the job with: the front of its plans, or after failures the ladder of those not tried."""
        needs, gpus = self.needs(entry), types_of(nodes)
        allowed = {name: gpu for name, gpu in gpus.items() if not needs.gpu_types or name in needs.gpu_types}
        if not allowed:
            return PlanList((), (), _no_type(needs))
        found = data_plans(
            self.profile(entry),
            needs.global_batch,
            list(allowed.values()),
            max_gpus=needs.max_gpus,
            recompute=needs.recompute,
            pinned=needs.pinned,
            knowledge=Knowledge(correction=self.store.correction, image=self.image),
        )
        if not entry.attempts:
            best = in_time(front(found.plans), entry, needs)[:MAX_PLANS]
            return PlanList(best, found.rejected, found.nearest)
        capacity = {name: gpu.memory_bytes for name, gpu in gpus.items()}
        left = plans_after(found.plans, entry.attempts, capacity)[:MAX_PLANS]
        return PlanList(left, found.rejected, f"no plan is left after {len(entry.attempts)} that ran out of memory")

    def mix(self, entry: JobEntry, nodes: Mapping[str, GpuNode], cards: Mapping[str, int]) -> Mix | None:
        """A gang over several types out of so many cards of each node, if the job allows it and has not failed before; as
        many cards as it may use."""
        needs = self.needs(entry)
        if not needs.mixed or entry.attempts:
            return None
        offered = {
            name: (nodes[name].gpu, count)
            for name, count in cards.items()
            if name in nodes and count and (not needs.gpu_types or nodes[name].gpu.name in needs.gpu_types)
        }
        most = min(needs.max_gpus, needs.global_batch, sum(count for _, count in offered.values()))
        fixed = needs.pinned.get("data")
        for num_gpus in range(most, 1, -1) if fixed is None else (fixed,):
            found = mixed_plan(
                self.profile(entry),
                needs.global_batch,
                offered,
                num_gpus=num_gpus,
                recompute=needs.recompute,
                knowledge=Knowledge(correction=self.store.correction, image=self.image),
            )
            if found is not None:
                return found
        return None

    def learn(self, entry: JobEntry, run: JobRun, ending: Ending, card: GpuType) -> bool:
        """Store the measured peak; returns whether plans made before are stale now."""
        if not run.peak_bytes or ending is Ending.HOST_FULL or run.grant.shares:
            return False  # of a mixed gang it is not known whose peak it was
        profile, plan = self.profile(entry), run.grant.plan
        bare = predicted(
            profile,
            card,
            plan.micro_batch,
            plan.recompute,
            keeps_gradients=plan.data > 1 or plan.num_micro > 1,
            knowledge=Knowledge(image=self.image),
        )
        key, before = correction_key(profile, card.name, self.image), self.store.correction
        self.store.learn(
            Observation(
                run_id=run.run_id,
                key=key,
                predicted_bytes=bare.nvml,
                measured_bytes=run.peak_bytes,
                out_of_memory=ending is Ending.CARD_FULL,
            )
        )
        return moved(before, self.store.correction, key) > STALE_FACTOR


class Profiler:
    """Traces modules in tasks of their own, each module once; nothing here waits for one."""

    def __init__(self, program: JobProgram):
        self.program = program
        self._tasks: dict[Any, str] = {}

    def start(self, key: str, request: Mapping[str, Any]) -> None:
        """Begin the trace of this key, unless it runs."""
        if key not in self._tasks.values():
            task: Any = ray.remote(num_cpus=0, max_retries=1)(_profile)
            self._tasks[task.remote(self.program, dict(request))] = key

    def collect(self) -> list[tuple[str, ModuleProfile | Exception]]:
        """The traces that ended since the last call: key, and the profile or why there is none."""
        if not self._tasks:
            return []
        done, _ = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        found: list[tuple[str, ModuleProfile | Exception]] = []
        for task in done:
            key = self._tasks.pop(task)
            try:
                found.append((key, ray.get(task, timeout=FETCH_S)))
            except Exception as error:  # a model that cannot be traced is one job's trouble
                found.append((key, error))
        return found


def _profile(program: JobProgram, request: Mapping[str, Any]) -> ModuleProfile:
    return program.profile(request)


def in_time(plans: Sequence[Plan], entry: JobEntry, needs: JobNeeds) -> tuple[Plan, ...]:
    """Plans that would end before the deadline, first come first, then the others; all as they are without one."""
    if needs.deadline_s is None:
        return tuple(plans)
    left_steps, end_s = needs.steps - entry.done_steps, entry.submit_s + needs.deadline_s
    return tuple(sorted(plans, key=lambda plan: time.time() + left_steps * plan.step_time_s > end_s))


def _no_type(needs: JobNeeds) -> str:
    wanted = ", ".join(needs.gpu_types) or "any"
    return f"the cluster has no card of type {wanted}; label a node, or drop gpu_types"


def types_of(nodes: Iterable[GpuNode]) -> Mapping[str, GpuType]:
    """Card types by name."""
    return {node.gpu.name: node.gpu for node in nodes}
