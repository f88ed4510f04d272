"""An event-driven cluster: jobs arrive, policies move them, restarts cost time, nodes fail; seeded and without a clock.

Two modes. `rounds` follows the simulator of the Sia artifact: jobs advance for one round, then the policy runs, so an
arrival waits for the next tick. `events` calls the policy at every arrival, finish and node event, and at ticks.
Jobs follow `AppProfile`, the truth; a policy sees `JobView` only. A job holds its GPUs while it checkpoints and
restores, its first start included, and makes no progress; a placement beyond the card's memory costs the same and ends.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.errors import PlacementError
from placement.goodput import Configs, Estimator, Throughput, gain
from placement.jobs import NodeSpec
from placement.ledger import Ledger
from placement.policies import Allocation, Cluster, FixedBatch, JobView, Policy
from placement.profiles import AppProfile
from placement.traces import TraceJob

ROUND_S = 60.0
MAX_DAYS = 60
RESOLUTION_S = 1e-6
"""Ends closer than this count as reached, so that rounding cannot stop the clock."""


@dataclass(frozen=True)
class NodeEvent:
    """A node goes down (up=False) or returns at `time_s`. Jobs on it fall back to their last epoch's checkpoint."""

    time_s: float
    node: int
    up: bool


@dataclass(frozen=True)
class JobRecord:
    """What became of one job."""

    name: str
    application: str
    submit_s: float
    start_s: float
    finish_s: float
    num_restarts: int
    num_oom: int
    gpu_seconds: float
    wait_s: float
    fairness: float
    """Time in the shared cluster / time alone on a 1/N share of it."""

    @property
    def jct_s(self) -> float:
        """Completion minus submission."""
        return self.finish_s - self.submit_s


@dataclass(frozen=True)
class Outcome:
    """One policy on one trace. used_gpus: (time_s, GPUs in use) after every decision; policy_s: seconds per decision."""

    policy: str
    num_gpus: int
    jobs: tuple[JobRecord, ...]
    used_gpus: tuple[tuple[float, int], ...]
    policy_s: tuple[float, ...]

    def metrics(self) -> dict[str, float]:
        """The figures of one run; hours where the name says so. p99 is at index int(0.99 n), as in Sia."""
        jct = np.sort([job.jct_s for job in self.jobs]) / 3600
        span = max(j.finish_s for j in self.jobs) - min(j.submit_s for j in self.jobs)
        queue = np.array([job.wait_s for job in self.jobs]) / 3600
        fairness = np.array([job.fairness for job in self.jobs])
        seconds = np.array(self.policy_s) if self.policy_s else np.zeros(1)
        return {
            "jct_mean_h": float(jct.mean()),
            "jct_median_h": float(np.median(jct)),
            "jct_p99_h": float(jct[int(0.99 * len(jct))]),
            "makespan_h": span / 3600,
            "queue_mean_h": float(queue.mean()),
            "queue_max_h": float(queue.max()),
            "utilisation": sum(j.gpu_seconds for j in self.jobs) / (self.num_gpus * span),
            "gpu_hours_per_job": sum(j.gpu_seconds for j in self.jobs) / len(self.jobs) / 3600,
            "restarts_per_job": float(np.mean([job.num_restarts for job in self.jobs])),
            "oom": float(sum(job.num_oom for job in self.jobs)),
            "fairness_worst": float(fairness.max()),
            "fairness_above_1": float((fairness > 1).mean()),
            "decision_p50_ms": float(np.median(seconds)) * 1e3,
            "decision_p99_ms": float(np.quantile(seconds, 0.99)) * 1e3,
        }


@dataclass
class _Running:
    """One job inside the simulator: the truth beside what the policy may see of it."""

    trace: TraceJob
    app: AppProfile
    view: JobView
    first_grads: dict[str, tuple[float, float]]
    """Gradient statistics of the first steps by application, as the first job of each measured them."""
    progress: float = 0.0
    epoch: int = 0
    batch: tuple[int, int] = (0, 0)
    tuned: bool = True
    oom: bool = False
    restart_left_s: float = 0.0
    rate: float = 0.0
    start_s: float = math.nan
    finish_s: float = math.nan
    num_oom: int = 0
    gpu_seconds: float = 0.0
    wait_s: float = 0.0

    def place(self, allocation: Allocation | None, batch: FixedBatch | None, now_s: float, cluster: Cluster) -> None:
        """Follow a decision: a changed placement begins a restart."""
        if allocation == self.view.allocation:
            return
        if self.view.allocation is not None or not math.isnan(self.start_s):
            self.view.num_restarts += allocation is not None
        self.view.allocation = allocation
        self.rate, self.oom = 0.0, False
        if allocation is None:
            return
        if math.isnan(self.start_s):
            self.start_s = now_s
        self.view.placed_s = now_s
        self.restart_left_s = self.app.restart_s
        self.tuned = batch is None
        self.batch = self._tune(cluster) if batch is None else (batch.local_batch, batch.accumulation)
        limit = self.app.max_local_batch(cluster.types[allocation.pool], allocation.per_node)
        self.oom = self.batch[0] > limit

    def _tune(self, cluster: Cluster) -> tuple[int, int]:
        allocation, estimator = self.view.allocation, self.view.estimator
        assert allocation is not None
        limit = self.app.max_local_batch(cluster.types[allocation.pool], allocation.per_node)
        replicas = allocation.num_gpus
        if estimator.grad is None:
            per_replica = -(-self.app.initial_batch // replicas)
            steps = -(-per_replica // limit)
            return max(-(-per_replica // steps), self.app.min_local_batch(cluster.types[allocation.pool])), steps - 1
        one = Configs(*(np.array([x], np.int32) for x in (allocation.pool, len(allocation.per_node), replicas)))
        _, local, accumulation = estimator.table(one, np.array([limit], np.int64))
        if local[0] == 0:
            raise PlacementError(f"{self.trace.name}: {replicas} GPUs exceed what its largest batch can feed")
        return int(local[0]), int(accumulation[0])

    def _run_on(self, cluster: Cluster, retune: bool = True) -> None:
        """Tune the batch and take the true rate; the policy sees the measured times and gradient statistics."""
        allocation = self.view.allocation
        assert allocation is not None
        if self.tuned and retune:
            self.batch = self._tune(cluster)
        local, accumulation = self.batch
        gpu_type, replicas = cluster.types[allocation.pool], allocation.num_gpus
        step_s, sync_s = self.app.curve(gpu_type, allocation.per_node).at(local)
        total = local * (accumulation + 1) * replicas
        grad = self.app.grad_stats(total, self.epoch)
        per_step = gain(*grad, total / self.app.initial_batch)
        self.rate = per_step / (step_s + accumulation * (step_s - sync_s)) / self.app.goodput_divisor
        nodes = len(allocation.per_node)
        self.view.estimator.throughput.observe(allocation.pool, nodes, replicas, local, step_s - sync_s, step_s)
        self.view.estimator.grad = grad
        self.first_grads.setdefault(self.app.name, grad)

    def next_change_s(self) -> float:
        """Seconds until the end of the restart, the epoch or the out-of-memory error, whichever comes first."""
        if self.view.allocation is None:
            return math.inf
        if self.restart_left_s > 0 or self.rate == 0:
            return max(self.restart_left_s, RESOLUTION_S)
        return max(float(self.app.epoch_progress[self.epoch] - self.progress) / self.rate, RESOLUTION_S)

    def advance(self, now_s: float, span_s: float, cluster: Cluster) -> None:
        """Run for `span_s` seconds from `now_s`; sets finish_s when the last epoch ends within them."""
        allocation = self.view.allocation
        if allocation is None:
            self.wait_s += span_s
            return
        left = span_s
        while left > 0 or (self.restart_left_s <= 0 and self.rate == 0):
            if self.restart_left_s > 0:
                used = min(self.restart_left_s, left)
                self.restart_left_s -= used
                left -= used
                if self.restart_left_s > RESOLUTION_S / 2:
                    break
                self.restart_left_s = 0.0
                self.view.measured_restart_s = self.app.restart_s
            if self.oom:
                self._run_out_of_memory(allocation)
                break
            if self.rate == 0:
                self._run_on(cluster, retune=False)
            need = float(self.app.epoch_progress[self.epoch] - self.progress) / self.rate
            if need > left + RESOLUTION_S / 2:
                self.progress += self.rate * left
                left = 0.0
                self._run_on(cluster)
                break
            left = max(left - need, 0.0)
            self.progress = float(self.app.epoch_progress[self.epoch])
            self.epoch += 1
            if self.epoch == len(self.app.epoch_progress):
                self.finish_s = now_s + span_s - left
                break
            self._run_on(cluster)
        self.gpu_seconds += allocation.num_gpus * (span_s - left)
        self.view.restarting = self.restart_left_s > 0
        self.view.progress_left = float(self.app.epoch_progress[-1] - self.progress)

    def _run_out_of_memory(self, allocation: Allocation) -> None:
        self.num_oom += 1
        self.view.excluded.add((allocation.pool, self.batch[0]))
        self.view.allocation, self.oom = None, False

    def lose_node(self) -> None:
        """Back to the last checkpoint, which is the end of the last epoch."""
        self.progress = float(self.app.epoch_progress[self.epoch - 1]) if self.epoch else 0.0
        self.view.allocation, self.rate, self.oom, self.restart_left_s = None, 0.0, False, 0.0
        self.view.restarting = False


def simulate(
    trace: Sequence[TraceJob],
    nodes: Sequence[NodeSpec],
    profiles: Mapping[str, AppProfile],
    policy: Policy,
    *,
    mode: str = "rounds",
    node_events: Sequence[NodeEvent] = (),
    round_s: float = ROUND_S,
    progress: object = None,
) -> Outcome:
    """Run `trace` to the last completion under `policy`.

    Raises PlacementError if the policy exceeds the cluster, or if a job does not finish within `MAX_DAYS`.
    progress: called with (simulated hours, finished, total) after every decision, or None.
    """
    if mode not in ("rounds", "events"):
        raise PlacementError(f"unknown mode '{mode}'; use rounds or events")
    if not trace:
        raise PlacementError("the trace holds no job; check its file or generate one")
    simulation = _Simulation(trace, nodes, profiles, policy, mode, sorted(node_events, key=lambda e: e.time_s), round_s)
    while simulation.step():
        if callable(progress):
            progress(simulation.now_s / 3600, len(simulation.finished), len(trace))
    return simulation.outcome()


@dataclass
class _Simulation:
    trace: Sequence[TraceJob]
    nodes: Sequence[NodeSpec]
    profiles: Mapping[str, AppProfile]
    policy: Policy
    mode: str
    node_events: list[NodeEvent]
    round_s: float
    now_s: float = 0.0
    active: list[_Running] = field(default_factory=list)
    finished: list[_Running] = field(default_factory=list)
    used: list[tuple[float, int]] = field(default_factory=list)
    policy_s: list[float] = field(default_factory=list)
    job_seconds: float = 0.0
    first_grads: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = sorted({job.application for job in self.trace} - set(self.profiles))
        if missing:
            raise PlacementError(
                f"no profile for application(s) {', '.join(missing)}; known: {', '.join(self.profiles)}"
            )
        self.cluster = Cluster(Ledger(self.nodes))
        self.waiting = sorted(self.trace, key=lambda job: job.submit_s)[::-1]
        self.next_tick = self.round_s
        used = {job.application for job in self.trace}
        self.bootstrap = {
            name: Throughput(
                [
                    np.column_stack([curve.local_batch, curve.step_time_s - curve.sync_time_s])
                    for curve in (app.curve(gpu_type, (1,)) for gpu_type in self.cluster.types)
                ]
            )
            for name, app in self.profiles.items()
            if name in used
        }
        self.max_local = {
            name: np.array(
                [self.profiles[name].max_local_batch(*self.cluster.shape(k)) for k in range(len(self.cluster.configs))]
            )
            for name in self.bootstrap
        }

    def step(self) -> bool:
        """Advance to the next decision; False when every job is done."""
        if not self.waiting and not self.active:
            return False
        if self.now_s > MAX_DAYS * 86400:
            names = ", ".join(r.trace.name for r in self.active[:5])
            raise PlacementError(f"jobs unfinished after {MAX_DAYS} simulated days under {self.policy.name}: {names}")
        target = self._next_time()
        span = target - self.now_s
        for running in self.active:
            running.advance(self.now_s, span, self.cluster)
        self.job_seconds += span * len(self.active)
        self.now_s = target
        done = [r for r in self.active if not math.isnan(r.finish_s)]
        self.active = [r for r in self.active if math.isnan(r.finish_s)]
        self.finished += done
        changed = bool(done) or any(r.view.allocation is None for r in self.active)
        while self.waiting and self.waiting[-1].submit_s <= self.now_s:
            self.active.append(self._admit(self.waiting.pop()))
            changed = True
        while self.node_events and self.node_events[0].time_s <= self.now_s:
            self._node_event(self.node_events.pop(0))
            changed = True
        tick = self.now_s >= self.next_tick
        if tick:
            self.next_tick += self.round_s
        if tick or (self.mode == "events" and changed):
            self._decide()
        return True

    def _next_time(self) -> float:
        if self.mode == "rounds":
            return self.next_tick
        times = [self.next_tick]
        times += [self.waiting[-1].submit_s] if self.waiting else []
        times += [self.node_events[0].time_s] if self.node_events else []
        times += [self.now_s + r.next_change_s() for r in self.active]
        return max(self.now_s, min(times))

    def _admit(self, job: TraceJob) -> _Running:
        app = self.profiles[job.application]
        throughput = self.bootstrap[app.name]
        if not self.policy.shares_profiles:
            throughput = copy.deepcopy(throughput)
        view = JobView(
            index=len(self.finished) + len(self.active),
            application=app.name,
            submit_s=job.submit_s,
            num_replicas=job.num_replicas,
            batch_size=job.batch_size,
            restart_s=app.policy_restart_s,
            progress_left=float(app.epoch_progress[-1]),
            max_local=self.max_local[app.name],
            estimator=Estimator(throughput, (app.initial_batch, app.max_batch)),
        )
        if self.policy.shares_profiles:
            view.estimator.grad = self.first_grads.get(app.name)
        return _Running(job, app, view, self.first_grads)

    def _node_event(self, event: NodeEvent) -> None:
        self.cluster.set_node(event.node, event.up)
        for running in self.active:
            allocation = running.view.allocation
            if not event.up and allocation is not None and event.node in allocation.nodes:
                running.lose_node()

    def _decide(self) -> None:
        views = [r.view for r in self.active]
        started = time.perf_counter()
        decisions = self.policy.decide(self.now_s, views, self.cluster)
        self.policy_s.append(time.perf_counter() - started)
        for running in self.active:
            allocation, batch = decisions.get(running.view.index, (None, None))
            running.place(allocation, batch, self.now_s, self.cluster)
        self.used.append((self.now_s, self.cluster.check([r.view.allocation for r in self.active])))

    def outcome(self) -> Outcome:
        mean_active = max(self.job_seconds / max(self.now_s, 1.0), 1.0)
        alone = {name: _alone_s(self.profiles[name], self.cluster, mean_active) for name in self.bootstrap}
        records = [
            JobRecord(
                r.trace.name, r.app.name, r.trace.submit_s, r.start_s, r.finish_s, r.view.num_restarts, r.num_oom,
                r.gpu_seconds, r.wait_s, (r.finish_s - r.trace.submit_s) / alone[r.app.name],
            )
            for r in self.finished
        ]  # fmt: skip
        num_gpus = int(self.cluster.capacity.sum())
        return Outcome(self.policy.name, num_gpus, tuple(records), tuple(self.used), tuple(self.policy_s))


def _alone_s(app: AppProfile, cluster: Cluster, num_sharing: float) -> float:
    """Seconds of one job alone on a 1/num_sharing part of each type, averaged by the types' GPUs; batch tuned truly."""
    total, share = 0.0, cluster.capacity / num_sharing
    for pool, gpu_type in enumerate(cluster.types):
        fits = [k for k in cluster.of_pool(pool) if cluster.configs.num_gpus[k] <= max(share[pool], 1)]
        placement = cluster.shape(fits[-1])[1]
        replicas, curve = sum(placement), app.curve(gpu_type, placement)
        limit = app.max_local_batch(gpu_type, placement)
        steps = np.diff(app.epoch_progress, prepend=0.0)
        seconds = np.full(len(steps), math.inf)
        for batch in np.geomspace(max(app.initial_batch, curve.local_batch[0] * replicas), app.max_batch, 20):
            rounds = math.ceil(batch / replicas / limit)
            step_s, sync_s = curve.at(batch / replicas / rounds)
            cost = (step_s + (rounds - 1) * (step_s - sync_s)) * app.goodput_divisor
            gains = [gain(*app.grad_stats(batch, e), batch / app.initial_batch) for e in range(len(steps))]
            seconds = np.minimum(seconds, steps * cost / np.array(gains))
        slower = max(replicas / share[pool], 1.0)
        total += float(seconds.sum()) * slower * cluster.capacity[pool] / cluster.capacity.sum()
    return total
