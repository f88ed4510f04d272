"""`schedule`: how long one scheduling pass and one event take, and how close prices come to the integer program.

A pass is `Scheduler.tick` on warm caches with per-card ledger, aging, reservation and backfill on: every queued job is
considered and its cards are chosen and booked. It is timed from an empty cluster and at 97 % occupancy. Events are
timed at 97 %: finishes (with the starts they cause), arrivals, losses and returns of nodes. Ray calls are not part of
it. Quality compares the value reached on instances of Sia's program (goodput curves of random scaling, restart factors)
with HiGHS at gap 1e-4, side by side on this machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jobs.job import Run
from placement.allocation import allocate
from placement.catalogue import GpuType, gpu_type
from placement.ilp import UNALLOCATED_COST, restart_factor, sia_costs, solve
from placement.jobs import JobClass, JobSpec, NodeSpec
from placement.plans import Search, enumerate_plans
from placement.scheduler import Scheduler
from placement.shapes import ModelShape, Setup
from placement.traces import PHILLY_WEEK_GPUS, generate_inventory
from zenray.config import Section

FILES: tuple[str, ...] = ()

CARD_OF = {
    "A100-80G": "A100-80",
    "H800": "H100",
    "A10": "A10",
    "series-1": "T4",
    "series-2": "V100-32",
    "A800": "A100-80",
}
"""Which data sheet stands for a type of the generated inventory; the two anonymous series are guesses."""
SIZES = ((24, 1024, 16), (24, 2048, 16), (32, 2560, 32), (32, 4096, 32), (40, 5120, 40), (48, 7168, 56), (80, 8192, 64))
"""Layers, width and heads of the seven models, 0.35 to 66 billion parameters."""
BATCHES = (64, 128, 256, 512)
OCCUPANCY = 0.97
QUALITY = ((20, 64), (64, 256), (160, 1024), (640, 2048), (1000, 10412))
HOUR_S = 3600.0
WARM_EVENTS = 100


class Config(Section):
    """What is timed."""

    gpus: int = 10412
    """Cards of the generated inventory, scaled from 10,412 in 4,278 nodes of six types."""
    jobs: int = 1000
    """Jobs in the queue when a pass begins."""
    mix: Literal["llm", "small"] = "llm"
    """llm: seven model sizes by four batches, plans from the predictor. small: GPU counts as in the Philly trace."""
    repetitions: int = 0
    """Passes per starting point; 0: 1,000 up to 20,000 GPUs and 200 above."""
    events: int = 4000
    """Events timed."""
    instances: int = 5
    """Instances per size of the comparison with the integer program; 0 leaves it out."""
    seed: int = 0


def run(config: Config, run: Run) -> dict[str, Any]:
    """Time passes and events, then compare with the integer program."""
    nodes = _nodes(config.gpus)
    num_gpus = sum(node.num_gpus for node in nodes)
    started = time.perf_counter()
    classes = llm_classes() if config.mix == "llm" else small_classes()
    run.say(
        f"{len(nodes)} nodes, {num_gpus} GPUs; {len(classes)} classes, {sum(len(c.options) for c in classes)} plans"
    )
    listing_s = time.perf_counter() - started
    bench = _Bench(config, nodes, classes)
    metrics: dict[str, Any] = {"num_gpus": num_gpus, "num_nodes": len(nodes), "listing_ms": listing_s * 1e3}
    metrics |= bench.passes(run)
    metrics |= bench.events()
    if config.instances:
        metrics |= compare(config, run)
    metrics["load_1min"] = os.getloadavg()[0]
    rows = [(key, value) for key, value in metrics.items() if not isinstance(value, dict)]
    run.table(f"schedule, mix {config.mix}, {config.jobs} queued", ("figure", "value"), rows)
    return metrics


def _nodes(num_gpus: int) -> list[NodeSpec]:
    return [
        replace(node, memory_bytes=gpu_type(CARD_OF[node.gpu_type]).memory_bytes)
        for node in generate_inventory(num_gpus)
    ]


def _cards() -> list[GpuType]:
    widths = {node.gpu_type: node.num_gpus for node in generate_inventory()}
    return [replace(gpu_type(card), name=name, gpus_per_node=widths[name]) for name, card in CARD_OF.items()]


def llm_classes() -> list[JobClass]:
    """28 classes with the plans that the predictor lists for the inventory's cards."""
    classes = []
    for layers, hidden, heads in SIZES:
        shape = ModelShape(layers=layers, hidden=hidden, heads=heads, seq=2048, vocab=50257)
        for batch in BATCHES:
            plans = enumerate_plans(shape, Setup(global_batch=batch), _cards(), Search(max_gpus=128, context=(1,)))
            classes.append(JobClass(f"l{layers}-h{hidden}-b{batch}", plans.options()))
    return classes


def small_classes() -> list[JobClass]:
    """The 28 classes' first plans of each GPU count that the Philly trace knows: small jobs, mostly one GPU."""
    sizes = tuple(PHILLY_WEEK_GPUS)
    small = []
    for job_class in llm_classes()[:8]:
        for size in sizes:
            options = tuple(option for option in job_class.options if option.num_gpus == size)
            small.append(JobClass(f"{job_class.name}-g{size}", options))
    return small


class _Bench:
    """One scheduler with a full queue, and copies of its arrays to begin every repetition alike."""

    def __init__(self, config: Config, nodes: list[NodeSpec], classes: list[JobClass]):
        self.config, self.classes = config, classes
        self.random = np.random.default_rng(config.seed)
        self.scheduler = Scheduler(nodes, classes)
        self.num_gpus = sum(node.num_gpus for node in nodes)
        self.num_submitted = 0
        self.now_s = 10 * HOUR_S

    def submit(self, num: int) -> None:
        """Queue `num` jobs of random class that came in over the last hours."""
        self.scheduler.submit_all([self.spec() for _ in range(num)])

    def spec(self) -> JobSpec:
        """A job of random class, size about 1 GPU-hour to days, submitted within the last two hours."""
        if self.config.mix == "small":
            share = np.tile(list(PHILLY_WEEK_GPUS.values()), len(self.classes) // len(PHILLY_WEEK_GPUS))
        else:
            share = np.ones(len(self.classes))
        feasible = share * np.array([len(c.options) > 0 for c in self.classes])
        job_class = self.classes[int(self.random.choice(len(self.classes), p=feasible / feasible.sum()))]
        steps = float(self.random.lognormal(8.5, 1.2)) / job_class.options[0].step_time_s
        self.num_submitted += 1
        submit_s = self.now_s - float(self.random.uniform(0, 2 * HOUR_S))
        return JobSpec(f"job-{self.num_submitted}", job_class.name, steps, submit_s)

    def occupancy(self) -> float:
        """Share of cards with an owner."""
        return float((self.scheduler.ledger.cells.owner >= 0).sum()) / self.num_gpus

    def passes(self, run: Run) -> dict[str, Any]:
        """Full passes from an empty cluster and at 97 % occupancy."""
        self.submit(self.config.jobs)
        metrics = self._timed("pass", run)
        metrics["placed"] = metrics.pop("pass_placed")
        while self.occupancy() < OCCUPANCY:
            self.submit(self.config.jobs)
            if len(self.scheduler.tick(self.now_s)) == 0:
                break
        while self.occupancy() > OCCUPANCY:
            self.scheduler.finish(self._running(), self.now_s)
        self.submit(max(0, self.config.jobs - self.scheduler.num_waiting))
        metrics["full_occupancy"] = self.occupancy()
        metrics["full_waiting"] = self.scheduler.num_waiting
        metrics |= self._timed("full_pass", run)
        metrics["full_reservation"] = self.scheduler.reservation is not None
        return metrics

    def _timed(self, name: str, run: Run) -> dict[str, Any]:
        scheduler = self.scheduler
        arrays = [*scheduler.ledger.cells, *scheduler._queue, *scheduler._hold]
        before = [array.copy() for array in arrays]
        repetitions = self.config.repetitions or (1000 if self.config.gpus <= 20000 else 200)
        scheduler.tick(self.now_s)
        seconds = []
        for _ in range(repetitions):
            for array, copy in zip(arrays, before, strict=True):
                np.copyto(array, copy)
            started = time.perf_counter()
            placed = scheduler.tick(self.now_s)
            seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        used = sum(start.option.num_gpus for start in scheduler.starts_of(placed))
        listing_s = time.perf_counter() - started
        spent = np.array(seconds) * 1e3
        run.say(f"{name}: {len(placed)} placed on {used} GPUs, p50 {np.median(spent):.3g} ms, max {spent.max():.3g} ms")
        return {
            f"{name}_p50_ms": float(np.median(spent)),
            f"{name}_p99_ms": float(np.quantile(spent, 0.99)),
            f"{name}_max_ms": float(spent.max()),
            f"{name}_placed": len(placed),
            f"{name}_gpus": used,
            f"{name}_list_ms": listing_s * 1e3,
        }

    def _running(self) -> str:
        """Id of a random running job."""
        running = np.flatnonzero(self.scheduler._queue.option >= 0)
        spec = self.scheduler._specs[int(self.random.choice(running))]
        assert spec is not None
        return spec.job_id

    def events(self) -> dict[str, Any]:
        """Finishes, arrivals and node events at the state that `passes` left."""
        seconds: dict[str, list[float]] = {"finish": [], "arrive": [], "node": []}
        names = [node.name for node in self.scheduler.ledger.nodes]
        starts = 0

        def timed(kind: str, event: Callable[..., Any], *arguments: object) -> Any:
            started = time.perf_counter()
            result = event(*arguments, self.now_s)
            seconds[kind].append(time.perf_counter() - started)
            return result

        for turn in range(WARM_EVENTS + self.config.events):
            if turn == WARM_EVENTS:
                for spent in seconds.values():
                    spent.clear()
            job, spec = self._running(), self.spec()
            if turn % 10 == 9:
                name = names[int(self.random.integers(len(names)))]
                timed("node", self.scheduler.node_lost, name)
                timed("node", self.scheduler.node_joined, name)
            elif turn % 2:
                starts += len(timed("arrive", self.scheduler.submit, spec))
            else:
                starts += len(timed("finish", self.scheduler.finish, job))
        everything = np.concatenate([np.array(s) for s in seconds.values()]) * 1e6
        metrics: dict[str, Any] = {"event_p50_us": float(np.median(everything)), "event_starts": starts}
        metrics |= {"event_p99_us": float(np.quantile(everything, 0.99)), "event_max_us": float(everything.max())}
        for kind, spent in seconds.items():
            metrics[f"{kind}_p99_us"] = float(np.quantile(np.array(spent), 0.99)) * 1e6 if spent else 0.0
        return metrics


def compare(config: Config, run: Run) -> dict[str, Any]:
    """Gain by prices over gain of the integer program, and the time of both, per instance size."""
    random = np.random.default_rng(config.seed)
    metrics: dict[str, Any] = {"objective_vs_ilp": 1.0}
    rows = []
    for num_jobs, num_gpus in QUALITY:
        ratios, ours_ms, ilp_ms = [], [], []
        for _ in range(config.instances):
            costs, types, gpus, capacity = program(num_jobs, num_gpus, random)
            allocate(UNALLOCATED_COST - costs, types, gpus, capacity)
            started = time.perf_counter()
            ours = allocate(UNALLOCATED_COST - costs, types, gpus, capacity)
            between = time.perf_counter()
            best = solve(costs, types, gpus, capacity)
            ilp_ms.append((time.perf_counter() - between) * 1e3)
            ours_ms.append((between - started) * 1e3)
            ratios.append(ours.value / best.gain)
        key = f"{num_jobs}x{num_gpus}"
        ilp, own = float(np.median(ilp_ms)), float(np.median(ours_ms))
        rows.append((num_jobs, num_gpus, min(ratios), float(np.mean(ratios)), own, ilp, ilp / own))
        metrics[key] = {
            "objective_vs_ilp": min(ratios),
            "ilp_ms": ilp,
            "allocate_ms": own,
            "overhead_vs_ilp": own / ilp,
        }
        metrics["objective_vs_ilp"] = min(metrics["objective_vs_ilp"], min(ratios))
        metrics |= {"ilp_ms": ilp, "overhead_vs_ilp": own / ilp}
    run.table(
        "prices against the integer program (Sia, HiGHS, gap 1e-4)",
        ("jobs", "GPUs", "gain, worst", "gain, mean", "prices ms", "ILP ms", "times faster"),
        rows,
    )
    return metrics


def program(num_jobs: int, num_gpus: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """An instance of Sia's program on three types like its cluster's: costs [J, K], types, GPUs [K], capacity [T]."""
    widths = (4, 8, 8)
    capacity = np.array(
        [round(num_gpus * share / w) * w for share, w in zip((0.375, 0.375, 0.25), widths, strict=True)]
    )
    rows = []
    for t, width in enumerate(widths):
        rows += [(t, 1 << e) for e in range(width.bit_length())]
        rows += [(t, width * n) for n in range(2, min(capacity[t] // width, 64 // width) + 1)]
    types, gpus = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    costs = np.empty((num_jobs, len(rows)))
    for i in range(num_jobs):
        speed = np.array([1.0, 1.7, 4.0]) * random.lognormal(0, 0.3, 3)
        goodput = speed[types] * gpus / (1 + random.uniform(0.005, 0.3) * (gpus - 1))
        feasible = gpus <= 2 ** random.integers(0, 7)
        present = -1 if random.random() < 0.3 else int(random.choice(np.flatnonzero(feasible)))
        factor = restart_factor(
            random.uniform(60, 20000), int(random.integers(0, 10)), random.choice([25, 30, 45, 120, 250])
        )
        costs[i] = sia_costs(goodput, feasible, present, factor)
    return costs, types, gpus, capacity
