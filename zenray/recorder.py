"""The single writer of run records, on the driver: training appends to a spool on disk, a thread sends it in batches.

What always holds: training never waits for the store and never fails because of it after the start; what the store
misses is sent when it is back, or by the next start; a run ends FINISHED, FAILED or KILLED, also when its process is
gone. Run ids are explicit, so MLFLOW_RUN_ID in the environment changes nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from collectives.errors import ZenrayError
from zenray.environment import NodeLoad, environment
from zenray.redact import redact, redact_text
from zenray.spool import Spool, orphans
from zenray.stopping import STOP_CODE, stop_on_sigterm
from zenray.tracking import LONG_VALUE, Rejected, Store, StoreDown, TrackingError, entity_key, old_file_store

HEARTBEAT_S = 5.0
"""A living recorder renews the heartbeat tag of its open runs this often."""

STALE_S = 12 * HEARTBEAT_S
"""A RUNNING run of another host counts as lost when its heartbeat is older than this."""

STOP_FLUSH_S = 1.5
"""After SIGTERM the endings may take this long to arrive; `ray job stop` kills after 3 s."""

STOP_EXIT_CODES = frozenset({int(signal.SIGTERM), STOP_CODE, 128 + signal.SIGINT})
"""Exit codes that mean "stopped from outside" (Ray's own SIGTERM handler leaves with the bare signal number)."""


def default_uri() -> str:
    """MLFLOW_TRACKING_URI, or a sqlite file in the current directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"


def ending(error: BaseException | None, stopped: bool = False) -> str:
    """The MLflow status of a run whose block was left with `error`: FINISHED, FAILED or KILLED."""
    if stopped or isinstance(error, KeyboardInterrupt):
        return "KILLED"
    if isinstance(error, SystemExit):
        if error.code in STOP_EXIT_CODES:
            return "KILLED"
        return "FINISHED" if error.code in (None, 0) else "FAILED"
    return "FINISHED" if error is None else "FAILED"


def owner_of_this_process() -> str:
    """host:pid:start time. The start time tells a process from a later one with the same pid."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def owner_is_gone(owner: str, heartbeat_s: float, now_s: float) -> bool:
    """Whether the process that wrote a RUNNING run has ended. On another host only its heartbeat can tell."""
    host, pid, started = owner.rsplit(":", 2)
    if host != socket.gethostname():
        return now_s - heartbeat_s > STALE_S
    try:
        process = psutil.Process(int(pid))
        return abs(process.create_time() - float(started)) > 1.0 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class RunRecord:
    """One MLflow run, a job or one of its variants or trials. All methods return at once and never raise."""

    def __init__(self, recorder: Recorder, key: str, name: str):
        self.recorder, self.key, self.name = recorder, key, name
        self._params: dict[str, str] = {}
        self._nonfinite: dict[str, str] = {}
        self._num_nonfinite = 0
        self._lock = threading.Lock()

    def params(self, values: Mapping[str, Any]) -> None:
        """Short flat inputs. A long value becomes an artifact, and the param says where; a changed one (population
        based training does that) becomes the metric `hparam/<name>` and a tag, since MLflow params never change."""
        fresh: dict[str, str] = {}
        for name, value in redact(dict(values)).items():
            key, text = entity_key(name), str(value)
            if self._params.setdefault(key, text) != text:
                self.tags({f"hparam.{key}": text})
                if isinstance(value, int | float):
                    self.metrics({f"hparam/{key}": float(value)})
                continue
            if len(text) > LONG_VALUE:
                file = f"params/{key.replace('/', '_').replace(' ', '_')}.txt"
                self.text(file, text)
                text = f"{len(text)} characters, see artifact {file}"
            fresh[key] = text
        self._put("params", values=fresh)

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Numbers at `step`. Those that are not finite are counted and named in the tag `nonfinite=loss@17`."""
        finite = {}
        bad = []
        for name, value in values.items():
            number, key = float(value), entity_key(name)
            if number - number == 0.0:
                finite[key] = number
            else:
                bad.append(key)
        if bad:
            finite["nonfinite_values"] = float(self._note_nonfinite(bad, step))
        self._put("metrics", values=finite, step=int(step))

    def _note_nonfinite(self, names: list[str], step: int) -> int:
        with self._lock:
            self._num_nonfinite += len(names)
            news = [name for name in names if name not in self._nonfinite]
            self._nonfinite.update({name: f"{name}@{step}" for name in news})
            count, text = self._num_nonfinite, ", ".join(self._nonfinite.values())
        if news:
            self.tags({"nonfinite": text})
        return count

    def tags(self, values: Mapping[str, object]) -> None:
        """Labels; may be overwritten."""
        clean = {entity_key(name): str(value) for name, value in redact(dict(values)).items()}
        for name, text in clean.items():
            if len(text) > LONG_VALUE:
                self.text(f"tags/{name.replace('/', '_')}.txt", text)
                clean[name] = f"{len(text)} characters, see artifact tags/"
        self._put("tags", values=clean)

    def text(self, file: str, content: str) -> None:
        """One text artifact, redacted."""
        self._put("text", file=file, content=redact_text(content))

    def document(self, file: str, value: Any) -> None:
        """One JSON artifact, redacted: the full configuration, the plan, the table of ranks."""
        self.text(file, json.dumps(redact(value), indent=2, default=str))

    def file(self, path: Path, folder: str = "") -> None:
        """One file as artifact. It must stay where it is until the recorder is closed."""
        self._put("file", path=str(path.resolve()), folder=folder)

    def checkpoint(self, folder: Path, step: int) -> None:
        """A complete checkpoint on disk that outlives the run, as a logged model; it is not copied."""
        tags = {"path": redact_text(str(folder)), "step": str(step)}
        self._put("model", name=f"checkpoint-step-{step}", values=tags)

    @contextmanager
    def child(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, object] | None = None,
        *,
        key: str | None = None,
    ) -> Iterator[RunRecord]:
        """A variant or trial below this run; ends as its block ends. key: see `Recorder.job`."""
        with self.recorder._run(name, self.key, params or {}, tags or {}, key) as run:
            yield run

    def _put(self, op: str, **fields: Any) -> None:
        if fields.get("values") != {}:
            self.recorder._append({"op": op, "run": self.key, "time": now_ms(), **fields})


def now_ms() -> int:
    """Wall clock in MLflow's unit."""
    return int(time.time() * 1000)


class Recorder:
    """Opens the store once, then writes in a thread of its own. Use as a context manager, before any worker starts."""

    def __init__(
        self,
        project: str = "zenray",
        uri: str | None = None,
        spool_dir: Path = Path("runs/.spool"),
        warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        """Raises TrackingError when the store is misconfigured (file store, no permission, refused login); a server
        that does not answer is only a warning."""
        self.warn = warn
        self.stopped = False
        self._warned: set[str] = set()
        self._lost_records = 0
        self._open: dict[str, str] = {}
        """Runs that have not ended: name by key."""
        self._job: RunRecord | None = None
        self._load, self._num_beats = NodeLoad(), 0
        self._closing = threading.Event()
        self._wake = threading.Condition()
        self.store = Store(uri or default_uri(), project)
        self.spool_dir = spool_dir
        self._down = False
        if self.store.is_sqlite and (line := old_file_store(Path.cwd())):
            self.warn(line)
        try:
            self.store.open()
        except StoreDown as error:
            self._note_outage(error)
        self.spool = Spool(spool_dir / f"{uuid.uuid4().hex}.jsonl")
        self._append({"op": "open", "uri": self.store.uri, "project": project})
        self._thread = threading.Thread(target=self._write, name="zenray-tracking", daemon=True)
        self._thread.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(timeout_s=2.0 if ending(error, self.stopped) == "KILLED" else 30.0)

    @contextmanager
    def job(
        self,
        name: str,
        *,
        config: Mapping[str, Any],
        params: Mapping[str, Any],
        tags: Mapping[str, object] | None = None,
        key: str | None = None,
    ) -> Iterator[RunRecord]:
        """The parent run of a job. SIGTERM inside the block leaves it by SystemExit(143) and ends the run KILLED.

        key: a name of the run that the caller keeps; the run of an earlier process with this key goes on.

        Before the block starts one artifact (config.json) makes the round trip to the store and back; TrackingError
        says where it failed. Call `ray.init` first: it sets a SIGTERM handler of its own.
        """
        with stop_on_sigterm(self._note_stop), self._run(name, None, params, tags or {}, key) as run:
            run.document("config.json", config)
            run.document("environment.json", environment())
            self._job = run
            self._check_round_trip(run)
            yield run

    def ui_command(self) -> str:
        """What to type, or to open, to browse the records."""
        return self.store.ui_command()

    def run_id(self, run: RunRecord, timeout_s: float = 10.0) -> str | None:
        """MLflow's id of `run`, or None while the store is down."""
        return self.store.run_ids.get(run.key) if self.flush(timeout_s) else None

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything written so far has arrived; False when the time is over first."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._wake.notify_all()
            while self.spool.pending_bytes:
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._wake.wait(min(left, 0.1))
        return True

    def close(self, timeout_s: float = 30.0) -> None:
        """Send what is left, for at most `timeout_s` (a store known to be down gets 2 s); the rest stays on disk."""
        sent = self.flush(min(timeout_s, 2.0) if self._down else timeout_s)
        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        self._thread.join(timeout=1.0)
        if not sent:
            self.warn(
                f"tracking: {self.spool.pending_bytes} bytes of records stay in {self.spool.path}; the next start with "
                f"the same store and project sends them"
            )
        if not self._thread.is_alive():
            self.spool.close()

    # --- the training side --------------------------------------------------------------------------------------------

    @contextmanager
    def _run(
        self,
        name: str,
        parent: str | None,
        params: Mapping[str, Any],
        tags: Mapping[str, object],
        key: str | None,
    ) -> Iterator[RunRecord]:
        run = RunRecord(self, key or uuid.uuid4().hex, name)
        identity = {"zenray.key": run.key, "zenray.owner": owner_of_this_process(), "zenray.heartbeat": str(now_ms())}
        opening = {"op": "run", "run": run.key, "parent": parent, "name": name, "time": now_ms(), "tags": identity}
        self._append(opening | {"goes_on": key is not None})
        self._open[run.key] = name
        run.params(params)
        run.tags(tags)
        error: BaseException | None = None
        try:
            yield run
        except BaseException as caught:
            error = caught
            raise
        finally:
            reason = "" if error is None else redact_text(f"{type(error).__name__}: {error}")
            self._end(run.key, ending(error, self.stopped), reason)

    def _end(self, key: str, status: str, reason: str) -> None:
        """Append the ending of a run, once."""
        if self._open.pop(key, "ended") == "ended":
            return
        if status != "FINISHED":
            tags = {"zenray.ending": reason[:LONG_VALUE]}
            self._append({"op": "tags", "run": key, "time": now_ms(), "values": tags})
        self._append({"op": "end", "run": key, "time": now_ms(), "status": status})

    def _append(self, record: dict[str, Any]) -> None:
        try:
            self.spool.append(record)
        except OSError as error:
            self._lost_records += 1
            self._warn_once("disk", f"tracking: record lost, and maybe later ones: {error}")

    def _check_round_trip(self, run: RunRecord) -> None:
        if not self.flush(timeout_s=30.0):
            return
        try:
            self.store.check_artifact(run.key, "config.json")
        except StoreDown as error:
            self._note_outage(error)

    def _note_stop(self) -> None:
        """End all runs now, since the caller's own clean-up may outlast the grace before SIGKILL."""
        self.stopped = True
        for key in list(self._open):
            self._end(key, "KILLED", "SIGTERM")
        self.flush(STOP_FLUSH_S)

    def _warn_once(self, what: str, line: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self.warn(line)

    def _note_outage(self, error: StoreDown) -> None:
        self._down = True
        self._warn_once(
            "down",
            f"tracking: {redact_text(self.store.uri)} does not answer ({type(error.__cause__ or error).__name__}); "
            f"training goes on, the records are kept in {self.spool_dir} and sent when it is back",
        )

    # --- the writer thread --------------------------------------------------------------------------------------------

    def _write(self) -> None:
        pause_s, next_beat = 0.1, time.monotonic() + HEARTBEAT_S
        adopted = False
        while not self._closing.is_set():
            try:
                self.store.open()
                self._send()
                if not adopted:
                    adopted = True
                    self._adopt()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + HEARTBEAT_S
                    self._note_load()
                    self.store.beat(list(self._open), now_ms())
                pause_s, self._down = 0.1, False
            except StoreDown as error:
                self._note_outage(error)
                pause_s = min(2 * pause_s, 5.0)
            except ZenrayError as error:
                self._warn_once("refused", f"tracking: the store refuses this job's records: {error}")
                return
            with self._wake:
                self._wake.notify_all()
                if pause_s > 0.1 or not self.spool.pending_bytes:
                    self._wake.wait(pause_s)

    def _note_load(self) -> None:
        if self._job is not None and self._job.key in self._open:
            self._num_beats += 1
            self._job.metrics(self._load.figures(), self._num_beats)

    def _send(self) -> None:
        while batch := self.spool.peek():
            for num_bytes in self.store.apply(batch, self._rejected):
                self.spool.advance(num_bytes)

    def _rejected(self, record: dict[str, Any], error: Exception) -> None:
        self._warn_once(
            f"rejected {record['op']}", f"tracking: the store refused a record of kind '{record['op']}': {error}"
        )

    def _adopt(self) -> None:
        """Send what dead recorders of the same store left behind, then mark their runs."""
        send_orphans(self.store, self.spool_dir, self._rejected)
        try:
            self.store.mark_lost_runs(owner_is_gone)
        except TrackingError as error:
            self._warn_once("lost runs", f"tracking: {error}")


def send_orphans(store: Store, spool_dir: Path, rejected: Rejected) -> None:
    """Send every orphaned spool that was meant for this store and project. Raises StoreDown."""
    for spool in orphans(spool_dir):
        try:
            head = spool.peek()[:1]
            if head and head[0][0] == {"op": "open", "uri": store.uri, "project": store.project}:
                while batch := spool.peek():
                    for num_bytes in store.apply(batch, rejected):
                        spool.advance(num_bytes)
        finally:
            spool.close()


def send_leftovers(project: str, uri: str | None, spool_dir: Path, warn: Callable[[str], None]) -> None:
    """Send what an ended process could not, such as a driver behind links that do not lead to the server."""
    if not any(spool_dir.glob("*.jsonl")):
        return
    store = Store(uri or default_uri(), project)
    try:
        store.open()
        send_orphans(store, spool_dir, lambda record, error: warn(f"tracking: a record was refused: {error}"))
    except StoreDown as error:
        warn(f"tracking: {error}; the records stay in {spool_dir}")
