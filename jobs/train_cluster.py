"""Where a training job runs: the cluster of RAY_ADDRESS, one on this machine, or nodes behind shaped links.

With `link` the job builds one network namespace per rank, a Ray node in each, and runs itself again as the driver
inside the first namespace; the inner job does the work and the outer one judges the links and cleans up.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import yaml

from collectives.errors import ConfigError
from jobs.cluster import NamespaceCluster, connect
from jobs.job import LINK_RECORD, Run
from jobs.links import ShapedBed, self_check, unavailable_reason
from jobs.train_config import TrainConfig
from placement.inventory import Strategy
from zenray.config import Section
from zenray.recorder import send_leftovers

START_ALLOWANCE_S = 180.0
"""Added to the time limit of the training for starting nodes, workers and the record."""


@dataclass(frozen=True)
class TrainCluster:
    """A cluster this driver is connected to. links: what the outer job recorded about them, None without shaping."""

    description: str
    links: dict[str, Any] | None
    resources_per_worker: dict[str, float]
    strategy: Strategy


def shapes_links(config: TrainConfig, say: Callable[[str], None]) -> bool:
    """Whether this process must build links first. Raises ConfigError where it must but cannot."""
    if config.link is None or LINK_RECORD in os.environ:
        return False
    address = os.environ.get("RAY_ADDRESS")
    reason = f"RAY_ADDRESS={address} names a cluster to join" if address else unavailable_reason()
    if reason is None:
        return True
    if config.link_required:
        raise ConfigError(f"link={config.link:.0f} bit/s cannot be built here: {reason}. Set link=none to run without.")
    say(f"links are not shaped: {reason}")
    return False


def warn_of_temporary_folder(say: Callable[[str], None]) -> None:
    """Inside `ray job submit` the current directory is a copy that Ray removes some time after the job."""
    if "runtime_resources" in Path.cwd().parts and "MLFLOW_TRACKING_URI" not in os.environ:
        say(
            f"results and records go to {Path.cwd()}, Ray's copy of the working directory, which is removed later; to keep "
            f"them give --out an absolute path and set MLFLOW_TRACKING_URI (--runtime-env-json env_vars)"
        )


def train_behind_links(
    config: TrainConfig, run: Run, whole: Section | None = None, num_runs: int = 1
) -> dict[str, Any]:
    """Run the job again inside shaped links; returns the metrics of the inner job and the verdict on the links.

    whole: what the inner job reads, where that is more than one training job; num_runs: how many it trains in turn.
    """
    settings = run.out / "config.yaml"
    settings.write_text(yaml.safe_dump((whole or config).model_dump(mode="json")), encoding="utf-8")
    run.say(f"{config.ranks} nodes behind links of {config.link or 0:.0f} bit/s; this takes about 10 s")
    with ShapedBed(config.ranks, config.link) as bed, NamespaceCluster(bed, config.ranks) as cluster:
        cluster.env[LINK_RECORD] = json.dumps(bed.record())
        command = [sys.executable, "-m", f"jobs.{run.name}", "--config", str(settings), "--out", str(run.out)]
        code = cluster.drive(command, timeout_s=num_runs * config.timeout_s + START_ALLOWANCE_S)
        for line in cluster.retried:
            run.say(f"event: {line}")
        send_leftovers(config.tracking.project, config.tracking.uri, run.out.parent / ".spool", run.say)
        if code:
            raise SystemExit(code)
        result = json.loads((run.out / "result.json").read_text())
        run.baseline.update(result["baseline"])
        metrics: dict[str, Any] = result["metrics"]
        probe = metrics["all_reduce_probe"]
        check = self_check(bed, config.ranks, probe["payload_bytes"], probe["seconds"])
    run.say(
        f"links: dense all-reduce of {probe['payload_bytes']:,} bytes in {check.measured_s * 1e3:.0f} ms, "
        f"{(check.expected_s or 0) * 1e3:.0f} ms expected: {check.verdict} (load {check.load_1min})"
    )
    return metrics | {"self_check": asdict(check)}


@contextmanager
def train_cluster(config: TrainConfig) -> Iterator[TrainCluster]:
    """Join or start the cluster, and say what a worker takes there."""
    links: dict[str, Any] | None = json.loads(os.environ.get(LINK_RECORD, "null"))
    cores = os.cpu_count() or 1
    with connect(num_cpus=max(config.ranks, cores), num_nodes=config.ranks if links else 1) as cluster:
        has_gpus = ray.cluster_resources().get("GPU", 0) >= config.ranks  # type: ignore[no-untyped-call]
        if links:
            description = (
                f"{config.ranks} Ray nodes, each behind a link of {links['shaping']['rate_bits_per_s']:.0f} bit/s"
            )
        elif os.environ.get("RAY_ADDRESS"):
            description = f"the Ray cluster at {cluster.address}"
        else:
            description = f"a Ray cluster on this machine ({cores} cores), over loopback"
        yield TrainCluster(
            description=description,
            links=links,
            resources_per_worker={"CPU": 1.0, "GPU": 1.0} if has_gpus else {"CPU": 1.0},
            strategy="STRICT_SPREAD" if links else "PACK",
        )
