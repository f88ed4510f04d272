"""The keys of `python -m jobs.sweep`, and what a point of its space means for a training job."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from collectives.codecs import CODECS
from collectives.errors import ConfigError
from jobs.train import plan_of, workload_of
from jobs.train_config import PositiveCount, TrackingConfig, TrainConfig
from zenray.config import Section, validate
from zenray.sweeps import FLOORS

FIXED = (
    "link",
    "link_required",
    "tracking",
    "checkpoint",
    "steps",
    "timeout_s",
    "baseline",
    "rivals",
    "baseline_seeds",
)
"""What a sweep cannot vary: all trials share the cluster and the record, and are compared at the same steps."""

ALONE: dict[str, Any] = {"baseline": False, "baseline_seeds": 0, "rivals": [], "checkpoint": {}}
"""The baseline of a trial is the sweep's reference."""

INTERPLAY = ("workload", "optimizer", "policy", "scheme")
"""Keys whose values may exclude each other."""

DENSITY_CODECS = frozenset({"topk", "sq", "randomk"})


class Between(Section):
    """A range to draw from; `grid` does not take one."""

    low: float
    """Smallest value, which the reference takes."""
    high: float
    """Largest value."""
    log: bool = False
    """Draw evenly in the logarithm."""


def _as_lists(space: Any) -> Any:
    """`space.policy=off,int8b` on the command line is a list too; YAML reads a bare `off` as false."""
    if not isinstance(space, dict):
        return space
    read = {k: [yaml.safe_load(word) for word in v.split(",")] if isinstance(v, str) else v for k, v in space.items()}
    for key in {"policy", "scheme"} & read.keys():
        if isinstance(read[key], list):
            read[key] = ["off" if value is False else value for value in read[key]]
    return read


Space = Annotated[dict[str, list[bool | int | float | str] | Between], BeforeValidator(_as_lists)]


class SweepConfig(Section):
    """Which training settings to try, and what counts as good."""

    train: TrainConfig = TrainConfig()
    """What every trial shares: see `python -m jobs.train`. Baseline, rivals, checkpoints and recovery have no part."""
    space: Space = Field(default={})
    """Keys of `train`, each with the values to try or {low, high, log}. The first values together are the reference,
    which is tried first and against which speed-ups are reckoned. Codec, bits and block are the policy's: int8b is 8
    bits in blocks of 256, int4b 4 bits in blocks of 32, bf16 16 bits."""
    trials: PositiveCount = 8
    """How many points to try; a grid ends earlier when it is exhausted."""
    search: Literal["optuna", "random", "grid"] = "optuna"
    """How points are chosen: a tree of Parzen estimators, at random, or all combinations in order."""
    scheduler: Literal["asha", "none"] = "asha"
    """asha: stop a trial early when it is worse than most others were at the same step."""
    grace_steps: PositiveCount = 10
    """No trial is stopped before."""
    reduction: PositiveCount = 3
    """One in so many goes on past each rung."""
    objective: Literal["composite", "pareto"] = "composite"
    """What the search minimises: the weighted score, or all objectives with a weight at once. Stopping early, and the
    policy at the end, go by the score either way."""
    weights: dict[str, float] = Field(default={"time_to_loss_s": 1.0, "wire_bytes_per_step": 0.1, "loss": 1.0})
    """Of time_to_loss_s, wire_bytes_per_step, loss (training loss of the last block) and codec_s_per_step, by logarithm."""
    target_loss: Annotated[float, Field(gt=0)] | None = None
    """The training loss that time_to_loss_s waits for; none: the end of all steps."""
    seed: int = 0
    """Of the search."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""


def check(config: SweepConfig) -> None:
    """Raises ConfigError for a space or weights that no trial could use."""
    if not config.space:
        raise ConfigError(
            "space is empty: name keys of the training job and their values, such as policy: [off, int8b]"
        )
    for key, values in config.space.items():
        if key.partition(".")[0] in FIXED:
            raise ConfigError(f"space.{key}: all trials of a sweep share {key}; set train.{key} instead")
        if isinstance(values, Between):
            if config.search == "grid":
                raise ConfigError(f"space.{key} is a range, which search=grid cannot enumerate; give a list")
            if not values.low < values.high or (values.log and values.low <= 0):
                raise ConfigError(f"space.{key}: low = {values.low} and high = {values.high} make no range")
        elif not values:
            raise ConfigError(f"space.{key} is empty")
        for value in [values.low, values.high] if isinstance(values, Between) else values:
            check_value(config, key, value)
    unknown = sorted(set(config.weights) - set(FLOORS))
    if unknown or not any(config.weights.values()) or min(config.weights.values()) < 0:
        raise ConfigError(
            f"weights = {config.weights}: give a weight above 0 to some of {', '.join(FLOORS)}, no others"
        )
    if config.train.warmup_steps >= config.train.steps:
        raise ConfigError(f"train.warmup_steps = {config.train.warmup_steps} leaves none of {config.train.steps} steps")


def check_value(config: SweepConfig, key: str, value: Any) -> None:
    """Raises ConfigError for a value that no trial could train with, whatever its other settings."""
    others = [name for name in INTERPLAY if name in config.space and name != key]
    lists = [values for name in others if isinstance(values := config.space[name], list)]
    refused: ConfigError | None = None
    for rest in product(*lists):
        try:
            settings = train_config(config.train, dict(zip(others, rest, strict=True)) | {key: value})
            plan_of(settings, Path())
            workload_of(settings)
            return
        except ConfigError as error:
            refused = refused or error
    raise ConfigError(f"space.{key} = {value!r}: {refused}")


def train_config(base: TrainConfig, point: Mapping[str, Any]) -> TrainConfig:
    """The training job of one point: the subject alone, without checkpoints, which a trial would leave behind.

    Raises ConfigError for an unknown key or a value that is not valid.
    """
    data = base.model_dump(mode="json") | ALONE
    for key, value in point.items():
        *sections, leaf = key.split(".")
        place: Any = data
        for name in sections:
            place = place.get(name) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise ConfigError(f"'{key}' names no key of the training job")
        place[leaf] = value
    return validate(TrainConfig, data)


def widest(config: SweepConfig) -> int:
    """The largest number of ranks of any trial."""
    values = config.space.get("ranks", [config.train.ranks])
    return max(int(value) for value in values) if isinstance(values, list) else config.train.ranks


def reference_point(config: SweepConfig) -> dict[str, Any]:
    """The first value of every key."""
    return {key: values.low if isinstance(values, Between) else values[0] for key, values in config.space.items()}


def grid(config: SweepConfig) -> list[dict[str, Any]]:
    """All combinations that differ in effect, the reference first; at most `trials`."""
    lists = [values for values in config.space.values() if not isinstance(values, Between)]
    points = [dict(zip(config.space, values, strict=True)) for values in product(*lists)]
    distinct = {repr(effective(config.train, point)): point for point in reversed(points)}
    return [point for point in points if point in distinct.values()][: config.trials]


def effective(base: TrainConfig, point: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a point that has an effect: a top-k ratio means nothing to a codec that keeps every element."""
    policy = point.get("policy", base.policy)
    named = {policy} if isinstance(policy, str) else {c for text in policy.values() for c in text.split(",")}
    ignored = set()
    if not named & DENSITY_CODECS:
        ignored.add("density")
    if not named & set(CODECS):
        ignored.add("error_feedback")
    return {key: value for key, value in point.items() if key not in ignored}


def point_text(point: Mapping[str, Any]) -> str:
    """A point in one line."""
    words = (f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in point.items())
    return " ".join(words)


def codec_facts(policy: str | Mapping[str, str]) -> dict[str, Any]:
    """Bits and block of a codec that the policy fixes, to sort and filter trials by."""
    codec = CODECS.get(policy) if isinstance(policy, str) else None
    if codec is None:
        return {}
    bits = {"int8b": 8, "int4b": 4, "fp8b": 8, "bf16": 16, "fp16": 16, "sign": 1}.get(codec.name)
    facts = {"codec": codec.name, "bits": bits, "block": getattr(codec, "block", None)}
    return {key: value for key, value in facts.items() if value is not None}
