"""The branch of errors of workers and their groups."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.errors import ZenrayError


class WorkerError(ZenrayError):
    """A worker or its group failed; the group must be restarted in a new epoch or shut down."""


class WorkerLost(WorkerError):
    """A worker process or its node is gone."""

    def __init__(self, *, rank: int, epoch: int, node: str, pid: int, cause: str):
        self.rank, self.epoch, self.node, self.pid, self.cause = rank, epoch, node, pid, cause
        super().__init__(
            f"rank {rank} (process {pid} on node {node}, epoch {epoch}) is gone: {cause} Restart the group; if this "
            f"repeats, look for a killed process (memory) in that node's system log."
        )


class WorkerTimeout(WorkerError):
    """Workers did not finish a phase of their group's life before its deadline."""

    def __init__(self, *, phase: str, epoch: int, missing: Sequence[int], timeout_s: float):
        self.phase, self.epoch, self.missing, self.timeout_s = phase, epoch, tuple(missing), timeout_s
        super().__init__(
            f"rank(s) {', '.join(map(str, self.missing))} did not finish '{phase}' (epoch {epoch}) in {timeout_s:g} s. "
            f"They hang or are slow: look at their logs, or raise the limit if they are only slow."
        )


class GroupStateError(WorkerError):
    """A worker group was asked for something that its state does not allow."""


class CheckpointError(ZenrayError):
    """A checkpoint could not be written, or none can be loaded. What was complete before still is."""


class HolderLost(CheckpointError):
    """A holder of checkpoint copies is gone or does not answer."""

    def __init__(self, *, rank: int, host: str, step: int, cause: str):
        self.rank, self.host, self.step, self.cause = rank, host, step, cause
        super().__init__(
            f"rank {rank}: the holder on host {host} did not take step {step}: {cause} The group goes on in the next "
            f"epoch with the holders that are left."
        )


class MemoryExhausted(CheckpointError):
    """A holder's memory limit does not allow another shard."""

    def __init__(self, *, host: str, need_bytes: int, used_bytes: int, limit_bytes: int):
        self.host, self.need_bytes, self.used_bytes, self.limit_bytes = host, need_bytes, used_bytes, limit_bytes
        super().__init__(
            f"the holder on host {host} keeps {used_bytes} bytes and cannot take {need_bytes} more: its limit is "
            f"{limit_bytes}. Raise the limit, use fewer copies, or more hosts."
        )


class StaleEpoch(CheckpointError):
    """A frame or request of an epoch that has been fenced."""

    def __init__(self, *, epoch: int, fenced: int):
        self.epoch, self.fenced = epoch, fenced
        super().__init__(f"epoch {epoch} is over: epoch {fenced} has begun. This process was replaced; let it end.")


class Interrupted(WorkerError):
    """A rank that waited for a commit was told to leave: its group is about to be rebuilt."""
