"""Where torch's pipeline stages send activations and their gradients: the same messages, as packets of a codec.

`CompressedStage` is torch's own `PipelineStage` for any of torch's schedules; only what travels differs. Each message
is encoded once by the sender and decoded once by the receiver, so the error does not grow with the number of stages,
and none of it is carried over. Only codecs of fixed packet size can be used, since receives are posted beforehand.

For the same reason a codec that a guard takes back (channel.py) still carries the rest of the step: a flag in the header
of the packet that was looked at tells the receiver, and both sides use another codec from the next step on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from collectives.channel import Channel, Decision, Movement, RoleRecord, as_fp32
from collectives.codecs import CODECS
from collectives.codecs.codec import Flag, add_flags, packet_flags
from collectives.errors import ConfigError
from collectives.policy import Role, SyncPolicy


@dataclass(frozen=True)
class _Incoming:
    """A posted packet and the buffer that torch reads."""

    packet: Tensor
    target: Tensor
    decision: Decision
    channel: Channel


class CompressedStage(PipelineStage):
    """`PipelineStage` with a policy; making one is a collective call over `group` (default: the world).

    Other arguments as for torch's class. Raises ConfigError where the policy names a codec without fixed packet size.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        policy: SyncPolicy | str | Mapping[str, str] = "auto",
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **options: Any,
    ):
        super().__init__(submodule, stage_index, num_stages, device, group=group, **options)
        made = SyncPolicy.of(policy)
        _refuse_unsized(made)
        self.act = Channel.over(Role.PP_ACT, made, group, timeout_s=timeout_s, sized_only=True)
        self.act_grad = Channel(Role.PP_GRAD, made, self.act.transport, beside=self.act, sized_only=True)
        self._incoming: dict[tuple[Role, int], list[_Incoming]] = {}
        self._sent: list[Tensor] = []
        self._taken_back: list[tuple[Channel, Movement, str, str]] = []
        """Channel, movement, codec, reason: due at the next step."""

    def records(self) -> list[RoleRecord]:
        """Means per message of pp_act and pp_grad that this rank sent."""
        return [self.act.record(), self.act_grad.record()]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._packed(super().get_fwd_send_ops(fwd_chunk_id), self.act)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._packed(super().get_bwd_send_ops(bwd_chunk_id), self.act_grad)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._expected(super().get_fwd_recv_ops(fwd_chunk_id), self.act, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._expected(super().get_bwd_recv_ops(bwd_chunk_id), self.act_grad, bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """torch calls this at the start of every step."""
        super().clear_runtime_states()
        self._incoming.clear()
        self._sent.clear()
        for channel, movement, codec, reason in self._taken_back:
            channel.take_back(movement, codec, reason)
        self._taken_back.clear()

    def _packed(self, ops: Sequence[dist.P2POp], channel: Channel) -> list[dist.P2POp]:
        """The same sends, with packets. They are kept until the step is over, because torch holds none of them."""
        return [self._one_packed(op, channel) for op in ops]

    def _one_packed(self, op: dist.P2POp, channel: Channel) -> dist.P2POp:
        tensor, decision = op.tensor, _decide(op.tensor, channel, "send")
        with channel.counted(tensor.nbytes, decision):
            if decision.codec is None:
                return op
            values = as_fp32(tensor)
            packet = decision.codec.encode(values, seed=channel.seed())
            channel.note(packet_flags(packet))
            if reason := channel.look_at(values, tensor.element_size(), decision.codec):
                add_flags(packet, Flag.TAKEN_BACK)
                self._taken_back.append((channel, "send", decision.codec.name, reason))
            channel.transport.traffic.add(channel.transport.traffic.sent, channel.role, op.group_peer, packet.nbytes)
        self._sent.append(packet)
        return _with_tensor(op, packet)

    def _expected(self, ops: Sequence[dist.P2POp], channel: Channel, chunk: int) -> list[dist.P2POp]:
        replaced, incoming = [], self._incoming.setdefault((channel.role, chunk), [])
        for op in ops:
            decision = _decide(op.tensor, channel, "receive")
            if decision.codec is None:
                replaced.append(op)
                continue
            packet = torch.empty(decision.codec.wire_bytes(op.tensor.numel()), dtype=torch.uint8)
            incoming.append(_Incoming(packet, op.tensor, decision, channel))
            replaced.append(_with_tensor(op, packet))
        return replaced

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._unpack(Role.PP_ACT, fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._unpack(Role.PP_GRAD, bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _unpack(self, role: Role, chunk: int) -> None:
        for incoming in self._incoming.pop((role, chunk), []):
            codec, target = incoming.decision.codec, incoming.target.detach()
            assert codec is not None
            values = torch.empty(target.numel())
            codec.decode(incoming.packet, values)
            if Flag.TAKEN_BACK in packet_flags(incoming.packet):
                self._taken_back.append(
                    (incoming.channel, "receive", codec.name, "its sender found that it loses too much")
                )
            target.copy_(values.view(target.shape))


def _decide(tensor: Tensor, channel: Channel, movement: Movement) -> Decision:
    if not tensor.is_floating_point() or tensor.device.type != "cpu":
        return Decision(None, "not a floating-point tensor on the cpu", 0.0)
    return channel.decide(tensor.numel(), tensor.element_size(), movement)


def _with_tensor(op: dist.P2POp, tensor: Tensor) -> dist.P2POp:
    return dist.P2POp(op.op, tensor, group=op.group, group_peer=op.group_peer)


def _refuse_unsized(policy: SyncPolicy) -> None:
    """A preset's lossless codec simply stays plain here; a named codec that cannot be used is an error."""
    for role, codecs in () if policy.fixed else policy.codecs:
        if role in (Role.PP_ACT, Role.PP_GRAD) and not all(name == "off" or CODECS[name].fixed_size for name in codecs):
            raise ConfigError(f"{role}: packets of {', '.join(codecs)} need a fixed size to travel between stages")
