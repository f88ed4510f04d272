"""The MLflow record of a job that is one run: its configuration, the figures of `result.json`, and its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.job import Run
from jobs.train_config import TrackingConfig
from zenray.config import Section
from zenray.recorder import Recorder, RunRecord


@contextmanager
def recorded(config: Section, tracking: TrackingConfig, run: Run) -> Iterator[RunRecord]:
    """The run of this job, with every plain key of its configuration as a parameter. Join the cluster before."""
    keys = config.model_dump(mode="json")
    params = {name: value for name, value in keys.items() if isinstance(value, str | int | float | list)}
    with (
        Recorder(tracking.project, tracking.uri, run.out.parent / ".spool", run.say) as recorder,
        recorder.job(
            run.name, config=keys, params=params, tags={"zenray.job": run.name, "out": run.out.resolve()}
        ) as record,
    ):
        yield record
        recorder.flush(timeout_s=30.0)
        run.say(f"browse the record: {recorder.ui_command()}")


def record_figures(record: RunRecord, metrics: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Every number in `metrics`, nested ones as `outer/inner`, and the files."""
    record.metrics(dict(_numbers("", metrics)))
    for path in files:
        record.file(path)


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)
