"""`memory`: predicted against measured peaks of public Megatron-LM runs.

`--truth FILE.csv` names the measured rows (launch flags and `mem_max_allocated_bytes`); the predictor's constants are
frozen and nothing is fitted on the file. `crossval=true` instead fits the constants anew for each shape class on all
other classes, and shows what the whole file would give beside what is shipped.

Compared are allocated bytes with allocated bytes, on the last pipeline rank, which is the one that the runs log. The
headline is the dense GPT rows; mixtures, latent attention, BERT and T5 stand beside it, and rows that the predictor does
not claim to know are counted by reason.
"""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from collectives.errors import ConfigError
from jobs.data import data_path
from jobs.job import Run
from placement.calibrate import Evidence, cross_validate, fit, predict_case
from placement.catalogue import GIB, gpu_type
from placement.marp import marp, megatron_formula
from placement.megatron import Case, Unsupported, class_key, is_dense_gpt, read_case
from placement.memory import SHIPPED, Calibration, predict
from zenray.config import Section

FILES = ("truth",)
TRUTH = "mem_max_allocated_bytes"
PART_COLOURS = {"static": "#30638e", "activations": "#edae49", "logits": "#0b7a75", "workspace": "#d1495b"}


class Config(Section):
    """How the rows are judged."""

    crossval: bool = False
    """Fit the constants on all classes but the row's own, instead of using the shipped ones."""


@dataclass(frozen=True)
class Scores:
    """Rows side by side, in the order of the file. Bytes on the last pipeline rank."""

    cases: tuple[Case, ...]
    families: NDArray[np.str_]
    classes: NDArray[np.str_]
    dense: NDArray[np.bool_]
    measured: NDArray[np.float64]
    centre: NDArray[np.float64]
    upper: NDArray[np.float64]

    @property
    def accuracy(self) -> NDArray[np.float64]:
        return 1 - np.abs(self.centre - self.measured) / self.measured


def run(config: Config, run: Run) -> dict[str, Any]:
    """Score the rows; see the module's docstring."""
    path = run.options.get("truth") or data_path("memory/megatron_dev.csv")
    if not path.exists():
        raise ConfigError(f"no measured rows at {path}; give --truth FILE.csv or set ZENRAY_DATA")
    run.say(f"reading {path}")
    evidence, dense, families, unsupported = read_truth(path)
    metrics: dict[str, Any] = {"truth": str(path), "crossval": config.crossval, "unsupported": dict(unsupported)}
    metrics["unsupported_rows"] = sum(unsupported.values())
    if not evidence.cases:
        return metrics | {"rows": 0, "supported_rows": 0}
    constants: Sequence[Calibration] = [SHIPPED] * len(evidence.cases)
    if config.crossval:
        run.say(f"fitting {len(set(evidence.classes))} folds, each without one class")
        constants = cross_validate(evidence)
        metrics["fitted_on_all_rows"] = asdict(fit(evidence))
        metrics["shipped"] = asdict(SHIPPED)
    predicted = np.array([predict_case(case, c) for case, c in zip(evidence.cases, constants, strict=True)])
    scores = Scores(
        evidence.cases,
        np.array(families),
        np.array(evidence.classes),
        np.array(dense, bool),
        evidence.measured,
        predicted[:, 0],
        predicted[:, 1],
    )
    metrics |= _headline(scores, constants)
    metrics["by_class"] = {name: _summary(scores, scores.classes == name) for name in sorted(set(evidence.classes))}
    metrics["by_family"] = {name: _summary(scores, scores.families == name) for name in sorted(set(families))}
    metrics["baselines"] = _baselines(scores)
    metrics["predict_ms_p50"] = _predict_ms(scores.cases[0])
    run.baseline |= metrics["baselines"]
    _report(metrics, run)
    _plot_scatter(scores, run.out / "predicted_vs_measured.png")
    _plot_breakdown(scores, run.out / "breakdown.png")
    return metrics


def read_truth(path: Path) -> tuple[Evidence, list[bool], list[str], Counter[str]]:
    """Supported rows as evidence, whether each is dense GPT, its family, and the count of the others by reason."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if TRUTH not in (reader.fieldnames or ()):
            raise ConfigError(f"{path} has no column {TRUTH}; it needs one measured peak per row, in bytes")
        rows = list(reader)
    cases: list[Case] = []
    dense: list[bool] = []
    families: list[str] = []
    measured: list[float] = []
    unsupported: Counter[str] = Counter()
    for row in rows:
        case = _read(row)
        if isinstance(case, Unsupported):
            unsupported[case.reason] += 1
            continue
        cases.append(case)
        dense.append(is_dense_gpt(row))
        families.append(row.get("family") or "")
        measured.append(float(row[TRUTH]))
    classes = tuple(class_key(family, case) for family, case in zip(families, cases, strict=True))
    return Evidence(tuple(cases), np.array(measured), classes), dense, families, unsupported


def _read(row: Mapping[str, str | None]) -> Case | Unsupported:
    try:
        peak = float(row.get(TRUTH) or 0)
        case = read_case(row)
        if isinstance(case, Case):
            gpu_type(case.gpu)
    except (ConfigError, ValueError) as error:
        return Unsupported(f"unreadable: {error}")
    return case if peak > 0 else Unsupported("no measured peak")


def _headline(scores: Scores, constants: Sequence[Calibration]) -> dict[str, Any]:
    rows = scores.dense
    out: dict[str, Any] = {"rows": int(rows.sum()), "supported_rows": len(rows)}
    if not rows.any():
        return out
    accuracy = scores.accuracy[rows]
    class_means = [float(accuracy[scores.classes[rows] == name].mean()) for name in sorted(set(scores.classes[rows]))]
    return out | {
        "accuracy_mean": float(accuracy.mean()),
        "accuracy_median": float(np.median(accuracy)),
        "accuracy_mean_of_classes": float(np.mean(class_means)),
        "accuracy_worst": float(accuracy.min()),
        "under_predicted_at_headroom": float((scores.measured > scores.upper)[rows].mean()),
        "under_predicted_centre": float((scores.measured > scores.centre)[rows].mean()),
        "upper_over_true_mean": float((scores.upper / scores.measured)[rows].mean()),
        "headroom": float(np.mean([c.headroom for c, dense in zip(constants, rows, strict=True) if dense])),
        "mixture_headroom": float(np.mean([c.mixture_headroom for c in constants])),
    }


def _summary(scores: Scores, rows: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "rows": int(rows.sum()),
        "accuracy_mean": float(scores.accuracy[rows].mean()),
        "accuracy_median": float(np.median(scores.accuracy[rows])),
        "bias": float((scores.centre / scores.measured - 1)[rows].mean()),
        "under_predicted_at_headroom": float((scores.measured > scores.upper)[rows].mean()),
        "upper_over_true_mean": float((scores.upper / scores.measured)[rows].mean()),
    }


def _baselines(scores: Scores) -> dict[str, Any]:
    """The two published formulas on the same dense rows; MARP also on those that it was made for (p = c = 1)."""
    index = np.flatnonzero(scores.dense)
    cases = [scores.cases[i] for i in index]
    if not cases:
        return {}
    measured = scores.measured[index]
    simple = np.array([case.layout.pipeline[0] == 1 and case.layout.context[0] == 1 for case in cases])
    guesses = {
        "marp": np.array([marp(case.shape, case.layout)[0] for case in cases]),
        "megatron_formula": np.array([megatron_formula(case.shape, case.setup, case.layout)[0] for case in cases]),
    }
    out: dict[str, Any] = {}
    for name, guess in guesses.items():
        accuracy = 1 - np.abs(guess - measured) / measured
        out[name] = {
            "accuracy_mean": float(accuracy.mean()),
            "accuracy_median": float(np.median(accuracy)),
            "under_predicted": float((measured > guess).mean()),
            "rows": len(cases),
            "accuracy_mean_without_pipeline_or_context": float(accuracy[simple].mean()) if simple.any() else None,
        }
    return out


def _predict_ms(case: Case, repetitions: int = 100) -> float:
    """Median time of one call for one job class on one card, in milliseconds."""
    samples = []
    for _ in range(repetitions):
        started = time.perf_counter()
        predict(case.shape, case.setup, case.layout, gpu_type(case.gpu))
        samples.append(time.perf_counter() - started)
    return float(np.median(samples) * 1e3)


def _report(metrics: Mapping[str, Any], run: Run) -> None:
    for key in ("by_family", "by_class"):
        rows = [
            [name, entry["rows"], entry["accuracy_mean"], entry["bias"], entry["upper_over_true_mean"]]
            for name, entry in metrics[key].items()
        ]
        run.table(f"accuracy {key.replace('_', ' ')}", (key[3:], "rows", "accuracy", "bias", "upper/true"), rows)
    if not metrics["rows"]:
        return
    rivals = [[name, entry["rows"], entry["accuracy_mean"]] for name, entry in metrics["baselines"].items()]
    ours = ["zenray", metrics["rows"], metrics["accuracy_mean"]]
    run.table("dense GPT rows, against published formulas", ("predictor", "rows", "accuracy"), [ours, *rivals])


def _plot_scatter(scores: Scores, path: Path) -> None:
    """Predicted over measured, both on logarithmic axes, one colour a family."""
    figure, (plain, ratio) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    measured, centre = scores.measured / GIB, scores.centre / GIB
    limits = measured.min() * 0.8, measured.max() * 1.25
    for family in sorted(set(scores.families)):
        rows = scores.families == family
        plain.scatter(measured[rows], centre[rows], s=14, alpha=0.6, label=f"{family} ({rows.sum()})")
        ratio.scatter(measured[rows], (centre / measured)[rows], s=14, alpha=0.6)
    plain.plot(limits, limits, color="black", linewidth=0.8, zorder=0)
    plain.set(xscale="log", yscale="log", xlabel="measured peak, GiB", ylabel="predicted peak, GiB")
    plain.set(title="Allocated bytes on the last pipeline rank", xlim=limits, ylim=limits)
    plain.legend(frameon=False)
    ratio.axhspan(0.97, 1.03, color="0.9", zorder=0, label="within 3 %")
    ratio.set(xscale="log", xlabel="measured peak, GiB", ylabel="predicted / measured", title="The same, as a ratio")
    ratio.legend(frameon=False, loc="lower right")
    for axis in (plain, ratio):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_breakdown(scores: Scores, path: Path) -> None:
    """Where the bytes go on the largest run: first and last stage, beside the measured peak and the card."""
    index = int(np.argmax(np.where(scores.dense, scores.measured, 0) if scores.dense.any() else scores.measured))
    case = scores.cases[index]
    gpu = gpu_type(case.gpu)
    table = predict(case.shape, case.setup, case.layout, gpu)
    figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for row, stage in enumerate((table.first, table.last)):
        left = 0.0
        for part, colour in PART_COLOURS.items():
            size = float(getattr(stage, part)[0]) / GIB
            label = part if row == 0 else None
            axis.barh(row, size, left=left, color=colour, label=label)
            left += size
            if size > 0.03 * gpu.memory_bytes / GIB:
                axis.text(left - size / 2, row, f"{size:.1f}", ha="center", va="center", color="white")
    axis.set_yticks([0, 1], ["first stage", "last stage"])
    axis.axvline(scores.measured[index] / GIB, color="black", linestyle="--", label="measured, last stage")
    axis.axvline(float(table.nvml_upper[0]) / GIB, color="tab:red", linestyle=":", label="upper bound, whole card")
    axis.axvline(gpu.memory_bytes / GIB, color="0.4", label=f"{gpu.name} in all")
    s = case.shape
    axis.set(
        xlabel="GiB per GPU", title=f"{s.layers} layers, h {s.hidden}, s {s.seq}, {int(case.layout.world[0])} GPUs"
    )
    axis.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
