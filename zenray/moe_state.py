"""Experts in checkpoints: by logical expert, so that any number of ranks, slots and policies can load what others wrote.

`ExpertsState` is one more state provider beside model and optimizer: it holds this rank's optimizer shards of every expert
and, as a hint, the placement. `load_experts` reads the shards of all ranks that wrote a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from safetensors.torch import load as load_tensors
from torch import Tensor

from actors.errors import CheckpointError
from actors.folder import ShardFolder, Stamp
from actors.state import State
from placement.expert_plans import ExpertPlan
from placement.quotas import Retention
from zenray.moe import ExpertBalancer


@dataclass(frozen=True)
class ExpertsState:
    """The experts of one balancer on one rank; see `actors.state.StateProvider`."""

    balancer: ExpertBalancer
    name: str = "experts"

    def state_dict(self) -> State:
        """`layer/expert/table` -> this rank's shard; placement, retention and step as JSON."""
        balancer, plan = self.balancer, self.balancer.book.current
        state: State = {
            f"{layer}/{key}": value
            for layer, item in enumerate(balancer.layers)
            for key, value in item.state.state_dict().items()
        }
        placement = {"version": plan.version, "valid_from": plan.valid_from, "slots": plan.slots.tolist()}
        shape = {"layers": len(balancer.layers), "experts": balancer.num_experts}
        return state | {"placement": placement, "retention": asdict(balancer.retention), "shape": shape}

    def load_state_dict(self, state: State) -> None:
        """What this rank wrote in a group of the same size; for others see `load_experts`."""
        self._load([state], own=True)

    def load_shards(self, states: list[State]) -> None:
        """From all ranks' states in rank order. Raises CollectiveMismatch where an expert is missing or incomplete.

        A collective call: afterwards the slots hold the loaded weights. The saved placement is used where it fits.
        """
        self._load(states, own=False)

    def _load(self, states: list[State], own: bool) -> None:
        balancer = self.balancer
        shape = {"layers": len(balancer.layers), "experts": balancer.num_experts}
        if states[0]["shape"] != shape:
            raise CheckpointError(f"the checkpoint holds {states[0]['shape']}, this model {shape}: it is another model")
        for layer, item in enumerate(balancer.layers):
            prefix = f"{layer}/"
            parts: list[dict[str, Tensor]] = [
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                for state in states
            ]
            if own:
                item.state.load_own(parts[0])
            else:
                item.state.load_state_dict(parts)
        saved = states[0]["retention"]
        balancer.retention = Retention(**saved | {"variance": tuple(saved["variance"])})
        placement: dict[str, Any] = states[0]["placement"]
        slots = np.array(placement["slots"], np.int32)
        if slots.shape == balancer.book.current.slots.shape:
            balancer.adopt(ExpertPlan(placement["version"], placement["valid_from"], slots))
        else:
            balancer.adopt(balancer.book.current)


def load_experts(folder: ShardFolder, step: int, experts: ExpertsState) -> Stamp:
    """Restore the experts of `step` from the shards of all ranks that wrote it, however many; returns rank 0's stamp."""
    manifest, data = folder.read(step, 0)
    stamp = Stamp(**manifest["stamp"])
    states = []
    for rank in range(stamp.world_size):
        if rank:
            manifest, data = folder.read(step, rank)
        prefix = f"{experts.name}/"
        tensors = {key.removeprefix(prefix): v for key, v in load_tensors(data).items() if key.startswith(prefix)}
        if experts.name not in manifest["values"]:
            raise CheckpointError(f"{folder.shard(step, rank)} holds no state '{experts.name}'")
        states.append(manifest["values"][experts.name] | tensors)
    experts.load_shards(states)
    return stamp
