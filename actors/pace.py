"""When the chunks of a copy travel: in the spans in which training leaves the network idle, as `plan_traffic` says.

Each step is measured: its idle spans, how long it takes until a copy can leave, and the speed of the link while it sends.
After a few steps, and from then on with every step anew, each span takes the bytes that the plan gives it, and the last one
the rest. A training thread that waits for the commit lifts all limits, and so does time: a copy is worth more than an
undisturbed step that does not end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from actors.delivery import CHUNK_BYTES
from placement.traffic import Link, TrafficPlan, plan_traffic

PROFILE_STEPS = 5
"""Steps whose medians make a plan. The first ones of a run are slower than all others: their plan does not last."""


@dataclass
class Measured:
    """One step. spans_s: idle seconds of the network in order, the last one until training waits for the commit."""

    spans_s: list[float] = field(default_factory=list)
    lead_s: float | None = None
    """From the beginning until the first copy to another host can leave; None before it does."""
    num_bytes: int = 0
    """Of a copy to another host."""
    sent_s: float = 0.0
    """How long all such copies took, without the waiting for room."""


class Pace:
    """Of one rank. `busy`, `begin` and `lift` belong to the thread that trains, the rest to the one that sends."""

    def __init__(self, num_remote: int, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self.num_remote, self.timeout_s, self.clock = num_remote, timeout_s, clock
        self.plan: TrafficPlan | None = None
        """None while the first steps are measured."""
        self.needed_s: float | None = None
        """What copies need of a step's idle time by the same measurements: until they can leave, and to travel."""
        self._steps: deque[Measured] = deque(maxlen=PROFILE_STEPS)
        self._now = Measured()
        self._begun = self._idle_since = clock()
        self._waited_s = 0.0
        self._budget: list[int] = []
        """Bytes that may still be sent in each span but the last."""
        self._is_busy = self._is_lifted = self._is_awaited = False
        self._changed = threading.Condition()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While training itself uses the network."""
        with self._changed:
            if not self._is_awaited:
                self._now.spans_s.append(self.clock() - self._idle_since)
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy, self._idle_since = False, self.clock()
                self._changed.notify()

    def begin(self) -> None:
        """A copy is about to be sent: here a step begins."""
        with self._changed:
            if self._now.num_bytes and self._is_awaited:
                self._steps.append(self._now)
                if len(self._steps) == PROFILE_STEPS and len({len(step.spans_s) for step in self._steps}) == 1:
                    self._make_plan()
            self._begun = self._idle_since = self.clock()
            self._now, self._is_lifted, self._is_awaited = Measured(), False, False
            if self.plan is not None:
                self._budget = [sum(size for _, size in span) for span in self.plan.spans[:-1]]

    def lift(self) -> None:
        """Training waits: send all. What follows until the next `begin` is too late for this step."""
        with self._changed:
            if not self._is_awaited:
                self._now.spans_s.append(self.clock() - self._idle_since)
            self._is_awaited = self._is_lifted = True
            self._changed.notify()

    def allow(self, num_bytes: int) -> int:
        """Wait for room, at most `timeout_s`, then return how many of `num_bytes` may be sent at once."""
        began = self.clock()
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            if self._now.lead_s is None:
                self._now.lead_s = began - self._begun
            try:
                while True:
                    place = len(self._now.spans_s)
                    if self._is_lifted or self.plan is None or (place >= len(self._budget) and not self._is_busy):
                        return min(num_bytes, CHUNK_BYTES)
                    if not self._is_busy and self._budget[place]:
                        size = min(num_bytes, CHUNK_BYTES, self._budget[place])
                        self._budget[place] -= size
                        return size
                    if not self._changed.wait(deadline - time.monotonic()):
                        self._is_lifted = True
            finally:
                self._waited_s += self.clock() - began

    def delivered(self, num_bytes: int, seconds: float) -> None:
        """One remote copy went through, acknowledgement included."""
        with self._changed:
            self._now.num_bytes = num_bytes
            self._now.sent_s += seconds - self._waited_s
            self._waited_s = 0.0

    def _make_plan(self) -> None:
        spans_s = [median(seconds) for seconds in zip(*(step.spans_s for step in self._steps), strict=True)]
        lead_s = median(step.lead_s or 0.0 for step in self._steps)
        num_bytes, sent_s = self._steps[-1].num_bytes, median(step.sent_s for step in self._steps)
        spans_s[0] = max(0.0, spans_s[0] - lead_s)
        link = Link(0.0, self.num_remote * num_bytes / sent_s)
        self.plan = plan_traffic(spans_s, num_bytes, self.num_remote, min(CHUNK_BYTES, num_bytes), link)
        self.needed_s = lead_s + sent_s
