"""`sparse`: bytes and balance of every sparse scheme against the lower bound, on the index sets of a workload.

Bytes are counted value-free, through the same partition and sizing code that moves them, so 128 full-size workers fit
into one process. `verify=true` also moves real values between threads, compares every result with a float64 oracle and
every counted byte with the prediction, and reports seconds per phase; it needs a small workload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
import torch

from collectives.errors import ConfigError, ZenrayError
from collectives.kernels.idcoding import index_dtype
from collectives.kernels.idsets import union_ids
from collectives.kernels.rows import as_rows, gather_rows, nonzero_rows, scatter_add_rows
from collectives.sparse.columns import column_cuts
from collectives.sparse.omnireduce import BLOCK_WIDTH, OmniReduce, blocks_of_rows, num_blocks
from collectives.sparse.rows import Scheme, SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.sparse.two_level import TwoLevel, node_unions
from collectives.sparse.workspace import Workspace
from collectives.sparse.zen import PushPull
from collectives.transport import LocalTransport, Traffic, run_local
from jobs.job import Run
from jobs.workloads.zipf import WORKLOADS, RowWorkload, TopKWorkload, workload
from zenray.config import Section

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FILES = ()
NO_PAYLOAD = ("metadata", "touched", "node_push", "node_pull")
"""Phases left out of the bytes: sizes, ids that a dense baseline would not need, and links inside a node."""

ITEMSIZE = 4
MAX_VERIFY_BYTES = 2 << 30
KERNEL_BYTES = 64 << 20


class Config(Section):
    """What is counted."""

    workload: Literal[WORKLOADS] = "lstm"  # type: ignore[valid-type]
    """A generator of jobs/workloads/zipf.py."""
    ranks: int = 16
    """Workers, 2 to 128."""
    node_size: int = 8
    """Ranks per node for `two_level`; its bytes are those between nodes."""
    step: int = 0
    """Which step of the generator is drawn."""
    seed: int = 0
    """Seed of the generator."""
    verify: bool = False
    """Move real values between threads as well. The dense tensors of all ranks must fit into 2 GiB."""
    kernels: bool = True
    """Time the CPU kernels against a copy of the same bytes."""


def run(config: Config, run: Run) -> dict[str, Any]:
    """Count, optionally verify, and draw; see the module."""
    if not 2 <= config.ranks <= 128:
        raise ConfigError(f"ranks={config.ranks}: give 2 to 128")
    torch.set_num_threads(1)
    work = workload(config.workload)
    if config.verify and config.ranks * work.num_rows * work.width * ITEMSIZE > MAX_VERIFY_BYTES:
        raise ConfigError(
            f"verify=true with workload={config.workload} ranks={config.ranks} needs more than "
            f"{MAX_VERIFY_BYTES >> 30} GiB of dense tensors; use lstm20, nmt20 or bert, or fewer ranks"
        )
    run.say(f"drawing {config.ranks} workers of {config.workload}: [{work.num_rows:,}, {work.width}] fp32")
    ids = [work.rows(worker, config.step, config.seed) for worker in range(config.ranks)]
    facts = workload_facts(work, ids)
    schemes = {**SCHEMES, "two_level": TwoLevel(config.node_size)}
    figures: dict[str, dict[str, Any]] = {}
    for name, scheme in schemes.items():
        start = time.perf_counter()
        figures[name] = scheme_figures(scheme, ids, work.num_rows, work.width)
        run.say(f"{name}: counted in {time.perf_counter() - start:.1f} s")
    run.baseline = {"dense": figures["dense"], "agsparse": figures["agsparse"]}
    metrics: dict[str, Any] = {"workload": facts, "schemes": figures}
    if config.verify:
        for name, found in verify(schemes, ids, work.num_rows, work.width, config.seed).items():
            figures[name] |= found
            run.say(f"{name}: {config.ranks} ranks agree with the oracle, error {found['max_relative_error']:.1e}")
    if config.kernels:
        metrics["kernels"] = kernel_figures()
    _show(run, config, facts, metrics)
    return metrics


def lower_bound_bytes(ids: Sequence[np.ndarray], num_rows: int, width: int) -> float:
    """Bytes of values that a rank sends or receives at least, on average: k + (n - 2) / n * K rows.

    A position held by m ranks needs m - 1 messages before some rank knows its sum, and n - 1 ranks then need it.
    """
    k = sum(len(one) for one in ids) / len(ids)
    union = len(union_ids([as_rows(one) for one in ids], num_rows)[0])
    return (k + (len(ids) - 2) / len(ids) * union) * width * ITEMSIZE


def workload_facts(work: RowWorkload | TopKWorkload, ids: Sequence[np.ndarray]) -> dict[str, Any]:
    """What was drawn, beside what the generator's formulas expect."""
    k = np.mean([len(one) for one in ids])
    union = len(union_ids([as_rows(one) for one in ids], work.num_rows)[0])
    facts: dict[str, Any] = {
        "num_rows": work.num_rows,
        "width": work.width,
        "ranks": len(ids),
        "mean_k": float(k),
        "union": union,
        "density": float(k / work.num_rows),
        "gamma": float(union / k),
    }
    if isinstance(work, RowWorkload):
        facts["expected_density"], facts["expected_gamma"] = work.density(), work.gamma(len(ids))
        facts["expected_skew"] = work.skew(len(ids))
    return facts


def scheme_figures(scheme: Scheme, ids: Sequence[np.ndarray], num_rows: int, width: int) -> dict[str, Any]:
    """Bytes of the busiest rank and direction, the bound they are held against, and the imbalance of the partition."""
    push_imbalance, pull_imbalance = 1.0, 1.0
    bound = lower_bound_bytes(ids, num_rows, width)
    if isinstance(scheme, PushPull):
        parts = scheme.partition(ids, num_rows, width)
        push_imbalance, pull_imbalance = imbalance(*parts)
        tables = scheme.part_bytes(parts, num_rows, width, ITEMSIZE)
    else:
        tables = scheme.wire_bytes(ids, num_rows, width, ITEMSIZE)
    if scheme.name == "column":
        push_imbalance = pull_imbalance = float(np.diff(column_cuts(width, len(ids))).max() * len(ids) / width)
    if isinstance(scheme, OmniReduce):
        blocks = [blocks_of_rows(as_rows(one), num_rows, width)[0].numpy() for one in ids]
        push_imbalance, pull_imbalance = imbalance(
            *scheme.ranges.partition(blocks, num_blocks(num_rows, width), BLOCK_WIDTH)
        )
    payload = {phase: table for phase, table in tables.items() if phase not in NO_PAYLOAD}
    figures: dict[str, Any] = {
        "bottleneck_bytes": sum(bottleneck(table) for table in payload.values()),
        "mean_bytes": sum(int(table.sum()) for table in payload.values()) / len(ids),
        "metadata_bytes": bottleneck(tables["metadata"]) if "metadata" in tables else 0,
        "imbalance": push_imbalance,
        "pull_imbalance": pull_imbalance,
    }
    if isinstance(scheme, TwoLevel):
        nodes = node_unions(ids, num_rows, scheme.node_size)
        bound = lower_bound_bytes(nodes, num_rows, width) * len(nodes) / len(ids)
        figures["intra_node_bytes"] = sum(bottleneck(tables[p]) for p in ("node_push", "node_pull") if p in tables)
    figures["lower_bound_bytes"] = bound
    figures["ratio_to_lower_bound"] = figures["bottleneck_bytes"] / bound if bound else None
    if scheme.name == "zen":
        figures["formula_bytes"] = zen_formula_bytes(ids, num_rows * width, width)
        figures["ratio_to_formula"] = figures["mean_bytes"] / figures["formula_bytes"]
    return figures


def bottleneck(table: np.ndarray) -> int:
    """The most that any rank sends or receives in one phase."""
    return int(max(table.sum(axis=0).max(), table.sum(axis=1).max()))


def imbalance(pushed: np.ndarray, owned: np.ndarray) -> tuple[float, float]:
    """Push: n |I_w at j| / |I_w|, the largest over w and j. Pull: n |U at j| / |U|, the largest over j."""
    size = len(owned)
    push = (size * pushed / np.maximum(1, pushed.sum(axis=1, keepdims=True))).max()
    return float(push), float(size * owned.max() / max(1, owned.sum()))


def zen_formula_bytes(ids: Sequence[np.ndarray], num_elements: int, width: int) -> float:
    """(n - 1) / n * [k (v + i) + K v + N / 8]: COO push and hash-bitmap pull, in elements, perfectly balanced."""
    size, index_bytes = len(ids), index_dtype(num_elements).itemsize
    k = sum(len(one) for one in ids) / size * width
    union = len(union_ids([as_rows(one) for one in ids], num_elements // width)[0]) * width
    return (size - 1) / size * (k * (ITEMSIZE + index_bytes) + union * ITEMSIZE + num_elements / 8)


def verify(
    schemes: dict[str, Scheme], ids: Sequence[np.ndarray], num_rows: int, width: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Run every scheme with real values on threads. Raises ZenrayError for a wrong sum, replica or byte count."""
    rng = np.random.default_rng([seed, 1])
    rows = [
        SparseRows(as_rows(one), torch.from_numpy(rng.standard_normal((len(one), width), dtype=np.float32)), num_rows)
        for one in ids
    ]
    union = np.unique(np.concatenate(ids))
    oracle = np.zeros((len(union), width))
    for one in rows:
        oracle[np.searchsorted(union, one.ids.numpy())] += one.values.numpy()
    scale = max(1.0, float(np.abs(oracle).max(initial=0)))
    found = {}
    for name, scheme in schemes.items():

        def body(transport: LocalTransport, scheme: Scheme = scheme) -> tuple[SparseRows, Workspace, Traffic]:
            work = Workspace.of(transport)
            with work.timed("reduce"):
                result = scheme.all_reduce(rows[transport.rank], transport, "sum")
            return result, work, transport.traffic

        results = run_local(len(ids), body, timeout_s=300)
        reference = results[0][0]
        error = float(np.abs(reference.values.numpy() - oracle).max(initial=0)) / scale
        same = all(
            torch.equal(other.ids, reference.ids) and torch.equal(other.values, reference.values)
            for other, _, _ in results
        )
        tables = scheme.wire_bytes(ids, num_rows, width, ITEMSIZE)
        nothing = np.zeros(len(ids), np.int64)
        exact = all(
            np.array_equal(np.stack([traffic.sent.get(phase, nothing) for _, _, traffic in results]), table)
            for phase, table in tables.items()
        )
        if not (np.array_equal(reference.ids.numpy(), union) and error < 1e-5 and same and exact):
            raise ZenrayError(f"{name}: error {error:.2e}, replicas equal: {same}, bytes as counted: {exact}")
        found[name] = {"max_relative_error": error, "seconds": results[0][1].seconds}
    return found


def kernel_figures() -> dict[str, dict[str, float]]:
    """GB/s of row scan, gather and scatter-add on 64 MiB of fp32 rows, and seconds over those of a plain copy."""
    torch.manual_seed(0)
    width = 256
    num_rows = KERNEL_BYTES // (4 * width)
    source, out = torch.randn(num_rows, width), torch.empty(num_rows, width)
    order = torch.randperm(num_rows).sort().values
    total, fresh = torch.zeros(num_rows, width), torch.zeros(num_rows, dtype=torch.uint8)
    sparse = torch.zeros(num_rows, width)
    sparse[order[::20]] = 1.0
    copy = best_seconds(lambda: out.copy_(source))
    kernels: dict[str, Callable[[], object]] = {
        "row_scan": lambda: nonzero_rows(sparse),
        "gather": lambda: gather_rows(source, order, out),
        "scatter_add": lambda: scatter_add_rows(total, order, source, fresh),
    }
    figures = {}
    for name, kernel in kernels.items():
        seconds = best_seconds(kernel)
        figures[name] = {
            "gbps": KERNEL_BYTES / seconds / 1e9,
            "memcpy_gbps": KERNEL_BYTES / copy / 1e9,
            "vs_memcpy": seconds / copy,
        }
    return figures


def best_seconds(body: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of several runs, after one that is not counted."""
    body()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        times.append(time.perf_counter() - start)
    return min(times)


def _show(run: Run, config: Config, facts: dict[str, Any], metrics: dict[str, Any]) -> None:
    figures = metrics["schemes"]
    run.table(
        f"{config.workload}, {config.ranks} ranks: k {facts['mean_k']:,.0f}, union {facts['union']:,}",
        ["scheme", "x lower bound", "MB", "push imbalance", "pull imbalance"],
        [
            [name, f["ratio_to_lower_bound"], f["bottleneck_bytes"] / 1e6, f["imbalance"], f["pull_imbalance"]]
            for name, f in sorted(figures.items(), key=lambda item: item[1]["bottleneck_bytes"])
        ],
    )
    if "kernels" in metrics:
        run.table(
            "CPU kernels, one core, 64 MiB fp32",
            ["kernel", "x time of a copy", "GB/s", "copy GB/s"],
            [[name, f["vs_memcpy"], f["gbps"], f["memcpy_gbps"]] for name, f in metrics["kernels"].items()],
        )
    names = sorted(figures, key=lambda name: figures[name]["bottleneck_bytes"])
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(names) + 1.2), layout="constrained")
    axes.barh(names, [figures[name]["bottleneck_bytes"] / 1e6 for name in names], color="#4477aa")
    axes.axvline(figures["column"]["lower_bound_bytes"] / 1e6, color="#cc3311", label="lower bound")
    axes.set_xscale("log")
    axes.set_xlabel("MB through the busiest rank and direction (two_level: between nodes)")
    axes.set_title(f"{config.workload}, {config.ranks} ranks")
    axes.invert_yaxis()
    axes.legend(loc="upper right")
    figure.savefig(run.out / "sparse_bytes.png", dpi=120)
    plt.close(figure)
