"""What a simulated job really does: measured step times by placement, and gradient statistics by epoch.

The data are the public profiles of the Sia artifact (Jayaram Subramanya et al., SOSP'23): one folder per application
with `placements-<type>.csv`, `scalability-<type>.csv` and `validation-<batch>.csv`. Columns are read by name. Only the
simulator looks in here; a policy sees what ran (placement/goodput.py).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError

from placement.errors import PlacementError

K = TypeVar("K")

CHARGED_RESTART_S = {
    "cifar10": 50.0,
    "deepspeech2": 25.0,
    "bert": 120.0,
    "yolov3": 80.0,
    "imagenet": 250.0,
    "ncf": 15.0,
}
POLICY_RESTART_S = {"cifar10": 30.0, "deepspeech2": 25.0, "bert": 120.0, "yolov3": 45.0, "imagenet": 250.0}
GOODPUT_DIVISOR = {"cifar10": 1.8, "ncf": 1.5, "gpt_pmp": 1.0}
LOCAL_BATCH_LIMIT = {("deepspeech2", "rtx"): 57}
MAX_PROFILED_NODES = 16
SIA_APPS = ("cifar10", "deepspeech2", "bert", "yolov3", "imagenet", "ncf")


@dataclass(frozen=True)
class Curve:
    """Step and gradient-exchange time of one placement over the batch per replica; float64 [n], batches ascending."""

    local_batch: np.ndarray
    step_time_s: np.ndarray
    sync_time_s: np.ndarray

    @property
    def max_local_batch(self) -> int:
        """The largest batch per replica that was ever run so: the memory limit of the profile."""
        return int(self.local_batch[-1])

    def at(self, local_batch: float) -> tuple[float, float]:
        """(step_time_s, sync_time_s), linear between measured batches, constant below the smallest."""
        return (
            float(np.interp(local_batch, self.local_batch, self.step_time_s)),
            float(np.interp(local_batch, self.local_batch, self.sync_time_s)),
        )


@dataclass(frozen=True)
class AppProfile:
    """One application. E epochs, B validation batch sizes.

    epoch_progress float64 [E]: progress (steps at the initial batch) at the end of each epoch.
    grad_batch float64 [B]; grad_sqr, grad_var float64 [B, E].
    placements[type][(GPUs per node, ascending)] and scalability[type][(nodes, replicas)] hold the measured curves.
    """

    name: str
    epoch_progress: np.ndarray
    grad_batch: np.ndarray
    grad_sqr: np.ndarray
    grad_var: np.ndarray
    placements: dict[str, dict[tuple[int, ...], Curve]]
    scalability: dict[str, dict[tuple[int, int], Curve]]
    _cache: dict[tuple[str, tuple[int, ...]], Curve] = field(default_factory=dict, repr=False, compare=False)

    @property
    def initial_batch(self) -> int:
        """The batch at which one step is one unit of progress."""
        return int(self.grad_batch[0])

    @property
    def max_batch(self) -> int:
        """The largest batch that converges."""
        return int(self.grad_batch[-1])

    @cached_property
    def restart_s(self) -> float:
        """Checkpoint, move and start, as charged by the simulator."""
        return CHARGED_RESTART_S.get(self.name, 30.0)

    @cached_property
    def policy_restart_s(self) -> float:
        """The restart time that Sia's policy assumes."""
        return POLICY_RESTART_S.get(self.name, 30.0)

    @cached_property
    def goodput_divisor(self) -> float:
        """Calibration of simulated to real progress."""
        return GOODPUT_DIVISOR.get(self.name, 1.2)

    @property
    def gpu_types(self) -> list[str]:
        """Types with profiles."""
        return sorted(self.placements)

    def grad_stats(self, batch: float, epoch: int) -> tuple[float, float]:
        """(grad_sqr, grad_var) in an epoch, linear in the batch size."""
        return (
            float(np.interp(batch, self.grad_batch, self.grad_sqr[:, epoch])),
            float(np.interp(batch, self.grad_batch, self.grad_var[:, epoch])),
        )

    def max_local_batch(self, gpu_type: str, per_node: Sequence[int]) -> int:
        """The true memory limit, in samples per GPU; one more is an out-of-memory error."""
        limit = self.curve(gpu_type, per_node).max_local_batch
        return min(limit, LOCAL_BATCH_LIMIT.get((self.name, gpu_type), limit))

    def min_local_batch(self, gpu_type: str) -> int:
        """The smallest profiled batch per replica."""
        return int(self.curve(gpu_type, (1,)).local_batch[0])

    def curve(self, gpu_type: str, per_node: Sequence[int]) -> Curve:
        """Times of a placement, GPUs per node in any order; measured if it was, else interpolated over the cluster."""
        key = (gpu_type, tuple(sorted(per_node)))
        if key not in self._cache:
            self._cache[key] = self._find_curve(*key)
        return self._cache[key]

    def _find_curve(self, gpu_type: str, per_node: tuple[int, ...]) -> Curve:
        if gpu_type not in self.placements:
            raise PlacementError(
                f"application {self.name} has no profile for GPU type {gpu_type}; there are {', '.join(self.gpu_types)}"
            )
        measured = self.placements[gpu_type].get(per_node)
        if measured is not None:
            return measured
        grid = dict(self.scalability.get(gpu_type, {}))
        for placement, curve in self.placements[gpu_type].items():
            grid.setdefault((len(placement), sum(placement)), curve)
        wanted = (min(len(per_node), MAX_PROFILED_NODES), sum(per_node))
        return grid[wanted] if wanted in grid else _interpolate(grid, wanted)


def _interpolate(grid: dict[tuple[int, int], Curve], wanted: tuple[int, int]) -> Curve:
    """Linear over (nodes, replicas); outside the measured hull the nearest point."""
    points = np.array(sorted(grid), np.float64)
    curves = [grid[int(n), int(r)] for n, r in points]
    nearest = curves[int(np.argmin(((points - wanted) ** 2).sum(axis=1)))]
    batches = nearest.local_batch
    values = np.array(
        [
            [*np.interp(batches, c.local_batch, c.step_time_s), *np.interp(batches, c.local_batch, c.sync_time_s)]
            for c in curves
        ]
    )
    try:
        row = LinearNDInterpolator(points, values)(*wanted)
    except (QhullError, ValueError):
        return nearest
    if not np.all(np.isfinite(row)):
        return nearest
    return Curve(batches, row[: len(batches)], row[len(batches) :])


def load_profiles(folder: Path, apps: Sequence[str] = SIA_APPS) -> dict[str, AppProfile]:
    """Read the profiles below `folder`. Raises PlacementError naming the first path that is missing."""
    return {app: _load_app(folder / app) for app in apps}


def _load_app(folder: Path) -> AppProfile:
    validations = {int(path.stem.split("-")[1]): path for path in folder.glob("validation-*.csv")}
    if not validations:
        raise PlacementError(
            f"no Sia profiles at {folder} (validation-*.csv, placements-*.csv, scalability-*.csv are read); "
            f"set ZENRAY_DATA to the folder that holds traces/sia/profiles"
        )
    columns = [read_columns(validations[b], ("progress", "grad_sqr", "grad_var")) for b in sorted(validations)]
    placements: dict[str, dict[tuple[int, ...], Curve]] = {}
    scalability: dict[str, dict[tuple[int, int], Curve]] = {}
    for path in sorted(folder.glob("placements-*.csv")):
        table = read_columns(path, ("placement", "local_bsz", "step_time", "sync_time"))
        by_placement = {}
        for name, curve in _curves(table["placement"], table):
            by_placement[tuple(sorted(int(digit) for digit in str(name)))] = curve
        placements[path.stem.split("-", 1)[1]] = by_placement
    for path in sorted(folder.glob("scalability-*.csv")):
        table = read_columns(path, ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"))
        keys = [(int(float(n)), int(float(r))) for n, r in zip(table["num_nodes"], table["num_replicas"], strict=True)]
        scalability[path.stem.split("-", 1)[1]] = dict(_curves(keys, table))
    return AppProfile(
        name=folder.name,
        epoch_progress=np.min([np.array(c["progress"], np.float64) for c in columns], axis=0),
        grad_batch=np.array(sorted(validations), np.float64),
        grad_sqr=np.array([c["grad_sqr"] for c in columns], np.float64),
        grad_var=np.array([c["grad_var"] for c in columns], np.float64),
        placements=placements,
        scalability=scalability,
    )


def _curves(keys: Sequence[K], table: dict[str, list[str]]) -> list[tuple[K, Curve]]:
    groups: dict[K, list[tuple[float, float, float]]] = {}
    for key, *values in zip(keys, table["local_bsz"], table["step_time"], table["sync_time"], strict=True):
        batch, step, sync = (float(v) for v in values)
        groups.setdefault(key, []).append((batch, step, sync))
    curves = []
    for key, rows in groups.items():
        batch, step, sync = np.array(sorted(rows)).T
        curves.append((key, Curve(batch, step, sync)))
    return curves


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The named columns of a CSV file, as text. Raises PlacementError naming the file and what is missing."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise PlacementError(f"cannot read {path}: {error}") from None
    missing = [name for name in names if not rows or name not in rows[0]]
    if missing:
        raise PlacementError(f"{path} lacks the column(s) {', '.join(missing)} or is empty")
    return {name: [row[name] for row in rows] for name in names}


_SYNTHETIC = {
    # initial batch, max batch, epochs, steps an epoch, seconds per sample on the slowest type, samples that fit it
    "cifar10": (128, 4096, 100, 391, 7e-4, 1024),
    "deepspeech2": (20, 640, 80, 357, 3.2e-2, 80),
    "bert": (12, 384, 2, 7387, 7e-2, 12),
    "yolov3": (8, 512, 50, 2069, 4e-2, 16),
    "imagenet": (200, 12800, 90, 6406, 4.6e-3, 200),
    "ncf": (256, 32768, 10, 19418, 1e-6, 32768),
}
_SYNTHETIC_TYPES = {"aws": (4, 1.0, 1, 0.08), "rtx": (8, 1.7, 1, 0.06), "dgx-ext": (8, 4.0, 4, 0.01)}


def synthetic_profiles() -> dict[str, AppProfile]:
    """Made-up applications with the names and rough sizes of the measured ones: for tests and demonstrations only."""
    return {name: _synthetic_app(name) for name in _SYNTHETIC}


def _synthetic_app(name: str) -> AppProfile:
    initial, largest, epochs, steps, seconds_a_sample, fits = _SYNTHETIC[name]
    batches = initial * 2.0 ** np.arange(round(math.log2(largest / initial)) + 1)
    noise = np.linspace(4.0, 40.0, epochs)
    placements: dict[str, dict[tuple[int, ...], Curve]] = {}
    for gpu_type, (width, speed, memory, sync_s) in _SYNTHETIC_TYPES.items():
        local = np.unique(np.geomspace(max(initial // 4, 1), fits * memory, 8).round())
        curves = {}
        for gpus in [(g,) for g in range(1, width + 1)] + [(width,) * n for n in range(2, MAX_PROFILED_NODES + 1)]:
            replicas = sum(gpus)
            sync = 0.0 if replicas == 1 else sync_s * (1 + 0.02 * replicas) * (1 if len(gpus) == 1 else 2)
            compute = 0.01 + local * seconds_a_sample / speed
            curves[gpus] = Curve(local, compute + sync, np.full(len(local), sync))
        placements[gpu_type] = curves
    return AppProfile(
        name=name,
        epoch_progress=steps * np.arange(1.0, epochs + 1),
        grad_batch=batches,
        grad_sqr=np.ones((len(batches), epochs)),
        grad_var=np.tile(noise, (len(batches), 1)),
        placements=placements,
        scalability={},
    )
