"""The one table of Prometheus metrics, and the recorder that writes them through Ray.

Dashboards are checked against `METRICS`, and a recorder refuses what is not in it: a new metric is one row here. Ray
exports a row as `ray_<name>`, a counter as `ray_<name>_total`, a histogram as `ray_<name>_bucket`, `_sum`, `_count`.
What this file does not do: decide what is worth recording in MLflow.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import ray
from ray.util import metrics as ray_metrics

from collectives.errors import ConfigError


class Kind(StrEnum):
    """How a metric behaves over time: a counter only grows, a gauge is set, a histogram counts observations."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One row. `group` says what it is about; an internal metric is exported but needs no panel.

    The label `run` is a run's id, with `/variant` where a run trains several variants, or the queue's name.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    description: str
    group: str
    internal: bool = False
    boundaries: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in `unit`."""


_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_WAITS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, 30_000.0)

METRICS: tuple[Metric, ...] = (
    Metric("zenray_steps", Kind.COUNTER, "steps", ("run", "rank"), "Optimizer steps applied.", "Training"),
    Metric(
        "zenray_step_seconds",
        Kind.HISTOGRAM,
        "s",
        ("run", "rank"),
        "Time of one optimizer step, communication included.",
        "Training",
        boundaries=_SECONDS,
    ),
    Metric("zenray_loss", Kind.GAUGE, "1", ("run",), "Training loss of the last step, on rank 0.", "Training"),
    Metric(
        "zenray_wire_bytes",
        Kind.COUNTER,
        "bytes",
        ("run", "rank", "role", "phase"),
        "Bytes that this rank sent, by what the tensor is and which phase of the scheme sent them.",
        "Communication",
    ),
    Metric(
        "zenray_raw_bytes",
        Kind.COUNTER,
        "bytes",
        ("run", "rank", "role"),
        "Bytes of the tensors before any codec or sparse scheme: what a dense all-reduce works on.",
        "Communication",
    ),
    Metric(
        "zenray_codec_seconds",
        Kind.COUNTER,
        "s",
        ("run", "rank", "role", "codec"),
        "Time spent in encoding and decoding.",
        "Communication",
    ),
    Metric(
        "zenray_exposed_seconds",
        Kind.COUNTER,
        "s",
        ("run", "rank"),
        "Communication time that computation did not hide.",
        "Communication",
    ),
    Metric(
        "zenray_predicted_seconds",
        Kind.GAUGE,
        "s",
        ("run", "role"),
        "Communication time of one step as the cost model predicts it.",
        "Planner",
    ),
    Metric(
        "zenray_observed_seconds",
        Kind.GAUGE,
        "s",
        ("run", "role"),
        "Communication time of the last step as measured; compare with the prediction.",
        "Planner",
    ),
    Metric(
        "zenray_scheme_choices",
        Kind.COUNTER,
        "tensors",
        ("run", "role", "scheme"),
        "Tensors for which the planner chose a scheme; 'off' is plain PyTorch.",
        "Planner",
    ),
    Metric(
        "zenray_fallbacks",
        Kind.COUNTER,
        "events",
        ("run", "role", "reason"),
        "Times a chosen path was left for a plainer one.",
        "Planner",
    ),
    Metric(
        "zenray_imbalance",
        Kind.GAUGE,
        "ratio",
        ("run", "kind"),
        "Largest load over the mean load; 1 is even. Kinds: sent bytes of ranks; expert pairs (token-expert pairs of an "
        "expert, as the router chose); rank pairs (pairs that a rank computes, as the placement made of it).",
        "Balance",
    ),
    Metric(
        "zenray_peer_failures",
        Kind.COUNTER,
        "events",
        ("run", "error"),
        "Ranks that failed, by the class of their error.",
        "Failures",
    ),
    Metric(
        "zenray_recoveries",
        Kind.COUNTER,
        "events",
        ("run", "cause"),
        "Recoveries from memory or storage, by the class of the error that led to them.",
        "Failures",
    ),
    Metric(
        "zenray_committed_step",
        Kind.GAUGE,
        "steps",
        ("run",),
        "The last step whose copies are all acknowledged.",
        "Failures",
    ),
    Metric(
        "zenray_recovery_seconds",
        Kind.COUNTER,
        "s",
        ("run", "stage"),
        "Time in which a recovering group did not train, by stage.",
        "Failures",
    ),
    Metric(
        "zenray_epochs", Kind.COUNTER, "epochs", ("run",), "Starts of the worker group, the first one too.", "Failures"
    ),
    Metric("zenray_jobs", Kind.GAUGE, "jobs", ("run", "state"), "Jobs of the queue by state.", "Queue"),
    Metric(
        "zenray_queue_wait_seconds",
        Kind.HISTOGRAM,
        "s",
        ("run",),
        "Time from the submission of a job to its first start.",
        "Queue",
        boundaries=_WAITS,
    ),
    Metric(
        "zenray_replans",
        Kind.COUNTER,
        "events",
        ("run", "cause"),
        "Jobs that left a plan for want of memory, by how it was noticed.",
        "Queue",
    ),
    Metric(
        "zenray_predicted_memory_bytes",
        Kind.GAUGE,
        "bytes",
        ("run", "job_name"),
        "Upper bound of one card's memory as predicted for the plan that a job runs.",
        "Queue",
    ),
    Metric(
        "zenray_peak_memory_bytes",
        Kind.GAUGE,
        "bytes",
        ("run", "job_name"),
        "Highest memory of a card of the job so far; compare with the prediction.",
        "Queue",
    ),
)

REFRESH_S = 1.0
"""Ray exports each second at the most often."""
HOLD_S = 600.0
"""A gauge that nobody has set for so long is no longer exported."""

_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


class Metrics:
    """Records rows of `METRICS` with fixed labels of its own, such as `Metrics(run=run_id, rank=0)`.

    Without a connection to Ray nothing is exported, but names and labels are checked all the same: pure code and unit
    tests call it unchanged.
    """

    def __init__(self, **labels: object):
        self.labels = {key: str(value) for key, value in labels.items()}

    def add(self, name: str, amount: float = 1.0, **labels: object) -> None:
        """Increase a counter by `amount` >= 0."""
        metric, tags = self._resolve(name, Kind.COUNTER, labels)
        if not amount >= 0:
            raise ConfigError(f"counter {name} only grows; it cannot take {amount}")
        if amount and ray.is_initialized():
            _exporter(metric).inc(float(amount), tags)

    def set(self, name: str, value: float, **labels: object) -> None:
        """Set a gauge. It stays for `HOLD_S`: Ray drops one that was not set again for two export intervals."""
        metric, tags = self._resolve(name, Kind.GAUGE, labels)
        if ray.is_initialized():
            _gauges().set(metric, tags, float(value))

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Count one observation of a histogram."""
        metric, tags = self._resolve(name, Kind.HISTOGRAM, labels)
        if ray.is_initialized():
            _exporter(metric).observe(float(value), tags)

    def _resolve(self, name: str, kind: Kind, labels: Mapping[str, object]) -> tuple[Metric, dict[str, str]]:
        metric = _BY_NAME.get(name)
        if metric is None:
            near = difflib.get_close_matches(name, _BY_NAME, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "add a row to METRICS."
            raise ConfigError(f"metric '{name}' is not in the table; {hint}")
        if metric.kind is not kind:
            raise ConfigError(f"metric '{name}' is a {metric.kind}, not a {kind}")
        given = {key: str(value) for key, value in labels.items()}
        unknown, missing = set(given) - set(metric.labels), set(metric.labels) - set(given) - set(self.labels)
        if unknown or missing:
            raise ConfigError(
                f"metric '{name}' has the labels {', '.join(metric.labels)}; "
                f"unknown: {', '.join(sorted(unknown)) or 'none'}; missing: {', '.join(sorted(missing)) or 'none'}"
            )
        return metric, {key: given.get(key, self.labels.get(key, "")) for key in metric.labels}


class _Gauges:
    """Sets the gauges of this process again and again, each until `HOLD_S` after it was last set by its owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[Metric, tuple[str, ...]], tuple[float, dict[str, str], float]] = {}
        threading.Thread(target=self._repeat, name="zenray-gauges", daemon=True).start()

    def set(self, metric: Metric, tags: dict[str, str], value: float) -> None:
        with self._lock:
            self._held[metric, tuple(tags.values())] = value, tags, time.monotonic()
        _exporter(metric).set(value, tags)

    def _repeat(self) -> None:
        while True:
            time.sleep(REFRESH_S)
            oldest = time.monotonic() - HOLD_S
            with self._lock:
                self._held = {key: entry for key, entry in self._held.items() if entry[2] > oldest}
                held = [(metric, value, tags) for (metric, _), (value, tags, _) in self._held.items()]
            for metric, value, tags in held if ray.is_initialized() else []:
                _exporter(metric).set(value, tags)


@cache
def _gauges() -> _Gauges:
    """Those of this process; made, with their thread, when the first one is set."""
    return _Gauges()


@cache
def _exporter(metric: Metric) -> Any:
    """Ray's own object for a row, made when it is first written in this process."""
    if metric.kind is Kind.HISTOGRAM:
        return ray_metrics.Histogram(metric.name, metric.description, list(metric.boundaries), metric.labels)
    made = ray_metrics.Counter if metric.kind is Kind.COUNTER else ray_metrics.Gauge
    return made(metric.name, metric.description, metric.labels)
