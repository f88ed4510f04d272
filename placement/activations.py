"""Bytes of activations, logits and temporaries, term by term, for the layers of one pipeline stage.

Terms follow "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., MLSys'23, section 4):
tensors kept for backward, 2 bytes each, 1 byte a dropout mask. What is split by t and what only by sequence parallelism
is kept apart. All results are float64 bytes, one entry a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.shapes import Floats, Layout, ModelShape, Setup, padded_vocab

SCORE_BYTES = {"flash": 0, "fused": 0, "unfused": 4, "unfused_fp32": 6}
"""Bytes per attention score kept for backward; dropout adds its 1-byte mask."""
LOGIT_BYTES = {"vocab_parallel": 6.0, "fused_vocab_parallel": 10.0, "fused_out_of_place": 14.0, "plain": 10.0}
"""Bytes per logit at the peak. vocab_parallel: bf16 logits and their fp32 softmax, in place. The fused form keeps one
more fp32 copy, and two where an older compiler does not reuse its input. plain: kept logits and 8 bytes of
temporaries."""


@dataclass(frozen=True)
class LayerBytes:
    """One layer on one rank: `kept` until backward, `scores` the part that selective recomputation drops, `input` the
    part that full recomputation keeps, `transient` the gradients alive while the layer runs backward."""

    kept: Floats
    scores: Floats
    input: Floats
    transient: Floats


def tokens(shape: ModelShape, layout: Layout, seq: int | None = None) -> Floats:
    """Tokens of one micro-batch on one context rank."""
    return (seq or shape.seq) / layout.context * layout.micro_batch


def sequence_split(layout: Layout) -> Floats:
    """t where sequence parallelism is on, else 1."""
    return np.where(layout.sequence_parallel > 0, layout.tensor, 1).astype(np.float64)


def dense_layer(shape: ModelShape, setup: Setup, layout: Layout) -> LayerBytes:
    """A decoder or encoder layer with a dense MLP."""
    n, t, split = tokens(shape, layout), layout.tensor, sequence_split(layout)
    up = 2 if shape.gated else 1
    attention, scores = self_attention(shape, setup, layout, shape.seq)
    mlp = n * ((4 + _mask(setup)) * shape.hidden / split + 2 * (1 + up) * shape.ffn_width / t)
    gradients = n * (2 * shape.hidden / split + 2 * (1 + up) * shape.ffn_width / t)
    weight_gradient = 0.0 if setup.fused_wgrad else 2 * shape.hidden * up * shape.ffn_width / t
    return LayerBytes(
        attention + mlp, scores, 2 * n * shape.hidden / split, np.maximum(gradients + weight_gradient, scores)
    )


def self_attention(shape: ModelShape, setup: Setup, layout: Layout, seq: int) -> tuple[Floats, Floats]:
    """(bytes without scores, bytes of scores) of norm, projections, attention and dropout."""
    n, t, split = tokens(shape, layout, seq), layout.tensor, sequence_split(layout)
    around = (4 + _mask(setup)) * shape.hidden / split
    scores = n * score_bytes(setup) * shape.heads * seq / t
    if shape.latent is None:
        inside = 2 * (2 * shape.width + 2 * shape.kv_width) / t
        if shape.qk_norm or shape.rotary:
            # The joint projection stays alive through its view of the values; queries and keys are written anew.
            inside = inside + 2 * (shape.width + shape.kv_width) / t
        return n * (around + inside), scores
    m, a = shape.latent, shape.heads
    # Compressed queries and keys before and after their norm; then per head the up-projected queries, the queries and
    # keys with the rotary part attached, the up-projected keys and values, the values, and the output.
    compressed = 2 * (2 * m.q_rank + 2 * m.kv_rank + m.rope_dim) / split
    query = m.qk_dim + m.rope_dim
    per_head = 2 * (3 * query + (m.qk_dim + m.v_dim) + 2 * m.v_dim)
    return n * (around + compressed + a * per_head / t), scores


def cross_attention(shape: ModelShape, setup: Setup, layout: Layout) -> tuple[Floats, Floats]:
    """(bytes without scores, bytes of scores) of a decoder layer's attention to the encoder's output."""
    n, t, split = tokens(shape, layout), layout.tensor, sequence_split(layout)
    own = n * ((4 + _mask(setup)) * shape.hidden / split + 4 * shape.width / t)
    keys = tokens(shape, layout, shape.encoder_seq) * 4 * shape.kv_width / t
    return own + keys, n * score_bytes(setup) * shape.heads * shape.encoder_seq / t


def mixture_layer(shape: ModelShape, setup: Setup, layout: Layout, copies: float) -> LayerBytes:
    """A layer whose MLP is a mixture of experts. `copies`: times the routed tokens are kept besides the experts' input,
    by permutation, exchange and weighting."""
    assert shape.experts is not None
    x, h, t, split = shape.experts, shape.hidden, layout.tensor, sequence_split(layout)
    n, up = tokens(shape, layout), 2 if shape.gated else 1
    attention, scores = self_attention(shape, setup, layout, shape.seq)
    local = n / split
    routed = local * layout.expert_tensor * x.top_k * x.imbalance
    experts = routed * (2 * h + 2 * (1 + up) * x.ffn / layout.expert_tensor) + copies * 2 * h * local * x.top_k
    router = local * x.num_experts * 9
    shared = n * 2 * (1 + up) * x.shared_ffn / t
    around = local * (4 + _mask(setup)) * h
    transient = routed * (2 * h + 2 * (1 + up) * x.ffn / layout.expert_tensor)
    return LayerBytes(
        attention + around + experts + router + shared, scores, 2 * local * h, np.maximum(transient, scores)
    )


def score_bytes(setup: Setup) -> int:
    """Bytes kept per attention score."""
    kernel = SCORE_BYTES[setup.attention]
    return kernel + (1 if kernel and setup.attention_dropout > 0 else 0)


def logit_bytes(shape: ModelShape, setup: Setup, layout: Layout) -> Floats:
    """Logits and loss at the end of the last stage's forward pass. Earlier depths of multi-token prediction keep their
    fp32 softmax."""
    per_logit = 10.0 / setup.loss_chunks if setup.loss == "chunked" else LOGIT_BYTES[setup.loss]
    count = tokens(shape, layout) * padded_vocab(shape, layout.tensor) / layout.tensor
    return count * (per_logit + 4.0 * shape.mtp_depth)


def head_input_bytes(shape: ModelShape, layout: Layout) -> Floats:
    """Input and output of the last norm, and the gathered input of the output matrix."""
    split = sequence_split(layout)
    gathered = np.where(split > 1, 2.0, 0.0)
    transform = 8.0 if shape.head_transform else 0.0
    return tokens(shape, layout) * shape.hidden * (4 / split + gathered + transform)


def in_flight(layout: Layout, *, first: bool) -> Floats:
    """Micro-batches whose activations a stage holds, in units of its whole stage (interleaved: a fraction counts
    chunks). 1F1B (Narayanan et al., SC'21): stage r of p holds p - r."""
    p, v, m = layout.pipeline, layout.virtual, layout.num_micro
    behind = p - 1 if first else np.zeros_like(p)
    plain = np.minimum(behind + 1, m)
    interleaved = np.minimum(2 * behind + (v - 1) * p + 1, m * v) / v
    return np.where((v > 1) & (p > 1), interleaved, plain).astype(np.float64)


def mask_bytes(shape: ModelShape, setup: Setup, layout: Layout) -> Floats:
    """The loader's byte mask of one micro-batch."""
    if not setup.dense_mask:
        return np.zeros(len(layout))
    seq = max(shape.seq, shape.encoder_seq)
    return tokens(shape, layout, seq) * seq


def _mask(setup: Setup) -> int:
    return 1 if setup.hidden_dropout > 0 else 0
