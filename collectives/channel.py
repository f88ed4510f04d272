"""One role's traffic over one group: which codec it takes there, and what that came to.

For roles whose tensors are moved or reduced once per call (FSDP, tensor and pipeline parallelism, outer steps). The
choice follows the model alone: link and codec speeds are measured once and agreed, so it is equal on all ranks without
another exchange, and the same size takes the same codec, until a guard speaks.

Guard: at the first call of a size and each `LOOK_CALLS`-th after it, every rank looks at what the codec would lose of its
tensor, and all agree on the worst before anything is sent (`agree`). A codec that loses too much is taken back on all
ranks in that call, with all coarser ones, for good. A message between two ranks alone cannot wait for an agreement: the
sender looks (`look_at`), and the packet itself tells the receiver (pipeline.py). Plain calls pay nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from collectives.codec_cost import CodecSpeed, codec_speeds
from collectives.codecs import CODECS, Codec
from collectives.codecs.codec import Flag
from collectives.codecs.fp8 import Fp8Block
from collectives.codecs.hashing import derive_seed
from collectives.cost import Link, probe_link
from collectives.guards import Look, coarser, look
from collectives.packets import Workspace
from collectives.policy import MIN_COMPRESSED_BYTES, Role, SyncPolicy
from collectives.topology import Topology, probe_topology
from collectives.torch_transport import TorchTransport
from collectives.transport import Transport, all_gather_records

logger = logging.getLogger(__name__)

USE_BELOW = 0.9
MIN_SAVING_S = 20e-6
LOOK_CALLS = 97
"""Compressed calls of one size between two looks; a prime, so that equal layers of a model are looked at in turn. A look
costs about four times what int8b takes to encode and decode."""

Movement = Literal["all_reduce", "once", "send", "receive"]
"""How often the bytes of a tensor cross a rank's link: 2(n-1)/n, (n-1)/n (reduce-scatter, all-gather), or once: a send,
and the receive that is decided like it at another rank."""

Key = tuple[int, int, Movement]
"""Elements, bytes of an element, movement."""


@dataclass(frozen=True)
class RoleRecord:
    """What one role's tensors cost a rank per step or call, means since the start unless said otherwise.

    ratio: raw over wire bytes. predicted_ms, observed_ms: with codec. exposed_ms: not hidden by computation while the
    reductions were plain; exposed_share: of the step. codec_ms: by the measured speeds. relative_error: of dp_grad
    against the exact mean, of other roles against what a rank sends; residual_ratio: of residual and gradient norms; both
    the worst at the last look, 0 where never looked. nonfinite_calls: of this rank. fallbacks: codecs taken back.
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


@dataclass
class _Watch:
    """What the looks at tensors of one size found. Equal on all ranks, save for messages between two of them."""

    calls: int = 0
    relative_error: float = 0.0
    num_spread: int = 0
    """Looks in a row at which the codec spread what was not finite."""


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
        self.decisions: dict[Key, Decision] = {}
        self.events: list[str] = []
        """Codecs taken back, with reason; equal on all ranks, save for messages between two of them."""
        self._banned: dict[Movement, tuple[str, ...]] = {}
        self._watches: dict[Key, _Watch] = {}
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
        """The codec of a tensor of this size; the same at every rank."""
        key = (numel, itemsize, movement)
        if key not in self.decisions:
            self.decisions[key] = self._decide(*key)
        return self.decisions[key]

    def _decide(self, numel: int, itemsize: int, movement: Movement) -> Decision:
        size = self.transport.size
        factor = {"all_reduce": 2 * (size - 1) / size, "once": (size - 1) / size}.get(movement, 1.0)
        rounds, banned = 2 if movement == "all_reduce" else 1, self._banned.get(movement, ())
        names = [name for name in self.names if name not in banned]
        if self.names and not names:
            return Decision(None, f"{', '.join(name for name in self.names if name in banned)} taken back", 0.0)
        if not names or numel * itemsize < MIN_COMPRESSED_BYTES:
            return Decision(None, "under 64 KiB" if names else "no codec is allowed", 0.0)
        if self.policy.fixed:
            return Decision(self._configured(CODECS[names[0]]), "set by the policy", 0.0)
        assert self.link is not None
        plain_s = self.link.round_s * rounds + factor * numel * itemsize / self.link.bytes_per_s
        found = []
        for name in names:
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

    # --- guard ---

    def agree(self, x: torch.Tensor, movement: Movement, numel: int | None = None) -> Decision:
        """`decide` for a call that all ranks make, x being what this rank encodes; a collective call where a look is due.

        numel: by which all ranks decide, where they encode different parts; None is x.numel().
        """
        key = (x.numel() if numel is None else numel, x.element_size(), movement)
        decision = self.decide(*key)
        if decision.codec is None or not self._look_due(key):
            return decision
        while decision.codec is not None:
            seen = look(decision.codec, as_fp32(x), self.seed("look"))
            worst = Look.worst(all_gather_records(self.transport, "guard", seen.record()).tolist())
            reason = self._judge(key, decision.codec, worst)
            if not reason:
                break
            self.take_back(movement, decision.codec.name, reason)
            decision = self.decide(*key)
        return decision

    def look_at(self, x: torch.Tensor, itemsize: int, codec: Codec) -> str:
        """For a message x (flat fp32) to one rank: why `codec` must be taken back, on both sides, or nothing."""
        key: Key = (x.numel(), itemsize, "send")
        return self._judge(key, codec, look(codec, x, self.seed("look"))) if self._look_due(key) else ""

    def take_back(self, movement: Movement, codec: str, reason: str) -> None:
        """Use neither `codec` nor a coarser one again; on all ranks that the movement joins."""
        banned = self._banned.get(movement, ())
        if codec in banned:
            return
        self._banned[movement] = (*banned, *coarser(codec))
        self.decisions.clear()
        self.events.append(f"{self.role}: {codec} taken back at call {self._num_calls}: {reason}")
        if movement in ("send", "receive") or self.transport.rank == 0:
            logger.warning("%s", self.events[-1])

    def note(self, flags: Flag) -> None:
        """Count what a call's packets said."""
        if Flag.NONFINITE in flags:
            self._record = replace(self._record, nonfinite_calls=self._record.nonfinite_calls + 1)

    def _look_due(self, key: Key) -> bool:
        watch = self._watches.setdefault(key, _Watch())
        watch.calls += 1
        return (watch.calls - 1) % LOOK_CALLS == 0

    def _judge(self, key: Key, codec: Codec, seen: Look) -> str:
        """Why the codec must go, or nothing."""
        watch = self._watches[key]
        watch.relative_error = seen.relative_error
        watch.num_spread = watch.num_spread + 1 if seen.spreads else 0
        return seen.violation(codec.name, watch.num_spread) if coarser(codec.name) else ""

    # --- counts ---

    def seed(self, *parts: int | str) -> int:
        """Equal on all ranks, new for every call."""
        return derive_seed(0, self.role, self._num_calls, *parts)

    @contextmanager
    def counted(self, raw_bytes: int, decision: Decision) -> Iterator[None]:
        """Count one call that moves `raw_bytes` plainly from this rank."""
        traffic = self.transport.traffic
        sent, started = traffic.sent_bytes(), time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        wire = traffic.sent_bytes() - sent if decision.codec is not None else raw_bytes
        self._num_calls += 1
        record = self._record
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
        return replace(
            total,
            ratio=ratio,
            relative_error=max((watch.relative_error for watch in self._watches.values()), default=0.0),
            fallbacks=len(self.events),
            buffer_bytes=self.space.num_bytes,
            **means,
            **more,  # type: ignore[arg-type]
        )


def as_fp32(x: torch.Tensor) -> torch.Tensor:
    """A contiguous fp32 view or copy, flat."""
    return x.detach().reshape(-1).float().contiguous()
