"""The files under dashboards/: Grafana boards, generated from the table of metrics, and how they are loaded; the alerts.

A query is made by a function that knows the row of the table: what the name is in Prometheus, which labels it has, and
that the series of workers that have ended stay exported, so that panels aggregate over them. A panel therefore cannot
name a metric or a label that the code does not export. `make dashboards` writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from actors.metrics import METRICS, Kind, Metric
from collectives.errors import ConfigError
from zenray.alerts import alert_rules, prometheus_config

SCHEMA_VERSION = 36
WIDTH, HEIGHT, PER_ROW = 12, 8, 2
"""Of a panel, on Grafana's grid of 24 columns."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"bytes": "bytes", "bytes/s": "Bps", "s": "s", "ratio": "none", "1": "none", "share": "percentunit"}
"""Grafana's names of ours; a unit that is not here is shown as it is."""
_RUN = '{run=~"$run"}'
_TABLE: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True)
class Query:
    """One PromQL expression, the metrics that it reads, and the text of its legend."""

    expr: str
    metrics: tuple[str, ...]
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph. `unit` as in the table of metrics."""

    title: str
    unit: str
    about: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard: a file, a title and its panels."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def _row(name: str, kind: Kind, by: tuple[str, ...]) -> str:
    """The labels to group by. Raises ConfigError for a name, kind or label that the table does not have."""
    metric = _TABLE.get(name)
    if metric is None or metric.kind is not kind or not set(by) <= set(metric.labels):
        raise ConfigError(f"no {kind} '{name}' with the labels {', '.join(by) or 'none'} is in the table of metrics")
    return ", ".join(by)


def _legend(text: str, by: tuple[str, ...]) -> str:
    return " ".join([text, *(f"{{{{{label}}}}}" for label in by)]).strip()


def rate(name: str, *by: str) -> Query:
    """How fast a counter grows, per second."""
    labels = _row(name, Kind.COUNTER, by)
    expr = f"sum by ({labels}) (rate(ray_{name}_total{_RUN}[$__rate_interval]))"
    return Query(expr, (name,), _legend("", by))


def slowest(name: str, among: str, *by: str) -> Query:
    """How fast a counter grows where it grows least: among those that have series, by the label `among`."""
    labels = _row(name, Kind.COUNTER, (*by, among))
    expr = f"min by ({', '.join(by)}) (sum by ({labels}) (rate(ray_{name}_total{_RUN}[$__rate_interval])))"
    return Query(expr, (name,), _legend("", by))


def total(name: str, *by: str) -> Query:
    """A counter as it stands: for rare events, whose first one has no earlier sample to grow from."""
    labels = _row(name, Kind.COUNTER, by)
    return Query(f"sum by ({labels}) (ray_{name}_total{_RUN})", (name,), _legend("", by))


def level(name: str, *by: str, text: str = "") -> Query:
    """A gauge."""
    labels = _row(name, Kind.GAUGE, by)
    return Query(f"max by ({labels}) (ray_{name}{_RUN})", (name,), _legend(text, by))


def quantile(share: float, name: str, *by: str, recent: bool = True) -> Query:
    """A quantile of a histogram: of what was observed lately, or of all that was."""
    labels = _row(name, Kind.HISTOGRAM, by)
    series = f"ray_{name}_bucket{_RUN}"
    buckets = f"sum by (le, {labels}) ({f'rate({series}[$__rate_interval])' if recent else series})"
    return Query(f"histogram_quantile({share:g}, {buckets})", (name,), _legend(f"{100 * share:g} %", by))


def over(above: Query, below: Query) -> Query:
    """One expression divided by another that is grouped alike."""
    return Query(f"{above.expr} / ({below.expr} > 0)", above.metrics + below.metrics, above.legend)


BOARDS: tuple[Board, ...] = (
    Board(
        "training",
        "zenray: training and communication",
        (
            Panel(
                "Steps per second",
                "steps/s",
                "Optimizer steps of each run; ranks step together, so the slowest rank sets it.",
                (slowest("zenray_steps", "rank", "run"),),
            ),
            Panel(
                "Time of a step", "s", "Communication included.",
                (quantile(0.5, "zenray_step_seconds", "run"), quantile(0.95, "zenray_step_seconds", "run")),
            ),
            Panel("Loss", "1", "Training loss of the last step, the mean over ranks.", (level("zenray_loss", "run"),)),
            Panel(
                "Bytes sent", "bytes/s", "By what the tensor is and which phase of a scheme sent them.",
                (rate("zenray_wire_bytes", "run", "role", "phase"),),
            ),
            Panel(
                "Bytes sent by rank", "bytes/s", "A rank that stands out sends more than its share.",
                (rate("zenray_wire_bytes", "run", "rank"),),
            ),
            Panel(
                "Sent over raw bytes", "ratio", "A plain ring sends 2(n-1)/n of the raw bytes; below that it paid.",
                (over(rate("zenray_wire_bytes", "run", "role"), rate("zenray_raw_bytes", "run", "role")),),
            ),
            Panel(
                "Exposed communication", "share", "Share of a rank's time in which it only waits for communication.",
                (rate("zenray_exposed_seconds", "run", "rank"),),
            ),
        ),
    ),
    Board(
        "codecs",
        "zenray: codecs and plan",
        (
            Panel(
                "Communication of a step: predicted and observed", "s",
                "Far apart for long: the cost model does not know this network; the plan is then remade.",
                (
                    level("zenray_predicted_seconds", "run", "role", text="predicted"),
                    level("zenray_observed_seconds", "run", "role", text="observed"),
                ),
            ),
            Panel(
                "Time in codecs", "share", "Share of a rank's time spent on encoding and decoding.",
                (rate("zenray_codec_seconds", "run", "role", "codec"),),
            ),
            Panel(
                "Schemes chosen", "tensors", "Tensors for which each was chosen so far; off is plain PyTorch.",
                (total("zenray_scheme_choices", "run", "role", "scheme"),),
            ),
            Panel(
                "Fallbacks", "events", "Times a chosen path was left for another.",
                (total("zenray_fallbacks", "run", "role", "reason"),),
            ),
        ),
    ),
    Board(
        "memory",
        "zenray: memory against prediction",
        (
            Panel(
                "Memory of a card", "bytes", "The bound that the job was placed by, and the highest so far.",
                (
                    level("zenray_predicted_memory_bytes", "run", "job_name", text="bound"),
                    level("zenray_peak_memory_bytes", "run", "job_name", text="peak"),
                ),
            ),
            Panel(
                "Peak over bound", "share", "Above 1 the prediction was wrong; far below it cards are wasted.",
                (over(
                    level("zenray_peak_memory_bytes", "run", "job_name"),
                    level("zenray_predicted_memory_bytes", "run", "job_name"),
                ),),
            ),
            Panel(
                "Plans left for want of memory", "events", "By how it was noticed.",
                (total("zenray_replans", "run", "cause"),),
            ),
        ),
    ),
    Board(
        "queue",
        "zenray: queue and placement",
        (
            Panel("Jobs by state", "jobs", "Of a queue.", (level("zenray_jobs", "run", "state"),)),
            Panel(
                "Wait for a start", "s", "From submission to the first start.",
                (
                    quantile(0.5, "zenray_queue_wait_seconds", "run", recent=False),
                    quantile(0.95, "zenray_queue_wait_seconds", "run", recent=False),
                ),
            ),
            Panel("Starts of worker groups", "epochs", "More than one a run is a restart.", (total("zenray_epochs", "run"),)),
        ),
    ),
    Board(
        "experts",
        "zenray: experts and balance",
        (
            Panel(
                "Largest load over the mean", "ratio",
                "Expert pairs: as the router chose. Rank pairs: as the placement made of it, 1 is even. Sent bytes: of "
                "the schemes for sparse gradients.",
                (level("zenray_imbalance", "run", "kind"),),
            ),
            Panel(
                "Bytes of experts", "bytes/s", "Bytes sent by phase; dispatch and combine are those of experts.",
                (rate("zenray_wire_bytes", "run", "phase"),),
            ),
        ),
    ),
    Board(
        "recovery",
        "zenray: recovery",
        (
            Panel("Failed ranks", "events", "By the class of their error.", (total("zenray_peer_failures", "run", "error"),)),
            Panel("Recoveries", "events", "By what led to them.", (total("zenray_recoveries", "run", "cause"),)),
            Panel(
                "Time without training", "s", "Sum over all recoveries of a run, by stage.",
                (total("zenray_recovery_seconds", "run", "stage"),),
            ),
            Panel(
                "Last committed step", "steps", "All copies of this step are acknowledged; a failure costs the steps after it.",
                (level("zenray_committed_step", "run"),),
            ),
            Panel("Epochs", "epochs", "Starts of the worker group, the first one too.", (total("zenray_epochs", "run"),)),
        ),
    ),
)  # fmt: skip


# --- Grafana ----------------------------------------------------------------------------------------------------------


def board_json(board: Board) -> dict[str, Any]:
    """A dashboard as Grafana reads it. The data source and the runs are variables."""
    return {
        "uid": f"zenray-{board.name}",
        "title": board.title,
        "tags": ["zenray"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_DATASOURCE, _RUNS]},
        "panels": [_panel_json(index, panel) for index, panel in enumerate(board.panels)],
    }


_DATASOURCE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
_RUNS = {
    "name": "run",
    "label": "Run",
    "type": "query",
    "datasource": SOURCE,
    "query": {"query": 'label_values({__name__=~"ray_zenray_.+"}, run)', "refId": "runs"},
    "refresh": 2,
    "sort": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def _panel_json(index: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": WIDTH * (index % PER_ROW), "y": HEIGHT * (index // PER_ROW), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": UNITS.get(panel.unit, panel.unit), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }


# --- files ------------------------------------------------------------------------------------------------------------

_PROVIDER = {
    "apiVersion": 1,
    "providers": [
        {
            "name": "zenray",
            "folder": "zenray",
            "type": "file",
            "options": {"path": "${ZENRAY_DASHBOARDS}/grafana/boards"},
        }
    ],
}
_PROVIDER_HEAD = """\
# Copy this file to provisioning/dashboards/ of Grafana. With Ray's own set-up that is
# /tmp/ray/session_latest/metrics/grafana/provisioning/dashboards/; start Grafana with ZENRAY_DASHBOARDS set to the absolute
# path of this repository's folder dashboards/. Boards take any Prometheus data source, Ray's own by default.
"""
_PROMETHEUS_HEAD = """\
# prometheus --config.file=dashboards/prometheus/prometheus.yml --web.listen-address=127.0.0.1:9090
# Then, before `ray start`: RAY_PROMETHEUS_HOST=http://127.0.0.1:9090 RAY_GRAFANA_HOST=http://127.0.0.1:3000
"""
DISCOVERY_FILE = "/tmp/ray/prom_metrics_service_discovery.json"


def files() -> dict[str, str]:
    """Every generated file: its text by its path under dashboards/."""
    found = {f"grafana/boards/{board.name}.json": json.dumps(board_json(board), indent=1) + "\n" for board in BOARDS}
    found["grafana/provisioning/dashboards/zenray.yml"] = _PROVIDER_HEAD + _yaml(_PROVIDER)
    found["prometheus/alerts.yml"] = _yaml(alert_rules())
    found["prometheus/prometheus.yml"] = _PROMETHEUS_HEAD + _yaml(prometheus_config(DISCOVERY_FILE, "alerts.yml"))
    return found


def write(folder: Path) -> None:
    """Write them."""
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, width=120)
    return text
