"""The journal of a run: one line an epoch, one a start, one a commit; appended and synced before anybody acts on it.

What was written last may be torn by a crash: a line without its end, or that is no JSON, ends the reading.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from actors.errors import CheckpointError
from placement.recovery import EpochStart


class Journal:
    """Of one run, on the driver's disk. Creating one begins a new file."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.history: list[EpochStart] = []
        self.committed = -1
        """The last committed step, -1 before the first."""
        self._file: BinaryIO = path.open("wb")

    def fence(self, epoch: int) -> None:
        """From here on, whatever comes from an epoch before `epoch` is dropped."""
        self._append({"epoch": epoch})

    def start(self, epoch: int, step: int, num_ranks: int) -> None:
        """`epoch` goes on from the committed `step`, or begins anew (-1)."""
        self.history.append(EpochStart(epoch, step))
        self.committed = step
        self._append({"epoch": epoch, "start": step, "num_ranks": num_ranks})

    def commit(self, epoch: int, step: int) -> None:
        """Every copy of `step` is acknowledged."""
        self.committed = step
        self._append({"epoch": epoch, "commit": step})

    def event(self, text: str) -> None:
        """Something a reader should know."""
        self._append({"event": text})

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry | {"time_s": round(time.time(), 6)}).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"the journal {self.path} cannot be written: {error}. Without it no step can be committed: free some "
                f"space, or choose another folder."
            ) from error


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a journal, up to the first torn line."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n"):
                return
            yield entry
