"""SIGTERM ends a block wherever its first exception ends up."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zenray.stopping import keep_handler

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import logging, operator, os, signal, threading, time
from functools import partial
from types import SimpleNamespace
from zenray.stopping import stop_on_sigterm

def be_told():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100):
        pass

class Deleted:
    def __del__(self):
        be_told()

def say(*words):
    print(*words, flush=True)

def use(*ignored):
    pass

signal.signal(signal.SIGALRM, use)
signal.setitimer(signal.ITIMER_REAL, 300.0)
try:
    with stop_on_sigterm(lambda: say("told")) as stop:
        BODY
finally:
    say("left", signal.getsignal(signal.SIGALRM) is use, signal.getitimer(signal.ITIMER_REAL)[0] > 100)
"""
BODIES = {
    "raised": ("be_told(); say('never')", ""),
    "swallowed in a finalizer": ("Deleted(); say('went on'); time.sleep(60)", "went on"),
    "swallowed by catching everything": (
        """
        try:
            be_told()
        except BaseException:
            pass
        say('went on')
        time.sleep(60)""",
        "went on",
    ),
    "swallowed at the end": ("Deleted()", ""),
    "turned into another error": (
        """
        try:
            be_told()
        except BaseException:
            raise RuntimeError""",
        "",
    ),
    "a second signal before the repetition": ("Deleted(); be_told(); say('never')", ""),
    "clean-up goes to its end": (
        """
        try:
            be_told()
        finally:
            time.sleep(1.5)
            try:
                raise ValueError
            except ValueError:
                time.sleep(1.5)
            be_told()
            say('cleaned up')""",
        "cleaned up",
    ),
    "inside logging, which has just taken its lock": (
        """
        lock = logging._lock
        taken = map(operator.call, [lock.acquire, partial(signal.raise_signal, signal.SIGTERM)])
        logging._lock = SimpleNamespace(acquire=partial(tuple, taken), release=lock.release)
        try:
            logging.getLogger('here')
            logging._lock = lock
            time.sleep(60)
        finally:
            other = threading.Thread(target=logging.getLogger, args=('there',), daemon=True)
            other.start()
            other.join(10)
            say('taken' if other.is_alive() else 'free')""",
        "free",
    ),
    "clean-up around the inner of two blocks": (
        """
        try:
            with stop_on_sigterm():
                be_told()
        finally:
            be_told()
            time.sleep(0.3)
            say('cleaned up')""",
        "cleaned up",
    ),
    "held": ("stop.hold(); be_told(); time.sleep(1.5); say('undisturbed')", "undisturbed"),
}


@pytest.mark.parametrize(("body", "said"), BODIES.values(), ids=BODIES)
def test_a_stop_arrives_once_and_always(body: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BODY", body)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout.split("\n") == ["told", *([said] if said else []), "left True True", ""]
    assert ("Exception ignored in" in done.stderr) is ("Deleted()" in body)


def test_a_handler_is_kept_through_what_sets_its_own_and_the_default_is_not() -> None:
    def mine(*ignored: object) -> None: ...

    def theirs(*ignored: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    try:
        for first, last in ((mine, mine), (signal.SIG_DFL, theirs)):
            signal.signal(signal.SIGTERM, first)
            with keep_handler():
                signal.signal(signal.SIGTERM, theirs)
            assert signal.getsignal(signal.SIGTERM) is last
    finally:
        signal.signal(signal.SIGTERM, before)
