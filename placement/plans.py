"""Every way to run a job that fits: legal degrees, predicted memory and step time, the best per GPU type.

A plan names GPU type, degrees, micro-batch and recomputation. The global batch is the user's and is never changed:
b * m * d = B. Of the recomputation levels (none, selective, full) the cheapest that fits is kept. Per type only the
Pareto front over GPU count and step time survives, in order of goodput per weighted GPU. What does not survive is
listed with its reason, and where nothing fits, the nearest change that would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from placement.catalogue import GIB, GpuType
from placement.correction import ANALYTIC, Correction, correct_table
from placement.errors import PlacementError
from placement.jobs import PlanOption
from placement.memory import MemoryPrediction, MemoryTable, predict
from placement.shapes import RECOMPUTE, Ints, Layout, ModelShape, Recompute, Setup, ShapeError
from placement.speed import SpeedModel, step_time

PINNABLE = ("data", "tensor", "pipeline", "virtual", "context", "expert", "micro_batch")


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is tried. Degrees are tried in all combinations and filtered by the rules."""

    tensor: tuple[int, ...] = (1, 2, 4, 8)
    pipeline: tuple[int, ...] = (1, 2, 4, 8)
    virtual: tuple[int, ...] = (1, 2)
    context: tuple[int, ...] = (1, 2, 4)
    expert: tuple[int, ...] = (1, 2, 4, 8)
    """Only tried for mixtures of experts."""
    micro_batch: tuple[int, ...] = (1, 2, 4, 8, 16)
    max_gpus: int = 64
    sharding: int = 1
    """Optimizer sharding wherever there is somebody to share with: 0 none, 1 optimizer, 2 gradients, 3 parameters."""
    recompute: tuple[Recompute, ...] = RECOMPUTE
    pinned: Mapping[str, int] = field(default_factory=dict)
    """Degrees that the user fixes, by the names in PINNABLE."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.pinned) - set(PINNABLE))
        if unknown:
            raise ShapeError(f"cannot pin {', '.join(unknown)}; what can be pinned: {', '.join(PINNABLE)}")

    def values(self, degree: str) -> tuple[int, ...]:
        """What is tried for one degree."""
        if degree in self.pinned:
            return (self.pinned[degree],)
        tried: tuple[int, ...] = getattr(self, degree)
        return tried


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What is known beyond first principles when plans are made."""

    speed: Mapping[str, SpeedModel] = field(default_factory=dict)
    """By GPU type; others get the default model."""
    correction: Correction = field(default_factory=Correction)
    """What recorded peaks taught."""
    family: str = ""
    image: str = ""
    """Model family and software image: with GPU type and attention kernel the key of the correction."""

    def table(self, shape: ModelShape, setup: Setup, layout: Layout, gpu: GpuType) -> MemoryTable:
        """Predicted memory of the plans, corrected."""
        key = (self.family, gpu.name, self.image, setup.attention, ANALYTIC)
        return correct_table(self.correction, key, predict(shape, setup, layout, gpu))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run the job, with its predictions."""

    gpu_type: str
    data: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    micro_batch: int
    num_micro: int
    sequence_parallel: bool
    sharding: int
    recompute: Recompute
    memory: MemoryPrediction
    step_time_s: float
    samples_per_weighted_gpu_s: float
    """Goodput: samples a second for each GPU, weighted by the card's price."""

    @property
    def num_gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def option(self) -> PlanOption:
        """What the scheduler needs of it."""
        return PlanOption(
            gpu_type=self.gpu_type,
            num_gpus=self.num_gpus,
            tp_group=self.tensor,
            memory_bytes=int(np.ceil(self.memory.nvml_upper)),
            step_time_s=self.step_time_s,
        )


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Degrees that were left out, and why. `short_bytes` is how much a card lacks; 0 where a rule is broken."""

    gpu_type: str
    degrees: Mapping[str, int]
    reason: str
    short_bytes: int = 0


@dataclass(frozen=True)
class PlanList:
    """`plans` best first; `rejected` with reasons; `nearest` says what to change where there is no plan at all."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    nearest: str = ""

    def options(self) -> tuple[PlanOption, ...]:
        """The plans as the scheduler takes them."""
        return tuple(plan.option() for plan in self.plans)


def enumerate_plans(
    shape: ModelShape,
    setup: Setup,
    gpus: Sequence[GpuType],
    search: Search | None = None,
    knowledge: Knowledge | None = None,
) -> PlanList:
    """All plans worth queueing for on these GPU types.

    Raises PlacementError if no GPU type is given. No feasible plan is not an error: see `PlanList.nearest`.
    """
    if not gpus:
        raise PlacementError("no GPU type to plan for; name at least one from placement.catalogue")
    search, knowledge = search or Search(), knowledge or Knowledge()
    found = _search(shape, setup, gpus, search, knowledge)
    if found.plans:
        return found
    return replace(found, nearest=_nearest(shape, setup, gpus, search, found, knowledge))


def _search(
    shape: ModelShape,
    setup: Setup,
    gpus: Sequence[GpuType],
    search: Search,
    knowledge: Knowledge,
) -> PlanList:
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for gpu in gpus:
        legal, broken = _legal_layouts(shape, setup, gpu, search)
        rejected += broken
        if len(legal):
            mine, short = _fitting(shape, setup, gpu, search, legal, knowledge)
            plans += mine
            rejected += short
    plans.sort(key=lambda plan: (-plan.samples_per_weighted_gpu_s, plan.num_gpus, plan.gpu_type))
    return PlanList(tuple(plans), tuple(rejected))


def _legal_layouts(shape: ModelShape, setup: Setup, gpu: GpuType, search: Search) -> tuple[Layout, list[Rejected]]:
    """Layouts that keep every rule, and the degrees that break one, with the first rule they break."""
    experts = search.values("expert") if shape.experts else (1,)
    degrees = (*(search.values(name) for name in ("tensor", "pipeline", "virtual", "context")), experts)
    rows: list[tuple[int, ...]] = []
    broken: list[Rejected] = []
    for t, p, v, c, e in product(*degrees):
        names = {"tensor": t, "pipeline": p, "virtual": v, "context": c, "expert": e}
        reason = broken_rule(shape, gpu, **names)
        if reason:
            broken.append(Rejected(gpu_type=gpu.name, degrees=names, reason=reason))
            continue
        fitting = [
            (d, t, p, v, c, e, 1 if e > 1 else t, b, m)
            for b in search.values("micro_batch")
            for d, m in _batch_splits(setup.global_batch, b, search)
            if d * t * p * c <= search.max_gpus and m >= p and (v == 1 or m % p == 0) and (d * t * c) % e == 0
        ]
        if not fitting:
            reason = f"no b and d with b*m*d = {setup.global_batch}, m >= p, whole expert groups, within max_gpus"
            broken.append(Rejected(gpu_type=gpu.name, degrees=names, reason=reason))
        rows += fitting
    columns = np.array(rows, np.int64).reshape(-1, 9).T
    layout = Layout.of(
        data=columns[0],
        tensor=columns[1],
        pipeline=columns[2],
        virtual=columns[3],
        context=columns[4],
        expert=columns[5],
        expert_tensor=columns[6],
        micro_batch=columns[7],
        num_micro=columns[8],
        sequence_parallel=(columns[1] > 1).astype(np.int64),
        sharding=np.where(columns[0] * columns[4] > 1, search.sharding, 0),
    )
    return layout, broken


def broken_rule(
    shape: ModelShape, gpu: GpuType, *, tensor: int, pipeline: int, virtual: int, context: int, expert: int
) -> str:
    """The first rule that these degrees break, or ''."""
    heads, groups = shape.heads, shape.groups or shape.heads
    ffn = shape.ffn_width if shape.experts is None else shape.experts.ffn
    num_experts = shape.experts.num_experts if shape.experts else 1
    rules = (
        (tensor > gpu.gpus_per_node, f"t={tensor} would cross nodes of {gpu.gpus_per_node} {gpu.name}"),
        (heads % tensor != 0, f"t={tensor} does not divide {heads} heads"),
        (shape.ffn_width % tensor != 0 or ffn % tensor != 0, f"t={tensor} does not divide the MLP width {ffn}"),
        (groups % tensor != 0, f"t={tensor} would replicate {groups} key/value groups"),
        (shape.layers % pipeline != 0, f"p={pipeline} does not divide {shape.layers} layers"),
        (virtual > 1 and pipeline == 1, "v > 1 without a pipeline"),
        (shape.layers % (pipeline * virtual) != 0, f"p*v={pipeline * virtual} does not divide {shape.layers} layers"),
        (shape.seq % (context * (2 if context > 1 else 1)) != 0, f"c={context} does not divide sequence {shape.seq}"),
        (shape.encoder_layers % pipeline != 0, f"p={pipeline} does not divide {shape.encoder_layers} encoder layers"),
        (num_experts % expert != 0, f"e={expert} does not divide {num_experts} experts"),
    )
    return next((reason for is_broken, reason in rules if is_broken), "")


def _batch_splits(global_batch: int, micro_batch: int, search: Search) -> list[tuple[int, int]]:
    """(d, m) with b*m*d = B."""
    if global_batch % micro_batch:
        return []
    per = global_batch // micro_batch
    data = search.pinned.get("data")
    candidates = [data] if data else range(1, min(per, search.max_gpus) + 1)
    return [(d, per // d) for d in candidates if per % d == 0]


def _fitting(
    shape: ModelShape,
    setup: Setup,
    gpu: GpuType,
    search: Search,
    legal: Layout,
    knowledge: Knowledge,
) -> tuple[list[Plan], list[Rejected]]:
    """The Pareto front of what fits on this type, and what does not fit at any recomputation."""
    levels = [
        RECOMPUTE.index(level)
        for level in search.recompute
        if level != "selective" or setup.attention.startswith("unfused")
    ]
    chosen = np.full(len(legal), -1)
    least = np.full(len(legal), np.inf)
    for level in levels:
        table = knowledge.table(shape, setup, replace(legal, recompute=np.full(len(legal), level)), gpu)
        need = table.nvml_upper
        chosen = np.where((chosen < 0) & (need <= gpu.memory_bytes), level, chosen)
        least = np.minimum(least, need)
    fits = chosen >= 0
    short = _too_large(gpu, legal, least, fits)
    if not fits.any():
        return [], short
    layout = replace(legal.take(fits), recompute=chosen[fits])
    model = knowledge.speed.get(gpu.name, SpeedModel())
    seconds = step_time(shape, layout, gpu, setup.global_batch, model)
    front = pareto(layout.world, seconds)
    layout, seconds = layout.take(front), seconds[front]
    table = knowledge.table(shape, setup, layout, gpu)
    rate = setup.global_batch / (seconds * layout.world * gpu.price)
    plans = [
        Plan(
            gpu_type=gpu.name,
            **{name: int(getattr(layout, name)[i]) for name in (*PINNABLE, "num_micro", "sharding")},
            sequence_parallel=bool(layout.sequence_parallel[i]),
            recompute=RECOMPUTE[int(layout.recompute[i])],
            memory=table.prediction(i),
            step_time_s=float(seconds[i]),
            samples_per_weighted_gpu_s=float(rate[i]),
        )
        for i in range(len(layout))
    ]
    return plans, short


def _too_large(gpu: GpuType, legal: Layout, least: NDArray[np.float64], fits: NDArray[np.bool_]) -> list[Rejected]:
    """One entry for each set of degrees and micro-batch of which no data degree fits: the one that lacks least."""
    keys = np.stack([getattr(legal, name) for name in PINNABLE[1:]], axis=1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    best = np.full(len(unique), np.inf)
    np.minimum.at(best, inverse, least)
    any_fits = np.zeros(len(unique), bool)
    np.logical_or.at(any_fits, inverse, fits)
    return [
        Rejected(
            gpu_type=gpu.name,
            degrees=dict(zip(PINNABLE[1:], map(int, unique[i]), strict=True)),
            reason=f"{(best[i] - gpu.memory_bytes) / GIB:.2f} GiB more than the {gpu.memory_bytes / GIB:.0f} of {gpu.name}",
            short_bytes=int(np.ceil(best[i] - gpu.memory_bytes)),
        )
        for i in np.flatnonzero(~any_fits)
    ]


def pareto(num_gpus: Ints, seconds: NDArray[np.float64]) -> Ints:
    """Indices of the plans that no other beats in both GPU count and step time, by GPU count."""
    order = np.lexsort((seconds, num_gpus))
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], seconds[order][:-1]]))
    front: Ints = order[seconds[order] < best_before]
    return front


def _nearest(
    shape: ModelShape,
    setup: Setup,
    gpus: Sequence[GpuType],
    search: Search,
    found: PlanList,
    knowledge: Knowledge,
) -> str:
    """The smallest change that makes the job fit: a pinned degree let go, else how far off the closest plan is."""
    if search.pinned:
        for name in search.pinned:
            freed = replace(search, pinned={key: value for key, value in search.pinned.items() if key != name})
            plans = _search(shape, setup, gpus, freed, knowledge).plans
            if plans:
                best = min(plans, key=lambda plan: abs(getattr(plan, name) - search.pinned[name]))
                return f"{name}={getattr(best, name)} instead of {search.pinned[name]} fits {best.gpu_type}"
        plans = _search(shape, setup, gpus, replace(search, pinned={}), knowledge).plans
        if plans:
            best = plans[0]
            changes = ", ".join(f"{name}={getattr(best, name)}" for name in search.pinned)
            return f"{changes} fits {best.gpu_type}"
    missing = [entry for entry in found.rejected if entry.short_bytes > 0]
    if not missing:
        return "no degrees keep the rules: change the global batch or the layers, or allow more GPUs"
    closest = min(missing, key=lambda entry: entry.short_bytes)
    degrees = ", ".join(f"{name}={value}" for name, value in closest.degrees.items() if value > 1) or "one GPU"
    return (
        f"the closest, {degrees} on {closest.gpu_type}, lacks {closest.short_bytes / GIB:.2f} GiB a card; "
        f"allow more than {search.max_gpus} GPUs, a larger type, or a shorter sequence"
    )
