"""What a reader must know to compare two results, and how busy this node is."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

MIB = 1 << 20


def environment() -> dict[str, Any]:
    """Versions, machine, load and date."""
    packages = {}
    for package in ("torch", "ray", "mlflow", "numpy", "numba"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "packages": packages,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def node_metrics() -> dict[str, float]:
    """Load of this node since the last call in this process, by the names under which MLflow's page of system metrics
    looks for them; with the host's name in them, so that nodes of one run stay apart."""
    memory, network, disk = psutil.virtual_memory(), psutil.net_io_counters(), psutil.disk_usage("/")
    figures = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MIB,
        "system_memory_usage_percentage": memory.percent,
        "network_receive_megabytes": network.bytes_recv / MIB,
        "network_transmit_megabytes": network.bytes_sent / MIB,
        "disk_usage_percentage": disk.percent,
    }
    return {f"system/{_host()}/{name}": round(value, 2) for name, value in figures.items()}


def of_other_nodes(figures: Mapping[str, float]) -> dict[str, float]:
    """Those of `node_metrics` that were not taken on this host, whose recorder takes its own."""
    own = f"system/{_host()}/"
    return {name: value for name, value in figures.items() if not name.startswith(own)}


def _host() -> str:
    return socket.gethostname().replace("/", "_")
