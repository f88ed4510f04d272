"""`net`: collectives on real links of a chosen rate, against Gloo's own and against the line.

Every rank is a process in a network namespace of its own. All contenders run in turn in the same processes, round by
round, so that a busy machine slows all of them alike; a figure is the median over the rounds of the slowest rank. The
dense all-reduce of the same run checks the links: off theory by more than 5 % at up to 1 Gbit/s, the run is void.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Literal

import matplotlib
from pydantic import Field

from collectives.errors import CollectiveMismatch, ConfigError
from jobs.job import Run
from jobs.links import WIRE_EFFICIENCY, ShapedBed, self_check
from jobs.ranks import RankFailed, run_ranks
from jobs.workloads.zipf import WORKLOADS, workload
from zenray.config import Rate, Section

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FILES = ()
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "34359738368", "MALLOC_TOP_PAD_": "134217728"}
"""For every rank, so for baselines as well: fresh pages would cost eager baselines several times the copy itself."""
ITEMSIZE = 4
HOOKS = ("zenray", "fp16", "bf16", "powersgd", "quantise_per_tensor", "quantise_per_channel")
START_S = 120.0
"""Allowance for starting the ranks and compiling, before any round."""


class Config(Section):
    """What is measured."""

    link: Rate | Literal["none"] = 1e9
    """Rate of every rank's link in both directions; none: the loopback device, without namespaces."""
    ranks: int = Field(4, ge=2, le=16)
    """Processes, one thread each; with more than two per core the cores are the limit, not the link."""
    suite: Literal["all", "exchange", "sparse", "compress"] = "all"
    """exchange: dense buffers through all-reduce and all-to-all. sparse: all sparse schemes on `workload`. compress:
    dense gradients of `size_mib` through every codec, beside torch's own hooks. all: the first two."""
    workload: Literal[WORKLOADS] = "lstm20"  # type: ignore[valid-type]
    """The embedding gradient of `sparse`, a generator of jobs/workloads/zipf.py."""
    size_mib: int = Field(64, ge=1, le=1024)
    """Buffer of each rank in `exchange` and `compress`, in MiB; below 1 MiB per message the links' burst flatters."""
    repeats: int = Field(5, ge=5, le=100)
    """Timed rounds, after one for warming up."""
    engine: Literal["processes", "ray"] = "processes"
    """Who starts the ranks: plain processes that meet through a file, or a `WorkerGroup` over one Ray node per namespace
    (torch's hooks stay in processes, because some end theirs)."""


def run(config: Config, run: Run) -> dict[str, Any]:
    """Measure, check the links, and report ratios first; see the module."""
    suites = ["exchange", "sparse"] if config.suite == "all" else [config.suite]
    rate = None if config.link == "none" else config.link
    payload_bytes = {
        "exchange": (config.size_mib << 20) // (4 * config.ranks) * (4 * config.ranks),
        "compress": config.size_mib << 20,
    }
    if "sparse" in suites:
        work = workload(config.workload)
        payload_bytes["sparse"] = work.num_rows * work.width * ITEMSIZE
    spec = config.model_dump() | {"suites": suites, "bed": rate is not None}
    num_calls = 48 if "compress" in suites else 16
    slowest_s = num_calls * max(payload_bytes.values()) * 8 / (rate or 1e9)
    timeout_s = START_S + (1 + config.repeats) * len(suites) * slowest_s
    run.say(f"allocator of all ranks: {' '.join(f'{key}={value}' for key, value in ALLOCATOR.items())}")
    with ShapedBed(config.ranks, rate) if rate is not None else nullcontext() as bed:
        link = bed.record() if bed is not None else None
        run.say(f"links: {link or 'loopback, not shaped'}")
        ranks = measure(config, spec, bed, timeout_s, run)
        hooks = measure_hooks(config, spec, bed, timeout_s, run) if "compress" in suites else {}
    figures = {
        suite: {name: combine(name, [r[suite][name] for r in ranks]) for name in ranks[0][suite]} for suite in suites
    }
    reference = figures[suites[0]]["all_reduce" if suites[0] == "exchange" else "dense"]
    check = self_check(bed, config.ranks, payload_bytes[suites[0]], reference["median_s"])
    metrics: dict[str, Any] = {"self_check": asdict(check), "link": link, "allocator": ALLOCATOR, "ranks": config.ranks}
    if "exchange" in figures:
        metrics |= exchange_metrics(figures["exchange"], rate, config.ranks, payload_bytes["exchange"])
    if "sparse" in figures:
        metrics |= sparse_metrics(figures["sparse"])
        run.baseline = {name: figures["sparse"][name] for name in ("dense", "gloo_sparse")}
    if "compress" in figures:
        metrics |= compress_metrics(figures["compress"]) | {"hooks": hooks}
        run.baseline = {name: figures["compress"][name] for name in ("dense", "gloo_sparse")}
    _show(run, config, metrics)
    return metrics


def measure(
    config: Config, spec: dict[str, Any], bed: ShapedBed | None, timeout_s: float, run: Run
) -> list[dict[str, Any]]:
    """The figures of all ranks, started by the configured engine."""
    if config.engine == "processes":
        return run_ranks(
            config.ranks, "jobs.bench._net_ranks:measure", spec, bed=bed, timeout_s=timeout_s, env=ALLOCATOR
        )
    if bed is None:
        raise ConfigError("engine=ray needs a node per rank, so links of a rate: set link, or use engine=processes")
    from jobs.cluster import NamespaceCluster

    exchanged = run.out / "ranks.json"
    exchanged.write_text(json.dumps(spec | {"timeout_s": timeout_s}), encoding="utf-8")
    with NamespaceCluster(bed, config.ranks, env=ALLOCATOR) as cluster:
        code = cluster.drive([sys.executable, "-m", "jobs.bench._net_ray", str(exchanged)], timeout_s=timeout_s)
        for line in cluster.retried:
            run.say(f"event: {line}")
    if code:
        raise SystemExit(code)
    figures: list[dict[str, Any]] = json.loads(exchanged.read_text(encoding="utf-8"))
    exchanged.unlink()
    return figures


def measure_hooks(
    config: Config, spec: dict[str, Any], bed: ShapedBed | None, timeout_s: float, run: Run
) -> dict[str, dict[str, Any]]:
    """torch's communication hooks and ours under DDP, each in a launch of its own; a failure is a result."""
    found: dict[str, dict[str, Any]] = {}
    for hook in HOOKS:
        run.say(f"measuring DDP with hook {hook}")
        try:
            ranks = run_ranks(
                config.ranks,
                "jobs.bench._net_compress:measure_hook",
                spec | {"hook": hook},
                bed=bed,
                timeout_s=timeout_s,
                env=ALLOCATOR,
            )
        except RankFailed as failure:
            lines = [line for line in failure.detail.splitlines() if re.match(r"\w+(Error|Exception)\b", line)]
            found[hook] = {"failure": (lines or [failure.reason])[-1]}
            continue
        medians = {
            name: statistics.median(max(s) for s in zip(*(r[name] for r in ranks), strict=True)) for name in ranks[0]
        }
        found[hook] = {"median_s": medians[hook], "speedup_over_ddp": medians["none"] / medians[hook]}
    return found


def combine(name: str, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread over the rounds of the slowest rank in each; bytes of the busiest rank."""
    if by_rank[0]["replicated"] and len({entry["digest"] for entry in by_rank}) > 1:
        raise CollectiveMismatch(f"{name}: the ranks ended up with different bytes, so its times would mean nothing")
    rounds = [max(seconds) for seconds in zip(*(entry["seconds"] for entry in by_rank), strict=True)]
    median_s = statistics.median(rounds)
    wire = [entry["wire_bytes"] for entry in by_rank if entry["wire_bytes"] is not None]
    return {
        "median_s": median_s,
        "spread": (max(rounds) - min(rounds)) / median_s,
        "relative_error": by_rank[0]["relative_error"],
        "predicted_s": by_rank[0].get("predicted_s"),
        "predicted_bytes": by_rank[0].get("predicted_bytes"),
        "wire_bytes": max(wire, default=None),
        "counted_bytes": max(entry["counted_bytes"] for entry in by_rank),
    }


def exchange_metrics(
    figures: dict[str, dict[str, Any]], rate: float | None, num_ranks: int, payload_bytes: int
) -> dict[str, Any]:
    """Each contender beside the line: an all-to-all must move (n-1)/n of the buffer per port, an all-reduce twice that."""
    metrics = {}
    for name, entry in figures.items():
        moved = (num_ranks - 1) / num_ranks * payload_bytes * (2 if name == "all_reduce" else 1)
        share = None if rate is None else moved * 8 / (WIRE_EFFICIENCY * rate) / entry["median_s"]
        metrics[name] = {"line_rate_share": share, **entry}
    metrics["all_to_all"]["speedup_over_torch"] = (
        figures["torch_all_to_all"]["median_s"] / figures["all_to_all"]["median_s"]
    )
    return metrics


def sparse_metrics(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups of every scheme over both baselines, measured in the same rounds."""
    dense_s, gloo_sparse_s = figures["dense"]["median_s"], figures["gloo_sparse"]["median_s"]
    on_dense = figures["auto_on_dense"]
    schemes = {
        name: {
            "speedup_over_dense": dense_s / entry["median_s"],
            "speedup_over_gloo_sparse": gloo_sparse_s / entry["median_s"],
            **entry,
        }
        for name, entry in figures.items()
        if name != "auto_on_dense"
    }
    best = min(entry["median_s"] for entry in schemes.values() if entry["relative_error"] is None)
    auto = schemes["auto"]
    return {
        "schemes": schemes,
        "speedup_over_dense": auto["speedup_over_dense"],
        "speedup_over_gloo_sparse": auto["speedup_over_gloo_sparse"],
        "auto_over_best": auto["median_s"] / best,
        "auto_on_dense": on_dense | {"over_dense": on_dense["median_s"] / dense_s},
    }


def compress_metrics(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Speed-up of every codec over the plain fp32 all-reduce of the same rounds, and how good the model was."""
    dense_s = figures["dense"]["median_s"]
    schemes = {}
    for name, entry in figures.items():
        expected_s = entry["predicted_s"]
        schemes[name] = {
            "speedup_over_dense": dense_s / entry["median_s"],
            "predicted_over_observed": expected_s and expected_s / entry["median_s"],
            **entry,
        }
        if name.endswith("_gather"):
            schemes[name]["speedup_over_plain_gather"] = figures["plain_gather"]["median_s"] / entry["median_s"]
    return {"schemes": schemes}


def _show(run: Run, config: Config, metrics: dict[str, Any]) -> None:
    check = metrics["self_check"]
    if check["verdict"] == "void":
        run.say(
            f"VOID: the dense all-reduce took {check['measured_s']:.4f} s, theory says {check['expected_s']:.4f} s "
            f"(load {check['load_1min']}); repeat on a quieter machine or with a slower link"
        )
    else:
        run.say(f"self-check of the links: {check['verdict']}, load {check['load_1min']}")
    exchange = [name for name in ("all_reduce", "torch_all_to_all", "all_to_all") if name in metrics]
    if exchange:
        rows = [[name, metrics[name]["line_rate_share"], *_cells(metrics[name])] for name in exchange]
        run.table(f"{config.size_mib} MiB, {config.ranks} ranks", ["call", "of line rate", *CELLS], rows)
    if "hooks" in metrics:
        _show_codecs(run, config, metrics)
    elif "schemes" in metrics:
        schemes = metrics["schemes"]
        ratios = ("speedup_over_dense", "speedup_over_gloo_sparse")
        rows = [[name, *(entry[r] for r in ratios), *_cells(entry)] for name, entry in schemes.items()]
        run.table(f"{config.workload}, {config.ranks} ranks", ["scheme", "x dense", "x gloo", *CELLS], rows)
        run.say(
            f"auto takes {metrics['auto_over_best']:.3f} of the best exact scheme's time, and on a dense tensor "
            f"{metrics['auto_on_dense']['over_dense']:.3f} of the dense all-reduce's"
        )
        names = sorted(schemes, key=lambda name: schemes[name]["median_s"])
        figure, axis = plt.subplots(figsize=(8, 0.35 * len(names) + 1))
        axis.barh(names, [schemes[name]["median_s"] * 1000 for name in names])
        axis.set(xlabel="ms, median", title=f"{config.workload}, {config.ranks} ranks, self-check {check['verdict']}")
        figure.tight_layout()
        figure.savefig(run.out / "schemes.png", dpi=120)
        plt.close(figure)


def _show_codecs(run: Run, config: Config, metrics: dict[str, Any]) -> None:
    rows = [
        [name, e["speedup_over_dense"], e["relative_error"], e["predicted_over_observed"], *_cells(e)]
        for name, e in metrics["schemes"].items()
    ]
    columns = ["codec", "x dense", "error", "predicted / ms", *CELLS]
    run.table(f"mean of {config.size_mib} MiB fp32, {config.ranks} ranks", columns, rows)
    hooks = [
        [name, e.get("speedup_over_ddp"), e["median_s"] * 1e3 if "median_s" in e else None, e.get("failure", "")]
        for name, e in metrics["hooks"].items()
    ]
    run.table("backward of one layer under DDP", ["hook", "x plain DDP", "ms", "failure"], hooks)


CELLS = ("ms", "spread", "wire MB", "counted MB")


def _cells(entry: dict[str, Any]) -> list[float | None]:
    wire = entry["wire_bytes"]
    return [entry["median_s"] * 1e3, entry["spread"], wire and wire / 1e6, entry["counted_bytes"] / 1e6]
