"""What a block of steps exports: differences, by kind, under labels that the table knows."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from actors.metrics import Metrics
from collectives.channel import RoleRecord
from collectives.moe import LayerLoad, MoELayer
from zenray.step_metrics import ROLE, StepMetrics


class Recorded:
    """Stands in for the exporter; names and labels are checked by the real class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.sums: Counter[tuple[str, ...]] = Counter()
        self.last: dict[tuple[str, ...], float] = {}
        for method in ("add", "set", "observe"):
            monkeypatch.setattr(Metrics, method, self._stand_in(getattr(Metrics, method)))

    def _stand_in(self, real: Any) -> Any:
        def record(metrics: Metrics, name: str, value: float = 1.0, **labels: object) -> None:
            real(metrics, name, value, **labels)
            key = (name.removeprefix("zenray_"), *map(str, labels.values()))
            self.sums[key] += value  # type: ignore[assignment]
            self.last[key] = value

        return record


class Hook:
    """A synchroniser that did what the test says."""

    def __init__(self) -> None:
        self.exposed_s = 0.0
        self.calls: list[Any] = []
        self.stretches: list[Any] = []
        self.said: list[str] = []

    def records(self) -> list[Any]:
        return self.calls

    def segments(self) -> list[Any]:
        return self.stretches

    def events(self) -> list[str]:
        return self.said

    def role_record(self) -> RoleRecord:
        return RoleRecord(ROLE, predicted_ms=20.0, observed_ms=30.0)


def call(tensor: str, number: int, scheme: str, event: str = "") -> Any:
    return SimpleNamespace(tensor=tensor, call=number, scheme=scheme, event=event, predicted_s=1.0, observed_s=2.0)


def test_a_model_without_a_synchroniser_exports_steps_times_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Recorded(monkeypatch)
    metrics = StepMetrics("r", 0, nn.Linear(10, 5))
    metrics.block([0.5, 0.25], 3.0, {"push": 100, "pull": 50}, 1.5)
    metrics.block([0.25], 2.0, {"push": 10})
    assert found.sums[("steps",)] == 3
    assert found.sums[("step_seconds",)] == 1.0
    assert found.sums[("raw_bytes",)] == 3 * 55 * 4
    assert (found.sums[("wire_bytes", "push")], found.sums[("wire_bytes", "pull")]) == (110, 50)
    assert (found.last[("loss",)], found.last[("imbalance", "sent bytes")]) == (2.0, 1.5)


def test_only_rank_0_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Recorded(monkeypatch)
    StepMetrics("r", 1, nn.Linear(2, 2)).block([0.5], 3.0, {"push": 8}, 1.5)
    assert set(found.sums) == {("steps",), ("step_seconds",), ("raw_bytes",), ("wire_bytes", "push")}


def test_the_synchroniser_is_read_as_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    found, hook = Recorded(monkeypatch), Hook()
    monkeypatch.setattr("zenray.step_metrics.hook_of", lambda model: hook)
    metrics = StepMetrics("r", 0, nn.Linear(2, 2))
    hook.exposed_s = 1.0
    hook.calls = [call("e", 1, "column"), call("e", 2, "dense", "dense fallback, switched from column")]
    hook.stretches = [SimpleNamespace(names=("w", "b"), choice="int8b", codec_s=0.1)]
    hook.said = ["bucket 0: int8b taken back at call 3: too coarse"]
    metrics.block([1.0, 1.0], 0.0)
    hook.exposed_s = 1.5
    hook.calls = [*hook.calls, call("e", 3, "dense")]
    hook.stretches = [SimpleNamespace(names=("w", "b"), choice="off", codec_s=0.0)]
    hook.said = [*hook.said, "bucket 0: int8b replaced by off: slower"]
    metrics.block([1.0], 0.0)
    assert found.sums[("exposed_seconds",)] == 1.5
    assert found.sums[("codec_seconds", "int8b")] == pytest.approx(0.2)
    assert found.last[("predicted_seconds",)] == pytest.approx(1.02)
    assert found.last[("observed_seconds",)] == pytest.approx(2.03)
    choices = {key[1]: count for key, count in found.sums.items() if key[0] == "scheme_choices"}
    assert choices == {"dense": 1, "int8b": 2, "off": 2}
    reasons = {key[1]: count for key, count in found.sums.items() if key[0] == "fallbacks"}
    assert reasons == dict.fromkeys(("dense fallback", "switched from column", "codec taken back", "codec replaced"), 1)


def test_experts_are_judged_by_their_worst_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Recorded(monkeypatch)
    layers = [MoELayer.__new__(MoELayer) for _ in range(3)]
    for layer in layers:
        nn.Module.__init__(layer)
    layers[0].load = LayerLoad(np.array([[3, 1], [3, 1]]), np.array([4, 4]))
    layers[1].load = LayerLoad(np.array([[2, 2], [2, 2]]), np.array([2, 6]))
    layers[2].load = LayerLoad()  # has not run yet
    StepMetrics("r", 0, nn.Sequential(*layers)).block([1.0], 0.0)
    assert found.last[("imbalance", "expert pairs")] == 1.5
    assert found.last[("imbalance", "rank pairs")] == 1.5
