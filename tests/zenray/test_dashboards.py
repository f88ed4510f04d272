"""Dashboards and alerts: complete, valid, and the files that lie in dashboards/."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.metrics import METRICS
from collectives.errors import ConfigError
from zenray.alerts import ALERTS
from zenray.dashboards import BOARDS, DISCOVERY_FILE, board_json, files, level, quantile, rate

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

RULE_TEST = """
rule_files: [ALERTS]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'ray_zenray_steps_total{run="hangs", rank="0"}', values: '0+10x10 100x30'}
      - {series: 'ray_zenray_steps_total{run="works", rank="0"}', values: '0+10x40'}
      - {series: 'ray_zenray_committed_step{run="works"}', values: '5x40'}
      - {series: 'ray_zenray_peak_memory_bytes{run="q", job_name="big"}', values: '200x40'}
      - {series: 'ray_zenray_predicted_memory_bytes{run="q", job_name="big"}', values: '100x40'}
      - {series: 'ray_zenray_jobs{run="q", state="QUEUED"}', values: '2x40'}
      - {series: 'ray_zenray_jobs{run="q", state="RUNNING"}', values: '0x40'}
      - {series: 'ray_zenray_peer_failures_total{run="works", error="WorkerLost"}', values: '_x23 1x17'}
      - {series: 'ray_zenray_peer_failures_total{run="old", error="PeerLost"}', values: '1x40'}
      - {series: 'ray_zenray_recoveries_total{run="works", cause="WorkerLost"}', values: '_x15 1x5 3x5 4x15'}
      - {series: 'ray_zenray_imbalance{run="works", kind="rank pairs"}', values: '3x40'}
      - {series: 'ray_zenray_imbalance{run="works", kind="expert pairs"}', values: '9x40'}
    alert_rule_test:
"""


def test_the_files_in_the_repository_are_those_that_the_table_generates() -> None:
    found = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.rglob("*") if path.is_file()}
    assert found == files(), "run: make dashboards"


def test_every_metric_is_on_a_panel_or_internal() -> None:
    shown = {name for board in BOARDS for panel in board.panels for query in panel.queries for name in query.metrics}
    assert shown == {metric.name for metric in METRICS if not metric.internal}


def test_a_query_cannot_name_what_is_not_exported() -> None:
    for wrong in (
        lambda: rate("zenray_step", "run"),
        lambda: rate("zenray_steps", "variant"),
        lambda: rate("zenray_loss", "run"),
        lambda: level("zenray_steps", "run"),
        lambda: quantile(0.5, "zenray_loss", "run"),
    ):
        with pytest.raises(ConfigError, match="table of metrics"):
            wrong()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_board_is_valid_and_takes_any_data_source(board: Any) -> None:
    made = board_json(board)
    assert made["schemaVersion"] == 36
    assert {variable["name"] for variable in made["templating"]["list"]} == {"datasource", "run"}
    cells = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in made["panels"]]
    assert len(set(cells)) == len(cells)
    for panel in made["panels"]:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == [chr(ord("A") + i) for i in range(len(letters))]
        assert all('run=~"$run"' in target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_grafanas_own_types_read_a_board(board: Any) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    read = models.Dashboard.from_json(board_json(board))
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    assert again["uid"] == f"zenray-{board.name}"
    assert [p["title"] for p in again["panels"]] == [panel.title for panel in board.panels]


def test_the_provider_and_the_scrape_job_fit_rays_own_set_up() -> None:
    provider = yaml.safe_load(files()["grafana/provisioning/dashboards/zenray.yml"])["providers"][0]
    assert provider["options"]["path"] == "${ZENRAY_DASHBOARDS}/grafana/boards"
    assert (FOLDER / "grafana" / "boards").is_dir()
    scrape = yaml.safe_load(files()["prometheus/prometheus.yml"])["scrape_configs"][0]
    assert (scrape["job_name"], scrape["file_sd_configs"][0]["files"]) == ("ray", [DISCOVERY_FILE])


@needs_promtool
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    for kind, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            ["promtool", "check", kind, file], cwd=FOLDER / "prometheus", capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """At minute 25 of the series above; what an alert says is in its row."""
    expected: dict[str, list[dict[str, str]]] = {
        "ZenrayNoSteps": [{"run": "hangs"}],
        "ZenrayCheckpointsBehind": [{"run": "works"}],
        "ZenrayMemoryAboveBound": [{"run": "q", "job_name": "big"}],
        "ZenrayRankFailed": [{"run": "works", "error": "WorkerLost"}],
        "ZenrayExpertsUneven": [{"run": "works"}],
        "ZenrayQueueStands": [],  # only after half an hour
        "ZenrayRecoversAgainAndAgain": [],  # four only at minute 27
        "ZenrayFallsBack": [],
        "ZenrayNotScraped": [],
    }
    values = {"ZenrayExpertsUneven": "3"}
    lines = [RULE_TEST.replace("ALERTS", str(FOLDER / "prometheus" / "alerts.yml")).rstrip()]
    for name, _, _, summary, advice in ALERTS:
        alerts = []
        for labels in expected[name]:
            texts = [summary, advice]
            for label, value in labels.items():
                texts = [text.replace(f"{{{{ $labels.{label} }}}}", value) for text in texts]
            texts = [text.replace("{{ $value }}", values.get(name, "?")) for text in texts]
            shown = {"summary": texts[0], "description": texts[1]}
            alerts.append({"exp_labels": {**labels, "severity": "warning"}, "exp_annotations": shown})
        lines.append("      - " + json.dumps({"eval_time": "25m", "alertname": name, "exp_alerts": alerts}))
    (tmp_path / "test.yml").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
