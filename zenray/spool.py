"""The queue between training and the tracking store: one append-only JSONL file on disk.

Records survive the process that wrote them. A file lock says whether its owner lives: a spool whose lock is free and
which still holds records is an orphan, and the next start sends it. Memory use does not grow while the store is down.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collectives.errors import ZenrayError

COMPACT_BYTES = 4 << 20
"""A drained file above this size is cut to zero, so that a long run does not keep what the store already has."""


class SpoolBusy(ZenrayError):
    """Another living process owns this spool."""


class Spool:
    """Append at the end, read from the front; both may happen in different threads.

    A line without its line end (its writer was killed in the middle) is never read.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise SpoolBusy(f"the spool {path} belongs to a process that is still running") from None
        self._lock = threading.RLock()  # a signal handler may append while the same thread is appending
        self._offset = 0
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        tail_start = max(0, size - COMPACT_BYTES)
        tail = os.pread(self._file, size - tail_start, tail_start)
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._file, tail_start + tail.rfind(b"\n") + 1)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record. Raises OSError when the disk is full; the file stays readable."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            end = os.fstat(self._file).st_size
            if os.write(self._file, line) != len(line):
                os.ftruncate(self._file, end)
                raise OSError(f"no space left for {len(line)} bytes in {self.path}")

    def peek(self, limit_bytes: int = 1 << 18) -> list[tuple[dict[str, Any], int]]:
        """The next records, each with its size in bytes; they stay until `advance`. At least one if any is pending."""
        with self._lock:
            data = os.pread(self._file, limit_bytes, self._offset)
            while data and b"\n" not in data and self._offset + len(data) < os.fstat(self._file).st_size:
                data += os.pread(self._file, limit_bytes, self._offset + len(data))
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        return [(json.loads(line), len(line)) for line in lines]

    def advance(self, num_bytes: int) -> None:
        """Forget the first `num_bytes`: their records have arrived."""
        with self._lock:
            self._offset += num_bytes
            size = os.fstat(self._file).st_size
            if self._offset == size and size > COMPACT_BYTES:
                os.ftruncate(self._file, 0)
                self._offset = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes written but not yet advanced over."""
        with self._lock:
            return os.fstat(self._file).st_size - self._offset

    def close(self) -> None:
        """Release the lock; a drained file is removed, any other is left for the next start."""
        if not self.pending_bytes:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def orphans(directory: Path) -> Iterator[Spool]:
    """Open, one after the other, the non-empty spools in `directory` whose owner is gone. The caller closes each."""
    for path in sorted(directory.glob("*.jsonl")):
        try:
            if path.stat().st_size:
                yield Spool(path)
        except (SpoolBusy, FileNotFoundError):
            continue
