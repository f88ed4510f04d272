"""Which nodes with cards the cluster has right now: Ray's own list, completed by NVML once for each node with GPUs."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.monitor import read_cards
from placement.groups import read_cluster
from placement.inventory import CardReport, GpuNode, gpu_nodes

log = logging.getLogger(__name__)

CARDS_S = 30.0


class CardWatch:
    """Remembers what NVML said; a node that did not answer is taken by its labels."""

    def __init__(self) -> None:
        self._reports: dict[str, list[CardReport]] = {}

    def read(self) -> dict[str, GpuNode]:
        """The nodes with cards by node id. Takes up to CARDS_S for each new node with GPUs."""
        inventory = read_cluster()
        for node in inventory.nodes:
            if node.total.get("GPU", 0) >= 1 and node.node_id not in self._reports:
                self._reports[node.node_id] = _ask(node.node_id)
        reports = [report for cards in self._reports.values() for report in cards]
        return {node.spec.name: node for node in gpu_nodes(inventory, reports)}


def _ask(node_id: str) -> list[CardReport]:
    task: Any = ray.remote(num_cpus=0, max_retries=1)(read_cards)
    there = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
    try:
        reports: list[CardReport] = ray.get(there.remote(node_id), timeout=CARDS_S)
        return reports
    except ray.exceptions.RayError as error:
        log.warning("no card report from node %s: %s", node_id, error)
        return []
