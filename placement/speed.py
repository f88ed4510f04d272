"""How long one step takes, by a model simple enough to be replaced by measurements. Seconds per global batch.

Matrix products at a share of the card's peak, the pipeline's bubble, tensor-parallel all-reduces, expert exchange, and
the part of the gradient traffic that backward does not hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.catalogue import GpuType
from placement.shapes import Floats, Layout, ModelShape, padded_vocab, stage_parameters


@dataclass(frozen=True, kw_only=True)
class SpeedModel:
    """Assumptions of the estimate; measured figures of a job class replace it through `scale`."""

    efficiency: float = 0.45
    """Share of the peak rate that one card reaches on large matrix products."""
    loss_per_doubling_of_tensor: float = 0.06
    """Share of the efficiency lost when t doubles, since products get narrower."""
    tokens_for_half_efficiency: float = 512.0
    """Tokens of a micro-batch per card at which half of the efficiency is reached."""
    overlap: float = 0.8
    """Share of the backward pass that gradient traffic can hide behind."""
    gradient_factor: float = 1.0
    """Bytes on the wire over bytes of the gradients, from the compression plan."""
    scale: float = 1.0
    """Measured over estimated step time of this job class on this card."""


def step_time(shape: ModelShape, layout: Layout, gpu: GpuType, global_batch: int, model: SpeedModel) -> Floats:
    """Seconds per step of the whole global batch, one entry a plan."""
    t, p, d = layout.tensor, layout.pipeline, layout.data
    tokens = shape.seq / layout.context * layout.micro_batch
    step_flops = flops_per_token(shape) * shape.seq * global_batch
    flops = step_flops * np.where(layout.recompute == 2, 4 / 3, 1.0) / layout.world
    efficiency = model.efficiency * (1 - model.loss_per_doubling_of_tensor * np.log2(t))
    efficiency = efficiency * tokens / (tokens + model.tokens_for_half_efficiency)
    compute = flops / (gpu.flops * efficiency)
    layers = (shape.layers + shape.encoder_layers) / p
    payload = 2 * tokens * shape.hidden
    tensor = layout.num_micro * layers * 4 * payload * 2 * (t - 1) / t / gpu.link_rate
    inside = layout.world <= gpu.gpus_per_node
    slow = np.where(inside, gpu.link_rate, gpu.network_rate)
    expert = _expert_seconds(shape, layout, payload, slow)
    bubble = (p - 1) / (layout.num_micro * layout.virtual)
    weights = stage_parameters(shape, layout, first=False).total
    replicas = d * layout.context
    gradients = 2 * (replicas - 1) / replicas * 2 * weights * model.gradient_factor / slow
    gradients = gradients * np.where(layout.sharding == 3, 1.5, 1.0)
    exposed = np.maximum(0.0, gradients - model.overlap * compute * 2 / 3)
    seconds: Floats = model.scale * ((compute + tensor + expert) * (1 + bubble) + exposed)
    return seconds


def flops_per_token(shape: ModelShape) -> float:
    """Forward and backward of one token: 6 per active parameter, and 6 l h s for causal attention."""
    alone = Layout.of(micro_batch=1)
    held = stage_parameters(shape, alone, first=False)
    active = float(held.matrices[0] + padded_vocab(shape, alone.tensor)[0] * shape.hidden)
    if shape.experts is not None:
        active += float(held.routed[0]) * shape.experts.top_k / shape.experts.num_experts
    return 6 * active + 6 * (shape.layers + shape.encoder_layers) * shape.width * shape.seq


def _expert_seconds(shape: ModelShape, layout: Layout, payload: Floats, slow: Floats) -> Floats:
    """Two exchanges there and back per mixture layer, forward and backward, slowed by the busiest rank."""
    if shape.experts is None:
        return np.zeros(len(layout))
    x = shape.experts
    away = payload / layout.tensor * x.top_k * x.imbalance * (layout.expert - 1) / layout.expert
    layers = shape.moe_before[-1] / layout.pipeline
    seconds: Floats = layout.num_micro * layers * 4 * away / slow
    return seconds
