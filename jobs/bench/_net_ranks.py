"""The rank side of the `net` benchmark: one table of contenders, all timed in turn by the same processes.

A contender is one way to do a job. Its inputs are made, and put back between rounds, outside the clock; everything a
call does (packing, metadata, exchange, reduction) is inside. The baselines have the same buffers and allocator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.cost import probe_link
from collectives.gradients import GradientReducer
from collectives.planner import Planner
from collectives.policy import SyncPolicy
from collectives.segments import Place
from collectives.sparse.all_reduce import reduce_rows
from collectives.sparse.quantised import QUANTISED, RowFeedback
from collectives.sparse.rows import SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.torch_transport import TorchTransport
from collectives.transport import all_to_all
from jobs.bench._net_compress import compress_suite
from jobs.bench.contender import Contender, Result
from jobs.workloads.zipf import workload

LOSSLESS = SyncPolicy(codecs=(("dp_grad", ()),))
SETTLING_CALLS = 24
"""Calls after which the planner has tried every scheme that it has hopes for, three times each."""
TX_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measure(transport: TorchTransport, config: dict[str, Any]) -> dict[str, Any]:
    """One rank's figures, by suite and contender: seconds per round, wire and counted bytes of the last round."""
    suites = {suite: SUITES[suite](transport, config) for suite in config["suites"]}
    figures: dict[str, Any] = {suite: {} for suite in suites}
    for number in range(1 + config["repeats"]):
        for suite, contenders in suites.items():
            for contender in contenders:
                entry = figures[suite].setdefault(contender.name, {"seconds": []})
                seconds, wire, counted, result = one_call(transport, contender, config["bed"])
                if number == 0:
                    entry["digest"], entry["relative_error"] = contender.check(result)
                    entry |= {"replicated": contender.replicated, **contender.facts}
                else:
                    entry["seconds"].append(seconds)
                    entry |= {"wire_bytes": wire, "counted_bytes": counted}
                del result
    return figures


def one_call(transport: TorchTransport, contender: Contender, on_bed: bool) -> tuple[float, int | None, int, Result]:
    """Seconds, bytes the interface sent (barriers included; None without a bed), bytes counted, and the result."""
    contender.reset()
    counted = transport.traffic.sent_bytes()
    dist.barrier()
    wire = int(TX_BYTES.read_text()) if on_bed else None
    start = time.perf_counter()
    result = contender.call()
    seconds = time.perf_counter() - start
    dist.barrier()
    if wire is not None:
        wire = int(TX_BYTES.read_text()) - wire
    return seconds, wire, transport.traffic.sent_bytes() - counted, result


def exchange_suite(transport: TorchTransport, config: dict[str, Any]) -> Sequence[Contender]:
    """`size_mib` of float32 per rank: Gloo's ring, our exchange, and torch's own all-to-all."""
    size = transport.size
    numel = (config["size_mib"] << 18) // size * size
    generator = torch.Generator().manual_seed(transport.rank)
    data = torch.randn(numel, generator=generator)
    ring, received, stock = (torch.empty_like(data) for _ in range(3))

    def exchange() -> Tensor:
        all_to_all(transport, "all_to_all", received.chunk(size), data.chunk(size))
        return received

    def torch_exchange() -> Tensor:
        dist.all_to_all_single(stock, data)
        return stock

    def all_reduce() -> Tensor:
        transport.all_reduce("all_reduce", ring)
        return ring

    return [
        Contender("all_reduce", all_reduce, lambda: ring.copy_(data)),
        Contender("torch_all_to_all", torch_exchange, stock.zero_, replicated=False),
        Contender("all_to_all", exchange, received.zero_, lambda: stock, replicated=False),
    ]


def sparse_suite(transport: TorchTransport, config: dict[str, Any]) -> Sequence[Contender]:
    """The gradient of one embedding table: dense ring and torch's sparse all-reduce, every scheme, and our choice."""
    work = workload(config["workload"])
    generator = torch.Generator().manual_seed(transport.rank)
    ids = torch.from_numpy(work.rows(transport.rank))
    values = torch.randn(len(ids), work.width, generator=generator)
    rows = SparseRows(ids, values, work.num_rows)
    dense, total = (torch.zeros(work.num_rows, work.width) for _ in range(2))
    dense[ids] = values
    gradient: list[Tensor] = []

    def all_reduce() -> Tensor:
        transport.all_reduce("dense", total)
        return total

    def make_gradient() -> None:
        gradient[:] = [torch.sparse_coo_tensor(ids[None], values.clone(), tuple(dense.shape), is_coalesced=True)]

    def gloo_sparse() -> SparseRows:
        dist.all_reduce(gradient[0])
        return SparseRows(gradient[0].indices()[0], gradient[0].values(), work.num_rows)

    def scheme(name: str) -> Callable[[], SparseRows]:
        return lambda: reduce_rows(rows, "sum", transport=transport, scheme=name, name="embedding").rows

    baselines = [
        Contender("dense", all_reduce, lambda: total.copy_(dense)),
        Contender("gloo_sparse", gloo_sparse, make_gradient, lambda: total),
    ]

    def quantised(name: str) -> Callable[[], SparseRows]:
        feedback = RowFeedback()

        def call() -> SparseRows:
            reduced = QUANTISED[name].all_reduce(rows, transport, "sum", None, feedback)
            feedback.rollback()
            return reduced

        return call

    return [
        *baselines,
        *(Contender(name, scheme(name), reference=lambda: total) for name in SCHEMES),
        *automatic(transport, rows, total),
        *(Contender(name, quantised(name), lambda: None, lambda: total, 0.4) for name in QUANTISED),
    ]


def automatic(transport: TorchTransport, rows: SparseRows, total: Tensor) -> list[Contender]:
    """What the planner makes, as in training, of this gradient, and of a dense one of the same shape in place."""
    reducer = GradientReducer(transport, Planner(probe_link(transport)), LOSSLESS)
    shape, size = total.shape, transport.size
    gradient = torch.sparse_coo_tensor(rows.ids[None], rows.values, tuple(shape), is_coalesced=True)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(transport.rank))
    buffer, places = full.clone().view(-1), [Place("dense", 0, shape, True)]

    def sparse() -> SparseRows:
        if "embedding" not in reducer.planner.choices:
            for _ in range(SETTLING_CALLS):
                reducer.reduce_sparse("embedding", gradient)
        mean = reducer.reduce_sparse("embedding", gradient)
        return SparseRows(mean.indices()[0], mean.values(), shape[0])

    def dense() -> Tensor:
        reducer.reduce_flat(buffer, places)
        return buffer.view(shape)

    def reference() -> Tensor:
        mean = full.clone()
        transport.all_reduce("reference", mean, "mean")
        return mean

    return [
        Contender("auto", sparse, reference=lambda: total / size),
        Contender("auto_on_dense", dense, lambda: buffer.view(shape).copy_(full), reference),
    ]


SUITES = {"exchange": exchange_suite, "sparse": sparse_suite, "compress": compress_suite}
