"""`recover`: after a worker is killed, how long until training is where it was: zenray against Ray Train, same storage.

Both train the same loop on the same nodes with the same kill and write the same checkpoints to storage; zenray keeps
copies of every step in memory besides. Ray Train runs as shipped and with its health check made ten times as frequent.
For scale: GEMINI (Wang et al., SOSP'23) reports more than 13 times faster recovery, on GPU clusters with remote storage.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import Field
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from actors.keeper import Kept
from actors.recovery import RecoverableGroup
from actors.storage import Storage
from jobs.bench._recover_loops import TURN_NAMES, Task, Turn, protected, ray_train_loop, steady
from jobs.job import Run
from jobs.nodes import local_nodes
from jobs.record import record_figures, recorded
from jobs.train_config import TrackingConfig
from placement.recovery import Stage
from placement.traffic import MU
from zenray.config import Section

FILES = ()
PUBLISHED_RATIO = 13.0
HEALTH_CHECK = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
TUNED_S = "0.2"
SYSTEMS = ("zenray", "ray_train", "ray_train_tuned")
COLOURS = dict(zip(SYSTEMS, ("#0b7a75", "#b0b7bf", "#edae49"), strict=True))
FAILURE_EVERY_S = 60.0
"""For ETTR, the effective training time ratio: useful over total time at one failure in so many seconds."""


class Config(Section):
    """What is killed, and when."""

    ranks: Annotated[int, Field(ge=2, le=8)] = 2
    """Workers, one a node; zenray has one more node for its standby."""
    sizes_mib: list[Annotated[float, Field(gt=0)]] = Field([1.0, 16.0, 64.0], min_length=1)
    """Parameters and optimizer state of the model."""
    steps: Annotated[int, Field(ge=4)] = 30
    """Of each run."""
    every_steps: Annotated[int, Field(ge=1)] = 10
    """Steps between checkpoints on storage, for both."""
    compute_s: Annotated[float, Field(ge=0)] = 0.1
    """The gradients of a step take at least so long, as if a device computed them."""
    steady_compute_s: list[Annotated[float, Field(ge=0)]] = Field([0.1, 0.4], min_length=1)
    """The same where nothing fails, for the cost of copies: idle time may suffice for them or not."""
    kill_step: Annotated[int, Field(ge=2)] = 18
    """The step before which a worker is killed."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Kills for each system and size."""
    timeout_s: Annotated[float, Field(gt=0)] = 240.0
    """Limit of one run."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""


def run(config: Config, run: Run) -> dict[str, Any]:
    """Measure; ratios first."""
    rows: dict[str, dict[str, Any]] = {}
    with local_nodes(config.ranks + 1), recorded(config, config.tracking, run) as record:
        for size_mib in config.sizes_mib:
            rows[f"{size_mib:g}"] = row = measure_size(config, size_mib, run)
            run.say(f"{size_mib:g} MiB: " + ", ".join(f"{name} {row[name]['passed_s']:.2f} s" for name in SYSTEMS))
        metrics = figures(rows)
        plot(rows, run.out / "recover.png")
        record_figures(record, metrics, [run.out / "recover.png"])
    run.baseline.update({size: {name: row[name] for name in SYSTEMS[1:]} for size, row in rows.items()})
    show(rows, metrics, run)
    return metrics


def figures(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The metrics of result.json: ratios first."""
    ratios = {
        size: {name: row[name]["passed_s"] / row["zenray"]["passed_s"] for name in SYSTEMS[1:]}
        for size, row in rows.items()
    }
    steady = [s for row in rows.values() for s in row["steady"].values()]
    return {
        "speedup_over_ray_train": median(ratio["ray_train"] for ratio in ratios.values()),
        "speedup_over_ray_train_tuned": median(ratio["ray_train_tuned"] for ratio in ratios.values()),
        "speedup_by_size_mib": ratios,
        "published_ratio": PUBLISHED_RATIO,
        "overhead_where_idle_suffices": max((s["overhead"] for s in steady if s["idle_suffices"]), default=None),
        "overhead_per_step": {
            size: {compute_s: s["overhead"] for compute_s, s in row["steady"].items()} for size, row in rows.items()
        },
        "sizes_mib": rows,
    }


def measure_size(config: Config, size_mib: float, run: Run) -> dict[str, Any]:
    """All systems at one state size, one after the other on the same nodes."""
    row: dict[str, Any] = {}
    folder = run.out.resolve() / f"{size_mib:g}mib"
    task = partial(Task, state_bytes=int(size_mib * 2**20), steps=config.steps, every_steps=config.every_steps)
    for name in SYSTEMS:
        results = []
        for repeat in range(config.repeats):
            own = folder / f"{name}-{repeat}"
            own.mkdir(parents=True, exist_ok=True)
            job = task(folder=str(own), compute_s=config.compute_s, kill_step=config.kill_step)
            results.append(run_zenray(config, job) if name == "zenray" else run_ray_train(config, job, name))
        row[name] = {key: median(result[key] for result in results) for key in results[0]}
        row[name]["runs"] = len(results)
        row[name]["spread_s"] = [min(r["passed_s"] for r in results), max(r["passed_s"] for r in results)]
        row[name]["ettr"] = FAILURE_EVERY_S / (FAILURE_EVERY_S + row[name]["passed_s"])
    row["steady"] = {
        f"{compute_s:g}": run_steady(config, task(folder=str(folder), compute_s=compute_s, kill_step=None))
        for compute_s in config.steady_compute_s
    }
    return row


def run_steady(config: Config, task: Task) -> dict[str, Any]:
    """Steps with and without copies, in turns in the same processes, beside what the copies need of them."""
    journal = Path(task.folder) / "steady.jsonl"
    with RecoverableGroup(config.ranks, journal=journal, strategy="STRICT_SPREAD", start_timeout_s=120.0) as group:
        by_rank = group.run(partial(steady, task), timeout_s=config.timeout_s)
        kept = [row for row in group.kept if row.needed_s is not None]
    return steady_figures(by_rank, kept, num_cores=len(os.sched_getaffinity(0)))


def steady_figures(
    by_rank: Sequence[Mapping[str, Sequence[Turn]]], kept: Sequence[Kept], num_cores: int
) -> dict[str, Any]:
    """Medians of all turns and steps. The hosts of this bench share `num_cores`.

    idle_suffices: both hold. The plan of the traffic, made from the idle spans of the network, from when copies can leave
    and from the speed of the link, hides all bytes in them. And of the processor time that training leaves while it does
    not use the network, the same share MU is enough for all that the copies take: snapshot, digest, sending, receiving.
    """
    turns = {name: list(zip(*(rank[name] for rank in by_rank), strict=True)) for name in TURN_NAMES}
    with_copies, without = (median(max(t.step_s for t in ranks) for ranks in turns[name]) for name in TURN_NAMES)
    protected_cpu_s, training_cpu_s = (
        median(sum(t.all_cpu_s for t in ranks) for ranks in turns[name]) for name in TURN_NAMES
    )
    copies_cpu_s = protected_cpu_s - training_cpu_s
    idle_cpu_s = median(
        num_cores * min(t.step_s - t.network_s for t in ranks) - sum(t.compute_cpu_s for t in ranks)
        for ranks in turns["unprotected"]
    )
    exposed_s = median(row.predicted_s for row in kept if row.predicted_s is not None)
    return {
        "step_s": with_copies,
        "unprotected_step_s": without,
        "overhead": with_copies / without - 1,
        "overhead_by_turn": sorted(
            max(t.step_s for t in ranks) / max(t.step_s for t in others) - 1
            for ranks, others in zip(turns["protected"], turns["unprotected"], strict=True)
        ),
        "idle_suffices": exposed_s == 0.0 and copies_cpu_s <= MU * idle_cpu_s,
        "idle_network_s": median(min(t.step_s - t.network_s for t in ranks) for ranks in turns["unprotected"]),
        "needed_network_s": median(row.needed_s for row in kept if row.needed_s is not None),
        "idle_cpu_s": idle_cpu_s,
        "needed_cpu_s": copies_cpu_s,
        "gate_s": median(row.gate_s for row in kept),
        "predicted_gate_s": exposed_s,
        "frame_bytes": float(median(row.frame_bytes for row in kept)),
    }


def run_zenray(config: Config, task: Task) -> dict[str, float]:
    """One run under a recoverable group, with a kill."""
    folder = Path(task.folder)
    began = time.time()
    with RecoverableGroup(
        config.ranks, journal=folder / "journal.jsonl", strategy="STRICT_SPREAD", start_timeout_s=120.0
    ) as group:
        storage = Storage(folder / "checkpoints", config.every_steps)
        group.run(partial(protected, task), timeout_s=config.timeout_s, storage=storage)
        recovery = group.recoveries[0]
        extra = {f"{stage}_s": seconds for stage, seconds in recovery.seconds.items() if stage != Stage.TRAINING}
    return judge(folder, task, began) | extra


def run_ray_train(config: Config, task: Task, name: str) -> dict[str, float]:
    """One run under Ray Train, with the same kill."""
    before = os.environ.get(HEALTH_CHECK)
    if name == "ray_train_tuned":
        os.environ[HEALTH_CHECK] = TUNED_S
    began = time.time()
    try:
        TorchTrainer(
            ray_train_loop,
            train_loop_config=asdict(task),
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=config.ranks, placement_strategy="STRICT_SPREAD"),
            run_config=RunConfig(
                name="run", storage_path=f"{task.folder}/storage", failure_config=FailureConfig(max_failures=2)
            ),
        ).fit()
    finally:
        os.environ.pop(HEALTH_CHECK, None)
        if before is not None:
            os.environ[HEALTH_CHECK] = before
    return judge(Path(task.folder), task, began)


def judge(folder: Path, task: Task, began: float) -> dict[str, float]:
    """What the notes of one run say. passed_s: from the kill until every rank has applied the step it interrupted."""
    struck = lines(folder / "kill.jsonl")[0]["time_s"]
    applied = [lines(path) for path in sorted(folder.glob("applied-*.jsonl"))]
    after = [[line for line in rank if line["time_s"] > struck] for rank in applied]
    passed = max(min(line["time_s"] for line in rank if line["step"] == task.kill_step) for rank in after)
    before = [{line["step"] for line in rank if line["time_s"] <= struck} for rank in applied]
    redone = max(len(old & {line["step"] for line in new}) for old, new in zip(before, after, strict=True))
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl")
    return {
        "passed_s": passed - struck,
        "redone_steps": float(redone),
        "step_s": step_s(folder, task.kill_step or task.steps),
        "cold_start_s": min(rank[0]["time_s"] for rank in applied) - began,
        "stored_bytes": float(written),
    }


def step_s(folder: Path, until: int) -> float:
    """Median time from one applied step to the next on rank 0, before the kill, the first three left out."""
    times = [line["time_s"] for line in lines(folder / "applied-0.jsonl") if line["step"] < until][2:]
    seconds: list[float] = [after - before for before, after in itertools.pairwise(times)]
    return median(seconds)


def lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines, without one that a kill cut off."""
    found = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Left: recovery time against state size. Right: how many times as fast zenray is, beside the published ratio."""
    figure = Figure(figsize=(11.0, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    sizes = [float(size) for size in rows]
    for name in SYSTEMS:
        seconds = [row[name]["passed_s"] for row in rows.values()]
        ratios = [row[name]["passed_s"] / row["zenray"]["passed_s"] for row in rows.values()]
        for axis, values, unit in ((left, seconds, " s"), (right, ratios, "x")):
            if axis is left or name != "zenray":
                axis.plot(sizes, values, "o-", color=COLOURS[name], label=name.replace("_", " "), linewidth=1.8)
                axis.annotate(f"{values[-1]:.2g}{unit}", (sizes[-1], values[-1]), (6, -3), textcoords="offset points")
    right.axhline(PUBLISHED_RATIO, color="#d1495b", linestyle="--", label="GEMINI, against remote storage")
    left.set(title="From the kill of a worker until its step is passed", ylabel="seconds", yscale="log")
    right.set(title="How many times as fast zenray is", ylim=(0, None))
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, alpha=0.25)
        axis.set_xlabel("state, MiB")
        axis.legend(frameon=False)
    figure.savefig(path)


def show(rows: dict[str, dict[str, Any]], metrics: dict[str, Any], run: Run) -> None:
    """The closing table."""
    table = [
        (
            f"{size} MiB",
            name,
            row[name]["passed_s"],
            int(row[name]["redone_steps"]),
            row[name]["step_s"] * 1e3,
            row[name]["cold_start_s"],
        )
        for size, row in rows.items()
        for name in SYSTEMS
    ]
    run.table("After a kill", ("state", "system", "passed after s", "steps redone", "ms a step", "cold start s"), table)
    columns = (
        *("state", "device ms", "ms a step", "without copies", "overhead", "idle suffices"),
        *("network idle ms", "needed", "CPU idle ms", "needed", "gate ms", "planned"),
    )
    steps = [
        (
            f"{size} MiB",
            1e3 * float(compute_s),
            *(1e3 * steady[key] for key in ("step_s", "unprotected_step_s")),
            f"{steady['overhead']:.1%}",
            "yes" if steady["idle_suffices"] else "no",
            *(1e3 * steady[key] for key in ("idle_network_s", "needed_network_s", "idle_cpu_s", "needed_cpu_s")),
            *(1e3 * steady[key] for key in ("gate_s", "predicted_gate_s")),
        )
        for size, row in rows.items()
        for compute_s, steady in row["steady"].items()
    ]
    run.table("A step with copies in memory, and without", columns, steps)
    most = metrics["overhead_where_idle_suffices"]
    run.say(
        f"where the idle network and the idle processors suffice for copies, they lengthen a step by at most {most:.1%}"
        if most is not None
        else "in no cell do the idle network and the idle processors suffice for copies"
    )
    run.say(
        f"zenray is {metrics['speedup_over_ray_train']:.1f} times as fast as Ray Train, "
        f"{metrics['speedup_over_ray_train_tuned']:.1f} times as fast as Ray Train with a tuned health check "
        f"(GEMINI reports {PUBLISHED_RATIO:g} against remote storage)"
    )
