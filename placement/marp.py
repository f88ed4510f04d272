"""Two published memory formulas, kept as baselines: Frenzy's MARP and Megatron-LM's own estimate. Bytes per GPU."""

from __future__ import annotations

import numpy as np

from placement.shapes import Floats, Layout, ModelShape, Setup, padded_vocab


def marp(shape: ModelShape, layout: Layout) -> Floats:
    """MARP as far as it can be rebuilt from Frenzy (arXiv 2412.14479): 20 bytes a parameter over t, and fp16 activations
    of unfused attention without recomputation.

    It knows neither pipeline, context nor sequence parallelism, neither sharded optimizers nor logits.
    """
    h, s, layers, t = shape.hidden, shape.seq, shape.layers + shape.encoder_layers, layout.tensor
    parameters = shape.vocab * h + layers * (12 * h * h + 13 * h)
    activations = s * layout.micro_batch * h * layers * (10 + 24 / t + 5 * shape.heads * s / (h * t))
    return 20 * parameters / t + activations


def megatron_formula(shape: ModelShape, setup: Setup, layout: Layout) -> Floats:
    """Weights, optimizer and activations of the most loaded shard, by the formulas of Korthikanti et al. (MLSys'23):
    selective recomputation is taken for granted, logits count only with sequence parallelism on a single stage.
    """
    h, t, p, v = shape.hidden, layout.tensor, layout.pipeline, layout.virtual
    experts = shape.experts.num_experts if shape.experts else 1
    ffn = shape.experts.ffn if shape.experts else shape.ffn_width
    layers = shape.layers + shape.encoder_layers
    mlp = (1.5 if shape.gated else 1.0) * experts * ffn / h
    attention = (1 + shape.kv_width / shape.width) * shape.width / h
    block = 2 * layers * h * h * (attention + mlp + 2 / h + 1 / (layers * h))
    vocabulary = padded_vocab(shape, t) * h
    loaded = (block / p + vocabulary * np.where((p == 1) & (not shape.tied), 2, 1)) / t
    state = np.where(layout.sharding > 0, 6 + 12 / (layout.data * layout.context), 18)
    tokens = shape.seq * layout.micro_batch
    in_flight: Floats = np.where(v > 1, 1 + (p - 1) / (p * v), np.minimum(1.0, layout.num_micro / p))
    in_flight = np.where(p > 1, in_flight, 1.0).astype(np.float64)
    split = (18 + 4 * shape.ffn_width / h) / t
    unsplit = 10 + (8 + 4 * shape.ffn_width / h) / t
    is_split = (layout.sequence_parallel > 0) | (t == 1)
    activations = tokens * h * layers * np.where(is_split, split, unsplit) * in_flight
    activations = activations + (8 * tokens + tokens * h) * p * in_flight / t
    activations = activations + np.where((p == 1) & is_split, 4 * tokens * h * (1 + vocabulary / h**2) / t, 0)
    total: Floats = loaded * state + activations / layout.context
    return total
