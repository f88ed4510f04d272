"""Row 41: the dashboard shows "No data". Here: a real Prometheus scrapes real jobs, and every query returns series."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.metrics import METRICS, Kind
from zenray.alerts import ALERTS, prometheus_config

ROOT = Path(__file__).resolve().parents[2]
BOARDS = sorted((ROOT / "dashboards" / "grafana" / "boards").glob("*.json"))
JOBS = Path(__file__).with_name("dashboard_jobs.py")
START_S, JOBS_S, DATA_S = 60.0, 200.0, 90.0
VARIABLES = {"$__rate_interval": "10m", "$__interval": "15s", "$__range": "5m", "$run": ".*"}

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (.ci/run installs it)"),
]


def evaluated(expr: str) -> str:
    """An expression of a panel with Grafana's variables replaced; nothing may be left of them."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


class Prometheus:
    """A server of this test."""

    def __init__(self, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.targets = folder / "targets.json"
        self.targets.write_text("[]")
        config = prometheus_config(str(self.targets), str(ROOT / "dashboards" / "prometheus" / "alerts.yml"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", *arguments, f"--web.listen-address={self.address}"], stdout=log, stderr=log
            )

    def ask(self, path: str, **arguments: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def series(self, expr: str) -> list[Mapping[str, Any]]:
        """What an expression returns now. Raises AssertionError if Prometheus refuses it."""
        try:
            found: list[Mapping[str, Any]] = self.ask("query", query=expr)["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"bad: {expr}: {error.read().decode()}") from None
        return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    server = Prometheus(folder)
    log = (folder / "jobs.log").open("wb")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_metrics_report_interval_ms": "1000"}
    environment.pop("RAY_ADDRESS", None)
    jobs = subprocess.Popen(
        [sys.executable, str(JOBS), str(folder)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
    )  # fmt: skip
    assert jobs.stdin is not None
    assert jobs.stdout is not None
    try:
        for line in jobs.stdout:
            if line.startswith("targets "):
                server.targets.write_text(json.dumps([{"targets": json.loads(line.removeprefix("targets "))}]))
            if line == "done\n":
                break
        else:
            raise AssertionError((folder / "jobs.log").read_text()[-4000:])
        yield server
        jobs.stdin.close()
        assert jobs.wait(60) == 0
    finally:
        server.process.terminate()
        server.process.wait(10)
        if jobs.poll() is None:
            os.killpg(jobs.pid, signal.SIGTERM)  # its own session; Ray's processes end with their parent
            jobs.wait(30)
        log.close()


def panel_queries() -> Iterator[tuple[str, str]]:
    for path in BOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{board['title']} / {panel['title']} / {target['refId']}", target["expr"]


def test_41_every_query_of_every_board_returns_series(prometheus: Prometheus) -> None:
    queries = dict(panel_queries())
    assert len(queries) >= 20
    deadline = time.monotonic() + DATA_S
    empty = set(queries)
    while empty and time.monotonic() < deadline:
        empty = {name for name in empty if not prometheus.series(evaluated(queries[name]))}
        time.sleep(0.5)
    assert not empty, sorted(empty)


def test_41_every_metric_of_the_table_is_exported_with_its_labels(prometheus: Prometheus) -> None:
    ending = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
    for metric in METRICS:
        series = prometheus.series(f"ray_{metric.name}{ending[metric.kind]}")
        assert series, metric.name
        assert all(set(metric.labels) <= set(one["metric"]) for one in series), metric.name
        assert all(one["metric"]["run"] for one in series), metric.name


def test_41_alerts_are_evaluated_and_the_killed_rank_is_reported(prometheus: Prometheus) -> None:
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    assert {rule["name"] for rule in rules} == {alert[0] for alert in ALERTS}
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    firing = {one["metric"]["run"] for one in prometheus.series('ALERTS{alertname="ZenrayRankFailed"}')}
    assert "recovered" in firing  # the rank that was killed; those of the job that outgrew its card failed as well
    values = {one["metric"]["run"]: float(one["value"][1]) for one in prometheus.series("ray_zenray_recoveries_total")}
    assert values == {"recovered": 1.0}


def test_41_values_are_right(prometheus: Prometheus, wait_until: Callable[[Callable[[], bool], float], bool]) -> None:
    def values(expr: str, label: str) -> dict[str, float]:
        return {one["metric"].get(label, ""): float(one["value"][1]) for one in prometheus.series(expr)}

    here = '{run="trained/zenray"}'
    assert values(f"ray_zenray_steps_total{here}", "rank") == {"0": 16.0, "1": 16.0}
    assert values(f"sum by (rank) (ray_zenray_step_seconds_count{here})", "rank") == {"0": 16.0, "1": 16.0}
    raw_bytes = (
        16 * 4 * (20_000 * 128 + 128 * 512 + 512 + 4 * 128 + 2 * 2 * 128 * 128)
    )  # embedding, dense, gate, experts
    assert set(values(f"sum by (rank) (ray_zenray_raw_bytes_total{here})", "rank").values()) == {float(raw_bytes)}
    exchanged = values(f"sum by (phase) (ray_zenray_wire_bytes_total{here})", "phase")
    assert min(exchanged.values()) > 0
    assert values("ray_zenray_committed_step", "run") == {"recovered": 6.0}
    assert values('ray_zenray_epochs_total{run="trained"}', "run") == {"trained": 1.0}
    ended = {"DONE": 1.0, "FAILED": 1.0}  # a gauge takes up to three seconds from the code to an answer of Prometheus
    assert wait_until(lambda: values("ray_zenray_jobs > 0", "state") == ended, DATA_S), values(
        "ray_zenray_jobs > 0", "state"
    )
    attempts = values("sum (ray_zenray_replans_total)", "")[""]
    assert 1 <= attempts <= 4
    predicted, peak = (values(f"ray_zenray_{what}_memory_bytes", "job_name")["calm"] for what in ("predicted", "peak"))
    assert 0 < peak <= predicted <= 24 << 20
    assert values("ray_zenray_queue_wait_seconds_count", "run") == {"queue": 2.0}


def test_41_kinds_of_imbalance_are_those_of_the_table(prometheus: Prometheus) -> None:
    assert {one["metric"]["kind"] for one in prometheus.series("ray_zenray_imbalance")} == {
        "sent bytes", "expert pairs", "rank pairs",
    }  # fmt: skip


def test_41_panels_and_ray_agree_on_the_names(prometheus: Prometheus) -> None:
    """Every name that a panel or an alert reads is one that Prometheus has."""
    known = set(prometheus.ask("label/__name__/values"))
    texts = [expr for _, expr in panel_queries()] + [alert[1] for alert in ALERTS]
    named = {name for text in texts for name in re.findall(r"ray_zenray_\w+", text)}
    assert named <= known, named - known
