"""SIGTERM as an exception that neither gets lost nor breaks what it interrupts.

A handler that raises at once and once is not enough. It runs wherever the program happens to be: what it raises inside a
`__del__`, a weakref callback or code that catches everything ends there; and inside `logging`, which takes its lock one
line before the `try` that releases it, the exception leaves the lock taken, so that every other thread waits for ever.
So the handler raises again until the block has been left, and holds back in such modules and while the clean-up that
it caused is under way.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_S = 0.1
"""From one attempt to raise to the next."""

FRAGILE = frozenset({"logging", "importlib._bootstrap", "importlib._bootstrap_external"})
"""Modules that an exception out of nowhere may leave with a lock taken."""

PATIENCE = 50
"""Attempts that are given up for their sake; longer than that the program is stuck there."""

STOP_CODE = 128 + signal.SIGTERM


class Stopped(SystemExit):
    """The process was told to stop, and leaves with STOP_CODE."""

    def __init__(self) -> None:
        super().__init__(STOP_CODE)


class Stop:
    """What a block knows about being stopped."""

    def __init__(self, first: Callable[[], None]):
        self.is_asked = False
        """Whether the signal came."""
        self._first: Callable[[], None] | None = first
        self._is_busy = self._is_held = False
        self._patience = PATIENCE
        self._timer_before: tuple[float, float] | None = None

    def hold(self) -> None:
        """Raise nothing until the block is left: what follows must not be interrupted."""
        self._is_held = True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_busy:
            return
        self._is_busy = True
        try:
            self._attempt(frame)
        finally:
            self._is_busy = False

    def _attempt(self, frame: FrameType | None) -> None:
        if not self.is_asked:
            self.is_asked = True
            signal.signal(signal.SIGALRM, self._on_signal)
            self._timer_before = signal.setitimer(signal.ITIMER_REAL, REPEAT_S, REPEAT_S)
        if frame is not None and frame.f_globals.get("__name__") in FRAGILE and self._patience:
            self._patience -= 1
            return
        if self._first is not None:
            first, self._first = self._first, None
            first()
        if not self._is_held and not _is_leaving():
            raise Stopped


@contextmanager
def stop_on_sigterm(first: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """SIGTERM leaves the block by Stopped; so does a block that goes on to its end, or to another error, after it.

    first: called once, before the first raise. From the signal on SIGALRM and the real-time timer are used until the
    block is left; then everything is put back. Outside the main thread, which alone receives signals, nothing changes.
    """
    stop = Stop(first)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGALRM)}
    failure: BaseException | None = None
    signal.signal(signal.SIGTERM, stop._on_signal)
    try:
        yield stop
    except BaseException as error:
        if isinstance(error, Stopped) or not stop.is_asked:
            raise
        failure = error
    finally:
        stop.hold()
        if stop._timer_before is not None:
            signal.setitimer(signal.ITIMER_REAL, *stop._timer_before)
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.is_asked:
        raise Stopped from failure


@contextmanager
def keep_handler() -> Iterator[None]:
    """Put back a SIGTERM handler over which the block sets its own, as `ray.init` does; the default one is not kept."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _is_leaving() -> bool:
    """Whether the code that a signal interrupted is clean-up after Stopped, or after an error inside that clean-up."""
    error = sys.exception()
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None
