"""The queue on disk: a journal of changes, one JSON line each, synced before anybody acts on it, and a snapshot.

What always holds: after a kill at any moment, `entries` is what it was after the last change that returned. A torn last
line, written by a process that died, is dropped. One process writes at a time; the lock goes with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from actors.errors import WorkerError
from placement.correction import Correction, Observation, observe
from placement.queue import JobEntry, JobState, changed, check_transition, from_json

SNAPSHOT_LINES = 2000
"""Lines after which the journal is folded into a new snapshot."""
FORMAT_VERSION = 1


class JobStore:
    """The jobs of one queue and what their runs taught. Not thread-safe: the scheduler holds its own lock."""

    def __init__(self, folder: Path):
        """Open or create. Raises WorkerError if another process has the folder open, or if it cannot be read."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.entries: dict[str, JobEntry] = {}
        self.correction = Correction()
        self.profiles: dict[str, dict[str, Any]] = {}
        """Profiles of modules by their key, as JSON holds them."""
        self._lock = (folder / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise WorkerError(f"{folder} is in use by another scheduler; give each queue a folder of its own") from None
        self._generation = self._load()
        self._num_lines = 0
        self._file: BinaryIO = self._compact()

    def submit(self, entry: JobEntry) -> None:
        """A new job. Raises WorkerError for an id that is known."""
        if entry.job_id in self.entries:
            raise WorkerError(f"job {entry.job_id} is in the queue already; give it another name")
        self._append({"job": entry.job_id, "set": entry.to_json()})
        self.entries[entry.job_id] = entry

    def change(self, job_id: str, **values: Any) -> JobEntry:
        """Change fields of a job, its state only as the table of transitions allows; returns the new entry."""
        entry = self.entries[job_id]
        state = values.get("state", entry.state)
        if state != entry.state:
            check_transition(entry, JobState(state))
        new = changed(entry, values)
        self._append({"job": job_id, "set": {name: new.to_json()[name] for name in values}})
        self.entries[job_id] = new
        return new

    def learn(self, observation: Observation) -> None:
        """A peak that was measured; it moves the correction of its key."""
        self._append({"observation": _plain(observation)})
        self.correction = observe(self.correction, observation)

    def keep_profile(self, key: str, profile: Mapping[str, Any]) -> None:
        """The profile of a module, so that it is traced once."""
        self._append({"key": key, "profile": dict(profile)})
        self.profiles[key] = dict(profile)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
        self._lock.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._write(self._file, line)
        self._num_lines += 1
        if self._num_lines >= SNAPSHOT_LINES:
            self._apply(json.loads(json.dumps(line)))
            self._file.close()
            self._file = self._compact()

    def _write(self, file: BinaryIO, line: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise WorkerError(
                f"the queue's journal in {self.folder} cannot be written: {error}. Nothing is accepted until there is room."
            ) from error

    def _load(self) -> int:
        """Read the newest snapshot and the journal that follows it; returns their number."""
        numbers = sorted(
            int(match[1])
            for path in self.folder.glob("snapshot-*.json")
            if (match := re.fullmatch(r"snapshot-(\d+)\.json", path.name))
        )
        generation = numbers[-1] if numbers else 0
        if numbers:
            snapshot = json.loads((self.folder / f"snapshot-{generation}.json").read_bytes())
            if snapshot["format"] != FORMAT_VERSION:
                raise WorkerError(f"{self.folder} was written in format {snapshot['format']}, this is {FORMAT_VERSION}")
            self.entries = {entry["job_id"]: from_json(entry) for entry in snapshot["jobs"]}
            self.profiles = snapshot["profiles"]
            for values in snapshot["observations"]:
                self.correction = observe(self.correction, _observation(values))
        for line in _lines(self.folder / f"journal-{generation}.jsonl"):
            self._apply(line)
        return generation

    def _apply(self, line: Mapping[str, Any]) -> None:
        if "job" in line:
            self.entries[line["job"]] = changed(self.entries.get(line["job"]), line["set"])
        elif "observation" in line:
            self.correction = observe(self.correction, _observation(line["observation"]))
        else:
            self.profiles[line["key"]] = line["profile"]

    def _compact(self) -> BinaryIO:
        """Write a snapshot of all that is known and begin its journal; older files go last."""
        number = self._generation + 1
        snapshot = {
            "format": FORMAT_VERSION,
            "jobs": [entry.to_json() for entry in self.entries.values()],
            "profiles": self.profiles,
            "observations": [_plain(observation) for observation in self.correction.runs.values()],
        }
        journal = (self.folder / f"journal-{number}.jsonl").open("wb")
        partial = self.folder / "snapshot.partial"
        with partial.open("wb") as file:
            self._write(file, snapshot)
        partial.rename(self.folder / f"snapshot-{number}.json")
        _sync_folder(self.folder)
        for name in (f"snapshot-{self._generation}.json", f"journal-{self._generation}.jsonl"):
            (self.folder / name).unlink(missing_ok=True)
        self._generation, self._num_lines = number, 0
        return journal


def _plain(observation: Observation) -> dict[str, Any]:
    return {**observation.__dict__, "key": list(observation.key)}


def _observation(values: Mapping[str, Any]) -> Observation:
    return Observation(**{**values, "key": tuple(values["key"])})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, up to the first torn one."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        try:
            yield json.loads(line)
        except ValueError:
            return


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
