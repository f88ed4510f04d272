"""One attempt of one queued job: a worker group on the cards that the scheduler chose, and how it ended.

A thread of the scheduler's process. It reports what happens and decides nothing: what follows from an ending is the
scheduler's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import ray

from actors.errors import WorkerLost, WorkerTimeout
from actors.group import WorkerGroup
from actors.monitor import CardOutOfMemory, HostOutOfMemory
from actors.worker import RankFunction, Report
from collectives.errors import CollectiveError
from placement.data_plans import ModuleProfile
from placement.errors import GangDoesNotFit, PlacementError
from placement.inventory import NODE_ID_LABEL
from placement.jobs import PlanOption
from placement.mixed import Share
from placement.plans import Plan
from placement.shapes import Recompute

START_S = 120.0
"""For placing and joining the workers; a busy node takes long to start a process."""
JOIN_S = 30.0
"""How long a new attempt waits for the thread of the one before; that thread only cleans up."""


class Ending(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    ALARM = "stopped before the card was full"
    CARD_FULL = "card out of memory"
    HOST_FULL = "host out of memory"
    LOST = "workers lost"
    NO_PLACE = "no place now"
    IMPOSSIBLE = "no place ever"
    ERROR = "error"


MEMORY_ENDINGS = frozenset({Ending.ALARM, Ending.CARD_FULL, Ending.HOST_FULL})


@dataclass(frozen=True, kw_only=True)
class JobNeeds:
    """What the scheduler must know of a job file."""

    global_batch: int
    steps: int
    max_gpus: int
    recompute: tuple[Recompute, ...]
    pinned: Mapping[str, int]
    """Degrees that are fixed, see `placement.data_plans.PINNABLE`."""
    gpu_types: tuple[str, ...]
    """The only types allowed; empty: all."""
    resources: Mapping[str, float]
    """Of one rank, beside its card."""
    timeout_s: float
    """For one attempt."""
    deadline_s: float | None
    """From submission to the end."""
    boost_s: float
    mixed: bool
    """Its ranks may run on cards of different types at once."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Cards that a job has: the plan to run on them, the node of each, and what a rank runs by node if that differs."""

    job_id: str
    plan: Plan
    nodes: tuple[str, ...]
    shares: Mapping[str, Share] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a rank must know of its plan. Bytes are of one card."""

    data: int
    micro_batch: int
    recompute: Recompute
    upper_bytes: int
    capacity_bytes: int
    fake: bool
    """The card is pretended: enforce its capacity."""
    folder: str
    """Where the job's checkpoints are, on a file system that all nodes share."""
    shares: Mapping[str, Share] = field(default_factory=dict)
    """What a rank runs, by node id, where cards of several types are one gang; micro-batch and bytes are those then."""


class JobProgram(Protocol):
    """What turns a job file into training; given to the scheduler, which knows nothing of models."""

    def check(self, request: Mapping[str, Any]) -> JobNeeds:
        """Raises ConfigError if the request is wrong."""

    def profile_key(self, request: Mapping[str, Any]) -> str:
        """Equal for jobs that share a profile."""

    def class_key(self, request: Mapping[str, Any]) -> str:
        """Equal for jobs whose plans are the same."""

    def floor_bytes(self, request: Mapping[str, Any]) -> int:
        """Bytes of one card that no plan goes below, known without a trace: weights, gradients, optimizer."""

    def profile(self, request: Mapping[str, Any]) -> ModuleProfile:
        """Trace the job's module; takes seconds."""

    def rank_function(self, request: Mapping[str, Any], assignment: Assignment) -> RankFunction:
        """What every rank runs. Returns a mapping: `ended` ("done" or "alarm"), `alarm` (its text, on the ranks that
        raised it), `step`, `peak_bytes`, `needed_bytes`, and figures."""


@dataclass
class JobRun:
    """One attempt. `evicted`: its cards were taken (node loss); `cancelled`: its user ended it; `moving_to`: the plan that
    it goes on with after its next checkpoint."""

    grant: Grant
    run_id: str
    resource: str
    needs: JobNeeds
    function: RankFunction
    on_started: Callable[[JobRun], None]
    on_report: Callable[[JobRun, Report], None]
    on_ended: Callable[[JobRun, Ending, str, Mapping[str, Any]], None]
    before: JobRun | None = None
    delay_s: float = 0.0
    evicted: bool = False
    cancelled: bool = False
    moving_to: PlanOption | None = None
    peak_bytes: float = 0.0
    needed_bytes: float = 0.0
    """What the plan would have needed: the peak, or more where a trend says so."""
    step: int = 0
    loss: float | None = None
    begun_s: float = 0.0
    """Monotonic, as the next two."""
    first: tuple[int, float] | None = None
    """The first step that was reported, and when."""
    last_s: float = 0.0
    group: WorkerGroup | None = None
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def job_id(self) -> str:
        """Whose attempt it is."""
        return self.grant.job_id

    @property
    def restart_s(self) -> float | None:
        """What the start of this attempt took, up to the end of its first step; None before that."""
        return None if self.first is None else self.first[1] - self.begun_s

    @property
    def step_s(self) -> float | None:
        """Measured seconds a step; None before the second one."""
        if self.first is None or self.step <= self.first[0]:
            return None
        return (self.last_s - self.first[1]) / (self.step - self.first[0])

    def start(self) -> None:
        """Begin in a thread of its own."""
        self.thread = threading.Thread(target=self._attempt, daemon=True, name=self.run_id)
        self.thread.start()

    def stop(self) -> None:
        """End the workers at once; the thread then reports an ending."""
        group = self.group
        for member in group.members if group is not None else ():
            ray.kill(member.actor)

    def _attempt(self) -> None:
        if self.before is not None and self.before.thread is not None:
            self.before.thread.join(JOIN_S)
        self.before = None
        time.sleep(self.delay_s)
        self.begun_s = time.monotonic()
        results: list[Mapping[str, Any]] = []
        try:
            self.group = WorkerGroup(
                len(self.grant.nodes),
                resources_per_worker={**self.needs.resources, self.resource: 1},
                selectors=[{NODE_ID_LABEL: node} for node in self.grant.nodes],
                run_id=self.run_id,
                start_timeout_s=START_S,
            )
            with self.group as group:
                if self.cancelled or self.evicted:
                    raise PlacementError("the job was ended while it started")
                self.on_started(self)
                results = group.run(self.function, timeout_s=self.needs.timeout_s, on_report=self._hear)
            ending, detail = ended_well(results)
        except Exception as error:  # whatever it was, the scheduler must hear of it
            ending, detail = classify(error), str(error).strip() or type(error).__name__
            if isinstance(error, CardOutOfMemory):
                self.peak_bytes = max(self.peak_bytes, float(error.used_bytes))
        peaks = [float(result["peak_bytes"]) for result in results]
        self.peak_bytes = max([self.peak_bytes, *peaks])
        self.needed_bytes = max([self.peak_bytes, *(float(result["needed_bytes"]) for result in results)])
        self.on_ended(self, ending, detail, dict(results[0]) if results else {})

    def _hear(self, report: Report) -> None:
        metrics = report.metrics
        self.peak_bytes = max(self.peak_bytes, float(metrics.get("peak_bytes", 0.0)))
        if metrics.get("kind") == "progress":
            self.step, self.loss, self.last_s = int(metrics["step"]), metrics["loss"], time.monotonic()
            self.first = self.first or (self.step, self.last_s)
        self.on_report(self, report)


def ended_well(results: Sequence[Mapping[str, Any]]) -> tuple[Ending, str]:
    """All ranks returned: the end of the training, or of a plan that ran out of memory."""
    alarms = [result["alarm"] for result in results if result["ended"] == "alarm" and result["alarm"]]
    stopped = any(result["ended"] == "alarm" for result in results)
    return (Ending.ALARM, "; ".join(alarms)) if stopped else (Ending.DONE, "")


def classify(error: BaseException) -> Ending:
    """What kind of end an exception is. Memory of card and host apart; a lost worker only counts as memory where Ray or
    the kernel says so."""
    if isinstance(error, CardOutOfMemory):
        return Ending.CARD_FULL
    if isinstance(error, HostOutOfMemory | ray.exceptions.OutOfMemoryError):
        return Ending.HOST_FULL
    if isinstance(error, WorkerLost):
        words = error.cause.lower()
        pressed = "out of memory" in words or "low on memory" in words or "memory pressure" in words
        return Ending.HOST_FULL if pressed else Ending.LOST
    if isinstance(error, GangDoesNotFit) and error.reason == "never":
        return Ending.IMPOSSIBLE
    if isinstance(error, PlacementError):
        return Ending.NO_PLACE
    if isinstance(error, WorkerTimeout):
        return Ending.LOST if error.phase != "run" else Ending.ERROR
    return Ending.LOST if isinstance(error, CollectiveError) else Ending.ERROR
