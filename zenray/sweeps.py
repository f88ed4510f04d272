"""What a sweep knows about its trials: objectives, the Pareto front, and the journal from which it goes on.

Pure bookkeeping; no Ray, no MLflow. The journal is the one truth about a sweep: whatever its process was doing when it
was killed, trials that have ended keep their results, the others run again, under the same names in the record.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from collectives.errors import ConfigError, ZenrayError

FLOORS: Mapping[str, float] = {
    "time_to_loss_s": 1e-3,
    "wire_bytes_per_step": 1e3,
    "loss": 1e-6,
    "codec_s_per_step": 1e-4,
}
"""The objectives, all the smaller the better, and the value below which a difference no longer counts."""


def figures_of(
    *, step: int, steps: int, losses: Sequence[tuple[int, float]], s_per_step: float, target_loss: float | None
) -> dict[str, float]:
    """`loss` and `time_to_loss_s` of a trial at `step` of `steps`.

    losses: (step, mean training loss of a block), in order. The time is that of the steps until a block's loss is at or
    below the target, at the pace measured so far; without a target, of all steps. A trial that is not there yet is
    charged all steps, times how far its loss is above the target: so trials of different age can be compared.
    """
    loss = losses[-1][1]
    needed = float(steps)
    reached = next((at for at, value in losses if target_loss is not None and value <= target_loss), None)
    if reached is not None:
        needed = reached
    elif target_loss is not None:
        needed = steps * max(1.0, loss / target_loss)
    return {
        "step": step,
        "loss": loss,
        "s_per_step": s_per_step,
        "time_to_loss_s": needed * s_per_step,
        "reached": float(reached is not None),
    }


def score_of(figures: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Sum of weight times the natural logarithm of each objective: free of units, lower is better.

    A trial that halves an objective of weight 1 gains 0.69. NaN, as from a loss that diverged, counts as infinity.
    """
    total = sum(weight * math.log(max(figures[name], FLOORS[name])) for name, weight in weights.items() if weight)
    return total if math.isfinite(total) else math.inf


def gain_text(best: TrialLog, reference: TrialLog, weights: Mapping[str, float]) -> str:
    """What is behind the score of the best trial: nothing, a difference that the reference shows from block to block by
    itself, or a gain. The spread is that of the pace of its timed blocks, weighted as the score weighs the time."""
    if best is reference:
        return ", the reference itself: no trial was better"
    gain = reference.last["score"] - best.last["score"]
    blocks = [report for report in reference.reports if "block_s_per_step" in report and "held_out_loss" not in report]
    paces = [report["block_s_per_step"] for report in blocks]
    if len(paces) < 2:
        return f" (score {gain:.3f} below the reference's, which has too few blocks to tell that from noise)"
    spread = weights.get("time_to_loss_s", 0.0) * math.log(max(paces) / min(paces))
    if gain <= spread:
        return (
            f" (score {gain:.3f} below the reference's, whose own blocks differ by {spread:.3f}: that shows no gain; "
            f"raise train.steps)"
        )
    return f" (score {gain:.3f} below the reference's, whose own blocks differ by {spread:.3f})"


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Positions of the points that no other is as good as everywhere and better than somewhere; smaller is better.

    A point with a value that is not finite is never part of it.
    """

    def beats(a: Sequence[float], b: Sequence[float]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))

    finite = [index for index, point in enumerate(points) if all(map(math.isfinite, point))]
    return [index for index in finite if not any(beats(points[other], points[index]) for other in finite)]


class SweepFailed(ZenrayError):
    """No trial of a sweep came to its end."""


class Outcome(StrEnum):
    """How a trial ended: all steps done, stopped by the scheduler because others were better, or by an error."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class TrialLog:
    """One trial. key: of its run in the record. name: its settings in words. outcome None: it has not ended."""

    number: int
    key: str
    point: dict[str, Any]
    name: str
    reports: list[dict[str, float]] = field(default_factory=list)
    outcome: Outcome | None = None
    error: str = ""
    gains: dict[str, float] = field(default_factory=dict)
    """speedup and bytes_ratio over the reference, once the sweep is over."""
    is_running: bool = False
    """In this process."""
    recorded_step: float = -1
    """The record has the figures up to here already, from a start that was killed."""

    @property
    def last(self) -> dict[str, float]:
        """What it reported last."""
        return self.reports[-1] if self.reports else {}


class SweepJournal:
    """One line an event, in a JSONL file that may be moved with its folder. Opening one reads what an earlier process left.

    config_sha256: of the configuration; raises ConfigError if the file belongs to another one.
    """

    def __init__(self, path: Path, config_sha256: str):
        self.path = path
        self.trials: list[TrialLog] = []
        self.key = uuid.uuid4().hex
        """Of the parent run in the record."""
        lines = _whole_lines(path)
        self.goes_on = bool(lines)
        for entry in lines:
            self._take(entry, config_sha256)
        if not lines:
            self._write({"sweep": self.key, "config_sha256": config_sha256})

    def ended(self) -> list[TrialLog]:
        """The trials that need not run again."""
        return [trial for trial in self.trials if trial.outcome is not None]

    def begin(self, point: Mapping[str, Any], name: str) -> TrialLog:
        """A trial starts; one with this point that an earlier process did not finish starts again under its name."""
        for trial in self.trials:
            if trial.outcome is None and trial.point == point and not trial.is_running:
                trial.recorded_step = trial.last.get("step", -1)
                trial.reports.clear()
                break
        else:
            trial = TrialLog(len(self.trials), uuid.uuid4().hex, dict(point), name)
            self.trials.append(trial)
        trial.is_running = True
        self._write({"trial": trial.number, "key": trial.key, "point": trial.point, "name": trial.name})
        return trial

    def report(self, trial: TrialLog, figures: Mapping[str, float]) -> None:
        """Figures of a running trial."""
        trial.reports.append(dict(figures))
        self._write({"trial": trial.number, "report": dict(figures)})

    def end(self, trial: TrialLog, outcome: Outcome, error: str = "") -> None:
        """A trial has ended."""
        trial.outcome, trial.error = outcome, error
        self._write({"trial": trial.number, "outcome": outcome, "error": error})

    def _take(self, entry: Mapping[str, Any], config_sha256: str) -> None:
        if "sweep" in entry:
            if entry["config_sha256"] != config_sha256:
                raise ConfigError(
                    f"{self.path} belongs to a sweep with another configuration; give another --out, or the same "
                    f"configuration to go on with it"
                )
            self.key = entry["sweep"]
        elif "point" in entry:
            number = entry["trial"]
            self.trials[number : number + 1] = [TrialLog(number, entry["key"], entry["point"], entry["name"])]
        elif "report" in entry:
            self.trials[entry["trial"]].reports.append(entry["report"])
        else:
            trial = self.trials[entry["trial"]]
            trial.outcome, trial.error = Outcome(entry["outcome"]), entry["error"]

    def _write(self, entry: Mapping[str, Any]) -> None:
        """Appended at once. A line of a process that was killed has no end and is cut off by the next start."""
        with self.path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a journal; a torn last line is removed."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
