"""What a comparison of expert policies came to: modelled and measured time to loss, and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from placement.quotas import PairTimes

TARGETS = {"": 0.60, "_50": 0.50, "_75": 0.75}
"""Suffix of a key: share of the full run's steps whose loss is the target."""
DPI = 130
SMOOTHED_STEPS = 10


class Curve:
    """One policy with one seed: its steps, its evaluations, its seconds."""

    def __init__(self) -> None:
        self.steps: dict[str, list[Any]] = {}
        self.moe_s: dict[int, float] = {}
        """Measured, by step: of the slowest rank."""
        self.sent_bytes: dict[int, float] = {}
        """Of the busiest rank."""
        self.evaluations: dict[int, float] = {}

    def take(self, rank: int, report: Mapping[str, Any]) -> None:
        """One block of one rank."""
        first = int(report["first_step"])
        for offset, (seconds, sent) in enumerate(
            zip(report["steps"]["moe_s"], report["steps"]["sent_bytes"], strict=True)
        ):
            step = first + offset
            self.moe_s[step] = max(self.moe_s.get(step, 0.0), seconds)
            self.sent_bytes[step] = max(self.sent_bytes.get(step, 0.0), float(sum(sent.values())))
        if rank == 0:
            for key, values in report["steps"].items():
                self.steps.setdefault(key, []).extend(values)
            self.evaluations |= {int(step): loss for step, loss in report["evaluations"].items()}

    def modelled_s(self, times: PairTimes, link_bits_per_s: float) -> np.ndarray:
        """By step: sum over layers of tau_f max x + tau_b max K + selection, and the bytes over the link."""
        seconds = []
        for step, (pairs, kept) in enumerate(zip(self.steps["pairs"], self.steps["kept"], strict=True)):
            hottest = sum(max(layer) for layer in pairs)
            total = times.forward_s * hottest + times.backward_s * sum(max(layer) for layer in kept)
            if self.steps["rho"][step] < 1:
                total += times.selection_s * hottest
            seconds.append(total + 8 * self.sent_bytes[step] / link_bits_per_s)
        return np.array(seconds)

    def measured_s(self) -> np.ndarray:
        """By step: the slowest rank's seconds inside the expert layers."""
        return np.array([self.moe_s[step] for step in sorted(self.moe_s)])

    def loss_after(self, step: float) -> float:
        """Held-out loss after `step` steps, between evaluations by interpolation."""
        at = sorted(self.evaluations)
        return float(np.interp(step, at, [self.evaluations[x] for x in at]))

    def steps_to(self, target: float) -> float | None:
        """Steps until the held-out loss first is at most `target`, by interpolation; None if never."""
        before: tuple[float, float] | None = None
        for step in sorted(self.evaluations):
            loss = self.evaluations[step]
            if loss <= target:
                if before is None or before[1] <= loss:
                    return float(step)
                return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
            before = (float(step), loss)
        return None

    @property
    def final_loss(self) -> float:
        """At the last evaluation."""
        return self.evaluations[max(self.evaluations)]


def spent_until(seconds: np.ndarray, steps: float) -> float:
    """Seconds of the first `steps` steps, the last one in part."""
    return float(np.interp(steps, np.arange(len(seconds) + 1), np.concatenate([[0.0], np.cumsum(seconds)])))


Curves = Mapping[tuple[str, int], Curve]


def figures(
    curves: Curves, policy: str, seeds: Sequence[int], reference: str, times: PairTimes, link: float
) -> dict[str, Any]:
    """The figures of one policy: medians over the seeds; a target that one seed misses is not reached."""
    own = [curves[policy, seed] for seed in seeds]
    found: dict[str, Any] = {
        "final_eval_loss": median(curve.final_loss for curve in own),
        "peak_expert_bytes": max(max(curve.steps["peak_bytes"]) for curve in own),
        "imbalance_mean": float(np.mean([imbalance(curve.steps["pairs"]).mean() for curve in own])),
        "retained_share_mean": float(np.mean([retained(curve).mean() for curve in own])),
        "final_rho": median(curve.steps["rho"][-1] for curve in own),
        "moves_per_step": float(np.mean([np.mean(curve.steps["moves"]) for curve in own])),
        "replicas_together": max(max(curve.steps["together"]) for curve in own),
        "dropped_share": float(
            np.mean([np.sum(curve.steps["dropped"]) / np.sum(curve.steps["counts"]) for curve in own])
        ),
    }
    for suffix, share in TARGETS.items():
        rows = []
        for seed, curve in zip(seeds, own, strict=True):
            full = curves[reference, seed]
            target = full.loss_after(share * len(full.steps["loss"]))
            steps = curve.steps_to(target)
            if steps is not None:
                rows.append(
                    (spent_until(curve.modelled_s(times, link), steps), spent_until(curve.measured_s(), steps), steps)
                )
        reached = len(rows) == len(own)
        found[f"reached{suffix}"] = reached
        columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
        for key, values in zip(("moe_time_to_loss_s", "moe_wall_to_loss_s", "steps_to_loss"), columns, strict=True):
            found[f"{key}{suffix}"] = median(values) if reached else None
            found[f"{key}{suffix}_range"] = [min(values), max(values)] if reached else None
    return found


def imbalance(pairs: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Hottest rank over the mean, by step, mean over layers. pairs: [steps][layers][N]."""
    load = np.asarray(pairs, float)
    return np.asarray((load.max(2) / np.maximum(load.mean(2), 1e-9)).mean(1))


def retained(curve: Curve) -> np.ndarray:
    """Share of the routed pairs whose gradient is computed, by step."""
    kept, counts = np.asarray(curve.steps["kept"], float), np.asarray(curve.steps["counts"], float)
    return np.asarray(kept.sum((1, 2)) / np.maximum(counts.sum((1, 2)), 1))


# --- pictures ---------------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = _figure(5.5 * count, 4.0)
    axes = [figure.add_subplot(1, count, index + 1) for index in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, alpha=0.25)
    return figure, axes


def plot_time_to_loss(
    curves: Curves, policies: Sequence[str], reference: str, seed: int, times: PairTimes, link: float, path: Path
) -> None:
    """Held-out loss against the time in the expert layers, modelled and measured, of one seed; a dot where the loss of the
    reference at 60 % of its steps is reached."""
    figure, axes = _panels(2)
    full = curves[reference, seed]
    target = full.loss_after(TARGETS[""] * len(full.steps["loss"]))
    for index, policy in enumerate(policies):
        curve, color = curves[policy, seed], f"C{index}"
        at, reached = sorted(curve.evaluations), curve.steps_to(target)
        for axis, seconds in zip(axes, (curve.modelled_s(times, link), curve.measured_s()), strict=True):
            x, y = [spent_until(seconds, step) for step in at], [curve.evaluations[step] for step in at]
            label = f"{policy}: never"
            if reached is not None:
                label = f"{policy}: {spent_until(seconds, reached):.2f} s"
                axis.plot(spent_until(seconds, reached), target, "o", color=color, zorder=3)
            axis.plot(x, y, color=color, label=label)
    # the first steps fall so far that what is compared would be a stripe at the bottom
    lowest = min(min(curves[policy, seed].evaluations.values()) for policy in policies)
    for axis, title in zip(axes, ("Modelled: one core a rank", "Measured: ranks may share cores"), strict=True):
        axis.axhline(target, color="0.4", linewidth=0.8, linestyle="--")
        axis.set(title=title, xlabel="seconds in expert layers", ylabel="held-out loss, nats per byte")
        axis.set_ylim(lowest - 0.05, target + 0.8)
        axis.legend(frameon=False, fontsize=9, title=f"time to {target:.3f} (dashed)", title_fontsize=9)
    figure.savefig(path)


def plot_load(curves: Curves, policies: Sequence[str], seed: int, path: Path) -> None:
    """How popular each expert of the first layer is over the steps, and below it what each rank computes by policy."""
    heights = [3.0, *[1.0] * len(policies)]
    figure = _figure(9.0, sum(heights))
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    counts = np.asarray(curves[policies[0], seed].steps["counts"], float)[:, 0]
    popularity = (counts / np.maximum(counts.mean(1, keepdims=True), 1)).T
    image = axes[0].imshow(popularity, aspect="auto", interpolation="nearest", vmin=0, vmax=4)
    axes[0].set(title=f"Pairs of each expert over the mean, first layer ({policies[0]})", ylabel="expert")
    figure.colorbar(image, ax=axes[0], extend="max")
    for axis, policy in zip(axes[1:], policies, strict=True):
        load = np.asarray(curves[policy, seed].steps["pairs"], float)[:, 0]
        mean = np.asarray(curves[policy, seed].steps["counts"], float)[:, 0].sum(1, keepdims=True) / load.shape[1]
        image = axis.imshow(
            (load / np.maximum(mean, 1)).T, aspect="auto", interpolation="nearest", vmin=0.5, vmax=1.5, cmap="RdBu_r"
        )
        axis.set(ylabel="rank", yticks=range(load.shape[1]))
        axis.set_title(f"{policy}: pairs of each rank over an equal share", fontsize=9)
    axes[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(axes[1:]), extend="both")
    figure.savefig(path)


def plot_balance(curves: Curves, policies: Sequence[str], seed: int, path: Path) -> None:
    """Imbalance and retained share over the steps."""
    figure, (left, right) = _panels(2)
    for policy in policies:
        curve = curves[policy, seed]
        hot, kept = imbalance(curve.steps["pairs"]), retained(curve)
        left.plot(_smooth(hot), label=f"{policy}: {hot.mean():.2f}", linewidth=1.5)
        right.plot(_smooth(kept), label=f"{policy}: {kept.mean():.2f}", linewidth=1.5)
    left.set(title=f"Hottest rank over the mean, average of {SMOOTHED_STEPS} steps", xlabel="step")
    left.set_ylim(bottom=0.98)
    right.set(title="Share of routed pairs in the backward", xlabel="step", ylim=(0, 1.05))
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=9, title="mean of the run", title_fontsize=9)
    figure.savefig(path)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean of each step and those before it, SMOOTHED_STEPS in all."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - SMOOTHED_STEPS)
    return np.asarray((total[last] - total[first]) / (last - first))
