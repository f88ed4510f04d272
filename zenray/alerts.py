"""Alert rules on our metrics, and the Prometheus configuration that evaluates them on what Ray exports."""

from __future__ import annotations

from typing import Any


def _grown(name: str, window: str, *by: str) -> str:
    """How far a counter has come within `window`. `increase` would miss a first event, before which there is no sample."""
    now = f"sum by ({', '.join(by)}) (ray_{name}_total)"
    return f"{now} - ({now.replace('_total)', f'_total offset {window})')} or 0 * {now})"


ALERTS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "ZenrayRankFailed", _grown("zenray_peer_failures", "5m", "run", "error") + " > 0", "0m",
        "A rank of {{ $labels.run }} failed: {{ $labels.error }}",
        "See the dashboard 'zenray: recovery' and the job's log for the rank and its node.",
    ),
    (
        "ZenrayRecoversAgainAndAgain", _grown("zenray_recoveries", "30m", "run") + " > 3", "0m",
        "{{ $labels.run }} recovered {{ $value }} times in half an hour",
        "Look for one node behind the failures and take it out; until then each recovery repeats steps.",
    ),
    (
        "ZenrayNoSteps",
        "sum by (run) (increase(ray_zenray_steps_total[10m])) == 0 "
        "and sum by (run) (increase(ray_zenray_steps_total[30m])) > 0",
        "0m",
        "{{ $labels.run }} made no step for 10 minutes",
        "It has ended, or hangs: `ray job list` tells which; a hung collective ends by its own deadline.",
    ),
    (
        "ZenrayCheckpointsBehind",
        "max by (run) (changes(ray_zenray_committed_step[10m])) == 0 "
        "and on (run) sum by (run) (increase(ray_zenray_steps_total[10m])) > 0",
        "0m",
        "{{ $labels.run }} trains, but commits no step",
        "A failure now would cost all steps since the last commit: look at the holders' hosts and their memory.",
    ),
    (
        "ZenrayMemoryAboveBound",
        "max by (run, job_name) (ray_zenray_peak_memory_bytes) > max by (run, job_name) (ray_zenray_predicted_memory_bytes)",
        "0m",
        "{{ $labels.job_name }} uses more memory of a card than was predicted at most",
        "It may run out of memory; the queue then takes the next plan. Please report the job file.",
    ),
    (
        "ZenrayQueueStands",
        'max by (run) (ray_zenray_jobs{state="QUEUED"}) > 0 and on (run) max by (run) (ray_zenray_jobs{state="RUNNING"}) == 0',
        "30m",
        "{{ $value }} jobs wait in {{ $labels.run }} and none runs",
        "`zenray status JOB` says what each one lacks.",
    ),
    (
        "ZenrayFallsBack", _grown("zenray_fallbacks", "10m", "run", "reason") + " > 10", "0m",
        "{{ $labels.run }} leaves chosen paths: {{ $labels.reason }}",
        "The gradients or the network are not what was measured at the start; see 'zenray: codecs and plan'.",
    ),
    (
        "ZenrayExpertsUneven", 'max by (run) (ray_zenray_imbalance{kind="rank pairs"}) > 2', "10m",
        "One rank of {{ $labels.run }} computes {{ $value }} times the mean",
        "Every step waits for it: allow the placement to move or copy experts more often.",
    ),
    (
        "ZenrayNotScraped", 'up{job="ray"} == 0', "2m",
        "{{ $labels.instance }} does not answer Prometheus",
        "Panels show no data for that node: is its metrics port open, and the discovery file fresh?",
    ),
)  # fmt: skip
"""(name, expression, how long it must hold, summary, what to do)."""


def alert_rules() -> dict[str, Any]:
    """The rules file."""
    rules = [
        {
            "alert": name,
            "expr": expr,
            "for": holds,
            "labels": {"severity": "warning"},
            "annotations": {"summary": summary, "description": advice},
        }
        for name, expr, holds, summary, advice in ALERTS
    ]
    return {"groups": [{"name": "zenray", "rules": rules}]}


def prometheus_config(discovery_file: str, rules_file: str) -> dict[str, Any]:
    """Scrape every node that Ray lists in its discovery file, and evaluate the rules."""
    return {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},
        "rule_files": [rules_file],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [discovery_file]}]}],
    }
