"""How much GPU memory a training plan needs, from first principles, for all plans of a job at once.

Three truths are kept apart. *allocated*: live tensor bytes (torch.cuda.max_memory_allocated). *reserved*: segments the
allocator holds. *nvml*: reserved plus CUDA context and NCCL; the card runs out on this one. `upper` is the centre times
the headroom, and feasibility compares `nvml_upper` with the card.

The job's peak is the maximum over the first stage (most micro-batches in flight), the last stage (logits) and the
optimizer step. Constants that first principles do not give are in `Calibration`; `placement.calibrate` fits them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from placement.activations import (
    LayerBytes,
    cross_attention,
    dense_layer,
    head_input_bytes,
    in_flight,
    logit_bytes,
    mask_bytes,
    mixture_layer,
    sequence_split,
    tokens,
)
from placement.catalogue import MIB, GpuType
from placement.shapes import Floats, Layout, ModelShape, Parameters, Setup, moe_layers, stage_parameters

Phase = Literal["loss", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("loss", "backward", "optimizer")
Stage = Literal["first", "last"]
STAGES: tuple[Stage, ...] = ("first", "last")
Confidence = Literal["measured", "known", "extrapolated"]

STRICT_BLAS_BYTES = 32 * MIB
"""cuBLAS workspace a stream and thread under CUBLAS_WORKSPACE_CONFIG=:4096:8."""
GROUPED_STREAMS = 4
"""Streams, each with a workspace of the kernel library, that a grouped matrix product runs on."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What is measured, not derived. The defaults are the prior that a fit starts from; `SHIPPED` is its result."""

    slack_bytes: float = 12.0 * MIB
    """Remainders the allocator does not split, small tensors, the batch."""
    plain_layer_bytes: float = 18.0 * MIB
    """Buffers of plain torch layers where no kernel library runs."""
    boundary_tensors: float = 2.0
    """Activations in transit between stages, in units of a layer's input."""
    moe_slack_bytes: float = 20.0 * MIB
    expert_copies: float = 2.0
    """Times the routed tokens are kept by permutation, exchange and weighting."""
    reserved_over_allocated: float = 1.03
    """Segments held over live bytes; replaced by the allocator replay where a trace exists."""
    headroom: float = 1.10
    """99 % conformal quantile of measured over predicted, each class held out in turn: dense models."""
    mixture_headroom: float = 1.15
    """The same for mixtures of experts, whose peak moves with the router."""


@dataclass(frozen=True)
class StageMemory:
    """Allocated bytes of one pipeline stage, one entry a plan."""

    static: Floats
    activations: Floats
    logits: Floats
    workspace: Floats
    """Library workspaces, allocator slack, tensors in transit, masks, temporaries of the phase."""
    phase: NDArray[np.int64]
    """Index into PHASES."""

    @property
    def allocated(self) -> Floats:
        return self.static + self.activations + self.logits + self.workspace


@dataclass(frozen=True)
class MemoryTable:
    """Prediction for every plan of one job class on one GPU type, bytes per GPU."""

    first: StageMemory
    last: StageMemory
    gpu: GpuType
    extra: int
    """Bytes of other parts, the same for every plan."""
    headroom: float
    reserved_over_allocated: float
    factor: float = 1.0
    """What recorded runs multiply the centre with."""

    @property
    def allocated(self) -> Floats:
        return (np.maximum(self.first.allocated, self.last.allocated) + self.extra) * self.factor

    @property
    def reserved(self) -> Floats:
        return self.allocated * self.reserved_over_allocated

    @property
    def nvml(self) -> Floats:
        return self.reserved + self.gpu.context_bytes + self.gpu.nccl_bytes

    @property
    def nvml_upper(self) -> Floats:
        return self.reserved * self.headroom + self.gpu.context_bytes + self.gpu.nccl_bytes

    def __len__(self) -> int:
        return len(self.first.static)

    def __iter__(self) -> Iterator[MemoryPrediction]:
        return (self.prediction(index) for index in range(len(self)))

    def prediction(self, index: int = 0, confidence: Confidence = "known") -> MemoryPrediction:
        """One plan as plain numbers."""
        on_first = bool(self.first.allocated[index] > self.last.allocated[index])
        stage = self.first if on_first else self.last
        allocated = float(self.allocated[index])
        return MemoryPrediction(
            static=float(stage.static[index]) * self.factor,
            activations=float(stage.activations[index]) * self.factor,
            logits=float(stage.logits[index]) * self.factor,
            workspace=(float(stage.workspace[index]) + self.extra) * self.factor,
            context=float(self.gpu.context_bytes + self.gpu.nccl_bytes),
            allocated=allocated,
            reserved=float(self.reserved[index]),
            nvml=float(self.nvml[index]),
            allocated_upper=allocated * self.headroom,
            nvml_upper=float(self.nvml_upper[index]),
            peak_phase=PHASES[int(stage.phase[index])],
            limiting_stage="first" if on_first else "last",
            confidence=confidence,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes per GPU of one plan, at the limiting stage. static + activations + logits + workspace = allocated."""

    static: float
    activations: float
    logits: float
    workspace: float
    context: float
    """CUDA context and NCCL, outside torch."""
    allocated: float
    reserved: float
    nvml: float
    allocated_upper: float
    nvml_upper: float
    peak_phase: Phase
    limiting_stage: Stage
    confidence: Confidence

    def fits(self, gpu: GpuType) -> bool:
        """Whether the upper bound is within the card's total."""
        return self.nvml_upper <= gpu.memory_bytes

    def corrected(self, factor: float, headroom: float) -> MemoryPrediction:
        """Scaled by a learned factor, with the upper bounds at `headroom` over the new centre."""
        scaled = {
            name: getattr(self, name) * factor
            for name in ("static", "activations", "logits", "workspace", "allocated", "reserved")
        }
        return replace(
            self,
            **scaled,
            nvml=scaled["reserved"] + self.context,
            allocated_upper=scaled["allocated"] * headroom,
            nvml_upper=scaled["reserved"] * headroom + self.context,
            confidence="measured",
        )


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes per parameter: weight, gradient, optimizer state with master weights, and what only the step needs."""

    weight: int
    gradient: int
    state: int
    step: int = 0


OPTIMIZER_BYTES: dict[str, OptimizerBytes] = {
    "adam": OptimizerBytes(2, 4, 12),
    "adam_low_grads": OptimizerBytes(2, 2, 12),
    "adam_fp16": OptimizerBytes(2, 2, 12, step=4),
    "adam_fp32": OptimizerBytes(4, 4, 8),
    "adam_bf16": OptimizerBytes(2, 2, 4),
    "sgd": OptimizerBytes(2, 4, 4),
    "muon": OptimizerBytes(2, 4, 12),
}
MUON_STATE_SAVED = 4
"""Muon keeps a momentum only for matrices: no second moment (embeddings, norms and biases stay with Adam)."""


def predict(
    shape: ModelShape, setup: Setup, layout: Layout, gpu: GpuType, calibration: Calibration | None = None
) -> MemoryTable:
    """Memory of every plan in `layout` on cards of type `gpu`. Plans of one call share shape and setup.

    Assumes layers dealt evenly over stages. An encoder-decoder model with p > 1 is taken to give each stage its share
    of both.
    """
    constants = calibration or SHIPPED
    layers = _stage_layers(shape, setup, layout, constants)
    first = _stage(shape, setup, layout, gpu, constants, layers, first=True)
    last = _stage(shape, setup, layout, gpu, constants, layers, first=False)
    headroom = constants.headroom if shape.experts is None else constants.mixture_headroom
    return MemoryTable(first, last, gpu, setup.extra_bytes, headroom, constants.reserved_over_allocated)


def static_bytes(parameters: Parameters, setup: Setup, layout: Layout) -> tuple[Floats, Floats]:
    """(bytes held all the time, bytes the optimizer step adds). Routed experts are sharded over their own group."""
    kind = OPTIMIZER_BYTES[setup.optimizer]
    group = layout.data * layout.context
    shards = np.maximum(1, group // setup.optimizer_replicas)
    expert_shards = np.maximum(1, group * layout.tensor // (layout.expert * layout.expert_tensor))
    saved = MUON_STATE_SAVED if setup.optimizer == "muon" else 0
    held = np.zeros(len(layout))
    step = np.zeros(len(layout))
    for count, ranks, state in (
        (parameters.matrices, shards, kind.state - saved),
        (parameters.rest, shards, kind.state),
        (parameters.routed, expert_shards, kind.state - saved),
    ):
        by_stage = [np.where(layout.sharding >= stage, ranks, 1) for stage in (1, 2, 3)]
        held = held + count * (kind.weight / by_stage[2] + kind.gradient / by_stage[1] + state / by_stage[0])
        step = step + count * kind.step / by_stage[0]
    fp8_copies = 2 * (parameters.matrices + parameters.routed) if setup.fp8 else 0.0
    return held + fp8_copies, step


@dataclass(frozen=True)
class _Layers:
    """Per-layer bytes of the kinds of layer the model has, before they are counted per stage."""

    dense: LayerBytes
    mixture: LayerBytes | None
    encoder: LayerBytes | None


def _stage_layers(shape: ModelShape, setup: Setup, layout: Layout, constants: Calibration) -> _Layers:
    dense = dense_layer(shape, setup, layout)
    mixture = encoder = None
    if shape.experts is not None:
        mixture = mixture_layer(shape, setup, layout, constants.expert_copies)
    if shape.encoder_layers:
        encoder = dense_layer(replace(shape, seq=shape.encoder_seq), setup, layout)
        kept, scores = cross_attention(shape, setup, layout)
        dense = replace(dense, kept=dense.kept + kept, scores=dense.scores + scores)
    return _Layers(dense, mixture, encoder)


def _stage(
    shape: ModelShape,
    setup: Setup,
    layout: Layout,
    gpu: GpuType,
    constants: Calibration,
    layers: _Layers,
    *,
    first: bool,
) -> StageMemory:
    alone = layout.pipeline == 1
    parameters = stage_parameters(shape, layout, first=first)
    held, step = static_bytes(parameters, setup, layout)
    held = held + _gathered_layers(shape, setup, layout, parameters)
    counts = _layer_counts(shape, layout, first=first)
    flight = in_flight(layout, first=first)
    kept, recomputed, transient = _kept(layers, counts, layout, setup)
    split = sequence_split(layout)
    layer_input = 2 * tokens(shape, layout) * shape.hidden / split
    dropout = 1.0 if setup.hidden_dropout > 0 else 0.0
    embedding = np.where(alone | first, tokens(shape, layout) * shape.hidden * dropout / split, 0.0)
    activations = flight * kept + embedding
    fixed = library_bytes(shape, setup, gpu, constants) + mask_bytes(shape, setup, layout)
    fixed = fixed + np.where(alone, 0.0, constants.boundary_tensors * layer_input)
    if setup.attention == "fused":
        fixed = fixed + gpu.attention_slack_bytes * flight * shape.layers / layout.pipeline
    logits, head = np.zeros(len(layout)), np.zeros(len(layout))
    if not first:
        logits = logit_bytes(shape, setup, layout)
        head = head_input_bytes(shape, layout)
        if setup.fused_wgrad:
            # Autograd wants a gradient of the vocabulary matrix beside the one accumulated in place.
            fixed = fixed + 2 * parameters.head
        if setup.deferred_head_grad:
            activations = activations + _deferred(shape, setup, layout, parameters)
    at_loss, at_backward = logits + head, recomputed + transient
    backward = at_backward > at_loss
    in_step = step > np.maximum(at_loss, at_backward) + activations
    return StageMemory(
        static=held,
        activations=np.where(in_step, 0.0, activations + np.where(backward, recomputed, 0.0)),
        logits=np.where(backward | in_step, 0.0, logits),
        workspace=fixed + np.where(in_step, step, np.where(backward, transient, head)),
        phase=np.where(in_step, 2, np.where(backward, 1, 0)),
    )


def _layer_counts(shape: ModelShape, layout: Layout, *, first: bool) -> tuple[Floats, Floats, Floats]:
    """(dense, mixture, encoder) layers on the stage, the layers of multi-token prediction included."""
    mixture = moe_layers(shape, layout, first=first)
    dense = shape.layers / layout.pipeline - mixture
    if not first and shape.mtp_depth:
        if shape.experts is not None and shape.moe_before[-1] > shape.moe_before[-2]:
            mixture = mixture + shape.mtp_depth
        else:
            dense = dense + shape.mtp_depth
    return dense, mixture, shape.encoder_layers / layout.pipeline


def _kept(
    layers: _Layers, counts: tuple[Floats, Floats, Floats], layout: Layout, setup: Setup
) -> tuple[Floats, Floats, Floats]:
    """(bytes a micro-batch keeps on the stage, bytes recomputed at once, transient of the backward pass)."""
    kept = np.zeros(len(layout))
    recomputed = np.zeros(len(layout))
    transient = np.zeros(len(layout))
    selective, full = layout.recompute == 1, layout.recompute == 2
    for layer, count in zip((layers.dense, layers.mixture, layers.encoder), counts, strict=True):
        if layer is None:
            continue
        whole = layer.kept + layer.scores
        stored = np.where(full, layer.input / setup.recompute_layers, np.where(selective, layer.kept, whole))
        again = np.where(full, setup.recompute_layers * whole, np.where(selective, layer.scores, 0.0))
        present = count > 0
        kept = kept + count * stored
        recomputed = np.where(present, np.maximum(recomputed, again), recomputed)
        transient = np.where(present, np.maximum(transient, layer.transient), transient)
    return kept, recomputed, transient


def _gathered_layers(shape: ModelShape, setup: Setup, layout: Layout, parameters: Parameters) -> Floats:
    """Unsharded weights of two layers and gradients of one, where parameters are sharded."""
    kind = OPTIMIZER_BYTES[setup.optimizer]
    per_layer = (parameters.matrices + parameters.routed) * layout.pipeline / (shape.layers + shape.encoder_layers)
    largest = np.maximum(per_layer, parameters.head)
    return np.where(layout.sharding == 3, largest * (2 * kind.weight + kind.gradient), 0.0)


def _deferred(shape: ModelShape, setup: Setup, layout: Layout, parameters: Parameters) -> Floats:
    """Inputs of the output matrix and gradients of its logits that wait for the drain of the pipeline."""
    waiting = np.minimum(layout.num_micro - 1, layout.pipeline)
    width = parameters.head / shape.hidden + shape.hidden
    return np.where(layout.pipeline > 1, waiting * 2 * tokens(shape, layout) * width, 0.0)


def library_bytes(shape: ModelShape, setup: Setup, gpu: GpuType, constants: Calibration) -> float:
    """Workspaces and slack that do not depend on the plan. cuBLAS keeps one workspace for each of the two threads that
    run forward and backward."""
    blas = max(gpu.blas_workspace_bytes, STRICT_BLAS_BYTES if setup.strict_blas else 0)
    total = 2 * blas + constants.slack_bytes
    total += gpu.layer_library_workspace_bytes if setup.kernel_library else constants.plain_layer_bytes
    if shape.experts is not None:
        total += constants.moe_slack_bytes
        if shape.experts.grouped_gemm:
            total += GROUPED_STREAMS * gpu.layer_library_workspace_bytes
    return total


SHIPPED = Calibration(
    slack_bytes=7.39 * MIB,
    plain_layer_bytes=21.08 * MIB,
    boundary_tensors=1.923,
    moe_slack_bytes=22.94 * MIB,
    expert_copies=2.873,
    headroom=1.104,
    mixture_headroom=1.145,
)
"""The result of `placement.calibrate.fit` on 301 public Megatron-LM runs in 18 shape classes."""
