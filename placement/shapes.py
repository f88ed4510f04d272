"""What is trained and how: the shape of a transformer, the training setup, and how many parameters one rank holds.

Symbols follow the activation-recomputation paper (Korthikanti et al., MLSys'23): h hidden, a heads, g key/value groups,
f MLP width, s sequence, b micro-batch, t/p/c/e the tensor, pipeline, context and expert degrees. Every function that
takes a `Layout` works on arrays: one entry a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from collectives.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

Attention = Literal["flash", "fused", "unfused", "unfused_fp32"]
"""flash: FlashAttention; fused: the kernel library's own choice; unfused: separate products and softmax; unfused_fp32:
the same with the softmax kept in fp32."""
Loss = Literal["vocab_parallel", "fused_vocab_parallel", "fused_out_of_place", "plain", "chunked"]
Optimizer = Literal["adam", "adam_low_grads", "adam_fp16", "adam_fp32", "adam_bf16", "sgd", "muon"]
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


class ShapeError(ConfigError):
    """A model shape or layout contradicts itself; the message names the numbers."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks and per-head widths, in elements."""

    q_rank: int
    """0: queries are projected directly."""
    kv_rank: int
    qk_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture-of-experts layer: counts and widths in elements."""

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    """Width of the shared expert; 0: none."""
    grouped_gemm: bool = True
    """One grouped kernel over all local experts; False: one expert after the other."""
    imbalance: float = 1.0
    """Tokens of the busiest rank over the mean, from the router's history."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer. `layers` are the decoder's; encoder fields are 0 for a decoder-only or encoder-only model."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    ffn: int = 0
    """0: 4h."""
    groups: int = 0
    """Key/value groups; 0: as many as heads."""
    head_dim: int = 0
    """0: h/a."""
    gated: bool = False
    bias: bool = True
    norm: Literal["layer", "rms"] = "layer"
    learned_positions: int = 0
    """Rows of the position table; 0: rotary or none."""
    rotary: bool = False
    tied: bool = True
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this times t."""
    qk_norm: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    moe_pattern: tuple[bool, ...] = ()
    """Which layers are mixtures of experts; empty: all, if `experts` is given."""
    mtp_depth: int = 0
    """Multi-token prediction: each depth adds a layer and a set of logits on the last stage."""
    encoder_layers: int = 0
    encoder_seq: int = 0
    head_transform: bool = False
    """BERT: a dense layer with norm before the output matrix, a pooler and segment embeddings."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} = {getattr(self, name)}: a model needs at least 1")
        if self.encoder_layers and self.encoder_seq < 1:
            raise ShapeError(f"{self.encoder_layers} encoder layers without encoder_seq, the encoder's tokens")
        if self.head_dim == 0 and self.hidden % self.heads:
            raise ShapeError(f"hidden {self.hidden} is not a multiple of heads {self.heads}; give head_dim")
        if self.groups and self.heads % self.groups:
            raise ShapeError(f"{self.heads} heads cannot share {self.groups} key/value groups")
        if self.moe_pattern and (self.experts is None or len(self.moe_pattern) != self.layers):
            raise ShapeError(f"moe_pattern has {len(self.moe_pattern)} entries for {self.layers} layers, or no experts")

    @property
    def width(self) -> int:
        """Width of the queries of all heads, a * head_dim."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Width of keys (or values) of all groups."""
        return self.width * (self.groups or self.heads) // self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @cached_property
    def moe_before(self) -> Ints:
        """moe_before[i] = number of mixture layers among the first i; length layers + 1."""
        if self.experts is None:
            return np.zeros(self.layers + 1, np.int64)
        pattern = self.moe_pattern or (True,) * self.layers
        return np.concatenate([[0], np.cumsum(np.asarray(pattern, np.int64))])


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How it is trained, apart from the degrees."""

    global_batch: int = 1
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    attention: Attention = "fused"
    loss: Loss = "vocab_parallel"
    loss_chunks: int = 8
    """Only for `chunked`."""
    optimizer: Optimizer = "adam"
    fp8: bool = False
    dense_mask: bool = False
    """The loader builds a [b, 1, s, s] byte mask."""
    fused_wgrad: bool = True
    """Weight gradients are accumulated inside the matrix product; False: each needs a low-precision temporary."""
    strict_blas: bool = False
    """Deterministic mode: cuBLAS keeps eight workspaces of 4 MiB per stream and thread."""
    kernel_library: bool = True
    """Layers come from a fused kernel library with a workspace of its own; False: plain torch layers."""
    recompute_layers: int = 1
    """Full recomputation: layers per checkpoint."""
    deferred_head_grad: bool = False
    """The output matrix's gradient waits for the pipeline to drain, holding the gradients of the logits."""
    optimizer_replicas: int = 1
    """Copies of the sharded optimizer state: it is split over data * context / this."""
    extra_bytes: int = 0
    """Buffers of other parts, such as compression residuals, per rank."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel degrees and what depends on the plan, one entry a plan (int64 arrays of one length, or scalars)."""

    data: Ints
    tensor: Ints
    pipeline: Ints
    virtual: Ints
    context: Ints
    expert: Ints
    expert_tensor: Ints
    micro_batch: Ints
    num_micro: Ints
    sequence_parallel: Ints
    """0 or 1."""
    sharding: Ints
    """0 none, 1 optimizer, 2 and gradients, 3 and parameters (ZeRO stages; 1 = Megatron's distributed optimizer)."""
    recompute: Ints
    """0 none, 1 selective (attention scores), 2 full."""

    @staticmethod
    def of(
        *,
        micro_batch: int | Ints,
        num_micro: int | Ints = 1,
        data: int | Ints = 1,
        tensor: int | Ints = 1,
        pipeline: int | Ints = 1,
        virtual: int | Ints = 1,
        context: int | Ints = 1,
        expert: int | Ints = 1,
        expert_tensor: int | Ints | None = None,
        sequence_parallel: int | Ints = 0,
        sharding: int | Ints = 0,
        recompute: int | Ints = 0,
    ) -> Layout:
        """Broadcast scalars and arrays to one length. `expert_tensor` defaults to `tensor`."""
        columns = np.broadcast_arrays(
            *(
                np.atleast_1d(np.asarray(column, np.int64))
                for column in (
                    data,
                    tensor,
                    pipeline,
                    virtual,
                    context,
                    expert,
                    tensor if expert_tensor is None else expert_tensor,
                    micro_batch,
                    num_micro,
                    sequence_parallel,
                    sharding,
                    recompute,
                )
            )
        )
        layout = Layout(**{field.name: column for field, column in zip(fields(Layout), columns, strict=True)})
        for field in fields(Layout)[:9]:
            low = getattr(layout, field.name).min(initial=1)
            if low < 1:
                raise ShapeError(f"{field.name} = {low}: degrees, micro-batch and their number are at least 1")
        return layout

    def __len__(self) -> int:
        return len(self.data)

    @property
    def world(self) -> Ints:
        """GPUs of the plan."""
        return self.data * self.tensor * self.pipeline * self.context

    def take(self, keep: NDArray[np.bool_] | Ints) -> Layout:
        """The plans at these places."""
        return Layout(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})


@dataclass(frozen=True)
class Parameters:
    """Parameters one rank holds, in elements, one entry a plan."""

    matrices: Floats
    """Weights of layers outside routed experts that are matrices."""
    rest: Floats
    """Embeddings, output matrix, norms, biases."""
    routed: Floats
    """Weights of routed experts; sharded over their own data-parallel group."""
    head: Floats
    """Of `rest`: one vocabulary matrix."""

    @property
    def total(self) -> Floats:
        return self.matrices + self.rest + self.routed


def padded_vocab(shape: ModelShape, tensor: Ints) -> Ints:
    """Vocabulary rounded up to a multiple of `vocab_multiple` * t."""
    unit = shape.vocab_multiple * tensor
    return -(-shape.vocab // unit) * unit


def layer_parameters(shape: ModelShape, layout: Layout, *, cross: bool = False) -> tuple[Floats, Floats]:
    """(matrix elements, vector elements) of one dense layer on one rank; `cross` adds cross attention."""
    h, t = shape.hidden, layout.tensor
    matrices, vectors = attention_parameters(shape, layout)
    up = 2 if shape.gated else 1
    matrices = matrices + (up + 1) * h * shape.ffn_width / t
    vectors = vectors + (h + up * shape.ffn_width / t if shape.bias else 0.0)
    vectors = vectors + 2 * _norm(shape, h)
    if cross:
        matrices = matrices + 2 * h * (shape.width + shape.kv_width) / t
        vectors = vectors + (h + (shape.width + 2 * shape.kv_width) / t if shape.bias else 0.0) + _norm(shape, h)
    return matrices, vectors


def attention_parameters(shape: ModelShape, layout: Layout) -> tuple[Floats, Floats]:
    """(matrix, vector) elements of self-attention on one rank, without the norms around it."""
    h, t = shape.hidden, layout.tensor
    if shape.latent is None:
        matrices = 2 * h * (shape.width + shape.kv_width) / t
        vectors = (h + (shape.width + 2 * shape.kv_width) / t) if shape.bias else np.zeros(len(layout))
        return matrices, vectors + (4 * _norm(shape, shape.width // shape.heads) / 2 if shape.qk_norm else 0)
    m = shape.latent
    query_in = m.q_rank or h
    # The down projections are computed whole on every tensor rank; only what is per head is split.
    down = h * m.q_rank + h * (m.kv_rank + m.rope_dim)
    per_head = query_in * (m.qk_dim + m.rope_dim) + m.kv_rank * (m.qk_dim + m.v_dim) + h * m.v_dim
    return down + shape.heads * per_head / t, np.full(len(layout), _norm(shape, m.q_rank + m.kv_rank))


def moe_parameters(shape: ModelShape, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """(matrix, vector, routed) elements of one mixture layer on one rank; (0, 0, 0) arrays without experts."""
    if shape.experts is None:
        zero = np.zeros(len(layout))
        return zero, zero, zero
    x, h = shape.experts, shape.hidden
    matrices, vectors = attention_parameters(shape, layout)
    up = 2 if shape.gated else 1
    matrices = matrices + (up + 1) * h * x.shared_ffn / layout.tensor + h * x.num_experts
    routed = x.num_experts / layout.expert * (up + 1) * h * x.ffn / layout.expert_tensor
    return matrices, vectors + 2 * _norm(shape, h), routed


def stage_parameters(shape: ModelShape, layout: Layout, *, first: bool) -> Parameters:
    """Parameters of the first or the last pipeline stage. Layers are dealt evenly, the earlier ones to the first."""
    h, t, p = shape.hidden, layout.tensor, layout.pipeline
    per_stage = shape.layers / p
    moe = moe_layers(shape, layout, first=first)
    dense_matrix, dense_vector = layer_parameters(shape, layout, cross=shape.encoder_layers > 0)
    moe_matrix, moe_vector, moe_routed = moe_parameters(shape, layout)
    matrices = (per_stage - moe) * dense_matrix + moe * moe_matrix
    vectors = (per_stage - moe) * dense_vector + moe * moe_vector
    routed = moe * moe_routed
    if shape.encoder_layers:
        encoder_matrix, encoder_vector = layer_parameters(shape, layout)
        matrices = matrices + shape.encoder_layers / p * encoder_matrix
        vectors = vectors + shape.encoder_layers / p * encoder_vector + _norm(shape, h)
    head = padded_vocab(shape, t) * h / t
    alone = p == 1
    has_input = alone | first
    rest = vectors + np.where(has_input, head + shape.learned_positions * h, 0.0)
    if not first:
        rest = rest + _norm(shape, h) + np.where(alone & shape.tied, 0.0, head)
        last_is_mixture = shape.experts is not None and bool(shape.moe_before[-1] > shape.moe_before[-2])
        extra_matrix = (moe_matrix if last_is_mixture else dense_matrix) + 2 * h * h / t
        matrices = matrices + shape.mtp_depth * extra_matrix
        rest = rest + shape.mtp_depth * (moe_vector if last_is_mixture else dense_vector) + 3 * shape.mtp_depth * h
        routed = routed + (shape.mtp_depth * moe_routed if last_is_mixture else 0.0)
        # The next token's embedding is looked up on the last stage as well.
        rest = rest + np.where(alone | (shape.mtp_depth == 0) | shape.tied, 0.0, head)
    elif shape.head_transform:
        rest = rest + np.where(alone, 0.0, 2 * h)
    if shape.head_transform and not first:
        matrices = matrices + 2 * h * h
        rest = rest + 8 * h
    return Parameters(matrices, rest, routed, head)


def moe_layers(shape: ModelShape, layout: Layout, *, first: bool) -> Floats:
    """Mixture layers on the first or the last stage."""
    per_stage = shape.layers // layout.pipeline
    before = shape.moe_before
    if first:
        contiguous = before[per_stage]
    else:
        contiguous = before[-1] - before[shape.layers - per_stage]
    # Interleaved chunks take layers from all over the model, so that each stage sees the average.
    average = before[-1] / layout.pipeline
    return np.where(layout.virtual > 1, average, contiguous).astype(np.float64)


def _norm(shape: ModelShape, width: int) -> int:
    return width * (2 if shape.norm == "layer" else 1)
