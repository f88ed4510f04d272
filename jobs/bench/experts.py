"""`experts`: placement rules on recorded expert counts, and on shifts from one domain to another.

`--counts FILE.npz` holds `counts[step, layer, expert]` and optionally `iters[step]`: each rule plans from counts `staleness`
rows old and is judged on the row itself. `--counts FILE.csv` with columns model, dataset, layer_slot, expert, count runs the
domain shifts: plan on one domain, judge on another (`shift`), or on a mix of 80 % and 20 % (`drift`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pyarrow.csv

from collectives.errors import ConfigError
from jobs.data import data_path
from jobs.job import Run
from placement.errors import PlacementError
from placement.experts import POLICIES, PlacementPolicy, num_moves
from placement.split import Int, Ranks, SlotMap
from zenray.config import Section

FILES = ("counts",)
EARLY_ITERATIONS = 100


class Config(Section):
    """What is placed where."""

    ranks: int = 16
    """Ranks of the expert-parallel group."""
    slots: int = 4
    """Expert instances per rank."""
    ranks_per_node: int = 8
    """Ranks on one machine; relabelling keeps experts on their machine first."""
    staleness: int = 1
    """Rows between the counts that a plan is made from and the counts that it serves."""
    policies: list[str] = sorted(POLICIES)
    """Rules to compare."""
    max_steps: int = 2000
    """Rows of the trace that are used, evenly spaced blocks from the start."""


def run(config: Config, run: Run) -> dict[str, Any]:
    """Compare the rules on the given counts; see the module's docstring for the keys."""
    unknown = sorted(set(config.policies) - set(POLICIES))
    if unknown:
        raise ConfigError(f"unknown policies {unknown}; known: {', '.join(sorted(POLICIES))}")
    path = run.options.get("counts") or data_path("moe/olmoe_mixtral_expert_counts.csv")
    if not path.exists():
        raise ConfigError(f"no expert counts at {path}; give --counts FILE.npz or FILE.csv")
    ranks = Ranks.equal(config.ranks, config.slots, config.ranks_per_node)
    metrics: dict[str, Any] = {"counts": str(path), "policies": {}}
    if path.suffix == ".csv":
        return metrics | _shifts(path, config, ranks, run)
    with np.load(path) as file:
        counts = file["counts"].astype(np.int64)[: config.max_steps]
        iterations = file["iters"][: config.max_steps] if "iters" in file else np.arange(len(counts))
    if counts.ndim != 3 or len(counts) <= config.staleness:
        raise ConfigError(f"{path}: counts must be [step, layer, expert] with more than {config.staleness} steps")
    curves = {}
    for name in config.policies:
        started = time.monotonic()
        try:
            rows = list(_replay(POLICIES[name], counts, config.staleness, ranks))
        except PlacementError as error:
            run.say(f"{name}: not possible here: {error}")
            metrics["policies"][name] = {"unavailable": str(error)}
            continue
        when = np.repeat(iterations[config.staleness :], counts.shape[1])
        imbalance, moves, seconds = (np.array(column) for column in zip(*rows, strict=True))
        late = when >= EARLY_ITERATIONS
        metrics["policies"][name] = {
            **_summary(imbalance[late] if late.any() else imbalance),
            "moves_per_step": float(moves.sum() / (len(counts) - config.staleness)),
            "plan_ms": float(np.median(seconds) * 1e3),
            "early": _summary(imbalance[~late]) if (~late).any() else None,
        }
        curves[name] = imbalance.reshape(-1, counts.shape[1]).mean(1)
        run.say(f"{name}: {len(rows)} plans in {time.monotonic() - started:.1f} s")
    _report(metrics["policies"], run)
    _plot(iterations[config.staleness :], curves, run.out / "imbalance.png")
    return metrics


def _replay(policy: PlacementPolicy, counts: Int, staleness: int, ranks: Ranks) -> Iterator[tuple[float, int, float]]:
    """Imbalance, moves and planning seconds of each (step, layer), the layers of one step together."""
    previous: list[SlotMap | None] = [None] * counts.shape[1]
    for step in range(staleness, len(counts)):
        for layer in range(counts.shape[1]):
            known = counts[max(0, step - staleness - 3) : step - staleness + 1, layer]
            started = time.perf_counter()
            slots = policy.hosts(known, ranks, previous[layer])
            split = policy.split(slots, counts[step, layer], ranks)
            seconds = time.perf_counter() - started
            before = previous[layer]
            moves = 0 if before is None else num_moves(slots, before, counts.shape[2])
            previous[layer] = slots
            yield imbalance_of(split.pairs), moves + split.weight_sends, seconds


def imbalance_of(pairs: Int) -> float:
    """Hottest rank over the mean; 1 for no pairs at all."""
    load = pairs.sum(1)
    return float(load.max() / load.mean()) if load.any() else 1.0


def _summary(imbalance: np.ndarray) -> dict[str, float]:
    return {
        "max_over_mean_mean": float(imbalance.mean()),
        "max_over_mean_median": float(np.median(imbalance)),
        "max_over_mean_p95": float(np.quantile(imbalance, 0.95)),
        "max_over_mean_worst": float(imbalance.max()),
    }


def _shifts(path: Path, config: Config, ranks: Ranks, run: Run) -> dict[str, Any]:
    """Plan on each domain, judge on itself, on a mix, and on every other domain of the same model and layer."""
    vectors = _domain_counts(path)
    metrics: dict[str, Any] = {"own": {}, "drift": {}, "shift": {}, "policies": {}, "domain_vectors": len(vectors)}
    for name in config.policies:
        own, drift, shift, seconds = [], [], [], []
        try:
            for (layer, domain), counts in vectors.items():
                started = time.perf_counter()
                slots = POLICIES[name].hosts(counts[None], ranks, None)
                seconds.append(time.perf_counter() - started)
                own.append(imbalance_of(POLICIES[name].split(slots, counts, ranks).pairs))
                for (other_layer, other), target in vectors.items():
                    if other_layer != layer or other == domain:
                        continue
                    scaled = target * (counts.sum() / target.sum())
                    mixed = np.rint(0.8 * counts + 0.2 * scaled).astype(np.int64)
                    drift.append(imbalance_of(POLICIES[name].split(slots, mixed, ranks).pairs))
                    shift.append(imbalance_of(POLICIES[name].split(slots, target, ranks).pairs))
        except PlacementError as error:
            run.say(f"{name}: not possible here: {error}")
            metrics["policies"][name] = {"unavailable": str(error)}
            continue
        for key, values in (("own", own), ("drift", drift), ("shift", shift)):
            metrics[key][name] = _summary(np.array(values))
        metrics["policies"][name] = _summary(np.array(own)) | {"plan_ms": float(np.median(seconds) * 1e3)}
    _report(metrics["policies"], run)
    return metrics


def _domain_counts(path: Path) -> dict[tuple[int, str], Int]:
    """(layer slot, domain) -> int64 [E], of the model in the file with most experts."""
    table = pyarrow.csv.read_csv(path)
    missing = {"model", "dataset", "layer_slot", "expert", "count"} - set(table.column_names)
    if missing:
        raise ConfigError(f"{path} has no column {sorted(missing)}")
    by_model: dict[str, dict[tuple[int, str], dict[int, int]]] = {}
    for row in table.to_pylist():
        vectors = by_model.setdefault(str(row["model"]), {})
        vectors.setdefault((int(row["layer_slot"]), str(row["dataset"])), {})[int(row["expert"])] = int(row["count"])

    def size(model: str) -> tuple[int, int]:
        """Most experts, then most domains."""
        return max(map(len, by_model[model].values())), len(by_model[model])

    largest = max(sorted(by_model), key=size)
    num_experts = size(largest)[0]
    return {
        key: np.array([counts.get(expert, 0) for expert in range(num_experts)], np.int64)
        for key, counts in sorted(by_model[largest].items())
    }


def _report(policies: dict[str, Any], run: Run) -> None:
    shown = {name: row for name, row in policies.items() if "unavailable" not in row}
    columns = ["max_over_mean_mean", "max_over_mean_median", "max_over_mean_p95", "moves_per_step", "plan_ms"]
    rows = [[name, *(row.get(column) for column in columns)] for name, row in shown.items()]
    run.table("Load of the hottest rank over the mean (1 = perfect)", ["policy", *columns], rows)


def _plot(steps: np.ndarray, curves: dict[str, np.ndarray], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, curve in curves.items():
        axes.plot(steps, curve, label=name, linewidth=1.2)
    axes.set(xlabel="iteration", ylabel="hottest rank / mean load", yscale="log", title="Expert imbalance by policy")
    axes.legend(ncols=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)
