"""Scheduling policies behind one interface, for the simulator and for comparison: what a policy sees and may say.

`decide` gets the jobs in order of submission and returns every job that shall hold GPUs; a job left out holds none.
Placement on nodes is shared (`Cluster.realise`), so that policies differ in what they choose, not in how it is packed.
The product's own policy is in placement/elastic.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from scipy.optimize import linprog

from placement.errors import PlacementError
from placement.goodput import Configs, Estimator
from placement.ilp import assignment_gain, restart_factor, sia_costs, solve
from placement.ledger import Ledger

MAX_GPUS_PER_JOB = 64
MAX_NODES_BY_WIDTH = {4: 16, 8: 8}


@dataclass(frozen=True)
class Allocation:
    """GPUs of one job: node indices ascending, and how many on each."""

    pool: int
    nodes: tuple[int, ...]
    per_node: tuple[int, ...]

    @property
    def num_gpus(self) -> int:
        """All its GPUs."""
        return sum(self.per_node)


@dataclass(frozen=True)
class FixedBatch:
    """A batch the policy insists on; without one the job tunes its batch to its goodput model."""

    local_batch: int
    accumulation: int


Decisions = Mapping[int, tuple[Allocation | None, FixedBatch | None]]


@dataclass
class JobView:
    """What a policy may know of a job: the user's request, what ran so far, the memory limits. Not the truth."""

    index: int
    application: str
    submit_s: float
    num_replicas: int
    batch_size: int
    restart_s: float
    """Restart time as Sia's policy assumes it."""
    progress_left: float
    """Steps at the initial batch to the epochs that the user asked for."""
    max_local: np.ndarray
    """int64 [K]: predicted samples that fit one GPU, by configuration."""
    estimator: Estimator
    allocation: Allocation | None = None
    placed_s: float = 0.0
    restarting: bool = False
    measured_restart_s: float | None = None
    """Restart time as it was seen, once the job has started."""
    num_restarts: int = 0
    excluded: set[tuple[int, int]] = field(default_factory=set)
    """(pool, batch per replica) that ran out of memory."""
    _table: tuple[tuple[int, tuple[float, float] | None], np.ndarray] | None = None

    def growth_limit(self, factor: int = 2) -> int:
        """Most GPUs to ask for: `factor` times what was tried, as scaling beyond is unknown, and what the batch can feed.

        Sia's factor is 2.
        """
        largest = self.estimator.batch_limits[1]
        by_batch = largest // int(self.estimator.throughput.min_local.min())
        return max(min(factor * self.estimator.throughput.max_replicas, MAX_GPUS_PER_JOB, by_batch), 1)

    def goodput(self, configs: Configs) -> np.ndarray:
        """Estimated goodput float64 [K], in steps at the initial batch per second; 0 where it does not fit."""
        key = (self.estimator.throughput.version, self.estimator.grad)
        if self._table is None or self._table[0] != key:
            self._table = (key, self.estimator.table(configs, self.max_local)[0])
        return self._table[1]


class Policy(Protocol):
    """One scheduler. It may keep state of its own between calls."""

    name: str
    shares_profiles: bool
    """Whether jobs of one class learn from each other's runs; otherwise each job starts from the bootstrap."""

    def decide(self, now_s: float, jobs: Sequence[JobView], cluster: Cluster) -> Decisions:
        """The allocation of every job that shall hold GPUs from now on."""


class Cluster:
    """Types, capacities and configurations of a cluster, and its ledger. Slots of the ledger are job indices."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.types = [gpu_type for gpu_type, _ in ledger.pools]
        if len(set(self.types)) != len(self.types):
            raise PlacementError("one GPU type with two memory sizes: give the sizes different type names")
        cells = ledger.cells
        self.width = cells.width.copy()
        self.num_nodes = np.bincount(cells.pool, minlength=len(self.types))
        self._widths = np.array([spec.num_gpus for spec in ledger.nodes])
        rows = [
            row
            for pool in range(len(self.types))
            for row in _pool_configs(pool, int(self.width[pool]), int(self.num_nodes[pool]))
        ]
        self.configs = Configs(*(np.array(column, np.int32) for column in zip(*rows, strict=True)))
        self.index = {(int(t), int(g)): k for k, (t, _, g) in enumerate(rows)}
        self._allocated: dict[int, Allocation] = {}
        self.memory = [memory for _, memory in ledger.pools]

    @property
    def capacity(self) -> np.ndarray:
        """GPUs that are up, int64 [T]."""
        up = self.ledger.cells.usable != 0
        return np.bincount(self.ledger.cells.pool, self._widths * up, len(self.types)).astype(np.int64)

    def of_pool(self, pool: int) -> np.ndarray:
        """Configuration indices of one pool, by GPUs ascending."""
        return np.flatnonzero(self.configs.gpu_type == pool)

    def shape(self, config: int) -> tuple[str, tuple[int, ...]]:
        """(type, GPUs per node) of a configuration."""
        pool, nodes = int(self.configs.gpu_type[config]), int(self.configs.num_nodes[config])
        gpus = int(self.configs.num_gpus[config])
        return self.types[pool], (gpus // nodes,) * nodes

    def config_of(self, allocation: Allocation | None) -> int:
        """Configuration index of an allocation, or -1."""
        return -1 if allocation is None else self.index.get((allocation.pool, allocation.num_gpus), -1)

    def set_node(self, node: int, up: bool) -> None:
        """Take a node out or back in; jobs on a lost node lose all their GPUs."""
        if not up:
            for slot in self.ledger.owners(node):
                self.release(slot)
        self.ledger.set_usable(node, (1 << self.ledger.nodes[node].num_gpus) - 1 if up else 0)

    def sync(self, jobs: Sequence[JobView]) -> None:
        """Free what jobs hold no longer: finished, lost or out of memory."""
        holding = {job.index for job in jobs if job.allocation is not None}
        for slot in [s for s in self._allocated if s not in holding]:
            self.release(slot)

    def place(self, slot: int, pool: int, num_gpus: int) -> Allocation | None:
        """Give `num_gpus` of a pool to a job by HAS's rule, or None if they are not there."""
        fit = self.ledger.find(pool, num_gpus)
        if fit is None:
            return None
        self.ledger.take(slot, fit, self.memory[pool])
        order = np.argsort(fit.nodes)
        nodes, takes = fit.nodes[order].tolist(), fit.takes[order].tolist()
        allocation = self._allocated[slot] = Allocation(pool, tuple(nodes), tuple(takes))
        return allocation

    def release(self, slot: int) -> None:
        """Take all GPUs of a job back."""
        if self._allocated.pop(slot, None) is not None:
            self.ledger.release(slot)

    def realise(self, jobs: Sequence[JobView], choice: np.ndarray) -> dict[int, tuple[Allocation | None, None]]:
        """Turn configurations into nodes: who keeps its configuration stays; a pool too fragmented is packed anew.

        choice int32 [J]: configuration per job or -1. Jobs inside a restart never move.
        """
        self.sync(jobs)
        wanted = {job.index: int(k) for job, k in zip(jobs, choice, strict=True) if k >= 0}
        for job in jobs:
            if wanted.get(job.index, -1) != self.config_of(job.allocation):
                self.release(job.index)
        for pool in range(len(self.types)):
            mine = [s for s, k in wanted.items() if self.configs.gpu_type[k] == pool]
            if not self._pack([s for s in mine if s not in self._allocated], wanted):
                pinned = {job.index for job in jobs if job.restarting}
                for slot in mine:
                    if slot not in pinned:
                        self.release(slot)
                self._pack([s for s in mine if s not in self._allocated], wanted)
        return {slot: (self._allocated[slot], None) for slot in wanted if slot in self._allocated}

    def _pack(self, slots: list[int], wanted: dict[int, int]) -> bool:
        done = True
        for slot in sorted(slots, key=lambda s: (-int(self.configs.num_gpus[wanted[s]]), s)):
            config = wanted[slot]
            done &= self.place(slot, int(self.configs.gpu_type[config]), int(self.configs.num_gpus[config])) is not None
        return done

    def check(self, allocations: Sequence[Allocation | None]) -> int:
        """GPUs in use; raises PlacementError if a node is given away twice or is down."""
        used = np.zeros(len(self._widths), np.int64)
        for allocation in allocations:
            if allocation is not None:
                used[list(allocation.nodes)] += allocation.per_node
        limit = self._widths * (self.ledger.cells.usable != 0)
        if np.any(used > limit):
            node = int(np.argmax(used - limit))
            raise PlacementError(f"a policy gave away {used[node]} of {limit[node]} GPUs of node {node}; it is wrong")
        return int(used.sum())


def _pool_configs(pool: int, width: int, num_nodes: int) -> list[tuple[int, int, int]]:
    """(pool, nodes, GPUs): powers of two inside a node, then whole nodes (Sia, section 3.3)."""
    inside = [(pool, 1, 1 << e) for e in range(width.bit_length()) if 1 << e <= width]
    if inside[-1][2] != width:
        inside.append((pool, 1, width))
    return inside + [(pool, n, n * width) for n in range(2, min(num_nodes, MAX_NODES_BY_WIDTH.get(width, 16)) + 1)]


class Sia:
    """Sia's policy: its integer program, every round, over goodput relative to each job's worst configuration."""

    name = "sia"

    def __init__(self, shares_profiles: bool = False):
        self.shares_profiles = shares_profiles

    def decide(self, now_s: float, jobs: Sequence[JobView], cluster: Cluster) -> Decisions:
        """Solve the program and realise it."""
        cluster.sync(jobs)
        if not jobs:
            return {}
        costs, pinned = sia_matrix(now_s, jobs, cluster)
        result = solve(costs, cluster.configs.gpu_type, cluster.configs.num_gpus, cluster.capacity, pinned)
        return cluster.realise(jobs, result.choice)


def sia_matrix(now_s: float, jobs: Sequence[JobView], cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """(costs float64 [J, K], pinned int32 [J]) of Sia's program for these jobs."""
    configs = cluster.configs
    costs = np.empty((len(jobs), len(configs)))
    pinned = np.full(len(jobs), -1, np.int32)
    for i, job in enumerate(jobs):
        present = cluster.config_of(job.allocation)
        feasible = configs.num_gpus <= job.growth_limit()
        ran = job.estimator.grad is not None
        goodput = job.goodput(configs) if ran else (configs.num_gpus == 1).astype(float)
        factor = restart_factor(now_s - job.submit_s, job.num_restarts, job.restart_s)
        costs[i] = sia_costs(goodput, feasible, present, factor)
        if job.restarting:
            pinned[i] = present
    return costs, pinned


class Fifo:
    """Rigid user requests in order of submission, best fit over types; the head of the queue blocks.

    The user's accumulation steps suit the largest card of the cluster; on a smaller one they may run out of memory.
    After such an error the job is told and avoids that type.
    """

    name = "fifo"
    shares_profiles = False

    def decide(self, now_s: float, jobs: Sequence[JobView], cluster: Cluster) -> Decisions:
        """Keep what runs, start in order."""
        cluster.sync(jobs)
        decisions: dict[int, tuple[Allocation | None, FixedBatch | None]] = {}
        for job in jobs:
            if job.allocation is not None:
                decisions[job.index] = (job.allocation, None)
        free = cluster.ledger.cells.num_free
        for job in jobs:
            if job.allocation is not None:
                continue
            batch = user_batch(job, int(job.max_local.max()))
            in_pool = np.bincount(cluster.ledger.cells.pool, free, len(cluster.types))
            placed = None
            for pool in np.argsort(in_pool, kind="stable"):
                if (int(pool), batch.local_batch) not in job.excluded:
                    placed = placed or cluster.place(job.index, int(pool), job.num_replicas)
            if placed is None:
                break
            decisions[job.index] = (placed, batch)
        return decisions


def user_batch(job: JobView, fits: int) -> FixedBatch:
    """The user's batch over the user's replicas, in as few accumulation steps as `fits` samples a GPU allow."""
    per_replica = -(-job.batch_size // job.num_replicas)
    steps = -(-per_replica // fits)
    return FixedBatch(-(-per_replica // steps), steps - 1)


class Frenzy:
    """Frenzy's idea as reconstructed from its abstract: predicted memory, a plan list, the tightest nodes; never moved.

    Plans keep the user's batch without accumulation, on every GPU count where it fits a card, ordered by one-GPU
    throughput per GPU. The first plan with enough free GPUs is taken; a job that fits nowhere waits, later ones pass.
    """

    name = "frenzy"
    shares_profiles = False

    def decide(self, now_s: float, jobs: Sequence[JobView], cluster: Cluster) -> Decisions:
        """Keep what runs, start what fits."""
        cluster.sync(jobs)
        decisions: dict[int, tuple[Allocation | None, FixedBatch | None]] = {}
        for job in jobs:
            if job.allocation is not None:
                decisions[job.index] = (job.allocation, None)
                continue
            for config, local in self._plans(job, cluster):
                pool, gpus = int(cluster.configs.gpu_type[config]), int(cluster.configs.num_gpus[config])
                placed = cluster.place(job.index, pool, gpus)
                if placed is not None:
                    decisions[job.index] = (placed, FixedBatch(local, 0))
                    break
        return decisions

    def _plans(self, job: JobView, cluster: Cluster) -> list[tuple[int, int]]:
        gpus, types = cluster.configs.num_gpus, cluster.configs.gpu_type
        local = -(-job.batch_size // gpus)
        params = job.estimator.throughput.params
        rate = local / (params[types, 0] + params[types, 1] * local)
        fits = np.flatnonzero((local <= job.max_local) & (local >= job.estimator.throughput.min_local[types]))
        return [(int(k), int(local[k])) for k in sorted(fits, key=lambda k: (-rate[k], gpus[k]))]


class Gavel:
    """Gavel's max-min fairness (OSDI'20) in rounds: rigid requests, shares of time per type from a linear program.

    Throughputs come from the same estimator as Sia's. Jobs are served by share owed over time received.
    """

    name = "gavel"
    shares_profiles = False
    round_s = 360.0

    def __init__(self) -> None:
        self._received: dict[tuple[int, int], float] = {}
        self._share: dict[int, np.ndarray] = {}
        self._since = 0.0
        self._decided = -1e9
        self._known: frozenset[int] = frozenset()

    def decide(self, now_s: float, jobs: Sequence[JobView], cluster: Cluster) -> Decisions:
        """Account time, renew shares when jobs come or go, and serve the most owed first."""
        cluster.sync(jobs)
        for job in jobs:
            if job.allocation is not None:
                key = (job.index, job.allocation.pool)
                self._received[key] = self._received.get(key, 0.0) + now_s - self._since
        self._since = now_s
        known = frozenset(job.index for job in jobs)
        idle = any(job.allocation is None for job in jobs)
        if not jobs or (now_s - self._decided < self.round_s and not (idle and known != self._known)):
            return {job.index: (job.allocation, None) for job in jobs if job.allocation is not None}
        if known != self._known:
            self._share = self._solve(jobs, cluster)
        self._known, self._decided = known, now_s
        return self._serve(jobs, cluster)

    def _rates(self, job: JobView, cluster: Cluster) -> np.ndarray:
        rates = np.zeros(len(cluster.types))
        for pool in range(len(cluster.types)):
            if job.num_replicas > cluster.capacity[pool]:
                continue
            limit = int(job.max_local[cluster.of_pool(pool)].max())
            batch = user_batch(job, limit)
            a, b = job.estimator.throughput.params[pool, :2]
            rates[pool] = 1.0 / ((batch.accumulation + 1) * (a + b * batch.local_batch))
        return rates

    def _solve(self, jobs: Sequence[JobView], cluster: Cluster) -> dict[int, np.ndarray]:
        """Maximise the least normalised throughput; variables are time shares [J * T] and the minimum itself."""
        num, types = len(jobs), len(cluster.types)
        rates = np.array([self._rates(job, cluster) for job in jobs])
        normal = rates / np.maximum(rates @ (cluster.capacity / cluster.capacity.sum()), 1e-12)[:, None]
        gpus = np.array([job.num_replicas for job in jobs], float)
        rows, limits = np.zeros((2 * num + types, num * types + 1)), np.zeros(2 * num + types)
        for i in range(num):
            mine = slice(i * types, (i + 1) * types)
            rows[i, mine], rows[i, -1] = -normal[i] * gpus[i], 1.0
            rows[num + i, mine], limits[num + i] = 1.0, 1.0
            for t in range(types):
                rows[2 * num + t, i * types + t] = gpus[i]
        limits[2 * num :] = cluster.capacity
        goal = np.zeros(num * types + 1)
        goal[-1] = -1.0
        result = linprog(goal, rows, limits, bounds=(0, None))
        share = result.x[:-1].reshape(num, types) * (normal > 0)
        return {job.index: share[i] for i, job in enumerate(jobs)}

    def _serve(self, jobs: Sequence[JobView], cluster: Cluster) -> Decisions:
        owed = []
        for job in jobs:
            for pool, share in enumerate(self._share.get(job.index, ())):
                if share > 1e-6:
                    owed.append((-share / (self._received.get((job.index, pool), 0.0) + 1.0), job.index, pool))
        by_index = {job.index: job for job in jobs}
        room, chosen = cluster.capacity.copy(), {}
        for _, slot, pool in sorted(owed):
            if slot not in chosen and by_index[slot].num_replicas <= room[pool]:
                chosen[slot] = pool
                room[pool] -= by_index[slot].num_replicas
        for job in jobs:
            if job.allocation is not None and chosen.get(job.index) != job.allocation.pool:
                cluster.release(job.index)
        decisions: dict[int, tuple[Allocation | None, FixedBatch | None]] = {}
        for slot in sorted(chosen, key=lambda s: -by_index[s].num_replicas):
            job, pool = by_index[slot], chosen[slot]
            kept = job.allocation if job.allocation is not None and job.allocation.pool == pool else None
            placed = kept or cluster.place(slot, pool, job.num_replicas)
            if placed is not None:
                limit = int(job.max_local[cluster.of_pool(pool)].min())
                decisions[slot] = (placed, user_batch(job, limit))
        return decisions


__all__ = [
    "Allocation",
    "Cluster",
    "Fifo",
    "FixedBatch",
    "Frenzy",
    "Gavel",
    "JobView",
    "Policy",
    "Sia",
    "assignment_gain",
    "sia_matrix",
]
