"""Checks with several processes: what each rank runs, and the launcher that starts, times and ends them.

`python -m collectives.gpucheck.ranks FOLDER RANK` is one rank; FOLDER holds spec.json and receives the results.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives.codecs import Int8Block
from collectives.ddp import attach
from collectives.gpucheck.report import Row, Status
from collectives.reduce import two_shot
from collectives.sparse.ids import normalise
from collectives.sparse.schemes import SCHEMES
from collectives.staging import StagedTransport
from collectives.torch_transport import TorchTransport
from collectives.transport import Transport, run_local

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 20
WITHOUT_KERNELS = ("omnireduce",)
"""Schemes that move blocks on the CPU only."""


def check_ranks(
    backend: str, num_ranks: int, device: torch.device, timeout_s: float, optional: bool = False
) -> Iterator[Row]:
    """One row a check. optional: a group that cannot be formed here is skipped, not failed."""
    part = f"{backend} x{num_ranks}"
    started = time.monotonic()
    results, problem = _launch(backend, num_ranks, device, timeout_s)
    for name in CHECKS:
        notes = [result.get(name) for result in results]
        good = len(notes) == num_ranks and all(note is not None and note["ok"] for note in notes)
        text = next(
            (note["note"] for note in notes if note and not note["ok"]), notes[0]["note"] if good and notes[0] else ""
        )
        status: Status = "ok" if good else "skipped" if optional and not any(notes) else "failed"
        yield Row(part, name, status, note=text or problem)
    yield Row(part, "processes", "ok", note=f"{time.monotonic() - started:.0f} s")


def _launch(backend: str, num_ranks: int, device: torch.device, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Every finished rank's results by check, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="zenray-gpu-") as name:
        folder = Path(name)
        spec = {"backend": backend, "num_ranks": num_ranks, "device": str(device), "timeout_s": timeout_s}
        (folder / "spec.json").write_text(json.dumps(spec))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL from 2.30 on; older versions refuse two ranks on one card
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        logs = [(folder / f"log-{rank}.txt").open("wb") for rank in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "collectives.gpucheck.ranks", name, str(rank)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            for rank, log in enumerate(logs)
        ]
        deadline, problem = time.monotonic() + timeout_s, ""
        for rank, process in enumerate(ranks):
            try:
                code = process.wait(max(deadline - time.monotonic(), 0.1))
                problem = problem or (f"rank {rank} ended with code {code}" if code else "")
            except subprocess.TimeoutExpired:
                problem = problem or f"rank {rank} did not finish within {timeout_s:g} s"
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            process.wait(10)
            log.close()
        if problem:
            tails = [(folder / f"log-{rank}.txt").read_text(errors="replace")[-1500:] for rank in range(num_ranks)]
            print("\n".join(tails), file=sys.stderr)
            lines = [line for line in tails[0].strip().splitlines() if line]
            problem += f": {lines[-1][:200]}" if lines else ""
        paths = [folder / f"result-{rank}.json" for rank in range(num_ranks)]
        return [json.loads(path.read_text()) for path in paths if path.exists()], problem


# --- in the rank's process --------------------------------------------------------------------------------------------


def transport_for(device: torch.device, timeout_s: float) -> Transport:
    """Over the default group; staged through host memory where that group cannot reach the card."""
    transport = TorchTransport(timeout_s=timeout_s)
    return transport if transport.device.type == device.type else StagedTransport(transport, device)


def check_dense(transport: Transport) -> str:
    """two_shot with int8b: the bytes that threads on the CPU get."""
    ranks, device = range(transport.size), transport.device
    inputs = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)) for rank in ranks]

    def reduce(transport: Transport, where: torch.device) -> Tensor:
        x = inputs[transport.rank].to(where)
        two_shot(x, Int8Block(), transport, op="mean", seed=1)
        return x.cpu()

    found = reduce(transport, device)
    expected = run_local(transport.size, lambda local: reduce(local, torch.device("cpu")))[transport.rank]
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), "bytes differ from the CPU's"
    return f"{transport.traffic.sent_bytes():,} bytes sent"


def check_sparse(transport: Transport) -> str:
    """Every sparse scheme: ids and values of the CPU."""
    parts, device = [], transport.device
    for rank in range(transport.size):
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(0, 5000, (700 * rank + 300,), generator=generator)
        parts.append((ids, torch.randn(len(ids), 64, generator=generator)))

    def reduce(name: str, transport: Transport, where: torch.device) -> tuple[Tensor, Tensor]:
        ids, values = (part.to(where) for part in parts[transport.rank])
        rows = normalise(ids, values, (5000, 64))
        found = SCHEMES[name].all_reduce(rows, transport, "mean")
        return found.ids.cpu(), found.values.cpu()

    names = [name for name in SCHEMES if name not in WITHOUT_KERNELS]
    for name in names:
        ids, values = reduce(name, transport, device)
        expected = run_local(transport.size, lambda local, name=name: reduce(name, local, torch.device("cpu")))[0]  # type: ignore[misc]
        assert torch.equal(ids, expected[0]), f"{name}: ids differ"
        assert torch.allclose(values, expected[1], rtol=1e-5, atol=1e-6), f"{name}: values differ"
    return ", ".join(names)


class Model(nn.Module):
    """An embedding and two layers: one sparse and some dense gradients."""

    def __init__(self, sparse: bool):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.EmbeddingBag(20_000, 64, sparse=sparse, mode="sum")
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.layers(self.embedding(ids))
        return result


def train(model: DistributedDataParallel, device: torch.device, num_steps: int = NUM_STEPS) -> float:
    """Plain SGD on random bags; seconds per step after the first three."""
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.05), torch.Generator().manual_seed(dist.get_rank())
    start = time.perf_counter()
    for step in range(num_steps):
        if step == 3:
            _synchronise(device)
            start = time.perf_counter()
        ids = torch.randint(0, 20_000, (64, 10), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(ids), ids[:, 0] % 10)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    _synchronise(device)
    return (time.perf_counter() - start) / (num_steps - 3)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_hook(transport: Transport) -> str:
    """The DDP hook with a sparse embedding ends where stock DDP with a dense one ends; both are timed."""
    device, timeout_s = transport.device, transport.timeout_s
    stock = DistributedDataParallel(copy.deepcopy(Model(sparse=False)).to(device))
    stock_s = train(stock, device)
    ours = DistributedDataParallel(Model(sparse=True).to(device))
    with attach(ours, timeout_s=timeout_s) as hook:
        ours_s = train(ours, device)
        hook.check_replicas()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), f"{name} differs from stock DDP"
    return f"{ours_s * 1e3:.2f} ms a step, stock DDP {stock_s * 1e3:.2f} ms"


ON_ANY_TRANSPORT: Mapping[str, Callable[[Transport], str]] = {
    "two-shot int8b": check_dense,
    "sparse schemes": check_sparse,
}
CHECKS: Mapping[str, Callable[[Transport], str]] = {**ON_ANY_TRANSPORT, "DDP hook, training loop": check_hook}


def check_threads(num_ranks: int, device: torch.device) -> Iterator[Row]:
    """Ranks that are threads of this process: all device code of a collective, byte counts, no wire."""
    for name, check in ON_ANY_TRANSPORT.items():
        notes = run_local(num_ranks, lambda local, check=check: check(StagedTransport(local, device)))  # type: ignore[misc]
        yield Row(f"threads x{num_ranks}", name, "ok", note=notes[0])


def main(folder: Path, rank: int) -> None:
    """The life of one rank. A check that fails on one rank is left by the others at their deadline."""
    torch.set_num_threads(1)
    spec = json.loads((folder / "spec.json").read_text())
    device, timeout_s = torch.device(spec["device"]), float(spec["timeout_s"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        spec["backend"],
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=spec["num_ranks"],
        timeout=timedelta(seconds=timeout_s),
    )
    transport, results = transport_for(device, timeout_s / 3), dict[str, Any]()
    for name, check in CHECKS.items():
        try:
            results[name] = {"ok": True, "note": check(transport)}
        except Exception as error:
            traceback.print_exc()
            results[name] = {"ok": False, "note": f"{type(error).__name__}: {error}"[:300]}
        unfinished = folder / f"unfinished-{rank}.json"
        unfinished.write_text(json.dumps(results))
        unfinished.replace(folder / f"result-{rank}.json")
        if not results[name]["ok"]:
            sys.stdout.flush()
            os._exit(1)  # the group is unusable, and its destructors may wait for peers
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
