"""Which Ray cluster a training job runs on: that of RAY_ADDRESS, shaped nodes of its own, or this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from jobs.train_config import TrainConfig
from placement.inventory import Strategy


@dataclass(frozen=True)
class TrainCluster:
    """A cluster this driver is connected to. link: as recorded, such as `1gbit` or `none`; text says it in a line."""

    text: str
    link: str
    resources_per_worker: dict[str, float]
    strategy: Strategy


@contextmanager
def train_cluster(config: TrainConfig, say: Callable[[str], None]) -> Iterator[TrainCluster]:
    ray.init(num_cpus=max(config.ranks, os.cpu_count() or 1), _node_ip_address="127.0.0.1", include_dashboard=False)
    try:
        yield TrainCluster("local", "none", {"CPU": 1.0}, "PACK")
    finally:
        ray.shutdown()
