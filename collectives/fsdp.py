"""Where FSDP2 hands us its tensors: a reduce-scatter of gradients and an all-gather of parameters with codecs inside.

`compress_fsdp(model, policy)` sets both on every FSDP2 module of `model`. What always holds: sums are made in fp32 in
rank order; every rank decodes the same bytes; sharded parameters and optimizer states stay exact, only the gathered
copies are lossy where the user asked for it; a group of parameters under 64 KiB stays plain. One message holds all
parameters of a module, so none of them can be exempt by itself.

What this does not do: HSDP's all-reduce over replicas (give `replica_hook` to `set_all_reduce_hook`), and GPUs, where
FSDP overlaps its own streams: modules on a GPU keep torch's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
)

from collectives import movement
from collectives.channel import Channel, Decision, RoleRecord, as_fp32
from collectives.codecs import CODECS
from collectives.codecs.codec import Codec, Flag, Residual
from collectives.errors import ConfigError
from collectives.feedback import ErrorFeedback
from collectives.policy import Role, SyncPolicy
from collectives.reduce import reduce_scatter, two_shot
from collectives.subgroup import SubTransport
from collectives.transport import Transport

LEFT_TO_TORCH = Decision(None, "no sum, mean or floating-point tensor", 0.0)


@dataclass
class FsdpSync:
    """What `compress_fsdp` attached: records, residuals, and the way to take a step back."""

    grads: Channel
    params: Channel
    feedback: dict[str, ErrorFeedback] = field(default_factory=dict)
    """By the module's name; empty without error feedback."""

    def records(self) -> list[RoleRecord]:
        """Means per call of fsdp_grad and fsdp_param on this rank."""
        owed = sum(feedback.num_bytes for feedback in self.feedback.values())
        return [self.grads.record(residual_bytes=owed), self.params.record()]

    def take_back(self) -> None:
        """The step whose backward pass has just ended will not be applied: residuals return. On all ranks alike."""
        for feedback in self.feedback.values():
            feedback.rollback()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by module name; see `collectives.feedback.reshard` for another number of ranks."""
        for feedback in self.feedback.values():
            feedback.commit()
        return {name: feedback.state_dict() for name, feedback in self.feedback.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore residuals; modules that the state lacks start from zero."""
        for name, entry in state.items():
            self.feedback.setdefault(name, ErrorFeedback(reversible=True)).load_state_dict(entry)


def compress_fsdp(
    model: nn.Module, policy: SyncPolicy | str | Mapping[str, str] = "auto", *, timeout_s: float = 300.0
) -> FsdpSync:
    """Let zenray reduce and gather for every FSDP2 module of `model`; a collective call, after `fully_shard`.

    Raises ConfigError where the model holds no FSDP2 module, or modules of several groups.
    """
    made = SyncPolicy.of(policy)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise ConfigError("the model holds no FSDP2 module: call torch.distributed.fsdp.fully_shard on it first")
    groups = {_shard_group(module) for module in modules.values()} - {None}
    if len(groups) != 1:
        raise ConfigError(f"the FSDP2 modules shard over {len(groups)} different groups; compress them one by one")
    grads = Channel.over(Role.FSDP_GRAD, made, groups.pop(), timeout_s=timeout_s)
    params = Channel(Role.FSDP_PARAM, made, grads.transport, beside=grads)
    sync = FsdpSync(grads, params)
    if any(parameter.is_cuda for parameter in model.parameters()):
        return sync
    for name, module in modules.items():
        module.set_custom_reduce_scatter(CompressedReduceScatter(sync, name))
        module.set_custom_all_gather(CompressedAllGather(sync))
    return sync


def _shard_group(module: FSDPModule) -> dist.ProcessGroup | None:
    groups = module._get_fsdp_state()._fsdp_param_groups
    return groups[0]._all_gather_process_group if groups else None


class CompressedReduceScatter(DefaultAllocMixin, ReduceScatter):
    """fsdp_grad: rank r gets the sum or mean of chunk r."""

    def __init__(self, sync: FsdpSync, name: str):
        self.sync, self.name, self.default = sync, name, DefaultReduceScatter()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        channel = self.sync.grads
        factor, size = _factor(op, channel.transport.size), channel.transport.size
        decision = channel.agree(input_tensor, "once") if factor is not None else LEFT_TO_TORCH
        with channel.counted((size - 1) * input_tensor.nbytes // size, decision):
            residual = self._residual(decision.codec, input_tensor)
            if decision.codec is None or factor is None:
                return self.default(output_tensor, input_tensor, group, op, async_op)  # type: ignore[no-any-return]
            out = output_tensor if output_tensor.dtype == torch.float32 else torch.empty(output_tensor.shape)
            channel.note(self._reduce(as_fp32(input_tensor), out, decision.codec, residual))
            if factor != 1 or out is not output_tensor:
                torch.mul(out, factor, out=out)
                output_tensor.copy_(out)
        return None

    def _reduce(self, x: Tensor, out: Tensor, codec: Codec, residual: Residual | None) -> Flag:
        channel = self.sync.grads
        options = {"residual": residual, "seed": channel.seed(self.name), "workspace": channel.space}
        if 1 < channel.topology.ranks_per_node < channel.transport.size:
            inner = CODECS["int8b"] if codec.name == "int4b" else codec
            per_node = channel.topology.ranks_per_node
            return reduce_scatter_two_hop(x, out, inner, codec, channel.transport, per_node, **options)
        return reduce_scatter(x, out, codec, channel.transport, **options)  # type: ignore[arg-type]

    def _residual(self, codec: Codec | None, x: Tensor) -> Residual | None:
        """The step before counts, unless it was taken back since: its residuals are settled now. Where this codec carries
        none, what an earlier one owes is added to x."""
        policy, feedback = self.sync.grads.policy, self.sync.feedback.get(self.name)
        layout, wanted = ((self.name, x.numel()),), policy.error_feedback
        if feedback is not None:
            feedback.commit()
        if codec is not None and (codec.ef_default(policy.optimizer) if wanted is None else wanted):
            feedback = self.sync.feedback.setdefault(self.name, ErrorFeedback(reversible=True))
            return feedback.residual(layout)
        if feedback is not None:
            feedback.deliver(layout, x.view(-1), 1)
        return None


class CompressedAllGather(DefaultAllocMixin, AllGather):
    """fsdp_param: every rank's shard to everybody."""

    def __init__(self, sync: FsdpSync):
        self.sync, self.default = sync, DefaultAllGather()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        channel, size = self.sync.params, self.sync.params.transport.size
        decision = LEFT_TO_TORCH
        if output_tensor.is_floating_point():
            decision = channel.agree(input_tensor, "once", output_tensor.numel())
        with channel.counted((size - 1) * input_tensor.nbytes, decision):
            if decision.codec is None:
                return self.default(output_tensor, input_tensor, group, async_op)  # type: ignore[no-any-return]
            gather(output_tensor, input_tensor, decision.codec, channel)
        return None


def gather(output: Tensor, shard: Tensor, codec: Codec, channel: Channel) -> None:
    """Every rank's shard, through the codec, into the equal chunks of `output`; the own one in decoded form as well."""
    whole = output if output.dtype == torch.float32 or codec.name == "lossless" else torch.empty(output.shape)
    parts = list(whole.view(-1).chunk(channel.transport.size))
    parts[channel.transport.rank].copy_(shard.reshape(-1))
    channel.note(movement.all_gather(parts, codec, channel.transport, seed=channel.seed(), workspace=channel.space))
    if whole is not output:
        output.copy_(whole)


def reduce_scatter_two_hop(
    x: Tensor,
    out: Tensor,
    inner: Codec,
    outer: Codec,
    transport: Transport,
    ranks_per_node: int,
    **options: Any,
) -> Flag:
    """`reduce_scatter` (sum) for ranks numbered node by node: inside the node with `inner`, between nodes with `outer`.

    Place p of a node first collects the chunks of all ranks at place p; so each chunk ends at its owner without a
    shuffle. Bytes between nodes per rank: (m-1)/(m*l) of the outer packet, for m nodes of l ranks.
    """
    nodes = transport.size // ranks_per_node
    node, place = divmod(transport.rank, ranks_per_node)
    inside = SubTransport(transport, range(node * ranks_per_node, (node + 1) * ranks_per_node))
    between = SubTransport(transport, range(place, transport.size, ranks_per_node))
    residual = options.pop("residual")
    by_place = x.view(nodes, ranks_per_node, -1).transpose(0, 1).contiguous().view(-1)
    collected = torch.empty(by_place.numel() // ranks_per_node)
    flags = reduce_scatter(by_place, collected, inner, inside, residual=residual, **options)
    return flags | reduce_scatter(collected, out, outer, between, **options)


def replica_hook(channel: Channel) -> Callable[[Tensor], None]:
    """For `FSDPModule.set_all_reduce_hook`: the mean over replicas of 1-D FSDP, channel being over the replicas."""

    def hook(gradient: Tensor) -> None:
        decision, transport = channel.agree(gradient, "all_reduce"), channel.transport
        with channel.counted(2 * (transport.size - 1) * gradient.nbytes // transport.size, decision):
            if decision.codec is None:
                transport.all_reduce("replicas", gradient, "mean")
                return
            channel.note(
                two_shot(gradient, decision.codec, transport, op="mean", seed=channel.seed(), workspace=channel.space)
            )

    return hook


def _factor(op: Any, size: int) -> float | None:
    """What the sum is multiplied by; None for reductions that are left to torch."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    return 1.0 if op == dist.ReduceOp.SUM else None
