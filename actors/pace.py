"""When the chunks of a copy travel: in the spans in which training leaves the network idle, as `plan_traffic` says.

The first steps are sent as they come and measured: the idle spans of a step, and the speed of the link. From then on
each span takes the bytes that the plan gives it, and the last one the rest. A training thread that waits for the commit
lifts all limits, and so does time: a copy is worth more than an undisturbed step that does not end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from actors.delivery import CHUNK_BYTES
from placement.traffic import Link, TrafficPlan, plan_traffic

PROFILE_STEPS = 3


class Pace:
    """Of one rank. `busy`, `begin` and `lift` belong to the thread that trains, the rest to the one that sends."""

    def __init__(self, num_remote: int, timeout_s: float):
        self.num_remote, self.timeout_s = num_remote, timeout_s
        self.plan: TrafficPlan | None = None
        """None while the first steps are measured."""
        self._steps: list[list[float]] = []
        """Idle seconds by span, of each measured step."""
        self._speeds: list[float] = []
        self._spans: list[float] = []
        self._idle_since = time.monotonic()
        self._budget: list[int] = []
        """Bytes that may still be sent in each span but the last."""
        self._is_busy, self._is_lifted = False, False
        self._changed = threading.Condition()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While training itself uses the network."""
        with self._changed:
            self._spans.append(time.monotonic() - self._idle_since)
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy, self._idle_since = False, time.monotonic()
                self._changed.notify()

    def begin(self) -> None:
        """A copy is about to be sent: here a step begins."""
        with self._changed:
            now = time.monotonic()
            if self.plan is None:
                self._steps.append([*self._spans, now - self._idle_since])
            else:
                self._budget = [sum(size for _, size in span) for span in self.plan.spans[:-1]]
            self._spans, self._idle_since, self._is_lifted = [], now, False

    def lift(self) -> None:
        """Training waits: send all."""
        with self._changed:
            self._is_lifted = True
            self._changed.notify()

    def allow(self, num_bytes: int) -> int:
        """Wait for room, at most `timeout_s`, then return how many of `num_bytes` may be sent at once."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            while True:
                place = len(self._spans)
                if self._is_lifted or self.plan is None or (place >= len(self._budget) and not self._is_busy):
                    return min(num_bytes, CHUNK_BYTES)
                if not self._is_busy and self._budget[place]:
                    size = min(num_bytes, CHUNK_BYTES, self._budget[place])
                    self._budget[place] -= size
                    return size
                if not self._changed.wait(deadline - time.monotonic()):
                    self._is_lifted = True

    def delivered(self, num_bytes: int, seconds: float) -> None:
        """One remote copy went through unhindered, acknowledgement included."""
        with self._changed:
            if self.plan is not None:
                return
            self._speeds.append(num_bytes / seconds)
            steps = self._steps[1:]  # the first holds the time before training began
            if len(steps) >= PROFILE_STEPS and len({len(spans) for spans in steps}) == 1:
                self.plan = self._make_plan(steps, num_bytes)
            del self._steps[1:-PROFILE_STEPS], self._speeds[: -PROFILE_STEPS * self.num_remote]

    def _make_plan(self, steps: Sequence[Sequence[float]], num_bytes: int) -> TrafficPlan:
        spans = [median(seconds) for seconds in zip(*steps, strict=True)]
        link = Link(0.0, median(self._speeds))
        return plan_traffic(spans, num_bytes, self.num_remote, min(CHUNK_BYTES, num_bytes), link)
