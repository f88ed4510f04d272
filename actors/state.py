"""What a checkpoint holds and how it lies on disk: safetensors and a JSON manifest with sha256, no pickle.

Everything that training needs to go on bit-identically is one list of `StateProvider`s (model, optimizer, hooks, random
states, data position, ...), one list for every tier: disk, own host's memory, peers' memory. On disk each rank writes
its own shard, `DIR/step-00000017/rank-3/`, under a temporary name that is renamed after fsync: a shard exists whole or
not at all. A step is complete when every rank's shard verifies. This module coordinates nothing between ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from collectives.errors import ZenrayError

FORMAT_VERSION = 1
SPARE_BYTES = 16 << 20
"""Free space a checkpoint leaves on its disk."""

MAX_MANIFEST_BYTES = 16 << 20

State = dict[str, Any]
"""Tensors, or values that JSON can hold, by key."""


class CheckpointError(ZenrayError):
    """A checkpoint could not be written, or none can be loaded. What was complete before still is."""


class StateProvider(Protocol):
    """One part of the training state. `name` is unique in its list and the same in every run."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> State:
        """Tensors (any device, not copied here) and JSON values, by key."""

    def load_state_dict(self, state: State) -> None:
        """Restore exactly; tensors arrive on the CPU."""


class WritePhase(StrEnum):
    """Points at which a write can be interrupted; failure tests stop the process at each of them."""

    TENSORS = "tensors"
    MANIFEST = "manifest"
    SYNC = "sync"
    RENAME = "rename"
    PRUNE = "prune"


@dataclass(frozen=True)
class Stamp:
    """Where a state belongs. Two stamps with different digests must not be mixed."""

    run_id: str
    step: int
    epoch: int
    rank: int
    world_size: int
    config_sha256: str


# --- bytes ------------------------------------------------------------------------------------------------------------


def pack(providers: Sequence[StateProvider]) -> tuple[bytes, dict[str, State]]:
    """All states as one safetensors buffer (keys `provider/key`) and the JSON values by provider."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, State] = {}
    seen: set[int] = set()
    for provider in providers:
        if provider.name in values:
            raise CheckpointError(f"two state providers are called '{provider.name}'")
        values[provider.name] = {}
        for key, value in provider.state_dict().items():
            if not isinstance(value, Tensor):
                values[provider.name][key] = value
                continue
            dense = value.detach().cpu().contiguous()
            if dense.data_ptr() in seen or dense.untyped_storage().nbytes() != dense.nbytes:
                dense = dense.clone()  # safetensors refuses tensors that share memory, such as tied weights
            seen.add(dense.data_ptr())
            tensors[f"{provider.name}/{key}"] = dense
    return save_tensors(tensors), values


def unpack(data: bytes, values: Mapping[str, State], providers: Sequence[StateProvider]) -> None:
    """Give every provider its state back. Raises CheckpointError before any is touched if the lists differ."""
    wanted, held = {provider.name for provider in providers}, set(values)
    if wanted != held:
        raise CheckpointError(
            f"the checkpoint holds the states {sorted(held)}, this run needs {sorted(wanted)}: resume with the same "
            f"model, optimizer and policy, or start anew"
        )
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise CheckpointError(f"the tensors of the checkpoint cannot be read: {error}") from error
    for provider in providers:
        prefix = f"{provider.name}/"
        state = dict(values[provider.name])
        state |= {key.removeprefix(prefix): item for key, item in tensors.items() if key.startswith(prefix)}
        provider.load_state_dict(state)


def digest_of(values: Mapping[str, Any]) -> str:
    """sha256 of a configuration: its JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


# --- disk -------------------------------------------------------------------------------------------------------------


class CheckpointFolder:
    """The checkpoints of one run on disk, as one rank sees them."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        keep: int = 2,
        on_phase: Callable[[WritePhase], None] = lambda phase: None,
    ):
        """keep: complete steps that remain. on_phase: called before each phase of a write (failure tests)."""
        self.folder, self.rank, self.world_size, self.keep, self.on_phase = folder, rank, world_size, keep, on_phase

    def save(self, stamp: Stamp, providers: Sequence[StateProvider]) -> int:
        """Write this rank's shard of `stamp.step`; returns its bytes. Older shards beyond `keep` go afterwards.

        Raises CheckpointError when the disk is full or fails; nothing of this step remains then.
        """
        data, values = pack(providers)
        files = {"tensors.safetensors": {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}}
        manifest = {"format": FORMAT_VERSION, "stamp": asdict(stamp), "files": files, "values": values}
        text = json.dumps(manifest, indent=1, sort_keys=True).encode()
        shard = self._shard(stamp.step)
        partial = shard.with_name(f".{shard.name}.partial")
        try:
            shard.parent.mkdir(parents=True, exist_ok=True)
            self._check_space(len(data) + len(text))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self.on_phase(WritePhase.TENSORS)
            self._write(partial / "tensors.safetensors", data, WritePhase.SYNC)
            self.on_phase(WritePhase.MANIFEST)
            self._write(partial / "manifest.json", text, WritePhase.SYNC)
            _sync_folder(partial)
            self.on_phase(WritePhase.RENAME)
            shutil.rmtree(shard, ignore_errors=True)  # only a rewrite of the same step after a restart meets one
            partial.rename(shard)
            _sync_folder(shard.parent)
            _sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"rank {self.rank}: checkpoint of step {stamp.step} ({len(data)} bytes) not written to {self.folder}: "
                f"{error}. Earlier checkpoints are untouched; free some space or choose another folder."
            ) from error
        self.on_phase(WritePhase.PRUNE)
        self._prune()
        return len(data) + len(text)

    def _write(self, path: Path, data: bytes, middle: WritePhase) -> None:
        with path.open("wb") as file:
            half = len(data) // 2
            file.write(data[:half])
            file.flush()
            self.on_phase(middle)
            file.write(data[half:])
            file.flush()
            os.fsync(file.fileno())

    def _check_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + SPARE_BYTES:
            raise OSError(f"{num_bytes + SPARE_BYTES} bytes needed, {free} free")

    def latest(self) -> int | None:
        """The highest step whose shards all verify, or None. Half-written and damaged steps are passed over."""
        for step in sorted(self._steps(), reverse=True):
            try:
                for rank in range(self.world_size):
                    self._verified(step, rank)
                return step
            except CheckpointError:
                continue
        return None

    def load(self, step: int, providers: Sequence[StateProvider], config_sha256: str) -> Stamp:
        """Restore this rank's shard of `step`. Raises CheckpointError, with the providers untouched, when it does not
        verify or belongs to another configuration or number of ranks."""
        manifest, data = self._verified(step, self.rank)
        stamp = Stamp(**manifest["stamp"])
        if stamp.world_size != self.world_size or stamp.config_sha256 != config_sha256:
            raise CheckpointError(
                f"{self._shard(step)} was written by {stamp.world_size} ranks with configuration "
                f"{stamp.config_sha256[:12]}; this run has {self.world_size} ranks and {config_sha256[:12]}. Resume "
                f"with the same settings, or choose another folder."
            )
        unpack(data, manifest["values"], providers)
        return stamp

    def _verified(self, step: int, rank: int) -> tuple[dict[str, Any], bytes]:
        shard = self._shard(step, rank)
        try:
            text = (shard / "manifest.json").read_bytes()
            if len(text) > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{shard}: the manifest has {len(text)} bytes, {MAX_MANIFEST_BYTES} allowed")
            manifest = json.loads(text)
            expected = manifest["files"]["tensors.safetensors"]
            data = (shard / "tensors.safetensors").read_bytes()
            stamp = Stamp(**manifest["stamp"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{shard} is no complete checkpoint: {error}") from error
        if manifest["format"] != FORMAT_VERSION or (stamp.step, stamp.rank) != (step, rank):
            raise CheckpointError(f"{shard} does not hold what its name says: {manifest['format']}, {stamp}")
        if len(data) != expected["num_bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{shard} is damaged: the tensors do not match the sha256 of the manifest")
        return manifest, data

    def _shard(self, step: int, rank: int | None = None) -> Path:
        return self.folder / f"step-{step:08d}" / f"rank-{self.rank if rank is None else rank}"

    def _steps(self) -> list[int]:
        names = (path.name for path in self.folder.glob("step-*")) if self.folder.exists() else ()
        return [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))]

    def _complete(self) -> list[int]:
        """Steps that every rank has renamed into place, newest first; contents are verified on load only."""
        steps = sorted(self._steps(), reverse=True)
        return [s for s in steps if all(self._shard(s, rank).is_dir() for rank in range(self.world_size))]

    def _prune(self) -> None:
        complete = self._complete()
        if len(complete) < self.keep:
            return
        for step in self._steps():
            if step < complete[self.keep - 1]:
                shard = self._shard(step)
                shutil.rmtree(shard, ignore_errors=True)
                shutil.rmtree(shard.with_name(f".{shard.name}.partial"), ignore_errors=True)
                with suppress(OSError):  # other ranks' shards are still there, or they removed the folder first
                    shard.parent.rmdir()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- the providers of every training loop -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """Parameters and buffers of a module, without the prefix that DDP adds."""

    model: nn.Module
    name: str = "model"

    def state_dict(self) -> State:
        return dict(self.model.state_dict())

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
        state: State = {
            "python": json.loads(json.dumps(random.getstate())),
            "numpy": [kind, np.asarray(words).tolist(), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            state[f"cuda{index}"] = torch.cuda.get_rng_state(index)
        for name, generator in self.generators.items():
            is_torch = isinstance(generator, torch.Generator)
            state[f"generator.{name}"] = generator.get_state() if is_torch else generator.bit_generator.state  # type: ignore[union-attr]
        return state

    def load_state_dict(self, state: State) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(state["numpy"]))
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
