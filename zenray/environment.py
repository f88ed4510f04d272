"""What a reader must know to compare two results, code included, and how busy this node is."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

MIB = 1 << 20
CODE_SUFFIXES = (".py", ".cu")
DIGEST_VARIABLE = "ZENRAY_CODE_SHA256"
"""Environment variable by which a submission tells the job which code it was given."""


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
        "code_sha256": code_digest(Path(__file__).resolve().parents[1]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def code_digest(folder: Path, names: Sequence[str] | None = None) -> str:
    """sha256 over the names and contents of the source files; names None: all below `folder`, hidden folders apart.

    Equal before the upload and inside the job, also when the job has written results beside its code.
    """
    if names is None:
        names = [str(path.relative_to(folder)) for path in _sources(folder)]
    digest = hashlib.sha256()
    for name in sorted(name for name in names if name.endswith(CODE_SUFFIXES)):
        digest.update(f"{name}\0{hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("venv", "__pycache__")]
        yield from (Path(root) / name for name in files if name.endswith(CODE_SUFFIXES))


class NodeLoad:
    """How busy this node is, by the names under which MLflow's page of system metrics looks for them, with the host in
    them so that the nodes of one run stay apart. Network traffic counts from the making of this object."""

    def __init__(self) -> None:
        self._start = psutil.net_io_counters()
        psutil.cpu_percent()  # each call answers for the time since the one before

    def figures(self) -> dict[str, float]:
        """Now; the CPU since the last call."""
        memory, network = psutil.virtual_memory(), psutil.net_io_counters()
        figures = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MIB,
            "system_memory_usage_percentage": memory.percent,
            "network_receive_megabytes": (network.bytes_recv - self._start.bytes_recv) / MIB,
            "network_transmit_megabytes": (network.bytes_sent - self._start.bytes_sent) / MIB,
            "disk_usage_percentage": psutil.disk_usage("/").percent,
        }
        return {f"system/{_host()}/{name}": round(value, 2) for name, value in figures.items()}


def of_other_nodes(figures: Mapping[str, float]) -> dict[str, float]:
    """Those of `NodeLoad` that were not taken on this host, whose recorder takes its own."""
    own = f"system/{_host()}/"
    return {name: value for name, value in figures.items() if not name.startswith(own)}


def _host() -> str:
    return socket.gethostname().replace("/", "_")
