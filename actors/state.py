"""What a checkpoint holds: safetensors and JSON values, no pickle.

Everything that training needs to go on bit-identically is one list of `StateProvider`s (model, optimizer, hooks, random
states, data position, ...), one list for every tier: disk (`actors.folder`), own host's memory, peers' memory
(`actors.shards`). This module coordinates nothing between ranks.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from actors.errors import CheckpointError
from actors.folder import ShardFolder, Stamp, WritePhase
from collectives.expert_state import ExpertState
from collectives.feedback import ErrorFeedback, reshard

__all__ = [
    "CheckpointError",
    "CheckpointFolder",
    "DataPosition",
    "ExpertShards",
    "ModelState",
    "OptimizerState",
    "RandomState",
    "Resharding",
    "ResidualState",
    "Stamp",
    "State",
    "StateProvider",
    "WritePhase",
    "collect",
    "digest_of",
    "distribute",
    "pack",
    "state_of",
    "unpack",
]

State = dict[str, Any]
"""Tensors, or values that JSON can hold, by key."""


class StateProvider(Protocol):
    """One part of the training state. `name` is unique in its list and the same in every run."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> State:
        """Tensors (any device, not copied here) and JSON values, by key.

        Where the state is replicated, the tensors are read until the next update: what changes sooner must be a copy.
        """

    def load_state_dict(self, state: State) -> None:
        """Restore exactly; tensors arrive on the CPU."""


@runtime_checkable
class Resharding(Protocol):
    """A provider of one rank's own state that also knows what becomes of it in a group of another size."""

    @property
    def name(self) -> str: ...

    def load_all(self, states: Sequence[State]) -> None:
        """Restore from the states of all old ranks, in their order."""


# --- bytes ------------------------------------------------------------------------------------------------------------


def collect(providers: Sequence[StateProvider]) -> tuple[dict[str, Tensor], dict[str, State]]:
    """The tensors of all states by `provider/key`, as they are, and the JSON values by provider."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, State] = {}
    for provider in providers:
        if provider.name in values:
            raise CheckpointError(f"two state providers are called '{provider.name}'")
        values[provider.name] = {}
        for key, value in provider.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"{provider.name}/{key}"] = value.detach() if value.requires_grad else value
            else:
                values[provider.name][key] = value
    return tensors, values


def distribute(tensors: Mapping[str, Tensor], values: Mapping[str, State], providers: Sequence[StateProvider]) -> None:
    """Give every provider its state back. Raises CheckpointError before any is touched if the lists differ."""
    wanted, held = {provider.name for provider in providers}, set(values)
    if wanted != held:
        raise CheckpointError(
            f"the checkpoint holds the states {sorted(held)}, this run needs {sorted(wanted)}: resume with the same "
            f"model, optimizer and policy, or start anew"
        )
    for provider in providers:
        provider.load_state_dict(state_of(provider.name, tensors, values))


def state_of(name: str, tensors: Mapping[str, Tensor], values: Mapping[str, State]) -> State:
    """The state of one provider, out of what `collect` gives for all."""
    prefix = f"{name}/"
    own = {key.removeprefix(prefix): item for key, item in tensors.items() if key.startswith(prefix)}
    return dict(values[name]) | own


def pack(providers: Sequence[StateProvider]) -> tuple[bytes, dict[str, State]]:
    """All states as one safetensors buffer (keys `provider/key`) and the JSON values by provider."""
    tensors, values = collect(providers)
    seen: set[int] = set()
    for key, tensor in tensors.items():
        dense = tensor.cpu().contiguous()
        if dense.data_ptr() in seen or dense.untyped_storage().nbytes() != dense.nbytes:
            dense = dense.clone()  # safetensors refuses tensors that share memory, such as tied weights
        seen.add(dense.data_ptr())
        tensors[key] = dense
    return save_tensors(tensors), values


def unpack(data: bytes, values: Mapping[str, State], providers: Sequence[StateProvider]) -> None:
    """Give every provider its state back. Raises CheckpointError before any is touched if the lists differ."""
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise CheckpointError(f"the tensors of the checkpoint cannot be read: {error}") from error
    distribute(tensors, values, providers)


def digest_of(values: Mapping[str, Any]) -> str:
    """sha256 of a configuration: its JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


# --- disk -------------------------------------------------------------------------------------------------------------


class CheckpointFolder(ShardFolder):
    """The checkpoints of one run on disk, as the providers of one rank see them."""

    def save(self, stamp: Stamp, providers: Sequence[StateProvider]) -> int:
        """Write this rank's shard of `stamp.step`; see `write`."""
        data, values = pack(providers)
        return self.write(stamp, data, values)

    def load(self, step: int, providers: Sequence[StateProvider], config_sha256: str) -> Stamp:
        """Restore this rank's shard of `step`. Raises CheckpointError, with the providers untouched, when it does not
        verify or belongs to another configuration or number of ranks."""
        manifest, data = self.read(step, self.rank)
        stamp = Stamp(**manifest["stamp"])
        if stamp.world_size != self.world_size or stamp.config_sha256 != config_sha256:
            raise CheckpointError(
                f"{self.shard(step)} was written by {stamp.world_size} ranks with configuration "
                f"{stamp.config_sha256[:12]}; this run has {self.world_size} ranks and {config_sha256[:12]}. Resume "
                f"with the same settings, or choose another folder."
            )
        unpack(data, manifest["values"], providers)
        return stamp


# --- the providers of every training loop -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """Parameters and buffers of a module, without the prefix that DDP adds."""

    model: nn.Module
    name: str = "model"

    def state_dict(self) -> State:
        """Buffers, which a forward pass may change, are copies."""
        state: State = dict(self.model.state_dict())
        for name, buffer in self.model.named_buffers():
            if name in state:
                state[name] = buffer.detach().clone()
        return state

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state, strict=True)


@dataclass(frozen=True)
class OptimizerState:
    """State of a torch optimizer, keyed by parameter name, so that it survives another order of parameters."""

    optimizer: torch.optim.Optimizer
    model: nn.Module
    name: str = "optimizer"

    def _names(self) -> list[str]:
        """Parameter names in the optimizer's own numbering."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def state_dict(self) -> State:
        names, whole = self._names(), self.optimizer.state_dict()
        state: State = {
            f"{names[index]}:{key}": value for index, item in whole["state"].items() for key, value in item.items()
        }
        groups = [dict(group, params=[names[i] for i in group["params"]]) for group in whole["param_groups"]]
        return state | {"param_groups": groups}

    def load_state_dict(self, state: State) -> None:
        index = {name: i for i, name in enumerate(self._names())}
        slots: dict[int, State] = {}
        for key, value in state.items():
            if key != "param_groups":
                name, _, slot = key.rpartition(":")
                slots.setdefault(index[name], {})[slot] = value
        groups = [dict(group, params=[index[name] for name in group["params"]]) for group in state["param_groups"]]
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})


@dataclass(frozen=True)
class RandomState:
    """The global generators of Python, NumPy and torch (and of each CUDA device), plus named ones of the loop."""

    generators: Mapping[str, torch.Generator | np.random.Generator]
    name: str = "random"

    def state_dict(self) -> State:
        kind, words, position, has_gauss, cached = np.random.get_state(legacy=True)
        version, python_words, gauss = random.getstate()
        state: State = {
            "python": [version, gauss],
            "python_words": torch.from_numpy(np.array(python_words, np.int64)),
            "numpy": [kind, position, has_gauss, cached],
            "numpy_words": torch.from_numpy(np.asarray(words).view(np.int32)),
            "torch": torch.get_rng_state(),
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            state[f"cuda{index}"] = torch.cuda.get_rng_state(index)
        for name, generator in self.generators.items():
            is_torch = isinstance(generator, torch.Generator)
            state[f"generator.{name}"] = generator.get_state() if is_torch else generator.bit_generator.state  # type: ignore[union-attr]
        return state

    def load_state_dict(self, state: State) -> None:
        version, gauss = state["python"]
        random.setstate((version, tuple(state["python_words"].tolist()), gauss))
        kind, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, state["numpy_words"].numpy().view(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        for key, value in state.items():
            if key.startswith("cuda"):
                torch.cuda.set_rng_state(value, int(key.removeprefix("cuda")))
        for name, generator in self.generators.items():
            if isinstance(generator, torch.Generator):
                generator.set_state(state[f"generator.{name}"])
            else:
                generator.bit_generator.state = state[f"generator.{name}"]


@dataclass
class DataPosition:
    """Batches consumed so far: what was prefetched but not yet used does not count, and is drawn again."""

    consumed: int = 0
    name: str = "data"

    def state_dict(self) -> State:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: State) -> None:
        self.consumed = int(state["consumed"])

    def load_all(self, states: Sequence[State]) -> None:
        """All ranks have consumed as many batches; one that joins goes on where they are."""
        self.load_state_dict(states[0])


@dataclass(frozen=True)
class ResidualState:
    """What the codecs of one rank still owe: each residual a tensor called `kind/offset/numel/parameter`."""

    feedback: ErrorFeedback
    name: str = "residuals"

    def state_dict(self) -> State:
        return {
            f"{kind}/{offset}/{numel}/{parameter}": values
            for kind, pieces in self.feedback.state_dict().items()
            for parameter, entries in pieces.items()
            for offset, numel, values in entries
        }

    def load_state_dict(self, state: State) -> None:
        self.feedback.load_state_dict(_residuals(state))

    def load_all(self, states: Sequence[State]) -> None:
        """Each rank owes the mean of what the old ranks owed, so that nothing is lost from the mean gradient."""
        self.feedback.load_state_dict(reshard([_residuals(state) for state in states]))


def _residuals(state: State) -> dict[str, Any]:
    kinds: dict[str, Any] = {"residuals": {}, "owner_residuals": {}}
    for key, values in state.items():
        kind, offset, numel, parameter = key.split("/", 3)
        kinds[kind].setdefault(parameter, []).append((int(offset), int(numel), values))
    return kinds


@dataclass(frozen=True)
class ExpertShards:
    """This rank's shards of all experts of one layer. Where an expert computes is no state: the slots are filled from
    the shards (`push_weights`) under whatever map the present group uses."""

    experts: ExpertState
    name: str = "experts"

    def state_dict(self) -> State:
        return dict(self.experts.state_dict())

    def load_state_dict(self, state: State) -> None:
        experts = self.experts
        for key, table in (("master", experts.master), ("momentum", experts.momentum), ("variance", experts.variance)):
            for expert in range(experts.num_experts):
                table[expert] = state[f"{expert}/{key}"]
        experts.step_count = int(state["step"])

    def load_all(self, states: Sequence[State]) -> None:
        """Each expert is put together from the old shards and cut anew."""
        self.experts.load_state_dict(states)
