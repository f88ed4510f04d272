"""The queue on disk: a kill at any byte loses nothing that was acknowledged; one writer at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors import job_store
from actors.errors import WorkerError
from actors.job_store import JobStore
from placement.correction import Observation
from placement.errors import PlacementError
from placement.queue import JobEntry, JobState


def entry(name: str) -> JobEntry:
    return JobEntry(job_id=name, request={"name": name, "batch": 4}, submit_s=1.5)


def observation(run_id: str) -> Observation:
    return Observation(run_id=run_id, key=("f", "g"), predicted_bytes=10.0, measured_bytes=11.0)


def fill(store: JobStore) -> None:
    store.submit(entry("a"))
    store.submit(entry("b"))
    store.change("a", state=JobState.PREDICTED, reason="why")
    store.keep_profile("key", {"most": 3})
    store.learn(observation("r1"))
    store.change("b", done_steps=7, history=("one", "two"))


def test_everything_is_there_again(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    fill(store)
    entries, correction = dict(store.entries), store.correction
    store.close()
    for _ in range(2):  # from the journal, then from the snapshot that opening wrote
        again = JobStore(tmp_path)
        assert again.entries == entries
        assert again.profiles == {"key": {"most": 3}}
        assert again.correction.runs == correction.runs
        again.close()
    assert len(list(tmp_path.glob("journal-*"))) == len(list(tmp_path.glob("snapshot-*.json"))) == 1


def test_a_torn_line_is_dropped_at_every_byte(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "whole")
    store.submit(entry("a"))
    store.change("a", state=JobState.PREDICTED)
    store.close()
    journal = next((tmp_path / "whole").glob("journal-*")).read_bytes()
    snapshot = next((tmp_path / "whole").glob("snapshot-*.json"))
    first = journal.index(b"\n") + 1
    for size in range(first, len(journal) + 1, 7):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / snapshot.name).write_bytes(snapshot.read_bytes())
        (folder / "journal-1.jsonl").write_bytes(journal[:size])
        cut = JobStore(folder)
        assert cut.entries["a"].state is (JobState.PREDICTED if size == len(journal) else JobState.SUBMITTED)
        cut.close()


def test_a_long_journal_becomes_a_snapshot_without_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "SNAPSHOT_LINES", 20)
    store = JobStore(tmp_path)
    store.submit(entry("a"))
    for step in range(45):
        store.change("a", done_steps=step)
    store.close()
    assert sum(1 for _ in next(tmp_path.glob("journal-*")).open()) < 20
    again = JobStore(tmp_path)
    assert again.entries["a"].done_steps == 44
    again.close()


def test_illegal_changes_and_second_names_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    store.submit(entry("a"))
    with pytest.raises(WorkerError, match="in the queue already"):
        store.submit(entry("a"))
    with pytest.raises(PlacementError, match="cannot become"):
        store.change("a", state=JobState.DONE)
    store.close()
    again = JobStore(tmp_path)
    assert again.entries["a"].state is JobState.SUBMITTED
    again.close()


def test_one_process_writes_and_a_killed_one_leaves_the_folder_free(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from actors.job_store import JobStore\n"
        "from placement.queue import JobEntry\n"
        "store = JobStore(Path(sys.argv[1]))\n"
        "store.submit(JobEntry(job_id='a', request={}, submit_s=0.0))\n"
        "try:\n    JobStore(Path(sys.argv[1]))\nexcept Exception as error:\n    print(type(error).__name__, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (-9, "WorkerError")
    store = JobStore(tmp_path)
    assert list(store.entries) == ["a"]
    store.close()
