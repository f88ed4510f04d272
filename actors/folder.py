"""Shards on disk: safetensors and a JSON manifest with sha256, whole or not at all. Knows bytes, no tensors.

Each rank's shard is `DIR/step-00000017/rank-3/`, written under a temporary name that is renamed after fsync. A step is
complete when every rank's shard verifies. This module coordinates nothing between ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from actors.errors import CheckpointError

FORMAT_VERSION = 1
SPARE_BYTES = 16 << 20
"""Free space a checkpoint leaves on its disk."""

MAX_MANIFEST_BYTES = 16 << 20


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


class ShardFolder:
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

    def write(self, stamp: Stamp, data: bytes, values: Mapping[str, Any]) -> int:
        """Write this rank's shard of `stamp.step`: safetensors bytes and what JSON holds. Returns the bytes written.

        Older shards beyond `keep` go afterwards. Raises CheckpointError when the disk is full or fails; nothing of this
        step remains then.
        """
        files = {"tensors.safetensors": {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}}
        manifest = {"format": FORMAT_VERSION, "stamp": asdict(stamp), "files": files, "values": values}
        text = json.dumps(manifest, indent=1, sort_keys=True).encode()
        shard = self.shard(stamp.step)
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
                    self.read(step, rank)
                return step
            except CheckpointError:
                continue
        return None

    def read(self, step: int, rank: int) -> tuple[dict[str, Any], bytes]:
        """The manifest and the safetensors bytes of one shard. Raises CheckpointError unless they verify."""
        shard = self.shard(step, rank)
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

    def shard(self, step: int, rank: int | None = None) -> Path:
        """The folder of one shard, this rank's by default."""
        return self.folder / f"step-{step:08d}" / f"rank-{self.rank if rank is None else rank}"

    def _steps(self) -> list[int]:
        names = (path.name for path in self.folder.glob("step-*")) if self.folder.exists() else ()
        return [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))]

    def _complete(self) -> list[int]:
        """Steps that every rank has renamed into place, newest first; contents are verified on load only."""
        steps = sorted(self._steps(), reverse=True)
        return [s for s in steps if all(self.shard(s, rank).is_dir() for rank in range(self.world_size))]

    def _prune(self) -> None:
        complete = self._complete()
        if len(complete) < self.keep:
            return
        for step in self._steps():
            if step < complete[self.keep - 1]:
                shard = self.shard(step)
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
