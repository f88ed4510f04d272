"""The picture of `jobs.chaos`: how long recoveries took, by kind of fault, and one of them in detail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jobs.chaos_rank import Kind
from placement.recovery import Stage

if TYPE_CHECKING:
    from jobs.chaos import Outcome

DOTS, LIMIT, STRUCK = "#0b7a75", "#d1495b", "#d1495b"
STAGES = {
    Stage.TRAINING: ("detect", "#e9d8a6"),
    Stage.FENCING: ("leave", "#ee9b00"),
    Stage.SURVEYING: ("ask holders", "#ca6702"),
    Stage.SEATING: ("seat standby", "#94d2bd"),
    Stage.JOINING: ("join", "#0a9396"),
    Stage.RESTORING: ("restore, bring back to m", "#005f73"),
}


def plot_chaos(outcomes: Sequence[Outcome], limits: Mapping[Kind, float], path: Path) -> None:
    """Left: every recovery as a dot, with the limits. Right: steps of each rank around the plain kill of median time."""
    figure = Figure(figsize=(12.0, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _all_recoveries(left, outcomes, limits)
    detailed = [outcome for outcome in outcomes if outcome.recovery_s is not None]
    kills = [outcome for outcome in detailed if outcome.fault.kind is Kind.KILL] or detailed
    if kills:
        _one_recovery(right, sorted(kills, key=lambda outcome: outcome.recovery_s or 0.0)[len(kills) // 2])
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _all_recoveries(axis: Axes, outcomes: Sequence[Outcome], limits: Mapping[Kind, float]) -> None:
    kinds = [kind for kind in Kind if any(o.fault.kind is kind and o.recovery_s is not None for o in outcomes)]
    for row, kind in enumerate(kinds):
        seconds = [o.recovery_s for o in outcomes if o.fault.kind is kind and o.recovery_s is not None]
        offsets = [row + 0.3 * ((index * 7) % 11 / 10 - 0.5) for index in range(len(seconds))]
        axis.plot(seconds, offsets, "o", color=DOTS, alpha=0.55, markersize=4.5, markeredgewidth=0)
        if kind in limits:
            label = "limit of the 95th percentile" if kind is next((k for k in kinds if k in limits), None) else None
            axis.plot([limits[kind]] * 2, [row - 0.35, row + 0.35], color=LIMIT, linewidth=2, label=label)
    axis.set_yticks(range(len(kinds)), [str(kind) for kind in kinds])
    axis.set_ylim(len(kinds) - 0.4, -1.0)
    axis.set_xlim(left=0)
    axis.grid(True, axis="x", alpha=0.25)
    axis.set(title="From the fault to the next step on every rank", xlabel="seconds")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, loc="upper right")


def _one_recovery(axis: Axes, outcome: Outcome) -> None:
    fault, zero = outcome.fault, outcome.struck_s
    for rank, lines in outcome.applied.items():
        for line in lines:
            again = line["attempt"] > 0
            axis.plot(line["time_s"] - zero, rank, "s" if again else "o", color="#005f73" if again else "#6c757d")
            axis.annotate(
                str(line["step"]), (line["time_s"] - zero, rank), (0, 6), textcoords="offset points", fontsize=7
            )
    if outcome.recoveries:
        recovery = outcome.recoveries[-1]
        begin = recovery.began_s - zero
        axis.axvspan(0, begin, color=STAGES[Stage.TRAINING][1], alpha=0.6, linewidth=0, label="detect")
        for stage, (label, colour) in list(STAGES.items())[1:]:
            seconds = recovery.seconds.get(stage, 0.0)
            axis.axvspan(
                begin, begin + seconds, color=colour, alpha=0.4, linewidth=0, label=f"{label} {seconds * 1e3:.0f} ms"
            )
            begin += seconds
    axis.plot(0, fault.rank, "x", color=STRUCK, markersize=11, markeredgewidth=2.5)
    axis.set_yticks(range(len(outcome.applied)), [f"rank {rank}" for rank in outcome.applied])
    axis.margins(y=0.25)
    axis.set(title=f"Seed {fault.seed}: {fault.kind} of rank {fault.rank} in {fault.phase} of step {fault.step}")
    axis.set_xlabel("seconds since the fault; numbers are steps")
    axis.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, columnspacing=1.0)
