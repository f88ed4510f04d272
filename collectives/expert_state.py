"""Expert weights in slots, optimizer state in shards: re-placing an expert costs nothing beyond the update itself.

SYMI (arXiv 2504.19925, section 3): the state of every expert is cut once into N shards that stay where they are. After a
step the updated weights must travel to the slots anyway; sending another expert to a slot costs the same.
Shard j of P parameters is [j P // N, (j + 1) P // N). Gradients of all instances of an expert are summed at the shard's
owner in (rank, slot) order, never in order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from collectives.errors import CollectiveMismatch
from collectives.transport import Parcel, Transport, all_gather_records, others

GRADIENTS, WEIGHTS, NORM = "expert_gradients", "expert_weights", "expert_norm"


def shard_cuts(num_parameters: int, size: int) -> list[int]:
    """First parameter of each rank's shard, and the end: int [size + 1]."""
    return [num_parameters * j // size for j in range(size + 1)]


class ExpertState:
    """AdamW on the shards of one layer's experts. `slots` are the weight tensors [s, ...] that the layer computes with.

    Values of one expert are its rows of all tensors in `slots`, flattened and concatenated in their order.
    """

    def __init__(
        self,
        slots: Sequence[nn.Parameter],
        num_experts: int,
        transport: Transport,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self.slots, self.num_experts, self.transport = list(slots), num_experts, transport
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.num_parameters = sum(p[0].numel() for p in self.slots)
        self.cuts = shard_cuts(self.num_parameters, transport.size)
        shard = self.cuts[transport.rank + 1] - self.cuts[transport.rank]
        dtype = torch.promote_types(self.slots[0].dtype, torch.float32)
        self.master = torch.zeros(num_experts, shard, dtype=dtype)
        self.momentum = torch.zeros_like(self.master)
        self.variance = torch.zeros_like(self.master)
        self.gradient = torch.zeros_like(self.master)
        self.step_count = 0

    def fill(self, expert: int, values: Tensor) -> None:
        """Set the master weights of one expert from its whole flat values [P], the same on all ranks."""
        self.master[expert] = values[self.cuts[self.transport.rank] : self.cuts[self.transport.rank + 1]]

    def reduce_gradients(self, hosts: np.ndarray, scale: float = 1.0) -> None:
        """Sum the slots' gradients of all instances into `gradient`, times `scale`. hosts: int32 [N, s], -1 = empty."""
        flat = self._flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in self.slots])
        self.gradient = self.sum_instances(flat, hosts) * scale

    def sum_instances(self, flat: Tensor, hosts: np.ndarray) -> Tensor:
        """flat: [s, P], values of this rank's slots, any P. Returns this rank's shard of their sum by expert: [E, shard]."""
        transport, rank = self.transport, self.transport.rank
        cuts = shard_cuts(flat.shape[1], transport.size)
        mine = _used(hosts[rank])
        shard = cuts[rank + 1] - cuts[rank]
        parts = {peer: flat.new_empty(len(_used(hosts[peer])), shard) for peer in others(transport)}
        with transport.exchange(GRADIENTS, [Parcel(peer, part) for peer, part in parts.items()]) as exchange:
            for peer in others(transport):
                exchange.send(peer, flat[mine, cuts[peer] : cuts[peer + 1]].contiguous())
        parts[rank] = flat[mine, cuts[rank] : cuts[rank + 1]]
        total = torch.zeros(self.num_experts, shard, dtype=self.master.dtype)
        for source in range(transport.size):
            for slot, part in zip(_used(hosts[source]), parts[source], strict=True):
                total[int(hosts[source, slot])] += part.to(total.dtype)
        return total

    def squared_norms(self, first: int = 0) -> np.ndarray:
        """Squared L2 norm of each expert's summed gradient, float64 [E]; equal on all ranks.

        first: leave out the values of each expert before this one.
        """
        own = self.gradient[:, max(0, first - self.cuts[self.transport.rank]) :]
        return self.totals(own.double().square().sum(1).numpy())

    def total(self, value: float) -> float:
        """Sum of one float64 over all ranks, in rank order, so equal on all of them."""
        return float(self.totals(np.array([value]))[0])

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Sums of float64 [n] over all ranks, in rank order, so equal on all of them."""
        table = all_gather_records(self.transport, NORM, values.view(np.int64).tolist())
        return np.asarray(table.view(np.float64).sum(0))

    def step(self, clip: float = 1.0) -> None:
        """One AdamW update of this rank's shards; `clip` multiplies the gradient (global-norm clipping)."""
        self.step_count += 1
        gradient, (beta1, beta2) = self.gradient * clip, self.betas
        self.momentum.lerp_(gradient, 1 - beta1)
        self.variance.lerp_(gradient.square(), 1 - beta2)
        root = (self.variance / (1 - beta2**self.step_count)).sqrt_().add_(self.eps)
        self.master.mul_(1 - self.lr * self.weight_decay)
        self.master.addcdiv_(self.momentum, root, value=-self.lr / (1 - beta1**self.step_count))

    def push_weights(self, hosts: np.ndarray) -> None:
        """Fill every slot with the expert that `hosts` [N, s] gives it; the old placement does not matter."""
        transport, rank, dtype = self.transport, self.transport.rank, self.slots[0].dtype
        mine = _used(hosts[rank])
        flat = torch.zeros(len(hosts[rank]), self.num_parameters, dtype=dtype)
        widths = np.diff(self.cuts)
        parts = {peer: torch.empty(len(mine), int(widths[peer]), dtype=dtype) for peer in others(transport)}
        with transport.exchange(WEIGHTS, [Parcel(peer, part) for peer, part in parts.items()]) as exchange:
            for peer in others(transport):
                experts = torch.from_numpy(hosts[peer][_used(hosts[peer])].astype(np.int64))
                exchange.send(peer, self.master[experts].to(dtype))
        parts[rank] = self.master[torch.from_numpy(hosts[rank][mine].astype(np.int64))].to(dtype)
        for peer, part in parts.items():
            flat[mine, self.cuts[peer] : self.cuts[peer + 1]] = part
        with torch.no_grad():
            for parameter, values in zip(self.slots, self._unflat(flat), strict=True):
                parameter.copy_(values)
                parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's shards by logical expert: `E/name` -> [shard], and the step."""
        tables = {"master": self.master, "momentum": self.momentum, "variance": self.variance}
        state = {f"{e}/{name}": table[e].clone() for name, table in tables.items() for e in range(self.num_experts)}
        return state | {"step": torch.tensor(self.step_count)}

    def load_state_dict(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Load from the state_dicts of all ranks of a group of any size, in rank order.

        Raises CollectiveMismatch if an expert is missing or its shards do not add up to its parameters.
        """
        rank = self.transport.rank
        tables = {"master": self.master, "momentum": self.momentum, "variance": self.variance}
        for name, table in tables.items():
            for expert in range(self.num_experts):
                shards = [state.get(f"{expert}/{name}") for state in states]
                if any(shard is None for shard in shards):
                    raise CollectiveMismatch(f"checkpoint has no {name} of expert {expert}; it holds another model")
                whole = torch.cat([shard for shard in shards if shard is not None])
                if len(whole) != self.num_parameters:
                    raise CollectiveMismatch(
                        f"checkpoint holds {len(whole)} of {self.num_parameters} values of expert {expert}'s {name}: "
                        f"a rank's part is missing or twice there"
                    )
                table[expert] = whole[self.cuts[rank] : self.cuts[rank + 1]]
        self.step_count = int(states[0]["step"])

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Load from the state_dict that this rank wrote in a group of this size. Raises CollectiveMismatch otherwise."""
        tables = {"master": self.master, "momentum": self.momentum, "variance": self.variance}
        for name, table in tables.items():
            for expert in range(self.num_experts):
                values = state.get(f"{expert}/{name}")
                if values is None or values.shape != table[expert].shape:
                    raise CollectiveMismatch(
                        f"checkpoint has {None if values is None else len(values)} of {table.shape[1]} values of expert "
                        f"{expert}'s {name} for this rank; load the shards of all ranks that wrote it"
                    )
                table[expert] = values
        self.step_count = int(state["step"])

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], dim=1)

    def _unflat(self, flat: Tensor) -> list[Tensor]:
        widths = [p[0].numel() for p in self.slots]
        return [part.reshape(p.shape) for part, p in zip(torch.split(flat, widths, dim=1), self.slots, strict=True)]


def _used(row: np.ndarray) -> np.ndarray:
    return np.flatnonzero(row >= 0)
