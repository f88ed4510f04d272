"""One trial of a sweep: what runs in Tune's trial process, whose placement group holds the ranks as well, and what the
driver writes down about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ray import tune

from actors.group import WorkerGroup
from actors.worker import Report
from collectives.errors import ZenrayError
from jobs.sweep_config import SweepConfig, codec_facts, effective, point_text, train_config
from jobs.train import SUBJECT, plan_of, workload_of
from zenray.comparison import Block, TrainingLog
from zenray.engine import train_rank
from zenray.recorder import RunRecord
from zenray.sweeps import FLOORS, Outcome, SweepJournal, TrialLog, figures_of, score_of

START_TIMEOUT_S = 120.0
THREAD_TIMEOUT_S = "60"
"""How long Tune waits for a trial that was stopped early before its process takes the next one; ranks that do not leave
are killed long before."""
FIGURES = ("step", *FLOORS, "s_per_step", "block_s_per_step", "reached", "score", "probe_s", "held_out_loss")
"""What the record takes of a report; Tune adds a dozen of its own."""


def bundles_of(config: SweepConfig, resources: Mapping[str, float], point: Mapping[str, Any]) -> list[dict[str, float]]:
    """One bundle a rank, behind an empty one: the trial's own process takes no CPU, it only waits."""
    return [{}, *([dict(resources)] * train_config(config.train, point).ranks)]


def run_trial(point: dict[str, Any], *, config: SweepConfig, resources: Mapping[str, float]) -> None:
    """Train one point in the placement group that Tune reserved, and report after every block of steps."""
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = THREAD_TIMEOUT_S
    settings = train_config(config.train, point)
    figures = TrialFigures(config)

    def on_report(report: Report) -> None:
        block = figures.take(report)
        if block is not None:
            tune.report(figures.now())

    with WorkerGroup(
        settings.ranks, resources_per_worker=resources, inside=True, start_timeout_s=START_TIMEOUT_S
    ) as group:
        rank_function = partial(train_rank, plan_of(settings, Path.cwd()), workload_of(settings))
        results = group.run(rank_function, timeout_s=settings.timeout_s, on_report=on_report)
    tune.report(figures.now() | {"held_out_loss": results[0][SUBJECT]["held_out_loss"]})


class TrialFigures:
    """Turns the reports of the ranks into the figures by which trials are compared."""

    def __init__(self, config: SweepConfig):
        self.config = config
        self.log = TrainingLog([SUBJECT])
        self._codec_s = 0.0
        self._losses: list[tuple[int, float]] = []

    def take(self, report: Report) -> Block | None:
        """Note one report; returns the block if it was one."""
        block = self.log.take(report.rank, report.metrics)
        if block is not None:
            self._codec_s = report.metrics["codec_s"]
            self._losses.append((block.first_step + len(block.losses), sum(block.losses) / len(block.losses)))
        return block

    def now(self) -> dict[str, float]:
        """After the last block; speed from the timed blocks, or from the warm-up while there is none."""
        blocks = self.log.timed(SUBJECT) or self.log.blocks
        figures = figures_of(
            step=self._losses[-1][0],
            steps=self.config.train.steps,
            losses=self._losses,
            s_per_step=sum(block.block_s for block in blocks) / sum(len(block.losses) for block in blocks),
            target_loss=self.config.target_loss,
        )
        figures["wire_bytes_per_step"] = sum(self.log.bytes_by_phase(SUBJECT).values())
        figures["codec_s_per_step"] = self._codec_s
        if not self.log.blocks[-1].warmup:
            figures["block_s_per_step"] = self.log.blocks[-1].block_s / len(self.log.blocks[-1].losses)
        figures["probe_s"] = self.log.probe.get("seconds", 0.0)
        return figures | {"score": score_of(figures, self.config.weights)}


class TrialRecorder(tune.Callback):  # type: ignore[misc]
    """Tune's events on the driver as journal entries and as child runs of the sweep's record; a context manager."""

    def __init__(self, config: SweepConfig, journal: SweepJournal, record: RunRecord, say: Callable[[str], None]):
        self.config, self.journal, self.record, self.say = config, journal, record, say
        self.records: dict[int, RunRecord] = {}
        """Of the trials that this process ran, by number; they take metrics after their end too."""
        self._running: dict[str, tuple[TrialLog, AbstractContextManager[RunRecord]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks to go on by itself; a sweep goes on from its journal instead."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, context in self._running.values():
            context.__exit__(kind, error, trace)
        self._running.clear()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        settings, point = train_config(self.config.train, trial.config), effective(self.config.train, trial.config)
        log = self.journal.begin(trial.config, point_text(point))
        params = {"ranks": settings.ranks, "policy": settings.policy, **codec_facts(settings.policy), **point}
        context = self.record.child(log.name, params, {"trial": log.number}, key=log.key)
        self.records[log.number] = context.__enter__()
        self._running[trial.trial_id] = log, context
        self.say(f"trial {log.number}: {log.name} ({len(self.journal.ended())} of {self.config.trials} have ended)")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        log, _ = self._running[trial.trial_id]
        figures = {name: float(result[name]) for name in FIGURES if name in result}
        self.journal.report(log, figures)
        names = [name for name in figures if name not in ("step", "reached")]
        if "held_out_loss" in figures:  # the last report repeats the last block, and adds this
            names = ["held_out_loss"]
        elif figures["step"] <= log.recorded_step:
            names = []
        self.records[log.number].metrics({name: figures[name] for name in names}, int(figures["step"]))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        log, context = self._running.pop(trial.trial_id)
        outcome = Outcome.DONE if "held_out_loss" in log.last else Outcome.STOPPED
        if outcome is Outcome.STOPPED:
            self.records[log.number].tags({"stopped_early": f"step {log.last.get('step', 0):.0f}"})
        self.journal.end(log, outcome)
        context.__exit__(None, None, None)
        last = log.last
        self.say(
            f"trial {log.number}: {outcome} after {last['step']:.0f} steps, loss {last['loss']:.4f}, "
            f"{1e3 * last['s_per_step']:.1f} ms and {last['wire_bytes_per_step'] / 1e3:,.0f} kB a step, "
            f"score {last['score']:.3f}"
        )

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        log, context = self._running.pop(trial.trial_id)
        error = trial.get_error() or ZenrayError("the trial's process is gone")
        text = str(error).strip()
        self.journal.end(log, Outcome.FAILED, text)
        context.__exit__(type(error), error, None)
        self.say(f"trial {log.number}: failed: {text.splitlines()[-1]}")
