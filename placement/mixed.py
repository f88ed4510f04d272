"""One job on cards of several types: every rank gets samples in proportion to its speed, so that none waits for another.

The ranks' samples sum to the user's global batch B, and a gradient is weighted by the samples behind it, so the numbers
are those of any other plan. Memory is checked for each type with the micro-batch that its own cards run. Only data
parallelism is mixed: tensor and pipeline groups stay on one type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from placement.catalogue import GpuType
from placement.data_plans import ModuleProfile, predicted, step_time_s
from placement.errors import PlacementError
from placement.memory import MemoryPrediction
from placement.plans import Knowledge, Plan
from placement.shapes import Recompute
from placement.speed import SpeedModel

DRIFT = 0.1
"""Relative error of a rank's share of the speed beyond which the batch is split anew."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank on a card of one type runs. Bytes are of its card."""

    speed: float
    """Predicted samples a second."""
    micro_batch: int
    upper_bytes: int
    capacity_bytes: int


def split_by_speed(speeds: Sequence[float], batch: int) -> tuple[int, ...]:
    """Samples of each rank: proportional to its speed, at least one, in sum `batch`; largest remainders round up.

    speeds: samples a second by rank, in any common unit. The same on every rank for the same speeds. Raises
    PlacementError for fewer samples than ranks, or a speed that is no positive number.
    """
    rates = np.array(speeds, np.float64)
    if len(rates) > batch:
        raise PlacementError(f"{batch} samples cannot be split over {len(rates)} ranks; use fewer cards")
    if not (np.isfinite(rates).all() and (rates > 0).all()):
        raise PlacementError(f"speeds {list(speeds)} are not all positive numbers; measure the ranks again")
    exact = rates / rates.sum() * (batch - len(rates))
    samples = np.floor(exact).astype(np.int64)
    for rank in np.argsort(samples - exact, kind="stable")[: batch - len(rates) - int(samples.sum())]:
        samples[rank] += 1
    return tuple(int(n) + 1 for n in samples)


def drifted(samples: Sequence[int], speeds: Sequence[float]) -> bool:
    """Whether measured speeds ask for another split: some rank's fair part of the batch is off by more than DRIFT."""
    total, rate = sum(samples), sum(speeds)
    fair = [total * speed / rate for speed in speeds]
    return any(abs(n - part) > max(DRIFT * part, 1.0) for n, part in zip(samples, fair, strict=True))


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A gang on cards of several types. `plan` names all types, joined by "+", and is otherwise that of the tightest."""

    plan: Plan
    cards: Mapping[str, int]
    """Cards taken, by node."""
    shares: Mapping[str, Share]
    """What a rank runs, by node."""


def mixed_plan(
    profile: ModuleProfile,
    global_batch: int,
    cards: Mapping[str, tuple[GpuType, int]],
    *,
    num_gpus: int,
    recompute: Sequence[Recompute],
    knowledge: Knowledge,
) -> Mix | None:
    """The fastest gang of exactly `num_gpus` of these cards, or None if not so many hold at least one sample.

    cards: type and number of cards by node. The first recomputation level that enough cards hold is taken for all.
    """
    for level in [level for level in recompute if level in profile.smallest]:
        types = {gpu.name: gpu for gpu, _ in cards.values()}
        fits = {name: _fit(profile, gpu, global_batch, level, knowledge) for name, gpu in types.items()}
        offers = []
        for node, (gpu, count) in cards.items():
            memory, share = fits[gpu.name]
            if share is not None and count > 0:
                offers.append((share, node, gpu, count, memory))
        offers.sort(key=lambda offer: (-offer[0].speed, -offer[3], offer[1]))
        taken: dict[str, int] = {}
        for _, node, _, count, _ in offers:
            left = num_gpus - sum(taken.values())
            if left > 0:
                taken[node] = min(left, count)
        if not 0 < num_gpus <= global_batch or sum(taken.values()) < num_gpus:
            continue
        used = [offer for offer in offers if offer[1] in taken]
        speeds = [share.speed for share, node, *_ in used for _ in range(taken[node])]
        split = split_by_speed(speeds, global_batch)
        seconds = max(n / speed for n, speed in zip(split, speeds, strict=True))
        price = sum(gpu.price * taken[node] for _, node, gpu, _, _ in used)
        tightest, _, _, _, memory = min(used, key=lambda offer: offer[0].capacity_bytes - offer[0].upper_bytes)
        plan = Plan(
            gpu_type="+".join(sorted({gpu.name for _, _, gpu, _, _ in used})),
            data=num_gpus,
            tensor=1,
            pipeline=1,
            virtual=1,
            context=1,
            expert=1,
            micro_batch=tightest.micro_batch,
            num_micro=-(-max(split) // tightest.micro_batch),
            sequence_parallel=False,
            sharding=0,
            recompute=level,
            memory=memory,
            step_time_s=seconds,
            samples_per_weighted_gpu_s=global_batch / (seconds * price),
        )
        return Mix(plan=plan, cards=taken, shares={node: share for share, node, *_ in used})
    return None


def _fit(
    profile: ModuleProfile, gpu: GpuType, most: int, recompute: Recompute, knowledge: Knowledge
) -> tuple[MemoryPrediction, Share | None]:
    """The largest micro-batch, a power of two up to `most`, that one card of this type holds; None if it holds none."""
    micro_batch = 1 << (min(profile.most, most).bit_length() - 1)
    while True:
        memory = predicted(profile, gpu, micro_batch, recompute, keeps_gradients=True, knowledge=knowledge)
        if memory.nvml_upper <= gpu.memory_bytes or micro_batch == 1:
            break
        micro_batch //= 2
    if memory.nvml_upper > gpu.memory_bytes:
        return memory, None
    model = knowledge.speed.get(gpu.name, SpeedModel())
    return memory, Share(
        speed=micro_batch / step_time_s(profile, gpu, (1, micro_batch, 1), recompute, model),
        micro_batch=micro_batch,
        upper_bytes=int(memory.nvml_upper),
        capacity_bytes=gpu.memory_bytes,
    )
