"""Averages dense gradients with the codecs that the planner chose, and keeps what they lost for the next step.

A bucket is cut into stretches of parameters with the same allowed codecs. Small exempt parameters inside a stretch are
taken out, reduced exactly as one message, and put back; in the stretch they count as zeros. What always holds: the
first step is plain (DDP forms its buckets anew after it), residuals follow parameter names, a step whose result is not
finite anywhere leaves every residual as it was, and results are the same bytes on every rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives.channel import RoleRecord
from collectives.codec_cost import CodecSpeed, DenseLoad, codec_speeds, configured
from collectives.codecs import CODECS, ErrorBoundedSum
from collectives.codecs.codec import Codec, Flag, Residual
from collectives.codecs.hashing import derive_seed
from collectives.codecs.lowrank import PowerSGD
from collectives.cost import Link
from collectives.dense_planner import DensePlanner, Stretch
from collectives.feedback import ErrorFeedback, Layout
from collectives.packets import Workspace
from collectives.policy import DENSE_FIRST, Role, SyncPolicy
from collectives.reduce import homomorphic, native, one_shot, owner_span, two_hop, two_shot
from collectives.segments import Place, Segment, contiguous_runs, cut, exempt_pieces
from collectives.sparse.quantised import RowFeedback
from collectives.topology import Topology
from collectives.transport import Transport, all_gather_records

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SegmentReport:
    """One stretch of dense gradients: what reduces it, why, and what that took, as the ranks last agreed."""

    label: str
    names: tuple[str, ...]
    numel: int
    choice: str
    reason: str
    predicted_bytes: int
    observed_bytes: int
    predicted_s: float
    observed_s: float
    codec_s: float
    """Part of `predicted_s` that encoding and decoding take, by their measured speeds."""


class DenseReducer:
    """Averages flat buffers over one transport. Not thread-safe: buckets come in the same order on all ranks."""

    def __init__(self, transport: Transport, link: Link, policy: SyncPolicy, topology: Topology | None = None):
        self.transport, self.policy = transport, policy
        self.topology = topology or Topology.one_node(transport.size)
        self.planner = DensePlanner(link)
        self.feedback = ErrorFeedback(reversible=True, device=transport.device)
        self.rows = RowFeedback()
        """Residuals of sparse gradients, which share this reducer's steps."""
        self.powersgd = PowerSGD()
        self.was_skipped = False
        """The running step does not count: some result was not finite, or the user took it back."""
        self._step: int | None = None
        self._spaces: dict[str, Workspace] = {}
        self._speeds: dict[str, CodecSpeed] = {}
        self._cuts: dict[tuple[Any, ...], list[Segment]] = {}
        self._raw_bytes = self._wire_bytes = self._num_steps = self._num_nonfinite = self._num_underflows = 0

    # --- steps ---

    def open_step(self, step: int) -> None:
        """Settle the step before, if this is another one: its residuals count, or are taken back."""
        if step != self._step:
            self.close_step()
            self._step = step

    def close_step(self) -> None:
        """The running step is over."""
        if self._step is None:
            return
        if self.was_skipped:
            self.feedback.rollback()
            self.rows.rollback()
        else:
            self.feedback.commit()
            self.rows.commit()
        self._num_steps += 1
        self._step, self.was_skipped = None, False

    def use(self, policy: SyncPolicy) -> None:
        """Follow another policy from the next step on."""
        self.policy = policy
        self._cuts.clear()

    # --- one bucket ---

    def reduce(self, buffer: Tensor, places: Sequence[Place], step: int) -> None:
        """Average these parameters of a flat bucket in place; the rest of the buffer is left alone."""
        self.open_step(step)
        segments = self._segments(places, buffer) if step > 0 and self.transport.size > 1 else []
        planned = [(segment, stretch) for segment in segments if (stretch := self._stretch(segment, buffer, step))]
        for segment, stretch in planned:
            self._plan(stretch, step)
            if self.planner.choice(stretch.label).candidate.codec not in stretch.load.feedback:
                self.feedback.deliver(segment.layout, buffer[segment.start : segment.stop], self.transport.size)
        active = [(s, stretch) for s, stretch in planned if not self.planner.choice(stretch.label).is_off]
        if not active:
            self._reduce_plain(buffer, places, planned)
            return
        with exempt_pieces(buffer, places, [segment for segment, _ in planned]) as exempt:
            for segment, stretch in planned:
                self._reduce_segment(buffer, segment, stretch)
            for piece in exempt:
                self.transport.all_reduce("dense", piece, "mean")
                self._check_finite(piece)
                self._raw_bytes += piece.nbytes
                self._wire_bytes += piece.nbytes

    def _reduce_plain(
        self, buffer: Tensor, places: Sequence[Place], planned: Sequence[tuple[Segment, Stretch]]
    ) -> None:
        """The backend's own all-reduce of contiguous runs; each stretch is charged its share of the time."""
        runs = [buffer[start:stop] for start, stop in contiguous_runs(places)]
        started = time.perf_counter()
        for run in runs:
            self.transport.all_reduce("dense", run, "mean")
        seconds = time.perf_counter() - started
        num_bytes = sum(run.nbytes for run in runs)
        self._raw_bytes += num_bytes
        self._wire_bytes += num_bytes
        for run in runs:
            self._check_finite(run)
        for segment, stretch in planned:
            share = segment.numel * buffer.element_size() / num_bytes
            self._observe(stretch, share * seconds, round(share * stretch.load.raw_bytes))

    def _reduce_segment(self, buffer: Tensor, segment: Segment, stretch: Stretch) -> None:
        x, choice = buffer[segment.start : segment.stop], self.planner.choice(stretch.label)
        traffic, is_round = self.transport.traffic, self.planner.round_due(stretch.label)
        alone = choice.candidate.codec not in stretch.load.feedback or self.planner.is_first(stretch.label)
        exact = x.float() if self.planner.canary_due(stretch.label) else None
        if exact is not None:
            exact = exact.clone() if exact.data_ptr() == x.data_ptr() else exact
            self.transport.all_reduce("canary", exact, "mean")
        gradient_norm = float(torch.linalg.vector_norm(x, dtype=torch.float32)) if is_round else 0.0
        sent, started, flags = traffic.sent_bytes(), time.perf_counter(), Flag.NONE
        if choice.is_off:
            self.transport.all_reduce("dense", x, "mean")
        else:
            flags = self._compress(x, segment, stretch, choice.candidate.codec, choice.candidate.pattern)
        seconds, sent = time.perf_counter() - started, traffic.sent_bytes() - sent
        finite = Flag.NONFINITE not in flags
        self.was_skipped |= not finite
        self._num_nonfinite += not finite
        if Flag.UNDERFLOW in flags:
            self._num_underflows += 1
            if self._num_underflows == 1:
                logger.warning(
                    "gradient of %s: over 1 %% of its values became zero in %s; scale the loss up, or allow bf16 instead",
                    stretch.label,
                    choice.candidate.codec,
                )
        scale = self.transport.size / (2 * (self.transport.size - 1))
        self._raw_bytes += x.nbytes
        self._wire_bytes += round(sent * scale)
        error = 0.0
        if exact is not None and finite and alone:
            scale_of = float(torch.linalg.vector_norm(exact))
            error = float(torch.linalg.vector_norm(x.float() - exact)) / scale_of if scale_of > 0 else 0.0
        residual = 0.0
        if is_round and gradient_norm > 0 and choice.candidate.codec in stretch.load.feedback:
            lost = self.feedback.residual(segment.layout).update
            residual = float(torch.linalg.vector_norm(lost)) / gradient_norm
        self._observe(stretch, seconds, sent, error, residual, finite and Flag.UNDERFLOW not in flags)

    def _observe(
        self,
        stretch: Stretch,
        seconds: float,
        num_bytes: int,
        error: float = 0.0,
        residual: float = 0.0,
        finite: bool = True,
    ) -> None:
        self.planner.observe(
            stretch.label, seconds, num_bytes, relative_error=error, residual_ratio=residual, finite=finite
        )

    def _compress(self, x: Tensor, segment: Segment, stretch: Stretch, name: str, pattern: str) -> Flag:
        """Average x with this codec and pattern; adds and updates the residual where the codec carries one."""
        codec, transport, layout = configured(name, self.policy.density), self.transport, segment.layout
        residual = self.feedback.residual(layout) if name in stretch.load.feedback else None
        seed = derive_seed(0, self._step or 0, stretch.label)
        space = self._spaces.setdefault(stretch.label, Workspace(x.device))
        if pattern == "two_shot":
            owner = self._owner_residual(codec, layout, x.numel()) if residual is not None else None
            return two_shot(
                x,
                codec,
                transport,
                op="mean",
                residual=residual,
                owner_residual=owner,
                seed=seed,
                workspace=space,
            )
        if pattern == "one_shot":
            return one_shot(x, codec, transport, op="mean", residual=residual, seed=seed, workspace=space)
        if pattern == "homomorphic":
            assert isinstance(codec, ErrorBoundedSum)
            return homomorphic(x, codec, transport, op="mean", residual=residual, workspace=space)
        if pattern == "two_hop":
            local = self.topology.ranks_per_node
            inner = CODECS["int8b"] if name == "int4b" else codec
            return two_hop(
                x,
                inner,
                codec,
                transport,
                ranks_per_node=local,
                op="mean",
                residual=residual,
                seed=seed,
                workspace=space,
            )
        if pattern == "powersgd":
            return self._low_rank(x, segment, residual)
        return native(x, codec, transport, op="mean", seed=seed)

    def _owner_residual(self, codec: Codec, layout: Layout, numel: int) -> Residual:
        span = owner_span(numel, self.transport.size, self.transport.rank, codec)
        return self.feedback.owner_residual(layout, span)

    def _low_rank(self, x: Tensor, segment: Segment, residual: Residual | None) -> Flag:
        assert residual is not None
        flat = x.float()
        spans = {p.name: (p.start - segment.start, p.stop - segment.start) for p in segment.places}
        parts = {p.name: flat[slice(*spans[p.name])].view(p.shape) for p in segment.places if p not in segment.holes}
        residuals = {name: residual.part(*span) for name, span in spans.items()}
        flags = self.powersgd.all_reduce(parts, self.transport, residuals=residuals)
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat)
        return flags

    def _check_finite(self, reduced: Tensor) -> None:
        """A loss scaler will skip the whole step if any gradient is not finite, so all residuals must follow."""
        if (self.feedback.buckets or self.rows.tables) and not bool(torch.isfinite(reduced).all()):
            self.was_skipped = True

    # --- planning ---

    def _segments(self, places: Sequence[Place], buffer: Tensor) -> list[Segment]:
        key = (tuple(place.name for place in places), buffer.dtype)
        if key not in self._cuts:
            between = self.topology.spans_nodes
            codecs = {
                p.name: self.policy.codecs_of_gradient(p.name, p.shape, buffer.dtype, between_nodes=between)
                for p in places
            }
            supported = {name: tuple(c for c in cs if _supports(c, buffer)) for name, cs in codecs.items()}
            self._cuts[key] = cut(places, supported, buffer.element_size())
        return self._cuts[key]

    def _stretch(self, segment: Segment, buffer: Tensor, step: int) -> Stretch | None:
        """What the planner must know of a segment now, or None where nothing is allowed (yet)."""
        early = step < self.policy.dense_steps
        codecs = tuple(c for c in segment.codecs if not (early and c in DENSE_FIRST))
        if not codecs:
            return None
        load = DenseLoad(
            numel=segment.numel,
            itemsize=buffer.element_size(),
            size=self.transport.size,
            feedback=frozenset(c for c in codecs if self._carries_residual(c)),
            ranks_per_node=self.topology.ranks_per_node,
            budget_bytes=self.policy.budget_bytes,
            density=self.policy.density,
        )
        return Stretch(segment.label, codecs, load, self.policy.fixed)

    def _carries_residual(self, name: str) -> bool:
        if name == "powersgd":
            return True
        wanted = self.policy.error_feedback
        return CODECS[name].ef_default(self.policy.optimizer) if wanted is None else wanted

    def _plan(self, stretch: Stretch, step: int) -> None:
        """Decide anew where a round is due; all ranks come here at the same calls."""
        due = self.planner.round_due(stretch.label) or self.planner.needs_choice(stretch.label)
        if not due and step != self.policy.dense_steps:
            return
        missing = [name for name in stretch.codecs if name not in self._speeds]
        if missing:
            self._speeds |= codec_speeds(missing, self.transport)
        table = all_gather_records(self.transport, "metadata", self.planner.record(stretch.label))
        self.planner.settle(stretch.label, table)
        self.planner.decide(stretch, self._speeds)

    # --- what it did ---

    def record(self) -> RoleRecord:
        """The figures of dp_grad on this rank."""
        measured, exposure = self.planner.measured().values(), self.planner.exposure()
        steps = max(self._num_steps, 1)
        return RoleRecord(
            role=Role.DP_GRAD,
            raw_bytes=self._raw_bytes / steps,
            wire_bytes=self._wire_bytes / steps,
            ratio=self._raw_bytes / self._wire_bytes if self._wire_bytes else 1.0,
            predicted_ms=1e3 * sum(choice.predicted_s for choice, *_ in measured),
            observed_ms=1e3 * sum(seconds for _, seconds, *_ in measured),
            exposed_ms=1e3 * exposure.exposed_s if exposure else 0.0,
            exposed_share=exposure.share if exposure else 0.0,
            codec_ms=1e3 * sum(choice.candidate.codec_s for choice, *_ in measured),
            relative_error=max((error for *_, error, _ in measured), default=0.0),
            residual_ratio=max((ratio for *_, ratio in measured), default=0.0),
            nonfinite_calls=self._num_nonfinite,
            underflow_calls=self._num_underflows,
            fallbacks=len(self.planner.events),
            residual_bytes=self.feedback.num_bytes + self.rows.num_bytes,
            buffer_bytes=sum(space.num_bytes for space in self._spaces.values()),
            plan_hash=self.planner.plan_hash(),
        )

    def report(self) -> list[SegmentReport]:
        """One row per stretch, in the order of the buckets."""
        segments = {segment.label: segment for cuts in self._cuts.values() for segment in cuts}
        return [
            SegmentReport(
                label=label,
                names=tuple(place.name for place in segments[label].places if place not in segments[label].holes),
                numel=segments[label].numel,
                choice=choice.candidate.key,
                reason=choice.reason,
                predicted_bytes=choice.candidate.wire_bytes,
                observed_bytes=num_bytes,
                predicted_s=choice.predicted_s,
                observed_s=seconds,
                codec_s=choice.candidate.codec_s,
            )
            for label, (choice, seconds, num_bytes, *_) in self.planner.measured().items()
            if label in segments
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plan, residuals and factors; the residuals are this rank's own."""
        self.close_step()
        return {
            "plan": self.planner.state_dict(),
            "feedback": self.feedback.state_dict(),
            "rows": {name: table.clone() for name, table in self.rows.tables.items()},
            "powersgd": self.powersgd.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; what it lacks starts anew."""
        self._step, self.was_skipped = None, False
        if "plan" in state:
            self.planner.load_state_dict(state["plan"])
        self.feedback.load_state_dict(state.get("feedback", {}))
        self.rows.load(state.get("rows", {}))
        if "powersgd" in state:
            self.powersgd.load_state_dict(state["powersgd"])


def _supports(name: str, buffer: Tensor) -> bool:
    """Codecs work on fp32 and bf16 or fp16 go through it; low rank needs the residual in the gradient's own type."""
    return CODECS[name].supports(torch.float32, buffer.device) and (name != "powersgd" or buffer.is_cpu)
