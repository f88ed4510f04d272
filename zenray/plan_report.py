"""Plans for people: rows of a table with the memory broken down, why others were left out, and bars against the card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from placement.catalogue import GIB, MIB, GpuType
from placement.plans import Plan, PlanList, Rejected
from placement.shapes import RECOMPUTE

PARTS = ("static", "activations", "logits", "workspace", "context")
COLUMNS = ("#", "card", "cards", "degrees", "b x m", "recompute", *PARTS, "upper", "of card", "step s", "samples/s")
MAX_BARS = 12


def plan_rows(plans: Sequence[Plan], gpus: Sequence[GpuType], global_batch: int) -> list[tuple[object, ...]]:
    """One row a plan, in the order of COLUMNS; sizes with their unit."""
    memory_of = {gpu.name: gpu.memory_bytes for gpu in gpus}
    return [
        (
            number,
            plan.gpu_type,
            plan.num_gpus,
            degrees_text(plan),
            f"{plan.micro_batch} x {plan.num_micro}",
            plan.recompute,
            *(size_text(getattr(plan.memory, part)) for part in PARTS),
            size_text(plan.memory.nvml_upper),
            f"{plan.memory.nvml_upper / memory_of[plan.gpu_type]:.0%}",
            plan.step_time_s,
            global_batch / plan.step_time_s,
        )
        for number, plan in enumerate(plans, 1)
    ]


def rejected_rows(rejected: Sequence[Rejected], most: int) -> list[tuple[object, ...]]:
    """(card, degrees, reason) of the `most` that lack least, those that break a rule last."""
    ordered = sorted(rejected, key=lambda entry: (entry.short_bytes == 0, entry.short_bytes))
    return [(entry.gpu_type, _degrees(entry), entry.reason) for entry in ordered[:most]]


def degrees_text(plan: Plan) -> str:
    """The degrees above one, such as `d=2 t=4`."""
    letters = {
        "d": plan.data,
        "t": plan.tensor,
        "p": plan.pipeline,
        "v": plan.virtual,
        "c": plan.context,
        "e": plan.expert,
    }
    return " ".join(f"{letter}={value}" for letter, value in letters.items() if value > 1) or "one card"


def size_text(num_bytes: float) -> str:
    """GiB from one GiB on, else MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def plot_plans(found: PlanList, gpus: Sequence[GpuType], path: Path) -> None:
    """Stacked bars of the first plans, headroom on top, and the capacity of the card as a line across each bar."""
    plans = found.plans[:MAX_BARS]
    figure = Figure(figsize=(max(6.0, 1.0 + len(plans)), 5.0), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(plans)
    for part in PARTS:
        heights = [getattr(plan.memory, part) / GIB for plan in plans]
        axes.bar(range(len(plans)), heights, bottom=bottoms, label=part)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    tops = [plan.memory.nvml_upper / GIB for plan in plans]
    rest = [max(0.0, top - low) for top, low in zip(tops, bottoms, strict=True)]
    axes.bar(range(len(plans)), rest, bottom=bottoms, label="headroom", color="none", edgecolor="grey", hatch="//")
    memory_of = {gpu.name: gpu.memory_bytes / GIB for gpu in gpus}
    capacities = [memory_of[plan.gpu_type] for plan in plans]
    axes.hlines(capacities, [i - 0.45 for i in range(len(plans))], [i + 0.45 for i in range(len(plans))], color="black")
    axes.set_xticks(range(len(plans)))
    axes.set_xticklabels(
        [f"{p.num_gpus} x {p.gpu_type}\n{degrees_text(p)}\nb={p.micro_batch}" for p in plans], fontsize=7
    )
    axes.set_ylabel("GiB per card (black: capacity)")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _degrees(entry: Rejected) -> str:
    parts = []
    for name, value in entry.degrees.items():
        if name == "recompute":
            parts.append(f"recompute={RECOMPUTE[value]}")
        elif value > 1:
            parts.append(f"{name}={value}")
    return " ".join(parts) or "one card"
