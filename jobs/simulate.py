"""`python -m jobs.simulate --trace TRACE --cluster NAME policies=ours,sia,frenzy,fifo`: schedulers on a job trace.

TRACE is `sia:FILE` (name, time, application, num_replicas, batch_size), `philly:FILE` (timestamp, duration, num_gpus),
or a generated one: `newtrace:SEED`, `philly:SEED`, `helios:SEED`. NAME is a cluster of the Sia evaluation, such as
sia64. What jobs do on the GPUs comes from Sia's measured profiles under $ZENRAY_DATA/traces/sia/profiles, or, with
profiles=synthetic, from made-up ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from collectives.errors import ConfigError
from jobs.data import data_path
from jobs.job import Run, run_job
from placement.elastic import Elastic
from placement.policies import Fifo, Frenzy, Gavel, Policy, Sia
from placement.profiles import AppProfile, load_profiles, synthetic_profiles
from placement.simulator import Outcome, simulate
from placement.traces import (
    HELIOS,
    NEW_TRACE,
    PHILLY,
    TraceJob,
    as_applications,
    generate,
    named_cluster,
    read_philly,
    read_sia,
)
from zenray.config import Section

POLICIES: dict[str, Callable[[], Policy]] = {
    "ours": Elastic,
    "ours-alone": lambda: Elastic(shares_profiles=False),
    "sia": Sia,
    "sia-shared": lambda: Sia(shares_profiles=True),
    "frenzy": Frenzy,
    "gavel": Gavel,
    "fifo": Fifo,
}
"""`-alone`: each job learns from its own runs only; `-shared`: from those of its class."""
GENERATED = {"newtrace": NEW_TRACE, "philly": PHILLY, "helios": HELIOS}
COLOURS = ("#30638e", "#d1495b", "#edae49", "#0b7a75", "#8d6a9f", "#6c757d", "#003d5b")
SAY_EVERY_S = 5.0


class Config(Section):
    """Which policies run, and how."""

    policies: list[str] = Field(default=["ours", "ours-alone", "sia", "sia-shared", "frenzy", "fifo"])
    """One simulation each, on the same trace."""
    mode: Literal["rounds", "events"] = "rounds"
    """rounds: decisions once a round, as Sia's simulator; events: also at each arrival and finish."""
    round_s: float = 60.0
    profiles: Literal["sia", "synthetic"] = "sia"
    max_jobs: int = 0
    """Only the first jobs of the trace; 0: all."""
    seed: int = 0
    """For what a trace leaves open: the applications of philly:FILE."""


def body(config: Config, run: Run) -> dict[str, Any]:
    """Simulate every policy; metrics by policy name."""
    unknown = [name for name in config.policies if name not in POLICIES]
    if unknown or not config.policies:
        raise ConfigError(f"unknown policies {', '.join(unknown) or '(none)'}; choose from {', '.join(POLICIES)}")
    trace = read_trace(str(run.options.get("trace", "newtrace:0")), config.seed)
    trace = trace[: config.max_jobs] if config.max_jobs else trace
    cluster = named_cluster(str(run.options.get("cluster", "sia64")))
    profiles = _profiles(config)
    run.say(f"{len(trace)} jobs over {trace[-1].submit_s / 3600:.1f} h on {sum(n.num_gpus for n in cluster)} GPUs")
    outcomes: dict[str, Outcome] = {}
    for name in config.policies:
        report = _progress(run, name)
        outcomes[name] = simulate(
            trace, cluster, profiles, POLICIES[name](), mode=config.mode, round_s=config.round_s, progress=report
        )
    metrics = {name: outcome.metrics() for name, outcome in outcomes.items()}
    columns = ("jct_mean_h", "jct_p99_h", "makespan_h", "queue_mean_h", "restarts_per_job", "utilisation", "oom")
    run.table("policies", ("policy", *columns), [(n, *(m[c] for c in columns)) for n, m in metrics.items()])
    plot(outcomes, run.out)
    if "sia" in metrics:
        run.baseline = {"policy": "sia", **metrics["sia"]}
    return {"policies": metrics, "num_jobs": len(trace)}


def read_trace(source: str, seed: int) -> list[TraceJob]:
    """The jobs of `kind:FILE` or `kind:SEED`. Raises ConfigError for anything else."""
    kind, separator, rest = source.partition(":")
    if separator and rest.isdigit() and kind in GENERATED:
        return generate(GENERATED[kind], int(rest))
    if separator and rest and kind == "sia":
        return read_sia(Path(rest))
    if separator and rest and kind == "philly":
        return as_applications(read_philly(Path(rest)), seed)
    raise ConfigError(
        f"--trace {source} is neither sia:FILE or philly:FILE nor {', '.join(f'{k}:SEED' for k in GENERATED)}"
    )


def _profiles(config: Config) -> Mapping[str, AppProfile]:
    return synthetic_profiles() if config.profiles == "synthetic" else load_profiles(data_path("traces/sia/profiles"))


def _progress(run: Run, name: str) -> Callable[[float, int, int], None]:
    """A callback that says every few seconds how far one simulation is."""
    last = time.monotonic()

    def report(hours: float, finished: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SAY_EVERY_S or finished == total:
            last = time.monotonic()
            run.say(f"{name}: hour {hours:.1f}, {finished} of {total} jobs finished")

    return report


def plot(outcomes: Mapping[str, Outcome], out: Path) -> None:
    """`jct.png`: distribution of completion times; `utilisation.png`: GPUs in use over time."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (name, outcome), colour in zip(outcomes.items(), COLOURS, strict=False):
        hours = np.sort([job.jct_s for job in outcome.jobs]) / 3600
        axes.step(hours, np.arange(1, len(hours) + 1) / len(hours), where="post", label=name, color=colour)
    axes.set(xscale="log", xlabel="job completion time (h)", ylabel="share of jobs", title="Completion times")
    _finish(figure, axes, out / "jct.png")
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (name, outcome), colour in zip(outcomes.items(), COLOURS, strict=False):
        hours, used = np.array([t for t, _ in outcome.used_gpus]) / 3600, np.array([u for _, u in outcome.used_gpus])
        axes.step(hours, used / outcome.num_gpus, where="post", label=name, color=colour, linewidth=0.8)
    axes.set(xlabel="time (h)", ylabel="GPUs in use / all GPUs", ylim=(0, 1.02), title="Utilisation")
    _finish(figure, axes, out / "utilisation.png")


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    """Run as a job."""
    return run_job("simulate", Config, body, files=("trace", "cluster"))


if __name__ == "__main__":
    sys.exit(main())
