"""`python -m jobs.train --config jobs/configs/demo.yaml key=value ...`: train a model, with zenray and with stock DDP.

Both variants train in the same workers, block by block. At the end: how much faster, how many bytes fewer, which scheme
each tensor took, that replicas and loss curves agree, and the command that opens the record.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from actors.errors import MemoryExhausted
from actors.group import WorkerGroup
from actors.protection import Protection, Recovery
from actors.recovery import RecoverableGroup
from actors.state import digest_of
from actors.worker import Report
from collectives.errors import ConfigError
from collectives.policy import SyncPolicy
from jobs.job import Run, run_job
from jobs.train_cluster import TrainCluster, shapes_links, train_behind_links, train_cluster, warn_of_temporary_folder
from jobs.train_config import TrainConfig
from jobs.workloads.click_log import ClickLog
from jobs.workloads.gpt import Gpt
from jobs.workloads.stdlib_lm import StdlibLm
from placement.recovery import Stage
from zenray.comparison import Block, Comparison, TensorChoice, TrainingLog, call_table, choices
from zenray.engine import CheckpointPlan, TrainPlan, Variant, Workload, train_rank
from zenray.environment import of_other_nodes
from zenray.plots import plot_bytes, plot_losses, plot_time
from zenray.recorder import Recorder, RunRecord
from zenray.recoveries import record_recoveries

SUBJECT, BASELINE = "zenray", "ddp_dense"
MIN_PAIRS = 3
"""Pairs of blocks below which a ratio is mostly accident."""


def workload_of(config: TrainConfig) -> Workload:
    """The workload that the configuration names."""
    if config.workload == "click_log":
        return ClickLog(config.click_log, config.batch, config.seed)
    if config.workload == "gpt":
        return Gpt(config.gpt, config.batch, config.seed)
    return StdlibLm(config.stdlib_lm, config.batch, config.seed)


def policy_of(config: TrainConfig) -> SyncPolicy:
    """How the subject's gradients travel. Raises ConfigError where the keys contradict each other."""
    policy = SyncPolicy.of(config.policy)
    if config.scheme != "auto":
        if policy.scheme != "auto":
            raise ConfigError(f"scheme={config.scheme} contradicts policy={config.policy}, which is a scheme too")
        policy = replace(policy, scheme=config.scheme)
    return replace(
        policy,
        optimizer=config.optimizer,
        dense_steps=config.dense_steps,
        density=config.density,
        error_feedback=config.error_feedback,
    )


def plan_of(config: TrainConfig, out: Path) -> TrainPlan:
    """What every rank trains."""
    if config.optimizer == "adamw" and config.workload != "gpt":
        raise ConfigError(f"optimizer=adamw takes no sparse gradients, which {config.workload} has; use adagrad or sgd")
    default = SyncPolicy(optimizer=config.optimizer, dense_steps=config.dense_steps)
    wanted = policy_of(config)
    variants = [Variant(SUBJECT, sparse=True, policy=wanted)]
    if config.baseline:
        variants.append(Variant(BASELINE, sparse=False, policy=None))
    for rival in config.rivals:
        if rival == "auto":
            variants.append(Variant("zenray_auto", sparse=True, policy=default))
        elif rival == "sparse":
            variants.append(Variant("ddp_sparse", sparse=True, policy=None))
        else:
            variants.append(Variant(f"ddp_{rival}", sparse=False, policy=None, hook=rival))
    for offset in range(1, 1 + config.baseline_seeds):
        variants.append(Variant(f"{BASELINE}_seed{offset}", sparse=False, policy=None, seed_offset=offset))
    variants = [replace(variant, bucket_mib=config.bucket_mib) for variant in variants]
    settings = config.checkpoint
    folder = Path(settings.folder).resolve() if settings.folder else out.resolve() / "checkpoints"
    free = {"checkpoint", "recovery", "tracking", "timeout_s", *(["steps"] if config.schedule == "constant" else [])}
    trained = config.model_dump(mode="json", exclude=free)
    return TrainPlan(
        variants=tuple(variants),
        steps=config.steps,
        warmup_steps=min(config.warmup_steps, config.steps - 1),
        block_steps=config.block_steps,
        optimizer=config.optimizer,
        lr=config.lr,
        config_sha256=digest_of(trained),
        checkpoint=CheckpointPlan(folder, settings.every_steps, settings.keep, settings.resume),
        schedule=config.schedule,
    )


def train(config: TrainConfig, run: Run) -> dict[str, Any]:
    """The job: cluster, record, training, tables."""
    policy_of(config)  # a wrong name is said before links and nodes are built
    if shapes_links(config, run.say):
        return train_behind_links(config, run)
    warn_of_temporary_folder(run.say)
    workload, plan = workload_of(config), plan_of(config, run.out)
    if plan.warmup_steps < config.warmup_steps:
        run.say(
            f"event: with steps={config.steps} only {plan.warmup_steps} of {config.warmup_steps} warm-up steps are left "
            f"out, so the speed figures mean little: raise steps"
        )
    with (
        train_cluster(config) as cluster,
        Recorder(config.tracking.project, config.tracking.uri, run.out.parent / ".spool", run.say) as recorder,
        recorder.job(
            f"train {config.workload}",
            config=config.model_dump(mode="json"),
            params=short_params(config) | {"link_bits_per_s": config.link if cluster.links else "none"},
            tags={"zenray.job": run.name, "out": run.out.resolve()},
        ) as record,
    ):
        run.say(cluster.description)
        record.document("plan.json", asdict(plan) | {"facts": dict(workload.facts()), "cluster": asdict(cluster)})
        log, results = run_group(config, plan, workload, cluster, record, run)
        metrics = conclude(config, log, results, record, run)
        if (kept := plan.checkpoint) is not None and kept.every_steps and not any("are off" in e for e in log.events):
            record.checkpoint(kept.folder, plan.steps)
        recorder.flush(timeout_s=30.0)
        run.say(f"browse the record: {recorder.ui_command()}")
    return metrics | {"cluster": asdict(cluster), "all_reduce_probe": log.probe}


def short_params(config: TrainConfig) -> dict[str, Any]:
    """The inputs by which runs are sorted and filtered; the whole configuration is an artifact."""
    names = ("workload", "ranks", "steps", "batch", "optimizer", "lr", "seed", "policy")
    return {name: str(getattr(config, name)) if name == "policy" else getattr(config, name) for name in names}


def run_group(
    config: TrainConfig, plan: TrainPlan, workload: Workload, cluster: TrainCluster, record: RunRecord, run: Run
) -> tuple[TrainingLog, list[dict[str, Any]]]:
    """Train on all ranks while reports become progress, rows and MLflow metrics; returns the results by rank."""
    log = TrainingLog([variant.name for variant in plan.variants])
    with ExitStack() as stack:
        children = {
            variant.name: stack.enter_context(
                record.child(variant.name, {"variant": variant.name, "sparse": variant.sparse})
            )
            for variant in plan.variants
        }
        run.say(f"starting {config.ranks} workers to train {', '.join(log.variants)} on {config.workload}")
        progress = stack.enter_context(progress_of(run, plan))

        def on_report(report: Report) -> None:
            num_events = len(log.events)
            block = log.take(report.rank, report.metrics)
            for event in log.events[num_events:]:
                run.say(f"event: {event}")
                record.tags({f"event.{num_events}": event})
            if report.metrics["kind"] == "node":
                record.metrics(of_other_nodes(report.metrics["figures"]), report.metrics["step"])
            if block is not None:
                record_block(children[block.variant], block)
                progress(block)

        results = train_group(config, partial(train_rank, plan, workload), cluster, on_report, record, run)
        for name, child in children.items():
            child.metrics(
                {"steps_per_s": log.steps_per_s(name), "held_out_loss": results[0][name]["held_out_loss"]}, plan.steps
            )
            child.metrics({f"bytes/{phase}": count for phase, count in log.bytes_by_phase(name).items()}, plan.steps)
            child.metrics(role_metrics(results[0][name]["dense"]), plan.steps)
            child.tags({"parameters_sha256": results[0][name]["parameters_sha256"]})
    return log, results


def train_group(
    config: TrainConfig,
    function: Any,
    cluster: TrainCluster,
    on_report: Callable[[Report], None],
    record: RunRecord,
    run: Run,
) -> list[Any]:
    """Run `function` on all ranks: through failures where the copies fit into memory, else without copies."""
    settings = config.recovery
    placed: dict[str, Any] = {"resources_per_worker": cluster.resources_per_worker, "start_timeout_s": 120.0}
    if settings.copies:
        protection = Protection(
            copies=settings.copies,
            spares=settings.spares,
            heartbeat_s=settings.heartbeat_s,
            max_recoveries=settings.max_recoveries,
            min_ranks=settings.min_ranks,
            memory_limit_bytes=settings.memory_mib << 20,
        )
        journal = run.out / "journal.jsonl"
        with RecoverableGroup(
            config.ranks, journal=journal, protection=protection, strategy=cluster.strategy, **placed
        ) as group:
            try:
                return group.run(function, timeout_s=config.timeout_s, on_report=on_report)
            except MemoryExhausted as error:
                run.say(f"event: training without copies in memory: {error}")
                record.tags({"recovery.off": str(error)})
            finally:
                for event in group.events:
                    run.say(f"event: {event}")
                for recovery in group.recoveries:
                    run.say(recovery_line(recovery))
                record_recoveries(record, group.recoveries, group.events)
    with WorkerGroup(config.ranks, strategy=cluster.strategy, **placed) as plain:
        return plain.run(function, timeout_s=config.timeout_s, on_report=on_report)


def recovery_line(recovery: Recovery) -> str:
    """One recovery as one line."""
    seconds = sum(s for stage, s in recovery.seconds.items() if stage != Stage.TRAINING)
    return (
        f"recovered in {seconds:.1f} s (rank(s) {list(recovery.lost_ranks)} lost), went on from copy {recovery.step} in "
        f"{recovery.source} with {recovery.num_ranks} ranks: {recovery.cause}"
    )


def role_metrics(dense: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a role as metrics `role/figure`; empty for stock DDP."""
    role = dense.get("role", {})
    return {f"{role['role']}/{key}": float(value) for key, value in role.items() if isinstance(value, int | float)}


def record_block(child: RunRecord, block: Block) -> None:
    """Loss and seconds at every step, speed at the end of the block."""
    for index, (loss, seconds) in enumerate(zip(block.losses, block.step_s, strict=True)):
        child.metrics({"loss": loss, "step_s": seconds}, block.first_step + index)
    child.metrics({"block_steps_per_s": block.steps_per_s}, block.first_step + len(block.losses) - 1)


@contextmanager
def progress_of(run: Run, plan: TrainPlan) -> Iterator[Any]:
    """A function that shows a block: bars on a terminal, a line a block otherwise."""
    if not run.console.is_terminal:
        yield lambda block: run.say(block_line(block))
        return
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=run.console, refresh_per_second=2) as bars:
        tasks = {v.name: bars.add_task(v.name, total=plan.steps, facts="") for v in plan.variants}

        def show(block: Block) -> None:
            facts = f"loss {block.losses[-1]:.3f}  {block.steps_per_s:.2f} steps/s"
            done = block.first_step + len(block.losses)
            bars.update(tasks[block.variant], completed=done, facts=facts)

        yield show


def block_line(block: Block) -> str:
    """One block as one line."""
    last = block.first_step + len(block.losses)
    note = " (warm-up)" if block.warmup else ""
    return f"{block.variant:>10} step {last:>5}  loss {block.losses[-1]:.4f}  {block.steps_per_s:6.2f} steps/s{note}"


def conclude(
    config: TrainConfig, log: TrainingLog, results: list[dict[str, Any]], record: RunRecord, run: Run
) -> dict[str, Any]:
    """Files, plots, the parent's metrics and the closing tables; returns the metrics of result.json."""
    mine = results[0]
    pq.write_table(log.step_table(), run.out / "steps.parquet")
    pq.write_table(call_table({name: mine[name]["records"] for name in log.variants}), run.out / "calls.parquet")
    plot_losses(log, run.out / "loss.png")
    plot_bytes(log, run.out / "bytes.png")
    schemes = choices(mine[SUBJECT]["records"])
    reductions = [(c.tensor, c.scheme, c.observed_ms, c.predicted_ms) for c in schemes]
    for row in mine[SUBJECT]["dense"].get("segments", []):
        reductions.append((row["label"], row["choice"], 1e3 * row["observed_s"], 1e3 * row["predicted_s"]))
    plot_time({name: 1 / log.steps_per_s(name) for name in log.variants}, reductions, run.out / "time.png")
    record.document("schemes.json", [asdict(choice) for choice in schemes])
    for name in ("steps.parquet", "calls.parquet", "loss.png", "bytes.png", "time.png"):
        record.file(run.out / name)
    variants = {name: variant_figures(log, name, mine[name]) for name in log.variants}
    metrics: dict[str, Any] = {"variants": variants, "schemes": [asdict(choice) for choice in schemes]}
    if config.baseline:
        comparison = log.compare(SUBJECT, BASELINE)
        run.baseline.update(variants[BASELINE])
        metrics["comparison"] = asdict(comparison)
        rivals = {name: log.compare(SUBJECT, name) for name in log.variants if name not in (SUBJECT, BASELINE)}
        metrics["rivals"] = {name: asdict(rival) for name, rival in rivals.items()}
        record.metrics({f"speedup_over_{name}": rival.speedup for name, rival in rivals.items()})
        found = {
            "speedup": comparison.speedup,
            "bytes_ratio": comparison.bytes_ratio,
            "wire_ratio": comparison.wire_ratio,
            "loss_gap": comparison.loss_gap,
            "steps_per_s": log.steps_per_s(SUBJECT),
            "baseline_steps_per_s": log.steps_per_s(BASELINE),
        }
        record.metrics({name: value for name, value in found.items() if value is not None and math.isfinite(value)})
    metrics["dense"] = {name: mine[name]["dense"] for name in log.variants if mine[name]["dense"]}
    if schemes:
        show_schemes(schemes, run)
    show_codecs(metrics["dense"], log, run)
    show_variants(variants, run)
    if config.baseline:
        for rival in (comparison, *rivals.values()):
            run.say(comparison_line(rival))
        dense = mine[SUBJECT]["dense"]
        if dense and all(
            choice.scheme == "dense" for choice in schemes
        ):  # rows save copies and updates too, not only bytes
            computing = mine[BASELINE]["compute_s"] * log.steps_per_s(BASELINE)
            metrics["exposed_share"] = max(0.0, 1 - computing)
            metrics["ceiling"] = show_ceiling(metrics["exposed_share"], comparison.bytes_ratio, run)
        metrics["loss_spread"] = show_spread(variants, run)
    return metrics


def show_codecs(dense: Mapping[str, Mapping[str, Any]], log: TrainingLog, run: Run) -> None:
    """Which codec each stretch of dense gradients took, why, and how good the prediction was; and the events."""
    rows = [
        (
            name,
            row["label"],
            row["choice"],
            f"{row['observed_bytes']:,} ({row['predicted_bytes']:,})",
            f"{row['observed_s'] * 1e3:.3g} ({row['predicted_s'] * 1e3:.3g})",
            row["reason"],
        )
        for name, found in dense.items()
        for row in found["segments"]
    ]
    if rows:
        columns = ("variant", "gradients", "codec", "bytes (predicted)", "ms (predicted)", "why")
        run.table("How dense gradients travelled: sent per rank and step", columns, rows)
    for name, found in dense.items():
        for event in found["events"]:
            run.say(f"event: {name}: {event}")


def show_ceiling(f: float, r: float, run: Run) -> float | None:
    """What the exposed share f of a stock step allows: 1 / ((1 - f) + f / r), r being how many times fewer bytes are sent."""
    if not f or not r > 0:
        return None
    ceiling = 1 / ((1 - f) + f / r)
    run.say(
        f"{f:.1%} of a stock step is communication that backward does not hide (the rest is its length without any); with "
        f"{r:.1f} times fewer bytes the bound is {ceiling:.2f} times the steps per second"
    )
    return float(ceiling)


def show_spread(variants: Mapping[str, Mapping[str, Any]], run: Run) -> dict[str, Any] | None:
    """Held-out losses against the spread of the stock runs with different seeds, where there are several."""
    stock = [f["held_out_loss"] for name, f in variants.items() if name.startswith(BASELINE)]
    if len(stock) < 2:
        return None
    low, high, ours = min(stock), max(stock), variants[SUBJECT]["held_out_loss"]
    run.say(
        f"held-out loss {ours:.4f}; stock fp32 with {len(stock)} seeds {low:.4f} to {high:.4f}: "
        f"{'inside or below' if ours <= high else f'{ours - high:.4f} above'}"
    )
    return {"low": low, "high": high, "subject": ours, "inside": ours <= high}


def variant_figures(log: TrainingLog, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one variant."""
    losses = log.losses(name)
    return {
        "steps_per_s": log.steps_per_s(name),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "held_out_loss": result["held_out_loss"],
        "sent_bytes_per_step": sum(log.bytes_by_phase(name).values()),
        "sent_bytes_per_step_by_phase": log.bytes_by_phase(name),
        "wire_bytes_per_step": log.wire_bytes(name),
        "num_parameters": result["num_parameters"],
        "parameters_sha256": result["parameters_sha256"],
    }


def show_schemes(schemes: list[TensorChoice], run: Run) -> None:
    """Which scheme each tensor took, and how good the prediction was."""
    rows = [
        (
            c.tensor,
            c.scheme,
            f"{c.observed_bytes:,} ({c.predicted_bytes:,})",
            f"{c.observed_ms:.3g} ({c.predicted_ms:.3g})",
            c.reason,
        )
        for c in schemes
    ]
    columns = ("tensor", "scheme", "bytes (predicted)", "ms (predicted)", "why")
    run.table("How each gradient travelled: payload of the busiest rank, medians per step", columns, rows)


def show_variants(variants: Mapping[str, Mapping[str, Any]], run: Run) -> None:
    """The closing table."""
    rows = [
        (
            name,
            f["steps_per_s"],
            f["sent_bytes_per_step"] / 1e6 if f["sent_bytes_per_step"] else None,
            None if f["wire_bytes_per_step"] is None else f["wire_bytes_per_step"] / 1e6,
            f["last_loss"],
            f["held_out_loss"],
            f"yes ({f['parameters_sha256'][:8]})",
        )
        for name, f in variants.items()
    ]
    columns = (
        "variant",
        "steps/s",
        "MB sent per step",
        "on the wire",
        "last loss",
        "held-out loss",
        "replicas identical",
    )
    run.table("Result", columns, rows)


def comparison_line(comparison: Comparison) -> str:
    """What the run says of one rival; few pairs are said to be few."""
    few = "" if comparison.num_pairs >= MIN_PAIRS else ": too few for a ratio, raise steps"
    ratio = comparison.wire_ratio if math.isnan(comparison.bytes_ratio) else comparison.bytes_ratio
    sent = "" if ratio is None else f", sends {ratio:.1f} times fewer bytes"
    return (
        f"{comparison.subject} is {comparison.speedup:.2f} times as fast as {comparison.baseline} "
        f"({comparison.speedup_first:.2f} in the first of {comparison.num_pairs} pairs of blocks, "
        f"{comparison.speedup_last:.2f} in the last{few}){sent}; largest difference of the loss curves "
        f"{comparison.loss_gap:.1e}"
    )


def main() -> int:
    """Entry point."""
    return run_job("train", TrainConfig, train)


if __name__ == "__main__":
    sys.exit(main())
