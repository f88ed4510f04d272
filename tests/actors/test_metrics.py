"""The table of metrics is what Prometheus and the dashboards accept, and the recorder holds to it."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from actors.metrics import METRICS, Kind, Metrics, _Gauges
from collectives.errors import ConfigError


def test_names_are_unique_valid_and_carry_their_unit() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"zenray_[a-z_]+", metric.name)
        assert not metric.name.endswith("_total"), "Ray appends it to counters"
        assert metric.unit not in ("s", "bytes") or metric.name.endswith(
            {"s": "_seconds", "bytes": "_bytes"}[metric.unit]
        )
        assert metric.description.endswith(".")
        assert metric.group


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_tells_runs_apart_and_has_valid_labels(metric: object) -> None:
    assert metric.labels[0] == "run"  # type: ignore[attr-defined]
    assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)  # type: ignore[attr-defined]
    assert not {"job", "instance"} & set(metric.labels), "Prometheus gives these to what it scrapes"  # type: ignore[attr-defined]
    assert bool(metric.boundaries) == (metric.kind is Kind.HISTOGRAM)  # type: ignore[attr-defined]
    assert list(metric.boundaries) == sorted(set(metric.boundaries))  # type: ignore[attr-defined]


def test_what_the_specification_of_a_run_asks_for_is_there() -> None:
    wanted = "steps step_seconds loss wire_bytes raw_bytes codec_seconds exposed_seconds predicted_seconds"
    wanted += " observed_seconds scheme_choices fallbacks imbalance peer_failures epochs"
    assert {f"zenray_{word}" for word in wanted.split()} <= {metric.name for metric in METRICS}


def test_without_ray_every_row_can_be_recorded_and_nothing_happens() -> None:
    for metric in METRICS:
        write = {Kind.COUNTER: "add", Kind.GAUGE: "set", Kind.HISTOGRAM: "observe"}[metric.kind]
        getattr(Metrics(run="r"), write)(metric.name, 1.0, **{label: "x" for label in metric.labels if label != "run"})


def test_unknown_names_labels_and_kinds_are_refused() -> None:
    metrics = Metrics(run="r", rank=0)
    with pytest.raises(ConfigError, match="did you mean 'zenray_steps'"):
        metrics.add("zenray_step")
    with pytest.raises(ConfigError, match="unknown: tensor"):
        metrics.add("zenray_steps", tensor="w")
    with pytest.raises(ConfigError, match="missing: phase, role"):
        metrics.add("zenray_wire_bytes", 10)
    with pytest.raises(ConfigError, match="is a gauge, not a counter"):
        metrics.add("zenray_loss", 1)
    with pytest.raises(ConfigError, match="only grows"):
        metrics.add("zenray_steps", -1)
    with pytest.raises(ConfigError, match="only grows"):
        metrics.add("zenray_steps", float("nan"))


def test_a_gauge_is_set_again_until_its_owner_has_been_silent_for_long(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[[Callable[[], bool], float], bool]
) -> None:
    """Ray forgets a gauge after two export intervals; one that is set once a block would come and go."""
    seen: list[tuple[float, dict[str, str]]] = []
    exporter = SimpleNamespace(set=lambda value, tags: seen.append((value, tags)))
    monkeypatch.setattr("actors.metrics._exporter", lambda metric: exporter)
    monkeypatch.setattr("actors.metrics.ray.is_initialized", lambda: True)
    monkeypatch.setattr("actors.metrics.REFRESH_S", 0.01)
    gauges = _Gauges()
    loss = next(metric for metric in METRICS if metric.name == "zenray_loss")
    gauges.set(loss, {"run": "a"}, 1.0)
    gauges.set(loss, {"run": "a"}, 2.0)
    gauges.set(loss, {"run": "b"}, 3.0)
    assert wait_until(lambda: len(seen) >= 9, 10.0)
    assert {(value, tags["run"]) for value, tags in seen[5:]} == {(2.0, "a"), (3.0, "b")}
    monkeypatch.setattr("actors.metrics.HOLD_S", 0.0)
    assert wait_until(lambda: not gauges._held, 10.0)
