"""An outer loop around local training (DiLoCo, Douillard et al., 2023): ranks train alone, then average what changed.

Every `every_steps` inner steps each rank's change since the last outer step (`outer_delta`) is averaged over the ranks
with a codec and error feedback; Nesterov momentum on that average moves the common anchor, from which all go on. So
replicas hold the same bytes after every outer step, and communication falls by the number of inner steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.channel import Channel, RoleRecord
from collectives.codecs import TopK
from collectives.errors import ConfigError
from collectives.feedback import ErrorFeedback
from collectives.policy import Role, SyncPolicy
from collectives.reduce import one_shot, owner_span, two_shot

CARRIED = ("int4b", "eb", "topk", "sq")
"""Codecs whose losses are added to the next delta, unless the policy says otherwise."""


class OuterLoop:
    """Call `step` after every inner optimizer step. Making one is a collective call; all ranks start from rank 0's model.

    lr, momentum: of the outer Nesterov step; the defaults are the publication's. Raises ConfigError for fp64 or integer
    parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: SyncPolicy | str | Mapping[str, str] = "auto",
        *,
        every_steps: int = 100,
        lr: float = 0.7,
        momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
    ):
        if every_steps < 1 or not 0 <= momentum < 1 or lr <= 0:
            raise ConfigError(
                f"every_steps = {every_steps}, lr = {lr}, momentum = {momentum}: at least 1, > 0, in [0, 1)"
            )
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wrong = [name for name, p in self.parameters.items() if p.dtype not in (torch.float32, torch.bfloat16)]
        if wrong:
            raise ConfigError(f"the outer loop takes fp32 and bf16 parameters; '{wrong[0]}' is neither")
        self.every_steps, self.lr, self.momentum = every_steps, lr, momentum
        self.channel = Channel.over(Role.OUTER_DELTA, SyncPolicy.of(policy), group, timeout_s=timeout_s)
        self.feedback = ErrorFeedback()
        self.anchor = self._flat()
        if self.channel.transport.rank:
            self.anchor.zero_()
        self.channel.transport.all_reduce("outer", self.anchor)
        self.velocity = torch.zeros_like(self.anchor)
        self.num_inner = self.num_outer = 0
        self._spread()

    @torch.no_grad()
    def step(self) -> bool:
        """Count one inner step; at every `every_steps`-th average over the ranks. Returns whether it did."""
        self.num_inner += 1
        if self.num_inner % self.every_steps:
            return False
        delta = self.anchor - self._flat()
        self._average(delta)
        self.velocity.mul_(self.momentum).add_(delta)
        self.anchor.add_(delta.add_(self.velocity, alpha=self.momentum), alpha=-self.lr)
        self._spread()
        self.num_outer += 1
        return True

    def _average(self, delta: Tensor) -> None:
        """The mean over ranks, in place; what the codec lost is added to the next delta."""
        channel, size = self.channel, self.channel.transport.size
        decision = channel.agree(delta, "all_reduce")
        with channel.counted(2 * (size - 1) * delta.nbytes // size, decision):
            codec, layout, wanted = decision.codec, (("delta", delta.numel()),), channel.policy.error_feedback
            options: dict[str, Any] = {"op": "mean", "seed": channel.seed(), "workspace": channel.space}
            if codec is not None and (codec.name in CARRIED if wanted is None else wanted):
                options["residual"] = self.feedback.residual(layout)
                if not isinstance(codec, TopK):
                    span = owner_span(delta.numel(), size, channel.transport.rank, codec)
                    options["owner_residual"] = self.feedback.owner_residual(layout, span)
            else:
                self.feedback.deliver(layout, delta, size)
            if codec is None:
                channel.transport.all_reduce("outer", delta, "mean")
            else:
                reduce = one_shot if isinstance(codec, TopK) else two_shot
                channel.note(reduce(delta, codec, channel.transport, **options))
            self.feedback.commit()

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).float() for p in self.parameters.values()])

    def _spread(self) -> None:
        start = 0
        for p in self.parameters.values():
            p.data.copy_(self.anchor[start : start + p.numel()].view(p.shape))
            start += p.numel()

    def records(self) -> list[RoleRecord]:
        """Means per outer step of outer_delta on this rank."""
        return [self.channel.record(residual_bytes=self.feedback.num_bytes)]

    def state_dict(self) -> dict[str, Any]:
        """Anchor and velocity are equal on all ranks, the residual is this rank's own."""
        return {
            "anchor": self.anchor.clone(),
            "velocity": self.velocity.clone(),
            "num_inner": self.num_inner,
            "num_outer": self.num_outer,
            "feedback": self.feedback.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; the inner optimizer and, between outer steps, the parameters are restored by their own states."""
        if state["anchor"].shape != self.anchor.shape:
            raise ConfigError(f"the state holds {state['anchor'].numel()} values, the model {self.anchor.numel()}")
        self.anchor.copy_(state["anchor"])
        self.velocity.copy_(state["velocity"])
        self.num_inner, self.num_outer = int(state["num_inner"]), int(state["num_outer"])
        self.feedback.load_state_dict(state["feedback"])
