"""How a recoverable group protects itself, where an epoch goes on from, and the record of a recovery."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Protection:
    """How a group protects itself."""

    copies: int = 2
    """m: holders of each shard, the own host's included."""
    spares: int = 1
    """Standby workers, each in a reserved bundle."""
    heartbeat_s: float = 2.0
    """H: a worker that is silent for so long is hung, and ended."""
    max_recoveries: int = 16
    """In one run; then the failure is raised."""
    replacement_s: float = 60.0
    """How long lost ranks wait for a replacement."""
    min_ranks: int | None = None
    """Elastic: without a replacement in time go on with fewer ranks, at least so many, and grow back when one comes.
    The result is then not the one of the full group. None: never."""
    shrink_after_s: float = 2.0
    """Elastic: how long to wait for a replacement before going on with fewer ranks."""
    memory_limit_bytes: int = 1 << 30
    """Of each holder."""


@dataclass
class Recovery:
    """One recovery, for the record. seconds: by stage, how long it took."""

    epoch: int
    cause: str
    lost_ranks: tuple[int, ...]
    began_s: float
    """time.time() at which the driver knew."""
    committed_before: int
    step: int = -1
    source: str = ""
    num_ranks: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """From where the next epoch goes on. sources None: from nothing, or from storage."""

    step: int
    old_shards: int
    sources: tuple[tuple[str, ...], ...] | None = None
    storage: Path | None = None
