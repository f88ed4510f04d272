"""`moe`: one expert layer's backward with a share of its pairs: what it costs in loss, and what it saves in time.

The language model of `jobs.moe` trains once with every pair and once for each share, over several seeds, with the pairs
drawn by score, drawn alike (uniform), and cut off below the largest scores (top-q, which is biased and must fail). The
layer's times are those of one core alone, with kept and with recomputed activations. Joint plans of random small cases
are held against the optimum of a mixed-integer program.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import mean, median, stdev
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from collectives.policy import SyncPolicy
from collectives.transport import Transport
from jobs.job import Run
from jobs.moe_rank import MoePlan, MoeTrainer, MoeVariant, one_core, time_layer
from jobs.ranks import run_ranks
from jobs.train_config import Count, PositiveCount
from jobs.workloads.moe_lm import MoeLm, MoeLmConfig
from placement.joint_plan import exact_joint_plan, joint_plan
from placement.quotas import sampling_variance
from placement.split import Ranks
from zenray.config import Section

FILES = ()
FULL = "full"
Share = Annotated[float, Field(gt=0, lt=1)]


class Config(Section):
    """What is trained and timed."""

    model: MoeLmConfig = MoeLmConfig(hidden=128, drift=0.0)
    """The language model."""
    retention: list[Share] = Field(default=[0.5, 0.75])
    """Shares of the pairs in the backward, drawn by score."""
    contrast: list[Share] = Field(default=[0.5])
    """Shares at which uniform and top-q selection are trained as well."""
    seeds: PositiveCount = 3
    """Runs of each; differences are means over them."""
    ranks: PositiveCount = 2
    """Processes; a rank's budget is its share of the pairs."""
    slots: PositiveCount = 16
    """Expert instances per rank."""
    steps: PositiveCount = 300
    """Steps of each run."""
    batch: PositiveCount = 16
    """Sequences per step."""
    lr: float = 3e-3
    """Largest learning rate."""
    timed_tokens: Count = 2048
    """Tokens of the timed layer; 0 times nothing."""
    timed_width: PositiveCount = 256
    """Model width of the timed layer; its experts are four times as wide."""
    planned_cases: Count = 30
    """Random cases in which the joint plan is compared with the optimum; 0 compares none."""
    timeout_s: float = 3000.0
    """Of the training."""


def run(config: Config, run: Run) -> dict[str, Any]:
    """Train, then time; see the module's docstring. Keys: retention.RHO.loss_minus_full, uniform and top_q beside."""
    metrics: dict[str, Any] = {"layer": times(config, run)} if config.timed_tokens else {}
    if config.planned_cases:
        metrics["joint_plan"] = joint_gap(config.planned_cases, run)
    run.say(f"training {len(variants_of(config))} variants x {config.seeds} seeds on {config.ranks} ranks")
    found = run_ranks(
        config.ranks, "jobs.bench.moe:train_rank", config.model_dump(mode="json"), timeout_s=config.timeout_s
    )[0]
    full = found[FULL]
    run.baseline.update({"full_backward_loss": mean(full), "by_seed": full})
    metrics["full_loss"] = mean(full)
    metrics["retention"] = {}
    rows = []
    for variant in variants_of(config)[1:]:
        gaps = [ours - theirs for ours, theirs in zip(found[variant.name], full, strict=True)]
        key = "" if variant.sampler == "scored" else f"{variant.sampler}_"
        row = metrics["retention"].setdefault(str(variant.rho), {})
        row[f"{key}loss_minus_full"] = mean(gaps)
        row[f"{key}loss_minus_full_by_seed"] = gaps
        rows.append([variant.name, mean(found[variant.name]), mean(gaps), stdev(gaps) if len(gaps) > 1 else None])
    run.table(
        f"Final held-out loss; full backward {mean(full):.4f}",
        ["backward", "loss", "minus full", "sd over seeds"],
        rows,
    )
    return metrics


def variants_of(config: Config) -> list[MoeVariant]:
    """The full backward first."""
    variants = [MoeVariant(FULL, "robust")]
    variants += [MoeVariant(f"{rho} scored", "robust", rho) for rho in config.retention]
    for sampler in ("uniform", "top_q"):
        variants += [MoeVariant(f"{rho} {sampler}", "robust", rho, sampler) for rho in config.contrast]
    return variants


def train_rank(transport: Transport, settings: Mapping[str, Any]) -> dict[str, list[float]]:
    """On each rank: the final held-out loss of every variant, by seed."""
    config = Config.model_validate(dict(settings))
    variants = variants_of(config)
    found: dict[str, list[float]] = {variant.name: [] for variant in variants}
    plan = MoePlan(
        variants=tuple(variants),
        seeds=tuple(range(config.seeds)),
        slots=config.slots,
        steps=config.steps,
        batch=config.batch,
        lr=config.lr,
        block_steps=config.steps,
        evaluate_every=config.steps,
        codecs=SyncPolicy("off"),
    )
    for seed in plan.seeds:
        workload = MoeLm(config.model, config.batch, seed, config.steps)
        for variant in variants:
            trainer = MoeTrainer(variant, workload, plan, transport)
            for step in range(config.steps):
                trainer.step(step)
            found[variant.name].append(trainer.evaluate())
    return found


def times(config: Config, run: Run) -> dict[str, Any]:
    """Backward time over that of the full backward with kept activations, by mode and share."""
    width, hidden, tokens = config.timed_width, 4 * config.timed_width, config.timed_tokens
    found: dict[str, Any] = {"width": width, "hidden": hidden, "pairs": 2 * tokens}
    shares = (1.0, 0.75, 0.5, 0.25)
    with one_core(0):
        for mode, keep_hidden in (("keep", True), ("recompute", False)):
            seconds = time_layer(width, hidden, 8, 2, tokens, shares, keep_hidden=keep_hidden)
            found.setdefault("forward_s", seconds[0][0])
            found.setdefault("backward_s", seconds[0][1])
            found[mode] = {str(rho): back / found["backward_s"] for rho, (_, back) in zip(shares, seconds, strict=True)}
    rows = [[mode, *found[mode].values()] for mode in ("keep", "recompute")]
    title = (
        f"Backward time of one layer ({width} x {hidden}, {2 * tokens} pairs) over the full one with kept activations"
    )
    run.table(title, ["activations", *(f"rho {rho}" for rho in shares)], rows)
    return found


def joint_gap(num_cases: int, run: Run) -> dict[str, float]:
    """Layer time of the joint plan over the optimum's (3 ranks x 3 slots, 6 experts), and how long a plan takes."""
    gaps, seconds = [], []
    for seed in range(num_cases):
        rng = np.random.default_rng(seed)
        w = rng.multinomial(240, rng.dirichlet(np.full(6, 0.7))).astype(np.int64) + 1
        scores = [np.exp(rng.normal(0, 1, count)) for count in w]
        limit = sum(sampling_variance(s, max(1, len(s) // 2)) for s in scores)
        case = (w, scores, Ranks.equal(3, 3), np.full(3, 2.0), limit)
        started = time.perf_counter()
        ours = joint_plan(*case)
        seconds.append(time.perf_counter() - started)
        gaps.append(ours.seconds / exact_joint_plan(*case).seconds)
    found = {"over_optimum_mean": mean(gaps), "over_optimum_worst": max(gaps), "plan_ms": median(seconds) * 1e3}
    run.say(
        f"joint plans: {found['over_optimum_mean']:.3f} times the optimum's time on average, "
        f"{found['over_optimum_worst']:.3f} at worst, {found['plan_ms']:.1f} ms each"
    )
    return found
