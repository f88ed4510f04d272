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
