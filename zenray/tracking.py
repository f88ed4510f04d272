"""The MLflow store behind the recorder; the only file that imports mlflow.

It opens the store once (under a file lock for sqlite, whose migrations fail when several processes run them), applies
records, and tells three kinds of trouble apart: the store is down (`StoreDown`, try again), it refuses one record (that
record is reported and dropped), it refuses us altogether (`TrackingError`, says what to do).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from collectives.errors import ZenrayError
from zenray.redact import redact_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

LONG_VALUE = 500
"""Params and tags above this many characters go into an artifact; MLflow cuts or refuses them at 6,000 and 8,000."""

MAX_KEY_LENGTH = 250
METRICS_PER_BATCH = 1000
INIT_LOCK_TIMEOUT_S = 120.0
BUSY_RETRIES = 40
BUSY_PAUSE_S = 0.25
SERVER_REQUEST_TIMEOUT_S = 10

EXPERIMENT_TAGS = {
    "mlflow.note.content": "One run a job, one child a variant or trial. Sort by `speedup`; pictures are artifacts.",
}

Record = dict[str, Any]
Rejected = Callable[[Record, Exception], None]


class TrackingError(ZenrayError):
    """The tracking store cannot be used as configured. Raised at the start, never in the middle of training."""


class StoreDown(ZenrayError):
    """The store does not answer now; the same call may succeed later."""


def entity_key(name: str) -> str:
    """`name` as MLflow accepts it for params, metrics and tags: other characters become `_`, at most 250 of them."""
    key = re.sub(r"[^\w\-. :/]", "_", name).strip("/. ") or "_"
    return re.sub(r"/(\.*/)+", "/", key)[:MAX_KEY_LENGTH]


def check_uri(uri: str) -> str:
    """`uri` with a sqlite path made absolute. Raises TrackingError for the file store, which MLflow has retired."""
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    scheme = urlsplit(uri).scheme
    if scheme in ("", "file"):
        raise TrackingError(
            f"'{uri}' names MLflow's old file store, which MLflow no longer writes to. Unset MLFLOW_TRACKING_URI to "
            f"use sqlite:///mlflow.db in the current directory, or set it to a sqlite:/// or http:// address. Old "
            f"records are moved by: mlflow migrate-filestore --help"
        )
    return uri


def old_file_store(folder: Path) -> str | None:
    """One line about an old `mlruns` in `folder` that holds experiments, or None."""
    if not any(folder.glob("mlruns/*/meta.yaml")):
        return None
    return (
        f"tracking: {folder / 'mlruns'} holds experiments of MLflow's old file store. They are left alone and will not "
        f"show up beside the new records; to move them see: mlflow migrate-filestore --help"
    )


@contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`, among processes. Raises TrackingError after `timeout_s`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TrackingError(f"cannot write {path}: {error}. Choose another MLFLOW_TRACKING_URI.") from error
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TrackingError(
                        f"another process has held {path} for {timeout_s:g} s while it initialises the tracking store; "
                        f"end it, or delete the lock if no such process exists"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _client(uri: str) -> MlflowClient:
    """Import MLflow with telemetry and pickle off and short time limits, and connect."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(SERVER_REQUEST_TIMEOUT_S))
    from mlflow import MlflowClient

    for noisy in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def connect(uri: str) -> MlflowClient:
    """A client to read the records at `uri` with. Raises TrackingError if the store is retired or its folder
    cannot be written."""
    uri = check_uri(uri)
    if not uri.startswith("sqlite:///"):
        return _client(uri)
    database = Path(uri.removeprefix("sqlite:///"))
    with file_lock(database.with_name(database.name + ".lock"), INIT_LOCK_TIMEOUT_S):
        return _client(uri)


class Store:
    """One experiment of one MLflow store. Used by one thread at a time."""

    def __init__(self, uri: str, project: str):
        self.uri, self.project = check_uri(uri), project
        self.is_sqlite = self.uri.startswith("sqlite:")
        self.run_ids: dict[str, str] = {}
        """MLflow's run id by our run key."""
        self.experiment_id: str | None = None
        self.artifact_error: Exception | None = None
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        """The connection; `open` has succeeded."""
        assert self._client is not None, "Store.open was not called"
        return self._client

    def open(self) -> None:
        """Initialise the store and the experiment, once; later calls return at once.

        Raises StoreDown (servers only) or TrackingError.
        """
        if self.experiment_id is not None:
            return
        if self.is_sqlite:
            database = Path(self.uri.removeprefix("sqlite:///"))
            with file_lock(database.with_name(database.name + ".lock"), INIT_LOCK_TIMEOUT_S):
                self._open(f"{(database.parent / 'mlartifacts').as_uri()}/{self.project}")
        else:
            self._open(None)

    def _open(self, artifact_location: str | None) -> None:
        try:
            self._client = self._client or _client(self.uri)
            experiment = self._client.get_experiment_by_name(self.project)
            if experiment is None:
                self.experiment_id = self._create_experiment(artifact_location)
                return
        except Exception as error:
            if not self.is_sqlite and _is_outage(error):
                raise StoreDown(f"{redact_text(self.uri)} does not answer") from error
            raise TrackingError(
                f"the tracking store {redact_text(self.uri)} cannot be used: {redact_text(str(error))[:500]}. Check "
                f"the address, the permissions and the login, or point MLFLOW_TRACKING_URI elsewhere."
            ) from error
        if experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"the MLflow experiment '{self.project}' is deleted. Bring it back with: mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}; or set another tracking.project."
            )
        self.experiment_id = str(experiment.experiment_id)

    def _create_experiment(self, artifact_location: str | None) -> str:
        try:
            return str(self.client.create_experiment(self.project, artifact_location, EXPERIMENT_TAGS))
        except Exception as error:
            if "RESOURCE_ALREADY_EXISTS" not in str(getattr(error, "error_code", error)):
                raise
            experiment = self.client.get_experiment_by_name(self.project)  # another program was faster
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def apply(self, batch: Sequence[tuple[Record, int]], rejected: Rejected) -> Iterator[int]:
        """Send records in order; yields the bytes of each group that is done. Applying one twice changes nothing.

        Raises StoreDown at the first record that could not be sent for now.
        """
        for group in _groups(batch):
            records = [record for record, _ in group]
            try:
                self._persist(records)
            except StoreDown:
                raise
            except Exception as error:
                for record in records:
                    rejected(record, error)
            yield sum(size for _, size in group)

    def _persist(self, records: Sequence[Record]) -> None:
        """Apply one group; wait out a busy database, and tell an outage from a refusal."""
        for attempt in range(BUSY_RETRIES):
            try:
                self._dispatch(records)
                return
            except Exception as error:
                if not _is_outage(error):
                    raise
                if not self.is_sqlite and not self._answers():
                    raise StoreDown(f"{redact_text(self.uri)} does not answer") from error
                if attempt == BUSY_RETRIES - 1 or (not self.is_sqlite and attempt == 2):
                    raise
                time.sleep(BUSY_PAUSE_S)

    def _answers(self) -> bool:
        try:
            self.client.get_experiment(str(self.experiment_id))
            return True
        except Exception as error:
            return not _is_outage(error)

    def _dispatch(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Param, RunTag

        record = records[0]
        if record["op"] == "open":
            return
        if record["op"] == "run":
            self._create_run(record)
            return
        run_id = self._run_id(record["run"])
        match record["op"]:
            case "metrics":
                self._log_metrics(run_id, records)
            case "params":
                params = [Param(key, text) for key, text in record["values"].items()]
                for start in range(0, len(params), 100):
                    self.client.log_batch(run_id, params=params[start : start + 100])
            case "tags":
                self.client.log_batch(run_id, tags=[RunTag(key, text) for key, text in record["values"].items()])
            case "text" | "file":
                self._log_artifact(run_id, record)
            case "model":
                self._log_model(run_id, record)
            case "end":
                self.client.set_terminated(run_id, record["status"], end_time=record["time"])

    def _create_run(self, record: Record) -> None:
        key = record["run"]
        run_id = self._find_run(key)
        if run_id is not None and record.get("goes_on"):
            self.client.update_run(run_id, status="RUNNING")
            for name, text in (record["tags"] | {"zenray.ending": "taken up again"}).items():
                self.client.set_tag(run_id, name, text)
        elif run_id is None:
            tags = dict(record["tags"])
            if record["parent"]:
                tags["mlflow.parentRunId"] = self._run_id(record["parent"])
            run = self.client.create_run(str(self.experiment_id), record["time"], tags=tags, run_name=record["name"])
            self.run_ids[key] = run.info.run_id

    def _find_run(self, key: str) -> str | None:
        if key not in self.run_ids:
            runs = self.client.search_runs([str(self.experiment_id)], f"tags.`zenray.key` = '{key}'", max_results=1)
            if runs:
                self.run_ids[key] = runs[0].info.run_id
        return self.run_ids.get(key)

    def _run_id(self, key: str) -> str:
        run_id = self._find_run(key)
        if run_id is None:
            raise TrackingError(f"run {key} is not in the experiment '{self.project}' of {redact_text(self.uri)}")
        return run_id

    def _log_metrics(self, run_id: str, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, record["time"], record["step"])
            for record in records
            for key, value in record["values"].items()
        ]
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_BATCH])

    def _log_artifact(self, run_id: str, record: Record) -> None:
        try:
            if record["op"] == "text":
                self.client.log_text(run_id, record["content"], record["file"])
            else:
                self.client.log_artifact(run_id, record["path"], record["folder"] or None)
        except Exception as error:
            self.artifact_error = error
            raise

    def _log_model(self, run_id: str, record: Record) -> None:
        """A kept checkpoint as MLflow's logged model: where it lies and what wrote it; its bytes stay there."""
        own = f"source_run_id = '{run_id}' AND name = '{record['name']}'"
        if not self.client.search_logged_models([str(self.experiment_id)], own):
            model = self.client.create_logged_model(
                str(self.experiment_id), record["name"], run_id, record["values"], model_type="checkpoint"
            )
            self.client.finalize_logged_model(model.model_id, "READY")

    def check_artifact(self, key: str, file: str) -> None:
        """Read a JSON artifact back. Raises TrackingError when the artifact store does not work for us."""
        location = "?"
        try:
            location = str(self.client.get_run(self._run_id(key)).info.artifact_uri)
            if self.artifact_error is not None:
                raise self.artifact_error
            with tempfile.TemporaryDirectory() as folder:
                json.loads(Path(self.client.download_artifacts(self._run_id(key), file, folder)).read_text())
        except Exception as error:
            if _is_outage(error) and not self._answers():
                raise StoreDown(f"{redact_text(self.uri)} does not answer") from error
            raise TrackingError(
                f"artifacts cannot be stored at {redact_text(location)} ({type(error).__name__}: "
                f"{redact_text(str(error))[:300]}). If that is a folder of the MLflow server, start the server with "
                f"--serve-artifacts --artifacts-destination DIR and use a new tracking.project; else make it writable."
            ) from error

    def beat(self, keys: Sequence[str], time_ms: int) -> None:
        """Renew the heartbeat of the given runs. A missed beat is no reason to stop: outages raise StoreDown."""
        for key in keys:
            try:
                self.client.set_tag(self._run_id(key), "zenray.heartbeat", str(time_ms))
            except Exception as error:
                if not self.is_sqlite and _is_outage(error) and not self._answers():
                    raise StoreDown(f"{redact_text(self.uri)} does not answer") from error

    def mark_lost_runs(self, owner_is_gone: Callable[[str, float, float], bool]) -> list[str]:
        """End as FAILED every RUNNING run whose owner is gone; `owner_is_gone(owner, heartbeat_s, now_s)` decides."""
        lost = []
        try:
            for run in self.client.search_runs([str(self.experiment_id)], "attributes.status = 'RUNNING'"):
                tags: Mapping[str, str] = run.data.tags
                if "zenray.owner" not in tags:
                    continue
                beat_ms = int(tags.get("zenray.heartbeat", run.info.start_time))
                if owner_is_gone(tags["zenray.owner"], beat_ms / 1000, time.time()):
                    self.client.set_tag(run.info.run_id, "zenray.ending", "its process is gone; no ending was recorded")
                    self.client.set_terminated(run.info.run_id, "FAILED", end_time=beat_ms)
                    lost.append(run.info.run_id)
        except Exception as error:
            if not _is_outage(error):
                raise TrackingError(f"cannot look for lost runs: {redact_text(str(error))[:300]}") from error
            raise StoreDown(f"{redact_text(self.uri)} does not answer") from error
        return lost

    def ui_command(self) -> str:
        """The command, or the address, that shows the records."""
        if self.uri.startswith("http"):
            return f"{redact_text(self.uri).rstrip('/')}/#/experiments/{self.experiment_id or ''}"
        return f"mlflow ui --backend-store-uri '{redact_text(self.uri)}' --host 127.0.0.1 --port 5000"


def _groups(batch: Sequence[tuple[Record, int]]) -> Iterator[list[tuple[Record, int]]]:
    """Neighbouring metrics of one run together (they travel in one batch), every other record alone."""
    group: list[tuple[Record, int]] = []
    num_values = 0
    for record, size in batch:
        joins = group and record["op"] == "metrics" == group[0][0]["op"] and record["run"] == group[0][0]["run"]
        if group and (not joins or num_values + len(record["values"]) > METRICS_PER_BATCH):
            yield group
            group, num_values = [], 0
        group.append((record, size))
        num_values += len(record.get("values", ()))
    if group:
        yield group


def _is_outage(error: Exception) -> bool:
    """Whether the same call may succeed later: no connection, a time-out, a busy database, an error of the server."""
    code = getattr(error, "error_code", None)
    if code in ("TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED"):
        return re.search(r"error code 4(?!29)\d\d", str(error)) is None
    lost_connection = isinstance(error, ConnectionError | TimeoutError)
    return lost_connection or type(error).__module__.partition(".")[0] in ("requests", "urllib3")
