"""Plans for a real module that trains data-parallel: how many cards, which micro-batch, recomputation or not.

A profile holds what a trace of the module found at its smallest and largest micro-batch. Peaks are a maximum of lines in
the micro-batch, hence convex, so the chord between the two ends never lies below them. From the profile every plan of a
job is predicted without another trace: d ranks, m micro-batches of b samples, b * m * d = B, the user's global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from placement.catalogue import GIB, GpuType
from placement.correction import TRACED, correct
from placement.errors import PlacementError
from placement.memory import MemoryPrediction, Phase
from placement.peaks import Peak
from placement.plans import Knowledge, Plan, PlanList, Rejected
from placement.shapes import RECOMPUTE, Recompute
from placement.speed import SpeedModel

PINNABLE = ("data", "micro_batch")
"""Degrees that a user may fix."""
HEADROOM = 1.05
"""Upper bound over centre of a traced module: the trace sees every tensor, only library workspaces are guessed."""


def too_large(floor_bytes: int, gpus: Sequence[GpuType]) -> str:
    """Why none of `gpus` (at least one) can hold a module whose weights, gradients and optimizer take `floor_bytes`; empty
    if one may."""
    largest = max(gpus, key=lambda gpu: gpu.memory_bytes)
    if floor_bytes <= largest.memory_bytes:
        return ""
    return (
        f"the closest, {largest.name}, lacks {(floor_bytes - largest.memory_bytes) / GIB:.3f} GiB a card: weights, "
        f"gradients and optimizer alone take {floor_bytes / GIB:.3f}; add a node with larger cards, or use a smaller model"
    )


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """Peaks of one rank that trains a module, by recomputation level, and what its speed depends on."""

    family: str
    """What the correction is learned for, such as the name of the workload."""
    variant: str
    """What tells models of a family apart, such as a digest of their shape."""
    smallest: Mapping[Recompute, Peak]
    """Forward and backward at micro-batch 1."""
    largest: Mapping[Recompute, Peak]
    """The same at micro-batch `most`."""
    most: int
    step: Peak
    """During the optimizer step."""
    gradient_bytes: float
    largest_gradient_bytes: float
    """Of one parameter."""
    reserved_over_allocated: float
    flops_per_sample: float
    tokens_per_sample: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> ModuleProfile:
        """The profile that `to_json` wrote."""
        peaks = {
            name: {level: Peak(**peak) for level, peak in values[name].items()} for name in ("smallest", "largest")
        }
        return ModuleProfile(**{**values, **peaks, "step": Peak(**values["step"])})

    def peak(self, micro_batch: int, recompute: Recompute, keeps_gradients: bool) -> tuple[Peak, Phase]:
        """Upper bound of the peak of one rank. keeps_gradients: they live through the forward pass, as they do with
        several micro-batches a step or in the buckets of several ranks. New ones are made beside them then, one at a
        time; and as the trace's peak may lie late in backward, what it holds in gradients there may be activations
        earlier."""
        low, high = self.smallest[recompute], self.largest[recompute]
        share = (micro_batch - 1) / (self.most - 1) if self.most > 1 else 0.0
        line = {
            f.name: getattr(low, f.name) + share * (getattr(high, f.name) - getattr(low, f.name)) for f in fields(Peak)
        }
        if keeps_gradients:
            line["activations"] += line["gradients"] + self.largest_gradient_bytes
            line["gradients"] = self.gradient_bytes
        backward = Peak(**line)
        return (backward, "backward") if backward.total >= self.step.total else (self.step, "optimizer")


def plan_key(plan: Plan) -> str:
    """What makes two plans the same one: card, ranks, micro-batch, recomputation."""
    return f"{plan.gpu_type} d={plan.data} b={plan.micro_batch} recompute={plan.recompute}"


def data_plans(
    profile: ModuleProfile,
    global_batch: int,
    gpus: Sequence[GpuType],
    *,
    max_gpus: int,
    recompute: Sequence[Recompute] = ("none", "full"),
    pinned: Mapping[str, int] | None = None,
    knowledge: Knowledge | None = None,
) -> PlanList:
    """Every plan that fits, best first (samples a second and weighted card), with those that do not and why.

    pinned: degrees that are fixed, by the names in PINNABLE.

    Raises PlacementError without a GPU type. No feasible plan is no error: see `PlanList.nearest`.
    """
    if not gpus:
        raise PlacementError("no GPU type to plan for; the cluster has no labelled card")
    known, wanted = knowledge or Knowledge(), pinned or {}
    levels = [level for level in RECOMPUTE if level in recompute and level in profile.smallest]
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for gpu in gpus:
        for d, b, m in splits(global_batch, min(max_gpus, global_batch), profile.most):
            if any(degree != wanted.get(name, degree) for name, degree in zip(PINNABLE, (d, b), strict=True)):
                continue
            for level in levels:
                memory = predicted(profile, gpu, b, level, keeps_gradients=d > 1 or m > 1, knowledge=known)
                short = int(memory.nvml_upper) - gpu.memory_bytes
                if short > 0:
                    reason = f"{short / GIB:.3f} GiB more than the {gpu.memory_bytes / GIB:.3f} of {gpu.name}"
                    degrees = {"data": d, "micro_batch": b, "recompute": RECOMPUTE.index(level)}
                    rejected.append(Rejected(gpu_type=gpu.name, degrees=degrees, reason=reason, short_bytes=short))
                    continue
                seconds = step_time_s(profile, gpu, (d, b, m), level, known.speed.get(gpu.name, SpeedModel()))
                rate = global_batch / (seconds * d * gpu.price)
                plans.append(_plan(gpu.name, (d, b, m), level, memory, seconds, rate))
    plans.sort(key=lambda plan: (-plan.samples_per_weighted_gpu_s, plan.num_gpus, plan.gpu_type))
    if plans:
        return PlanList(tuple(plans), tuple(rejected))
    nearest = _nearest(rejected, global_batch, max_gpus)
    if wanted:
        free = data_plans(profile, global_batch, gpus, max_gpus=max_gpus, recompute=recompute, knowledge=knowledge)
        fixed = ", ".join(f"{name}={degree}" for name, degree in wanted.items())
        nearest = f"{plan_key(free.plans[0])} fits, without {fixed}" if free.plans else free.nearest
    return PlanList((), tuple(rejected), nearest)


def front(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The plans that no other of their card type beats in both card count and step time, in the given order."""

    def beaten(plan: Plan) -> bool:
        return any(
            other.gpu_type == plan.gpu_type
            and other.num_gpus <= plan.num_gpus
            and other.step_time_s <= plan.step_time_s
            and (other.num_gpus, other.step_time_s) != (plan.num_gpus, plan.step_time_s)
            for other in plans
        )

    kept: dict[tuple[str, int], Plan] = {}
    for plan in plans:
        if not beaten(plan):
            kept.setdefault((plan.gpu_type, plan.num_gpus), plan)
    return tuple(kept.values())


def splits(global_batch: int, max_ranks: int, most: int) -> list[tuple[int, int, int]]:
    """(d, b, m) with d * b * m = B, d <= max_ranks, b <= most."""
    return [
        (d, b, global_batch // (d * b))
        for d in _divisors(global_batch)
        if d <= max_ranks
        for b in _divisors(global_batch // d)
        if b <= most
    ]


def predicted(
    profile: ModuleProfile,
    gpu: GpuType,
    micro_batch: int,
    recompute: Recompute,
    *,
    keeps_gradients: bool,
    knowledge: Knowledge,
) -> MemoryPrediction:
    """Bytes of one rank on one card, with what recorded runs taught."""
    peak, phase = profile.peak(micro_batch, recompute, keeps_gradients)
    blas = 2.0 * gpu.blas_workspace_bytes
    allocated = peak.total + blas
    reserved = allocated * profile.reserved_over_allocated
    context = float(gpu.context_bytes + gpu.nccl_bytes)
    memory = MemoryPrediction(
        static=peak.parameters + peak.gradients + peak.optimizer,
        activations=peak.activations,
        logits=0.0,
        workspace=blas,
        context=context,
        allocated=allocated,
        reserved=reserved,
        nvml=reserved + context,
        allocated_upper=allocated * HEADROOM,
        nvml_upper=reserved * HEADROOM + context,
        peak_phase=phase,
        limiting_stage="last",
        confidence="known",
    )
    return correct(knowledge.correction, correction_key(profile, gpu.name, knowledge.image), memory)


def correction_key(profile: ModuleProfile, gpu_type: str, image: str) -> tuple[str, ...]:
    """The key under which runs of a traced module are learned from. What others of its family need counts too, less."""
    return (profile.family, gpu_type, image, profile.variant, TRACED)


def step_time_s(
    profile: ModuleProfile, gpu: GpuType, split: tuple[int, int, int], recompute: Recompute, model: SpeedModel
) -> float:
    """Seconds of one step of the whole global batch."""
    d, b, m = split
    tokens = b * profile.tokens_per_sample
    efficiency = model.efficiency * tokens / (tokens + model.tokens_for_half_efficiency)
    flops = b * m * profile.flops_per_sample * (4 / 3 if recompute == "full" else 1.0)
    compute = flops / (gpu.flops * efficiency)
    rate = gpu.link_rate if d <= gpu.gpus_per_node else gpu.network_rate
    gradients = 2 * (d - 1) / d * profile.gradient_bytes * model.gradient_factor / rate
    return model.scale * (compute + max(0.0, gradients - model.overlap * compute * 2 / 3))


def _plan(
    gpu_type: str,
    split: tuple[int, int, int],
    recompute: Recompute,
    memory: MemoryPrediction,
    seconds: float,
    rate: float,
) -> Plan:
    d, b, m = split
    return Plan(
        gpu_type=gpu_type,
        data=d,
        tensor=1,
        pipeline=1,
        virtual=1,
        context=1,
        expert=1,
        micro_batch=b,
        num_micro=m,
        sequence_parallel=False,
        sharding=0,
        recompute=recompute,
        memory=memory,
        step_time_s=seconds,
        samples_per_weighted_gpu_s=rate,
    )


def _nearest(rejected: Sequence[Rejected], global_batch: int, max_gpus: int) -> str:
    if not rejected:
        return f"no way to split a global batch of {global_batch} over at most {max_gpus} cards; change one of them"
    closest = min(rejected, key=lambda entry: entry.short_bytes)
    degrees = closest.degrees
    level = RECOMPUTE[degrees["recompute"]]
    return (
        f"the closest, d={degrees['data']} b={degrees['micro_batch']} recompute={level} on {closest.gpu_type}, lacks "
        f"{closest.short_bytes / GIB:.3f} GiB a card; add a node with larger cards, or shorten the sequence"
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
