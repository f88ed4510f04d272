"""The tier below memory: every few committed steps the holders write what they keep to a folder that all nodes see."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.errors import CheckpointError
from actors.folder import ShardFolder

WRITES_AT_ONCE = 2
"""Checkpoints under way: one that is being written and one that waits. A further one is left out."""
_FETCH_S = 2.0


@dataclass(frozen=True)
class Storage:
    """Where checkpoints lie, and how often one is written: every `every_steps` committed steps; `keep` of them remain.

    resume: a run goes on from the newest one. config_sha256 is written beside it.
    """

    folder: Path
    every_steps: int
    keep: int = 2
    resume: bool = False
    config_sha256: str = ""

    def of(self, num_ranks: int) -> Path:
        """The folder of checkpoints by so many ranks."""
        return self.folder / f"ranks-{num_ranks}"

    def latest(self, most_ranks: int) -> tuple[int, int] | None:
        """(step, num_ranks) of the newest complete checkpoint, or None."""
        found = [
            (step, ranks)
            for ranks in range(1, most_ranks + 1)
            if (step := ShardFolder(self.of(ranks), 0, ranks).latest()) is not None
        ]
        return max(found, default=None)


class StorageTier:
    """The writes of one run. A write that fails turns the tier off, with an event; the memory tiers go on."""

    def __init__(self, storage: Storage | None, run_id: str, say: Callable[[str], None]):
        self.storage, self.run_id, self.say = storage, run_id, say
        self.is_on = storage is not None
        self._is_late = False
        self._writes: list[tuple[int, Any]] = []

    def latest(self, most_ranks: int) -> tuple[int, int, Path] | None:
        """(step, num_ranks, folder) of the newest complete checkpoint, or None; also after the tier was turned off."""
        found = self.storage.latest(most_ranks) if self.storage is not None else None
        if self.storage is None or found is None:
            return None
        return found[0], found[1], self.storage.of(found[1])

    def write_if_due(self, step: int, first_holders: Sequence[Any | None]) -> None:
        """Have the shard of each rank written by its first holder, beside the training."""
        storage, size = self.storage, len(first_holders)
        if storage is None or not self.is_on or not step or step % storage.every_steps:
            return
        if len({step for step, _ in self._writes}) == WRITES_AT_ONCE:
            self._say_late(step)
            return
        identity = {"run_id": self.run_id, "config_sha256": storage.config_sha256}
        folder = str(storage.of(size))
        for holder in dict.fromkeys(holder for holder in first_holders if holder is not None):
            ranks = [rank for rank, first in enumerate(first_holders) if first == holder]
            self._writes.append((step, holder.write.remote(folder, ranks, (step, size), storage.keep, identity)))

    def note(self, timeout_s: float = 0.0) -> None:
        """Hear of finished writes."""
        if not self._writes:
            return
        refs = [ref for _, ref in self._writes]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        for step, ref in [write for write in self._writes if write[1] in ready]:
            self._writes.remove((step, ref))
            try:
                if not ray.get(ref, timeout=_FETCH_S):
                    self._say_late(step)
            except RayActorError:
                continue  # the holder is gone: the ranks notice it by themselves
            except CheckpointError as error:
                if self.is_on:
                    self.is_on = False
                    self.say(f"storage is off from step {step} on, memory goes on: {error}")

    def _say_late(self, step: int) -> None:
        if not self._is_late:
            self._is_late = True
            self.say(
                f"storage is slower than training: step {step} is not written, others may follow; write less often"
            )

    def settle(self, deadline: float) -> None:
        """Wait for the writes under way."""
        while self._writes and time.monotonic() < deadline:
            self.note(1.0)
