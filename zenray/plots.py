"""The pictures of a training run, as PNG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zenray.comparison import TrainingLog
from zenray.sweeps import Outcome, TrialLog

COLOURS = ("#0b7a75", "#b0b7bf", "#d1495b", "#edae49")
DPI = 130
MAX_BARS = 8


def _panels() -> tuple[Figure, list[Axes]]:
    """A figure with two panels; no pyplot, so nothing global and no display."""
    figure = Figure(figsize=(10.0, 3.8), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, 2, index + 1) for index in range(2)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, alpha=0.25)
    return figure, axes


def _short(value: float) -> str:
    """Three digits, never in powers of ten where a reader would not."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot_losses(log: TrainingLog, path: Path) -> None:
    """Loss against training time and against steps: the gain, and the proof that it costs no accuracy."""
    figure, (by_time, by_step) = _panels()
    for index, variant in reversed(list(enumerate(log.variants))):
        losses = log.losses(variant)
        thick = 1.6 if index == 0 else 3.2
        by_time.plot(log.elapsed_s(variant), losses, color=COLOURS[index % len(COLOURS)], linewidth=1.8, label=variant)
        by_step.plot(
            range(1, len(losses) + 1), losses, color=COLOURS[index % len(COLOURS)], linewidth=thick, label=variant
        )
    by_time.set(title="Loss against training time", xlabel="seconds", ylabel="training loss")
    by_step.set(title="Loss against steps", xlabel="step")
    by_time.legend(frameon=False)
    by_step.legend(frameon=False)
    figure.savefig(path)


def plot_bytes(log: TrainingLog, path: Path) -> None:
    """What the busiest rank sends per step: in all, and by phase for the first variant."""
    figure, (total, phases) = _panels()
    sums = [sum(log.bytes_by_phase(variant).values()) / 1e6 for variant in log.variants]
    total.invert_yaxis()
    bars = total.barh(log.variants, sums, color=COLOURS[: len(sums)])
    total.bar_label(bars, [f" {_short(value)} MB" for value in sums])
    total.set(title="Payload sent per step", xlabel="MB, busiest rank", xlim=(0, 1.25 * max(sums, default=1.0) or 1.0))
    by_phase = sorted(log.bytes_by_phase(log.variants[0]).items(), key=lambda item: item[1])
    by_phase = [(name, count) for name, count in by_phase if count]
    bars = phases.barh([name for name, _ in by_phase], [count / 1e3 for _, count in by_phase], color=COLOURS[0])
    phases.bar_label(bars, [f" {_short(count / 1e3)} kB" for _, count in by_phase])
    largest = max((count / 1e3 for _, count in by_phase), default=1.0) or 1.0
    phases.set(title=f"{log.variants[0]}, by phase", xlabel="kB, busiest rank", xlim=(0, 1.3 * largest))
    for axis in (total, phases):
        axis.grid(False, axis="y")
    figure.savefig(path)


def plot_time(s_per_step: Mapping[str, float], reductions: Sequence[tuple[str, str, float, float]], path: Path) -> None:
    """Where a step's time goes. s_per_step by variant; reductions: (tensor, scheme, observed ms, predicted ms) of one."""
    figure, (steps, parts) = _panels()
    names = list(s_per_step)
    values = [1e3 * s if math.isfinite(s) else 0.0 for s in s_per_step.values()]
    bars = steps.barh(names, values, color=[COLOURS[index % len(COLOURS)] for index in range(len(names))])
    steps.bar_label(bars, [f" {_short(value)} ms" for value in values])
    steps.invert_yaxis()
    steps.set(title="Time of a step", xlabel="ms", xlim=(0, 1.25 * max(values, default=1.0) or 1.0))
    slowest = sorted(reductions, key=lambda row: -row[2])[:MAX_BARS]
    rows = range(len(slowest))
    parts.barh([r - 0.2 for r in rows], [row[2] for row in slowest], 0.4, color=COLOURS[0], label="observed")
    parts.barh([r + 0.2 for r in rows], [row[3] for row in slowest], 0.4, color=COLOURS[1], label="predicted")
    parts.set_yticks(rows, [f"{tensor[-28:]}\n{scheme}" for tensor, scheme, *_ in slowest], fontsize=8)
    parts.invert_yaxis()
    parts.set(title="Slowest reductions of gradients", xlabel="ms a step")
    if slowest:
        parts.legend(loc="lower right", framealpha=0.9, edgecolor="none")
        parts.set_ylim(max(len(slowest), 3) - 0.5, -0.5)
    for axis in (steps, parts):
        axis.grid(False, axis="y")
    figure.savefig(path)


def plot_pareto(trials: Sequence[TrialLog], front: Sequence[int], path: Path) -> None:
    """Time against bytes, and time against loss. Filled: trained to the end; ringed and numbered: nothing beats them."""
    figure, axes = _panels()
    seen = [trial for trial in trials if trial.last]
    for axis, (key, label, unit) in zip(
        axes,
        (("wire_bytes_per_step", "kB sent per step, busiest rank", 1e-3), ("loss", "training loss", 1.0)),
        strict=True,
    ):
        for trial in seen:
            done = trial.outcome is Outcome.DONE
            chosen = trial.number in front
            x, y = trial.last["time_to_loss_s"], unit * trial.last[key]
            colour = COLOURS[0] if chosen else COLOURS[1]
            axis.plot(x, y, "o", markersize=9 if chosen else 7, color=colour, fillstyle="full" if done else "none")
            if chosen:
                axis.annotate(str(trial.number), (x, y), (6, 5), textcoords="offset points", fontsize=9)
        axis.set(xlabel="seconds to the target loss, or for all steps", ylabel=label)
        axis.margins(0.12)
    axes[0].set(title="Bytes against time")
    axes[1].set(title="Loss against time")
    names = [f"{trial.number}  {trial.name}" for trial in seen if trial.number in front]
    figure.suptitle(
        "\n".join(["No trial beats these in every objective (hollow: stopped early):", *names]),
        fontsize=9,
        ha="left",
        x=0.02,
    )
    figure.set_size_inches(10.0, 4.2 + 0.17 * len(names))
    figure.savefig(path)
