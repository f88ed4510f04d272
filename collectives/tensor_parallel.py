"""Where torch's tensor-parallel layers exchange activations and their gradients: both all-reduces with codecs inside.

A row-wise layer ends with the sum of partial outputs (`tp_act`, forward); a column-wise layer begins with a copy whose
gradient is a sum (`tp_grad`, backward). `TensorParallel.colwise` and `.rowwise` are torch's own parallel styles with
only these two sums replaced; weights stay DTensors. `enter` and `leave` are the two sums by themselves, for layers with
plain local weights, which DDP around them needs. No residual is carried: an activation's error does not come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from collectives.channel import Channel, RoleRecord
from collectives.errors import ConfigError
from collectives.policy import Role, SyncPolicy
from collectives.reduce import two_shot


class TensorParallel:
    """The two sums of one tensor-parallel group; making one is a collective call over the group of `mesh`."""

    def __init__(
        self, mesh: DeviceMesh, policy: SyncPolicy | str | Mapping[str, str] = "auto", *, timeout_s: float = 300.0
    ):
        if mesh.ndim != 1:
            raise ConfigError(f"tensor parallelism needs a 1-D mesh, not one of {mesh.ndim} dimensions; take a part")
        made = SyncPolicy.of(policy)
        self.act = Channel.over(Role.TP_ACT, made, mesh.get_group(), timeout_s=timeout_s)
        self.grad = Channel(Role.TP_GRAD, made, self.act.transport, beside=self.act)

    def colwise(self, **layouts: Any) -> ColwiseParallel:
        """torch's style for `parallelize_module`, with the input's gradient summed here."""
        return _Colwise(self.grad, **layouts)

    def rowwise(self, **layouts: Any) -> RowwiseParallel:
        """torch's style for `parallelize_module`, with the partial outputs summed here."""
        return _Rowwise(self.act, **layouts)

    def enter(self, x: Tensor) -> Tensor:
        """x, the same on all ranks, on its way into column-wise sharded weights; its gradient is summed."""
        copied: Tensor = _SumBackward.apply(x, self.grad)  # type: ignore[no-untyped-call]
        return copied

    def leave(self, x: Tensor) -> Tensor:
        """The sum over ranks of what row-wise sharded weights gave, without bias; add the bias afterwards."""
        total: Tensor = _SumForward.apply(x, self.act)  # type: ignore[no-untyped-call]
        return total

    def records(self) -> list[RoleRecord]:
        """Means per call of tp_act and tp_grad on this rank."""
        return [self.act.record(), self.grad.record()]


def all_reduce(x: Tensor, channel: Channel) -> Tensor:
    """The sum of x over the channel's ranks, as a new tensor of x's type and shape, with the codec its size takes."""
    decision = channel.agree(x, "all_reduce")
    size, total = channel.transport.size, x.detach().clone(memory_format=torch.contiguous_format)
    with channel.counted(2 * (size - 1) * x.nbytes // size, decision):
        if decision.codec is None:
            channel.transport.all_reduce("tensor-parallel", total)
        else:
            channel.note(
                two_shot(total, decision.codec, channel.transport, seed=channel.seed(), workspace=channel.space)
            )
    return total


class _SumForward(torch.autograd.Function):
    """Partial outputs to their sum; the gradient of a sum that everybody holds passes unchanged."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, channel: Channel) -> Tensor:
        return all_reduce(x, channel)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """A copy for every rank; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.channel), None


class _Colwise(ColwiseParallel):
    def __init__(self, channel: Channel, **layouts: Any):
        super().__init__(**layouts)
        self.channel = channel

    def _prepare_input_fn(  # type: ignore[override]
        self, input_layouts: Any, desired_layouts: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh
    ) -> Any:
        x = inputs[0]
        if isinstance(x, DTensor) or input_layouts != (Replicate(),) or not x.is_floating_point():
            return super()._prepare_input_fn(input_layouts, desired_layouts, module, inputs, mesh)  # type: ignore[no-untyped-call]
        copied: Tensor = _SumBackward.apply(x, self.channel)  # type: ignore[no-untyped-call]
        return DTensor.from_local(copied, mesh, input_layouts, run_check=False, grad_placements=(Partial(),))


class _Rowwise(RowwiseParallel):
    def __init__(self, channel: Channel, **layouts: Any):
        super().__init__(**layouts)
        self.channel = channel

    def _prepare_output_fn(  # type: ignore[override]
        self, output_layouts: Any, use_local_output: bool, module: nn.Module, outputs: DTensor, mesh: DeviceMesh
    ) -> Any:
        # Only plain partial sums: an embedding's carry a mask that torch resolves itself.
        is_partial = len(outputs.placements) == 1 and type(outputs.placements[0]) is Partial
        if not is_partial or output_layouts != (Replicate(),):
            return super()._prepare_output_fn(output_layouts, use_local_output, module, outputs, mesh)  # type: ignore[no-untyped-call]
        partial_sum = outputs.to_local(grad_placements=(Replicate(),))
        total: Tensor = _SumForward.apply(partial_sum, self.channel)  # type: ignore[no-untyped-call]
        return total if use_local_output else DTensor.from_local(total, mesh, output_layouts, run_check=False)
