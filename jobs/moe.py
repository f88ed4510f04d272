"""`python -m jobs.moe --config jobs/configs/moe_lm.yaml key=value ...`: one model under several expert policies.

All policies train side by side in the same workers, from the same weights, on the same batches, block by block. At the
end: the time in expert layers until a held-out loss, modelled with the seconds per pair that one core needs alone, and as
measured here, where ranks may share cores.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from actors.group import WorkerGroup
from actors.worker import Report
from collectives.errors import ConfigError
from collectives.policy import SyncPolicy
from jobs.job import Run, run_job
from jobs.moe_config import MoeConfig
from jobs.moe_rank import MoePlan, MoeVariant, train_moe
from jobs.moe_report import Curve, figures, imbalance, plot_balance, plot_load, plot_time_to_loss, retained
from jobs.record import record_figures, recorded
from jobs.train_cluster import TrainCluster, shapes_links, train_behind_links, train_cluster, warn_of_temporary_folder
from placement.quotas import PairTimes
from zenray.recorder import RunRecord

SUBJECT = "lrmoe"
BASELINES = ("symi_cap", "symi_dropless")
REFERENCE = "symi_dropless"
"""The full backward, without drops: whose losses are the targets. Added where no policy of the kind is asked for."""
TOPQ_RHO = 0.5


def variant_of(policy: str) -> MoeVariant:
    """How a policy's name is trained."""
    if policy == "lrmoe":
        return MoeVariant(policy, "robust", "auto", planner="actor")
    if policy == "lrmoe_topq":
        return MoeVariant(policy, "robust", TOPQ_RHO, "top_q")
    return MoeVariant(policy, policy)


def plan_of(config: MoeConfig) -> MoePlan:
    """What every rank trains; the last variant may be there only as the reference."""
    names: list[str] = list(dict.fromkeys(config.policies))
    if not names:
        raise ConfigError("policies is empty; name at least one, such as policies=lrmoe,symi_cap")
    if not any(is_reference(name) for name in names):
        names.append(REFERENCE)
    return MoePlan(
        variants=tuple(map(variant_of, names)),
        seeds=tuple(range(config.first_seed, config.first_seed + config.seeds)),
        slots=config.slots,
        steps=config.steps,
        batch=config.batch,
        lr=config.lr,
        block_steps=config.block_steps,
        evaluate_every=config.evaluate_every,
        codecs=SyncPolicy.of(config.codecs),
    )


def is_reference(policy: str) -> bool:
    """Whether a policy computes every pair's gradient: all these have the same losses."""
    return policy not in ("lrmoe", "lrmoe_topq", "symi_cap")


def moe(config: MoeConfig, run: Run) -> dict[str, Any]:
    """The job: cluster, record, training, tables."""
    shared = config.cluster()
    if shapes_links(shared, run.say):
        return train_behind_links(shared, run, config)
    warn_of_temporary_folder(run.say)
    plan = plan_of(config)
    with train_cluster(shared) as cluster, recorded(config, config.tracking, run) as record:
        run.say(cluster.description)
        curves, facts = run_group(config, plan, cluster, record, run)
        metrics = conclude(config, plan, curves, facts, cluster, run)
        files = [run.out / name for name in ("time_to_loss.png", "load.png", "balance.png", "loads.npz")]
        record_figures(record, metrics["policies"] | metrics["roles"], files)
    return metrics


def run_group(
    config: MoeConfig, plan: MoePlan, cluster: TrainCluster, record: RunRecord, run: Run
) -> tuple[dict[tuple[str, int], Curve], dict[str, Any]]:
    """Train on all ranks; returns the curves by policy and seed, and rank 0's facts about the machine."""
    curves = {(variant.name, seed): Curve() for variant in plan.variants for seed in plan.seeds}
    facts: dict[str, Any] = {}
    with ExitStack() as stack:
        children = {
            variant.name: stack.enter_context(
                record.child(variant.name, {"policy": variant.name, "rho": variant.rho, "sampler": variant.sampler})
            )
            for variant in plan.variants
        }
        group = stack.enter_context(
            WorkerGroup(
                config.ranks,
                resources_per_worker=cluster.resources_per_worker,
                strategy=cluster.strategy,
                start_timeout_s=120.0,
            )
        )
        run.say(f"{config.ranks} workers joined; training {', '.join(children)} with {len(plan.seeds)} seed(s)")

        def on_report(report: Report) -> None:
            metrics = report.metrics
            if metrics["kind"] == "facts":
                facts.update(metrics)
                return
            if metrics["kind"] == "event":
                run.say(f"event: {metrics['text']}")
                return
            policy, seed = str(metrics["policy"]), int(metrics["seed"])
            curves[policy, seed].take(report.rank, metrics)
            if report.rank == 0:
                show_block(policy, seed, metrics, children[policy], plan, run)

        train = partial(train_moe, plan, config.model)
        results = group.run(train, timeout_s=config.timeout_s, on_report=on_report)
    facts["link_bytes_by_rank"] = [result["sent_bytes"] for result in results]
    facts["wire_bytes_by_rank"] = [result["wire_bytes"] for result in results]
    facts["roles"] = {role["role"]: role for role in results[0]["roles"]}
    return curves, facts


def show_block(policy: str, seed: int, block: dict[str, Any] | Any, child: RunRecord, plan: MoePlan, run: Run) -> None:
    """One block as a line of progress and as metrics of the policy's run."""
    steps, first = block["steps"], block["first_step"]
    suffix = "" if seed == plan.seeds[0] else f"_seed{seed}"
    hot = imbalance(steps["pairs"])
    for offset, loss in enumerate(steps["loss"]):
        child.metrics(
            {
                f"loss{suffix}": loss,
                f"rho{suffix}": steps["rho"][offset],
                f"imbalance{suffix}": float(hot[offset]),
            },
            first + offset,
        )
    for step, loss in block["evaluations"].items():
        child.metrics({f"held_out_loss{suffix}": loss}, int(step))
    last = first + len(steps["loss"])
    held_out = "".join(f"  held-out {loss:.4f}" for loss in block["evaluations"].values())
    run.say(
        f"{policy:>13} seed {seed} step {last:>4}/{plan.steps}  loss {steps['loss'][-1]:.4f}{held_out}  hottest/mean "
        f"{hot.mean():.3f}  rho {steps['rho'][-1]:.2f}"
    )


def conclude(
    config: MoeConfig,
    plan: MoePlan,
    curves: dict[tuple[str, int], Curve],
    facts: dict[str, Any],
    cluster: TrainCluster,
    run: Run,
) -> dict[str, Any]:
    """Figures, pictures, and the closing tables."""
    names = [variant.name for variant in plan.variants]
    reference = next(name for name in names if is_reference(name))
    times, seed = PairTimes(**facts["times"]), plan.seeds[0]
    link = config.link if cluster.links and config.link else config.modelled_link
    policies = {name: figures(curves, name, plan.seeds, reference, times, link) for name in names}
    plot_time_to_loss(curves, names, reference, seed, times, link, run.out / "time_to_loss.png")
    plot_load(curves, names, seed, run.out / "load.png")
    plot_balance(curves, names, seed, run.out / "balance.png")
    counts = np.asarray(curves[reference, seed].steps["counts"], np.int64)
    np.savez_compressed(run.out / "loads.npz", counts=counts, iters=np.arange(len(counts)))
    for name in BASELINES:
        if name in policies:
            run.baseline[name] = policies[name]
    below = compare(policies)
    show(policies, below, times, run)
    return {
        "policies": policies,
        "roles": facts["roles"],
        "below": below,
        "times": asdict(times),
        "link_bits_per_s": link,
        "reference": reference,
        "sent_bytes_by_rank": facts["link_bytes_by_rank"],
        "wire_bytes_by_rank": facts["wire_bytes_by_rank"],
        "all_reduce_probe": facts["probe"],
        "nodes": facts["nodes"],
        "curves": {
            name: {
                "held_out_loss": {str(k): v for k, v in sorted(curves[name, seed].evaluations.items())},
                "imbalance": imbalance(curves[name, seed].steps["pairs"]).round(4).tolist(),
                "retained_share": retained(curves[name, seed]).round(4).tolist(),
                "plan_version": curves[name, seed].steps["plan_version"][-1],
                "plan_age_mean": float(np.mean(curves[name, seed].steps["plan_age"])),
            }
            for name in names
        },
    }


def compare(policies: dict[str, Any]) -> dict[str, Any]:
    """How far below each baseline the subject's times are: 0.3 means 30 % less; None where one missed the target."""
    result: dict[str, Any] = {}
    for name in BASELINES:
        if SUBJECT not in policies or name not in policies:
            continue
        row: dict[str, float | None] = {}
        for key in ("moe_time_to_loss_s", "moe_wall_to_loss_s"):
            for suffix in ("", "_50", "_75"):
                ours, theirs = policies[SUBJECT][key + suffix], policies[name][key + suffix]
                row[key + suffix] = None if ours is None or not theirs else 1 - ours / theirs
        result[name] = row
    return result


def show(policies: dict[str, Any], below: dict[str, Any], times: PairTimes, run: Run) -> None:
    """The closing tables."""
    keys = ("moe_time_to_loss_s", "moe_wall_to_loss_s", "steps_to_loss", "final_eval_loss", "imbalance_mean")
    rows = [
        [name, *(row[key] for key in keys), row["retained_share_mean"], row["peak_expert_bytes"] / 1e6]
        for name, row in policies.items()
    ]
    columns = ["policy", "modelled s", "measured s", "steps", "final loss", "hottest/mean", "kept", "peak MB"]
    run.table("Time in expert layers until the loss of the full run at 60 % of its steps (medians)", columns, rows)
    run.say(
        f"one core alone: {times.forward_s * 1e6:.2f} us forward, {times.backward_s * 1e6:.2f} us backward per pair, "
        f"{times.selection_s * 1e6:.2f} us selection"
    )
    for name, row in below.items():
        parts = [
            f"{value:.1%} {'modelled' if 'time' in key else 'measured'} at {key.rpartition('_')[2] if key[-1] != 's' else 60} %"
            for key, value in row.items()
            if value is not None
        ]
        run.say(f"{SUBJECT} is below {name} by {', '.join(parts) or 'nothing: a target was missed'}")


def main() -> int:
    """Entry point."""
    return run_job("moe", MoeConfig, moe)


if __name__ == "__main__":
    sys.exit(main())
