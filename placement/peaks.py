"""What a trace of a real module finds: peaks by category, and what the allocator reserves for them."""

from __future__ import annotations

from dataclasses import dataclass

from placement.catalogue import GpuType
from placement.memory import SHIPPED, MemoryPrediction, Phase

CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
"""activations: all else that is live, temporaries included."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Live bytes at the moment of a peak, by category."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, kw_only=True)
class TracedMemory:
    """What the trace found. Bytes on one device; `depths` are the numbers of blocks that were traced."""

    forward_backward: Peak
    step: Peak
    blocks_over_requested: float
    """Allocator blocks over tensor bytes, from the replay of the deepest trace."""
    cached: float
    """Bytes held in segments beyond the blocks at the peak, the most that a replay showed."""
    depths: tuple[int, ...]
    extrapolated: bool

    @property
    def peak(self) -> Peak:
        return max(self.forward_backward, self.step, key=lambda peak: peak.total)

    @property
    def allocated(self) -> float:
        return self.peak.total

    @property
    def reserved(self) -> float:
        return self.allocated * self.blocks_over_requested + self.cached

    def prediction(self, gpu: GpuType, headroom: float = SHIPPED.headroom) -> MemoryPrediction:
        """On a card: with its library workspace, context and NCCL."""
        peak, blas = self.peak, 2.0 * gpu.blas_workspace_bytes
        phase: Phase = "optimizer" if peak is self.step else "backward"
        reserved = self.reserved + blas
        context = float(gpu.context_bytes + gpu.nccl_bytes)
        return MemoryPrediction(
            static=peak.parameters + peak.gradients + peak.optimizer,
            activations=peak.activations,
            logits=0.0,
            workspace=blas,
            context=context,
            allocated=peak.total + blas,
            reserved=reserved,
            nvml=reserved + context,
            allocated_upper=(peak.total + blas) * headroom,
            nvml_upper=reserved * headroom + context,
            peak_phase=phase,
            limiting_stage="last",
            confidence="extrapolated" if self.extrapolated else "known",
        )
