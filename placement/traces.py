"""Job traces and inventories as users have them, and a seeded generator with the same marginals.

Readers take columns by name. Sources: Sia (SOSP'23), Philly (Jeon et al., ATC'19), Gavel (Narayanan et al., OSDI'20),
Alibaba GPU traces (FGD, ATC'23; GFS, ASPLOS'26).
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from placement.errors import PlacementError
from placement.jobs import MAX_GPUS_PER_NODE, NodeSpec
from placement.profiles import read_columns

GIB = 1 << 30


@dataclass(frozen=True)
class TraceJob:
    """One submission: what its user asked for. submit_s is seconds since the start of the trace."""

    name: str
    submit_s: float
    application: str
    num_replicas: int
    batch_size: int


@dataclass(frozen=True)
class TimedJob:
    """A job of a trace that knows sizes and durations but no model."""

    name: str
    submit_s: float
    num_gpus: int
    duration_s: float


@dataclass(frozen=True)
class GavelJob:
    """A job of a Gavel trace: `job_type` names model and batch as in the throughput tables."""

    job_type: str
    total_steps: int
    submit_s: float
    scale_factor: int


def read_sia(path: Path) -> list[TraceJob]:
    """A workload file of Sia: name, time, application, num_replicas, batch_size."""
    table = read_columns(path, ("name", "time", "application", "num_replicas", "batch_size"))
    return _in_order(
        TraceJob(name, float(time), app, int(replicas), int(batch))
        for name, time, app, replicas, batch in zip(*table.values(), strict=True)
    )


def write_sia(path: Path, jobs: Sequence[TraceJob]) -> None:
    """The same columns as `read_sia` takes."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("name", "time", "application", "num_replicas", "batch_size"))
        writer.writerows((j.name, j.submit_s, j.application, j.num_replicas, j.batch_size) for j in jobs)


def read_philly(path: Path) -> list[TimedJob]:
    """A Philly week: timestamp, duration (s), num_gpus. Time 0 is the first submission."""
    table = read_columns(path, ("timestamp", "duration", "num_gpus"))
    start = min(datetime.fromisoformat(t) for t in table["timestamp"])
    rows = [
        TimedJob(f"philly-{i}", (datetime.fromisoformat(t) - start).total_seconds(), int(float(g)), float(d))
        for i, (t, d, g) in enumerate(zip(table["timestamp"], table["duration"], table["num_gpus"], strict=True))
    ]
    return sorted(rows, key=lambda job: job.submit_s)


def read_gavel(path: Path) -> list[GavelJob]:
    """A Gavel trace: tab-separated job type, command, steps argument, needs data, total steps, arrival s, scale factor.

    The last three fields are read from the end, as files with and without the `needs data` field exist.
    """
    jobs = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        fields = line.split("\t")
        try:
            jobs.append(GavelJob(fields[0], int(fields[-3]), float(fields[-2]), int(fields[-1])))
        except (ValueError, IndexError):
            raise PlacementError(f"{path}:{number}: not a Gavel job: {line[:80]!r}") from None
    return jobs


def read_gavel_throughputs(path: Path) -> dict[tuple[str, str, int], float]:
    """Steps per second alone on (GPU type, job type, scale factor), from a Gavel throughput table."""
    try:
        tables = json.loads(_text(path))
        rates = {}
        for gpu_type, rows in tables.items():
            for key, partners in rows.items():
                job_type, scale = ast.literal_eval(key)
                rates[gpu_type, str(job_type), int(scale)] = float(partners["null"])
    except (ValueError, KeyError, SyntaxError, AttributeError, TypeError) as error:
        raise PlacementError(f"{path} is not a Gavel throughput table: {error}") from None
    return rates


def read_inventory(path: Path, memory_gib: Callable[[str], int]) -> list[NodeSpec]:
    """Nodes with GPUs from an Alibaba file: sn, gpu, model (2023) or node_name, gpu_capacity_num, gpu_model (2026).

    memory_gib gives the memory of one card of a model, which the files do not hold.
    """
    with_names = {"gpu_model": ("node_name", "gpu_capacity_num", "gpu_model"), "model": ("sn", "gpu", "model")}
    header = _text(path).split("\n", 1)[0].strip().split(",")
    columns = next((names for key, names in with_names.items() if key in header), None)
    if columns is None:
        raise PlacementError(f"{path} has neither gpu_model nor model among its columns {', '.join(header)}")
    table = read_columns(path, columns)
    return [
        NodeSpec(f"node-{name}", model, int(gpus), memory_gib(model) * GIB)
        for name, gpus, model in zip(*(table[c] for c in columns), strict=True)
        if 0 < int(gpus) <= MAX_GPUS_PER_NODE
    ]


@dataclass(frozen=True)
class PodRequest:
    """A pod of the Alibaba 2023 trace. gpu_types is empty if any will do; times are blank in some files."""

    name: str
    num_gpus: int
    gpu_milli: int
    gpu_types: tuple[str, ...]
    creation_s: float | None
    deletion_s: float | None


def read_pods(path: Path) -> list[PodRequest]:
    """Pods of an Alibaba 2023 file; type lists are written A|B, and files without the later columns are read too."""
    required = ("name", "num_gpu", "gpu_milli")
    read_columns(path, required)
    with path.open(newline="", encoding="utf-8") as file:
        return [
            PodRequest(
                row["name"],
                int(row["num_gpu"]),
                int(row["gpu_milli"]),
                tuple(filter(None, (row.get("gpu_spec") or "").split("|"))),
                float(row["creation_time"]) if row.get("creation_time") else None,
                float(row["deletion_time"]) if row.get("deletion_time") else None,
            )
            for row in csv.DictReader(file)
        ]


def as_applications(jobs: Sequence[TimedJob], seed: int) -> list[TraceJob]:
    """Give every job of a trace without models an application by its GPU-hours, as Sia and Pollux do.

    Below 1 GPU-hour small (cifar10), to 10 medium (deepspeech2 or bert), to 100 large (yolov3), above imagenet.
    """
    random = np.random.default_rng(seed)
    result = []
    for job in jobs:
        hours = job.num_gpus * job.duration_s / 3600
        medium = "deepspeech2" if random.random() < 0.5 else "bert"
        app = "cifar10" if hours < 1 else medium if hours < 10 else "yolov3" if hours < 100 else "imagenet"
        replicas, batch = _pick(random, app)
        result.append(TraceJob(job.name, job.submit_s, app, replicas, batch))
    return result


@dataclass(frozen=True)
class Mix:
    """A kind of generated trace: how many jobs in how many hours, how bursty, and the share of each app."""

    num_jobs: int
    hours: int
    burstiness: float
    """Coefficient of variation of the hourly rate."""
    app_share: dict[str, float]


NEW_TRACE = Mix(960, 48, 0.6, {"cifar10": 0.52, "deepspeech2": 0.22, "bert": 0.21, "yolov3": 0.037, "imagenet": 0.009})
PHILLY = Mix(160, 8, 0.5, {"cifar10": 0.79, "deepspeech2": 0.09, "bert": 0.06, "yolov3": 0.045, "imagenet": 0.019})
HELIOS = Mix(160, 8, 0.5, {"cifar10": 0.83, "deepspeech2": 0.06, "bert": 0.04, "yolov3": 0.046, "imagenet": 0.026})
REQUESTS = {
    # (replicas, batch) -> share within the application
    "cifar10": {
        (4, 2048): 0.085,
        (6, 2048): 0.22,
        (8, 2048): 0.145,
        (8, 4096): 0.07,
        (10, 4096): 0.095,
        (12, 4096): 0.24,
        (16, 4096): 0.145,
    },
    "deepspeech2": {(6, 320): 0.34, (8, 320): 0.34, (12, 640): 0.32},
    "bert": {(6, 384): 0.25, (8, 384): 0.25, (12, 384): 0.25, (16, 384): 0.25},
    "yolov3": {(4, 64): 1.0},
    "imagenet": {(10, 1600): 0.3, (12, 3200): 0.35, (14, 3200): 0.35},
}


def generate(mix: Mix, seed: int) -> list[TraceJob]:
    """A trace with the marginals of `mix`: a Poisson process whose hourly rate varies, apps and requests by share."""
    random = np.random.default_rng(seed)
    shape = 1 / mix.burstiness**2
    rate = random.gamma(shape, 1 / shape, mix.hours)
    per_hour = random.multinomial(mix.num_jobs, rate / rate.sum())
    times = np.sort(np.repeat(np.arange(mix.hours), per_hour) * 3600.0 + random.uniform(0, 3600, mix.num_jobs))
    names = list(mix.app_share)
    share = np.array(list(mix.app_share.values()))
    apps = random.choice(len(names), mix.num_jobs, p=share / share.sum())
    jobs = []
    for i, (time, app) in enumerate(zip(times, apps, strict=True)):
        replicas, batch = _pick(random, names[app])
        jobs.append(TraceJob(f"{names[app]}-{i}", float(time), names[app], replicas, batch))
    return jobs


PHILLY_WEEK_GPUS = {1: 0.963, 2: 0.013, 4: 0.017, 8: 0.007}
PHILLY_WEEK_DURATION_S = {0: 1, 5: 58, 25: 593, 50: 1236, 75: 2390, 90: 12376, 95: 26586, 99: 162815, 100: 600000}


def generate_philly_week(seed: int, num_jobs: int = 14185) -> list[TimedJob]:
    """A week like Philly's busiest: GPU counts by share, durations by quantiles (log-linear between them)."""
    random = np.random.default_rng(seed)
    rate = random.gamma(1.2, 1.0, 168) + 0.07
    per_hour = random.multinomial(num_jobs, rate / rate.sum())
    times = np.sort(np.repeat(np.arange(168), per_hour) * 3600.0 + random.uniform(0, 3600, num_jobs))
    quantiles = np.array(list(PHILLY_WEEK_DURATION_S))
    log_duration = np.log(list(PHILLY_WEEK_DURATION_S.values()))
    duration = np.exp(np.interp(random.uniform(0, 100, num_jobs), quantiles, log_duration))
    gpus = random.choice(list(PHILLY_WEEK_GPUS), num_jobs, p=list(PHILLY_WEEK_GPUS.values()))
    return [
        TimedJob(f"philly-{i}", float(t), int(g), float(d))
        for i, (t, g, d) in enumerate(zip(times, gpus, duration, strict=True))
    ]


INVENTORY = (
    # GPU type, nodes, GPUs a node, GiB a card
    ("A100-80G", 432, 8, 80),
    ("H800", 219, 8, 80),
    ("A10", 2494, 1, 23),
    ("series-1", 902, 1, 15),
    ("series-1", 10, 4, 15),
    ("series-1", 77, 8, 15),
    ("series-2", 122, 8, 32),
    ("A800", 22, 8, 80),
)
"""10,412 GPUs in 4,278 nodes, with the type and node sizes of the 2026 Alibaba inventory; card memories are assumed."""


def generate_inventory(num_gpus: int = 10412) -> list[NodeSpec]:
    """Nodes in the proportions of `INVENTORY`, scaled to about `num_gpus` cards."""
    scale = num_gpus / sum(nodes * gpus for _, nodes, gpus, _ in INVENTORY)
    return [
        NodeSpec(f"{gpu_type}-{gpus}-{i}", gpu_type, gpus, gib * GIB)
        for gpu_type, nodes, gpus, gib in INVENTORY
        for i in range(max(1, round(nodes * scale)))
    ]


CLUSTERS = {
    # (GPU type, nodes, GPUs a node, GiB a card)
    "sia64": (("aws", 6, 4, 16), ("rtx", 3, 8, 11), ("dgx-ext", 2, 8, 40)),
    "aws64": (("aws", 16, 4, 16),),
}


def named_cluster(name: str) -> list[NodeSpec]:
    """One of the clusters of the Sia evaluation."""
    if name not in CLUSTERS:
        raise PlacementError(f"unknown cluster '{name}'; known are {', '.join(CLUSTERS)}, or give an inventory file")
    return [NodeSpec(f"{t}-{i}", t, gpus, gib * GIB) for t, nodes, gpus, gib in CLUSTERS[name] for i in range(nodes)]


def _pick(random: np.random.Generator, app: str) -> tuple[int, int]:
    requests = list(REQUESTS[app])
    return requests[int(random.choice(len(requests), p=list(REQUESTS[app].values())))]


def _in_order(jobs: Iterable[TraceJob]) -> list[TraceJob]:
    return sorted(jobs, key=lambda job: job.submit_s)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot read {path}: {error}") from None
