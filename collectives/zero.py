"""ZeRO stage 1: every rank keeps the optimizer state of one part of the parameters, and updates that part.

Gradients are reduce-scattered (`fsdp_grad`), the owner's optimizer runs on an exact fp32 part, and the updated part goes
to everybody (`fsdp_param`). A lossy parameter codec touches only the copies that are computed with, the owner's part
stays exact; since every rank holds all copies anyway, it carries their changes (see docs/decisions/009). Parameters lie
in one flat buffer; the model's parameters become views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.channel import Channel, Decision, RoleRecord
from collectives.errors import ConfigError
from collectives.fsdp import gather
from collectives.policy import Role, SyncPolicy
from collectives.reduce import Chunks, reduce_scatter


class ShardedOptimizer:
    """An optimizer over `model`'s parameters whose state is cut over the ranks; making one is a collective call.

    factory: makes the optimizer of the flat part from `[parameter]` and `options`, such as `torch.optim.AdamW`. It must
    treat all elements alike: rules that look at a parameter's shape (Muon, Adafactor) would see a flat one. Raises
    ConfigError for parameters that are not fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        factory: Callable[..., torch.optim.Optimizer],
        policy: SyncPolicy | str | Mapping[str, str] = "auto",
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **options: Any,
    ):
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wrong = [name for name, p in self.parameters.items() if p.dtype != torch.float32]
        if wrong:
            raise ConfigError(
                f"sharded optimizers take fp32 parameters; '{wrong[0]}' and {len(wrong) - 1} more are not"
            )
        made = SyncPolicy.of(policy)
        self.grads = Channel.over(Role.FSDP_GRAD, made, group, timeout_s=timeout_s)
        self.params = Channel(Role.FSDP_PARAM, made, self.grads.transport, beside=self.grads)
        size, rank = self.grads.transport.size, self.grads.transport.rank
        total = sum(p.numel() for p in self.parameters.values())
        cuts = Chunks.of(-(-total // size) * size, size, 1)
        self.values, self.gradients = torch.zeros(cuts.numel), torch.zeros(cuts.numel)
        self._adopt(model)
        self.part = nn.Parameter(self.values[cuts.whole(rank)].clone())
        self.optimizer = factory([self.part], **options)
        self._is_collected = False
        """All ranks' copies of the parameters are the same bytes."""

    def _adopt(self, model: nn.Module) -> None:
        """Make the parameters, and their gradients, views of the flat buffers."""
        start = 0
        for parameter in self.parameters.values():
            view = self.values[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradients[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def zero_grad(self) -> None:
        """Clear all gradients; they stay views of the flat buffer."""
        self.gradients.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients of all ranks, update the own part, and collect everybody's; a collective call."""
        self._check_views()
        self.part.grad = self._reduced()
        self.optimizer.step()
        self._collect()

    def _reduced(self) -> Tensor:
        """The mean of this rank's part, fp32."""
        channel, out = self.grads, torch.empty_like(self.part)
        size = channel.transport.size
        decision = channel.agree(self.gradients, "once")
        with channel.counted((size - 1) * self.gradients.nbytes // size, decision):
            if decision.codec is None:
                channel.transport.all_reduce("zero", self.gradients, "mean")
                out.copy_(self.gradients.chunk(size)[channel.transport.rank])
            else:
                flags = reduce_scatter(
                    self.gradients,
                    out,
                    decision.codec,
                    channel.transport,
                    op="mean",
                    seed=channel.seed(),
                    workspace=channel.space,
                )
                channel.note(flags)
        return out

    def _collect(self) -> None:
        """Everybody's part into the copies. A codec that rounds carries by how much the parts have left the copies, so
        its error is that of one step's change and does not add up; the first time, and after a restore, all is sent.
        """
        channel, part, numel = self.params, self.part.detach(), self.values.numel()
        size, rank = channel.transport.size, channel.transport.rank
        own = self.values.chunk(size)[rank]
        rounds = self._rounds(channel.decide(numel, 4, "once"))
        if rounds and not self._is_collected:
            decision = Decision(None, "copies that are not yet known to be equal", 0.0)
        else:
            decision = channel.agree(part - own if rounds else part, "once", numel)
        with channel.counted((size - 1) * part.nbytes, decision):
            if decision.codec is None:
                self.values.zero_()
                own.copy_(part)
                channel.transport.all_reduce("zero", self.values)
            elif self._rounds(decision):
                change = torch.empty_like(self.values)
                gather(change, part - own, decision.codec, channel)
                self.values += change
            else:
                gather(self.values, part, decision.codec, channel)
        self._is_collected = True

    @staticmethod
    def _rounds(decision: Decision) -> bool:
        return decision.codec is not None and decision.codec.name != "lossless"

    def _check_views(self) -> None:
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is None or grad.untyped_storage().data_ptr() != self.gradients.untyped_storage().data_ptr():
                raise ConfigError(
                    f"the gradient of '{name}' is not in the flat buffer: clear gradients with this optimizer's "
                    f"zero_grad, not with set_to_none"
                )

    @property
    def num_state_values(self) -> int:
        """Values of optimizer state on this rank."""
        return sum(v.numel() for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor))

    def records(self) -> list[RoleRecord]:
        """Means per step of fsdp_grad and fsdp_param on this rank."""
        return [self.grads.record(), self.params.record()]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of parameters and state; all ranks' parts together are the whole, in rank order."""
        return {"part": self.part.detach().clone(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the same number of ranks; a collective call, since parameters are collected again."""
        if state["part"].shape != self.part.shape:
            raise ConfigError(
                f"the state is a part of {state['part'].numel()} values, this rank's has {self.part.numel()}: the "
                f"number of ranks or the model has changed"
            )
        with torch.no_grad():
            self.part.copy_(state["part"])
            self.optimizer.load_state_dict(state["optimizer"])
            self._is_collected = False
            self._collect()
