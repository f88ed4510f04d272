"""A job's life in the queue: its states, what is remembered of it, and which changes are allowed. Pure.

An entry is rebuilt by folding its changes in order, so a journal of changes is all that has to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from placement.errors import PlacementError
from placement.replan import Attempt


class JobState(StrEnum):
    """Where a job is."""

    SUBMITTED = "SUBMITTED"
    PREDICTED = "PREDICTED"
    QUEUED = "QUEUED"
    RESERVED = "RESERVED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    DONE = "DONE"
    FAILED = "FAILED"
    INFEASIBLE = "INFEASIBLE"
    CANCELLED = "CANCELLED"


S = JobState
ON_CARDS = frozenset({S.RESERVED, S.STARTING, S.RUNNING, S.RESIZING})
OVER = frozenset({S.DONE, S.FAILED, S.CANCELLED})
"""States that nothing leaves. INFEASIBLE is left when a node joins that changes the answer."""

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    S.SUBMITTED: frozenset({S.PREDICTED, S.INFEASIBLE, S.FAILED, S.CANCELLED}),
    S.PREDICTED: frozenset({S.QUEUED, S.INFEASIBLE, S.FAILED, S.CANCELLED}),
    S.QUEUED: frozenset({S.RESERVED, S.INFEASIBLE, S.FAILED, S.CANCELLED}),
    S.RESERVED: frozenset({S.STARTING, S.QUEUED, S.FAILED, S.CANCELLED}),
    S.STARTING: frozenset({S.RUNNING, S.QUEUED, S.RESIZING, S.FAILED, S.CANCELLED}),
    S.RUNNING: frozenset({S.RESIZING, S.QUEUED, S.DONE, S.FAILED, S.CANCELLED}),
    S.RESIZING: frozenset({S.QUEUED, S.DONE, S.FAILED, S.CANCELLED}),
    S.DONE: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
    S.INFEASIBLE: frozenset({S.SUBMITTED, S.QUEUED, S.CANCELLED}),
}


@dataclass(frozen=True, kw_only=True)
class JobEntry:
    """All that is known of one job. Plain values only: it is what the journal holds."""

    job_id: str
    request: Mapping[str, Any]
    submit_s: float
    """Seconds since the epoch, as every time here: it must mean the same after a restart."""
    state: JobState = S.SUBMITTED
    reason: str = ""
    """Why it is where it is: what it waits for, what failed, or the nearest feasible change."""
    plan: str = ""
    """Key of the plan it has, or had last."""
    nodes: tuple[str, ...] = ()
    """Node of each rank, by rank."""
    starts: int = 0
    """Worker groups that were started for it."""
    attempts: tuple[Attempt, ...] = ()
    """Plans that ran out of memory."""
    losses: int = 0
    """Worker groups that were lost for reasons other than memory."""
    done_steps: int = 0
    start_s: float | None = None
    end_s: float | None = None
    outcome: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[str, ...] = ()
    """One line an event, for people."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)


def from_json(values: Mapping[str, Any]) -> JobEntry:
    """The entry that `to_json` wrote. Keys of a later version are refused with a PlacementError."""
    return changed(None, values)


def changed(entry: JobEntry | None, change: Mapping[str, Any]) -> JobEntry:
    """The entry after one change from the journal; None and a complete change make a new one."""
    unknown = set(change) - {f.name for f in fields(JobEntry)}
    if unknown:
        raise PlacementError(f"the queue's journal knows more than this version: {', '.join(sorted(unknown))}")
    values = dict(change)
    if "state" in values:
        values["state"] = JobState(values["state"])
    if "attempts" in values:
        values["attempts"] = tuple(a if isinstance(a, Attempt) else Attempt(**a) for a in values["attempts"])
    for name in ("nodes", "history"):
        if name in values:
            values[name] = tuple(values[name])
    return JobEntry(**values) if entry is None else replace(entry, **values)


def check_transition(entry: JobEntry, state: JobState) -> None:
    """Raises PlacementError for a change of state that the table does not list."""
    if state not in TRANSITIONS[entry.state]:
        raise PlacementError(f"job {entry.job_id} is {entry.state} and cannot become {state}")
