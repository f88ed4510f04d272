"""`python -m jobs.sweep --config jobs/configs/sweep.yaml key=value ...`: which compression settings pay for a training job.

Ray Tune over any keys of `jobs.train`: policy (codec, bits, block), scheme, error feedback, density of top-k, bucket size,
ranks. All trials are children of one MLflow run. A sweep that was interrupted, also by SIGKILL, goes on with the same
command and the same --out. At the end: all trials as a table, what none beats as a picture, and `policy.yaml` for
`python -m jobs.train --config DIR/policy.yaml`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from statistics import median
from types import SimpleNamespace
from typing import Any

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from actors.state import digest_of
from jobs.job import Run, run_job
from jobs.sweep_config import Between, SweepConfig, check, effective, grid, reference_point, train_config, widest
from jobs.sweep_trial import TrialRecorder, bundles_of, run_trial
from jobs.train_cluster import TrainCluster, shapes_links, train_behind_links, train_cluster, warn_of_temporary_folder
from placement.errors import PlacementError
from placement.groups import read_cluster
from placement.inventory import Gang, find_obstacle
from zenray.engine import PROBE_BYTES
from zenray.plots import plot_pareto
from zenray.recorder import Recorder, RunRecord
from zenray.sweeps import FLOORS, Outcome, SweepFailed, SweepJournal, TrialLog, gain_text, pareto_front

STUDY = "sweep"
TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the record and the journal are ours
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def sweep(config: SweepConfig, run: Run) -> dict[str, Any]:
    """The job: cluster, record, trials, tables."""
    check(config)
    shared = config.train.model_copy(update={"ranks": widest(config), "tracking": config.tracking})
    if shapes_links(shared, run.say):
        return train_behind_links(shared, run, config, num_runs=config.trials)
    warn_of_temporary_folder(run.say)
    journal = SweepJournal(run.out / "sweep.jsonl", digest_of(config.model_dump(mode="json", exclude={"tracking"})))
    with (
        train_cluster(shared) as cluster,
        Recorder(config.tracking.project, config.tracking.uri, run.out.parent / ".spool", run.say) as recorder,
        recorder.job(
            f"sweep {config.train.workload}",
            config=config.model_dump(mode="json"),
            params={"workload": config.train.workload, "space": ", ".join(config.space), "search": config.search}
            | {"scheduler": config.scheduler, "trials": config.trials, "steps": config.train.steps},
            tags={"zenray.job": run.name, "out": run.out.resolve()},
            key=journal.key,
        ) as record,
    ):
        run.say(cluster.description)
        if journal.goes_on:
            run.say(f"going on with {journal.path}: {len(journal.ended())} trials have ended already")
        with TrialRecorder(config, journal, record, run.say) as trials:
            run_trials(config, journal, cluster, trials, run)
        metrics = conclude(config, journal, trials.records, record, run)
        recorder.flush(timeout_s=30.0)
        run.say(f"browse the record: {recorder.ui_command()}")
    return metrics


# --- trials -----------------------------------------------------------------------------------------------------------


def run_trials(
    config: SweepConfig, journal: SweepJournal, cluster: TrainCluster, trials: TrialRecorder, run: Run
) -> None:
    """Run what is left of the sweep."""
    storage = optuna.storages.InMemoryStorage()
    num_left = prepare_study(config, journal, storage)
    if num_left <= 0:
        return
    concurrent = max_concurrent(config, cluster)
    run.say(f"{num_left} trials, {concurrent} at a time; the ranks of each are placed together, or wait together")
    os.environ.update(TUNE_SETTINGS)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the result files that we do not let it write
    objectives = objectives_of(config)
    several = len(objectives) > 1
    seed = config.seed + len(journal.trials)  # a sweep that goes on does not draw the same points again
    random = optuna.samplers.RandomSampler(seed)
    searcher = OptunaSearch(
        distributions_of(config),
        metric=objectives if several else objectives[0],
        mode=["min"] * len(objectives) if several else "min",
        sampler=random if config.search == "random" else optuna.samplers.TPESampler(seed=seed),
        study_name=STUDY,
        storage=storage,
    )
    resources = cluster.resources_per_worker
    trainable = tune.with_parameters(run_trial, config=config, resources=resources)
    folder = run.out.resolve() / "tune"
    try:
        tune.Tuner(
            tune.with_resources(
                trainable,
                lambda point: tune.PlacementGroupFactory(bundles_of(config, resources, point), cluster.strategy),
            ),
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                scheduler=scheduler_of(config, journal),
                num_samples=num_left,
                max_concurrent_trials=concurrent,
                reuse_actors=True,  # the process of a trial only waits for its ranks; another takes seconds to start
            ),
            run_config=tune.RunConfig(name="trials", storage_path=str(folder), verbose=0, callbacks=[trials]),
        ).fit()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def max_concurrent(config: SweepConfig, cluster: TrainCluster) -> int:
    """How many trials of the widest kind fit side by side into what is free now; at least one.

    Behind shaped links one alone, for two would halve each other's rate. Raises PlacementError if one could not run even
    on the idle cluster: it would wait for ever.
    """
    inventory, ranks, need = read_cluster(), widest(config), cluster.resources_per_worker
    obstacle = find_obstacle(Gang((need,) * ranks, cluster.strategy), inventory, "total")
    if obstacle is not None:
        raise PlacementError(
            f"a trial with {ranks} ranks of {need} can never run on this cluster: {obstacle.why}. Take fewer ranks, or "
            f"add nodes."
        )
    if cluster.links:
        return 1
    free = {name: sum(node.free.get(name, 0.0) for node in inventory.nodes) for name in need}
    return max(1, min(int(free[name] / (ranks * amount)) for name, amount in need.items()))


def objectives_of(config: SweepConfig) -> list[str]:
    """What the search minimises."""
    return [name for name in FLOORS if config.weights.get(name)] if config.objective == "pareto" else ["score"]


def distributions_of(config: SweepConfig) -> dict[str, BaseDistribution]:
    """The space in the search's words."""
    return {
        key: FloatDistribution(values.low, values.high, log=values.log)
        if isinstance(values, Between)
        else CategoricalDistribution(values)
        for key, values in config.space.items()
    }


def prepare_study(config: SweepConfig, journal: SweepJournal, storage: optuna.storages.InMemoryStorage) -> int:
    """Tell the search what is known and what comes first; returns how many trials are left to run."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    objectives = objectives_of(config)
    study = optuna.create_study(storage=storage, study_name=STUDY, directions=["minimize"] * len(objectives))
    for trial in journal.ended():
        values = [trial.last.get(name, float("nan")) for name in objectives]
        failed = any(value != value for value in values)
        study.add_trial(
            create_trial(
                state=TrialState.FAIL if failed else TrialState.COMPLETE,
                values=None if failed else values,
                params=trial.point,
                distributions=distributions_of(config),
            )
        )
    ended = [trial.point for trial in journal.ended()]
    if config.search == "grid":
        first = [point for point in grid(config) if point not in ended]
        num_left = len(first)
    else:
        first = [trial.point for trial in journal.trials if trial.outcome is None]
        first += [] if journal.trials else [reference_point(config)]
        num_left = config.trials - len(ended)
    for point in first:
        study.enqueue_trial(point)
    return num_left


def scheduler_of(config: SweepConfig, journal: SweepJournal) -> TrialScheduler:
    """ASHA as it stood: what trials reported that have ended counts in its rungs."""
    if config.scheduler == "none":
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    asha = ASHAScheduler(
        time_attr="step",
        metric="score",
        mode="min",
        max_t=config.train.steps + 1,
        grace_period=min(config.grace_steps, config.train.steps),
        reduction_factor=config.reduction,
    )
    for trial in journal.ended():
        if trial.reports:
            known: Any = SimpleNamespace(trial_id=f"ended {trial.number}")
            nobody: Any = None  # ASHA does not look at Tune's controller
            asha.on_trial_add(nobody, known)
            for report in trial.reports:
                asha.on_trial_result(nobody, known, report)
            asha.on_trial_complete(nobody, known, trial.last)
    return asha


# --- results ----------------------------------------------------------------------------------------------------------


def conclude(
    config: SweepConfig, journal: SweepJournal, records: dict[int, RunRecord], record: RunRecord, run: Run
) -> dict[str, Any]:
    """Files, the picture, the closing table; returns the metrics of result.json. Raises SweepFailed."""
    done = [trial for trial in journal.trials if trial.outcome is Outcome.DONE]
    if not done:
        errors = next((trial.error for trial in journal.trials if trial.error), "all were stopped early")
        raise SweepFailed(f"none of {len(journal.trials)} trials came to its end; the first error: {errors}")
    front = [done[i].number for i in pareto_front([[t.last[name] for name in FLOORS] for t in done])]
    best = min(done, key=lambda trial: trial.last["score"])
    reference = next((trial for trial in done if trial.point == reference_point(config)), None)
    for trial in done:
        if reference is not None:
            trial.gains = {
                "speedup": reference.last["time_to_loss_s"] / trial.last["time_to_loss_s"],
            }
            if min(trial.last["wire_bytes_per_step"], reference.last["wire_bytes_per_step"]):
                trial.gains["bytes_ratio"] = reference.last["wire_bytes_per_step"] / trial.last["wire_bytes_per_step"]
        if trial.number in records:
            records[trial.number].metrics(trial.gains, config.train.steps)
            records[trial.number].tags({"pareto": trial.number in front})
    rows = [trial_row(trial, trial.number in front, trial is best) for trial in sorted(journal.trials, key=rank_of)]
    run.table("Trials, the best first; * none is better in every objective", TRIAL_COLUMNS, rows)
    policy = run.out / "policy.yaml"
    policy.write_text(policy_text(config, best, journal), encoding="utf-8")
    plot_pareto(journal.trials, front, run.out / "pareto.png")
    trials = [
        {"trial": trial.number, "settings": trial.name, "outcome": trial.outcome, **trial.gains, **trial.last}
        | {"pareto": trial.number in front, "error": trial.error, "point": trial.point}
        for trial in journal.trials
    ]
    record.document("trials.json", trials)
    for path in (policy, run.out / "pareto.png"):
        record.file(path)
    counts = {f"trials_{outcome}": sum(t.outcome is outcome for t in journal.trials) for outcome in Outcome}
    record.metrics({"best_score": best.last["score"], **best.gains, **counts})
    record.tags({"best": best.name})
    if reference is not None:
        run.baseline.update({"settings": reference.name, **reference.last})
    gain = "" if reference is None else gain_text(best, reference, config.weights)
    run.say(f"best: {best.name}{gain}; train with it: python -m jobs.train --config {policy}")
    probes = [trial.last["probe_s"] for trial in done if trial.last.get("probe_s")]
    return {
        "trials": trials,
        "pareto": front,
        "best": best.number,
        "all_reduce_probe": {"payload_bytes": PROBE_BYTES, "seconds": median(probes) if probes else None},
    }


TRIAL_COLUMNS = ("", "settings", "outcome", "steps", "ms a step", "speed-up", "kB a step", "loss", "codec ms", "score")


def rank_of(trial: TrialLog) -> tuple[bool, float]:
    """Those that came to their end first, by score."""
    return trial.outcome is not Outcome.DONE, trial.last.get("score", float("inf"))


def trial_row(trial: TrialLog, in_front: bool, is_best: bool) -> tuple[object, ...]:
    """One line of the closing table, in the order of TRIAL_COLUMNS."""
    last = trial.last
    if not last:
        return ("", trial.name, trial.outcome, 0, *[None] * 5, trial.error.splitlines()[-1:] or None)
    return (
        ("best " if is_best else "") + ("*" if in_front else ""),
        trial.name,
        trial.outcome,
        int(last["step"]),
        1e3 * last["s_per_step"],
        trial.gains.get("speedup"),
        last["wire_bytes_per_step"] / 1e3,
        last["loss"],
        1e3 * last["codec_s_per_step"],
        last["score"],
    )


def policy_text(config: SweepConfig, best: TrialLog, journal: SweepJournal) -> str:
    """A configuration of `jobs.train` with the best settings, compared with stock DDP when it is run."""
    point = effective(config.train, best.point)
    settings = train_config(config.train, point).model_copy(update={"baseline": True, "tracking": config.tracking})
    ended = sum(trial.outcome is Outcome.DONE for trial in journal.trials)
    comment = (
        f"# Best of {len(journal.trials)} trials ({ended} trained to the end), score {best.last['score']:.4g} by "
        f"{', '.join(f'{name} x {weight:g}' for name, weight in config.weights.items())}.\n"
        f"# python -m jobs.train --config policy.yaml\n"
    )
    return comment + yaml.safe_dump(settings.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def main() -> int:
    """Entry point."""
    return run_job("sweep", SweepConfig, sweep)


if __name__ == "__main__":
    sys.exit(main())
