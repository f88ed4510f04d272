"""One role's traffic over one group: which codec it takes there, and what that came to.

For roles whose tensors are moved or reduced once per call (FSDP, tensor and pipeline parallelism, outer steps). The
choice follows the model alone: link and codec speeds are measured once and agreed, so it is equal on all ranks without
another exchange, and the same size always takes the same codec.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from collectives.codec_cost import CodecSpeed, codec_speeds
from collectives.codecs import CODECS, Codec
from collectives.codecs.fp8 import Fp8Block
from collectives.codecs.hashing import derive_seed
from collectives.cost import Link, probe_link
from collectives.packets import Workspace
from collectives.policy import MIN_COMPRESSED_BYTES, Role, SyncPolicy
from collectives.topology import Topology, probe_topology
from collectives.torch_transport import TorchTransport
from collectives.transport import Transport

USE_BELOW = 0.9
MIN_SAVING_S = 20e-6

Movement = Literal["all_reduce", "once", "send"]
"""How often the bytes of a tensor cross a rank's link: 2(n-1)/n, (n-1)/n (reduce-scatter, all-gather), or once."""


@dataclass(frozen=True)
class RoleRecord:
    """What one role's tensors cost a rank per step or call, means since the start unless said otherwise.

    ratio: raw over wire bytes. predicted_ms, observed_ms: with codec. exposed_ms: not hidden by computation while the
    reductions were plain; exposed_share: of the step. codec_ms: by the measured speeds. relative_error: against the
    exact result; residual_ratio: of residual and gradient norms; both the worst at the last look, 0 where never looked.
    """

    role: Role
    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    ratio: float = 1.0
    predicted_ms: float = 0.0
    observed_ms: float = 0.0
    exposed_ms: float = 0.0
    exposed_share: float = 0.0
    codec_ms: float = 0.0
    relative_error: float = 0.0
    residual_ratio: float = 0.0
    nonfinite_calls: int = 0
    underflow_calls: int = 0
    fallbacks: int = 0
    residual_bytes: int = 0
    buffer_bytes: int = 0
    plan_hash: str = ""


@dataclass(frozen=True)
class Decision:
    """codec None: plain. reason says why. predicted_s is 0 where the policy leaves nothing to predict for."""

    codec: Codec | None
    reason: str
    predicted_s: float
    codec_s: float = 0.0


class Channel:
    """A role on a transport; making one is a collective call, which measures the link where there is a choice.

    beside: another role's channel on the same transport, whose measurements hold here too. sized_only: leave out codecs
    whose packets have no fixed size.
    """

    def __init__(
        self,
        role: Role,
        policy: SyncPolicy,
        transport: Transport,
        *,
        beside: Channel | None = None,
        sized_only: bool = False,
    ):
        self.role, self.policy, self.transport = role, policy, transport
        self.topology: Topology = beside.topology if beside is not None else probe_topology(transport)
        names = policy.codecs_for(role, between_nodes=self.topology.spans_nodes) if transport.size > 1 else ()
        self.names = tuple(name for name in names if CODECS[name].fixed_size or not sized_only)
        self.link: Link | None = beside.link if beside is not None else None
        self.speeds: dict[str, CodecSpeed] = {}
        if self.names and not policy.fixed:
            self.link = self.link or probe_link(transport)
            self.speeds = codec_speeds(self.names, transport)
        self.space = Workspace(transport.device)
        self.decisions: dict[tuple[int, int, Movement], Decision] = {}
        self._record = RoleRecord(role)
        self._num_calls = 0

    @classmethod
    def over(
        cls,
        role: Role,
        policy: SyncPolicy,
        group: dist.ProcessGroup | None,
        *,
        timeout_s: float = 300.0,
        sized_only: bool = False,
    ) -> Channel:
        """On a process group; None is the world."""
        return cls(role, policy, TorchTransport(group, timeout_s=timeout_s), sized_only=sized_only)

    def decide(self, numel: int, itemsize: int, movement: Movement) -> Decision:
        """The codec of a tensor of this size; pure, so it is the same at every rank and call."""
        key = (numel, itemsize, movement)
        if key not in self.decisions:
            self.decisions[key] = self._decide(*key)
        return self.decisions[key]

    def _decide(self, numel: int, itemsize: int, movement: Movement) -> Decision:
        size = self.transport.size
        factor = {"all_reduce": 2 * (size - 1) / size, "once": (size - 1) / size, "send": 1.0}[movement]
        rounds = 2 if movement == "all_reduce" else 1
        if not self.names or numel * itemsize < MIN_COMPRESSED_BYTES:
            return Decision(None, "under 64 KiB" if self.names else "no codec is allowed", 0.0)
        if self.policy.fixed:
            return Decision(self._configured(CODECS[self.names[0]]), "set by the policy", 0.0)
        assert self.link is not None
        plain_s = self.link.round_s * rounds + factor * numel * itemsize / self.link.bytes_per_s
        found = []
        for name in self.names:
            codec, speed = CODECS[name], self.speeds[name]
            wire = codec.wire_bytes(numel) if codec.fixed_size else speed.bits / 8 * numel
            codec_s = numel * (speed.encode + speed.decode + (speed.reduce if movement == "all_reduce" else 0))
            sized = 0 if codec.fixed_size else rounds
            seconds = self.link.round_s * (rounds + sized) + factor * wire / self.link.bytes_per_s + codec_s
            found.append((seconds, codec_s, name))
        seconds, codec_s, name = min(found)
        codec = self._configured(CODECS[name])
        if seconds < USE_BELOW * plain_s and plain_s - seconds > MIN_SAVING_S:
            return Decision(codec, f"{seconds * 1e3:.3g} ms instead of {plain_s * 1e3:.3g}", seconds, codec_s)
        return Decision(None, f"{name} would take {seconds * 1e3:.3g} of {plain_s * 1e3:.3g} ms", plain_s)

    def _configured(self, codec: Codec) -> Codec:
        """Gradients of activations span a wider range than activations: e5m2 backward, e4m3 forward."""
        if isinstance(codec, Fp8Block) and self.role in (Role.TP_GRAD, Role.PP_GRAD):
            return replace(codec, form="e5m2")
        return codec

    def seed(self, *parts: int | str) -> int:
        """Equal on all ranks, new for every call."""
        return derive_seed(0, self.role, self._num_calls, *parts)

    @contextmanager
    def counted(self, raw_bytes: int, decision: Decision) -> Iterator[None]:
        """Count one call that moves `raw_bytes` plainly from this rank."""
        traffic, record = self.transport.traffic, self._record
        sent, started = traffic.sent_bytes(), time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        wire = traffic.sent_bytes() - sent if decision.codec is not None else raw_bytes
        self._num_calls += 1
        self._record = replace(
            record,
            raw_bytes=record.raw_bytes + raw_bytes,
            wire_bytes=record.wire_bytes + wire,
            predicted_ms=record.predicted_ms + 1e3 * decision.predicted_s,
            observed_ms=record.observed_ms + 1e3 * seconds,
            codec_ms=record.codec_ms + 1e3 * decision.codec_s,
        )

    def record(self, **more: float) -> RoleRecord:
        """Means per call so far; `more` overrides fields that the caller knows."""
        total, calls = self._record, max(self._num_calls, 1)
        means = {
            name: getattr(total, name) / calls
            for name in ("raw_bytes", "wire_bytes", "predicted_ms", "observed_ms", "codec_ms")
        }
        ratio = total.raw_bytes / total.wire_bytes if total.wire_bytes else 1.0
        return replace(total, ratio=ratio, buffer_bytes=self.space.num_bytes, **means, **more)  # type: ignore[arg-type]


def as_fp32(x: torch.Tensor) -> torch.Tensor:
    """A contiguous fp32 view or copy, flat."""
    return x.detach().reshape(-1).float().contiguous()
