"""Run by test_41: real jobs on a real Ray that make every metric of the table move, then wait to be scraped.

Prints "targets " and the metrics endpoints as soon as the cluster is up, "done" when all jobs have ended; ends with its
standard input.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

from actors.group import WorkerGroup
from actors.keeper import Keeper, NoProbe, Phase
from actors.recovery import RecoverableGroup
from actors.scheduler import JobScheduler
from actors.state import ModelState
from actors.worker import WorkerContext
from collectives.moe import MoELayer, Routes
from collectives.policy import SyncPolicy
from collectives.torch_transport import TorchTransport
from jobs.nodes import local_nodes
from placement.queue import OVER
from zenray.engine import TrainPlan, Variant, train_rank
from zenray.job_config import JobConfig, request_of
from zenray.queue_program import QueueProgram

ROWS, WIDTH, STEPS, EXPERTS = 20_000, 128, 16, 4


def by_remainder(counts: np.ndarray) -> Routes:
    """Expert e on rank e mod n."""
    size = len(counts)
    pairs = np.zeros((size, size, EXPERTS), np.int64)
    for expert in range(EXPERTS):
        pairs[:, expert % size, expert] = counts[:, expert]
    return Routes(pairs, np.arange(EXPERTS, dtype=np.int32).reshape(-1, size).T.copy())


class Model(nn.Module):
    """A sparse embedding, a dense layer large enough for a codec, and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.dense = nn.Linear(WIDTH, 4 * WIDTH)
        transport = TorchTransport(timeout_s=60.0)
        self.experts = MoELayer(
            WIDTH, WIDTH, EXPERTS, EXPERTS // transport.size, 1, transport=transport, plan=by_remainder
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        y, _ = self.experts(x)
        return (self.dense(x + y).square().mean() + y.square().mean()).float()


@dataclass
class Work:
    """Few rows at first, then all of them: a sparse scheme pays first, and later does not."""

    seed: int = 0

    def facts(self) -> Mapping[str, object]:
        return {}

    def model(self, sparse: bool) -> nn.Module:
        return Model()

    def batch(self, step: int, rank: int) -> tuple[Tensor, ...]:
        return (torch.arange(ROWS),) if step > STEPS // 2 else (torch.arange(rank, 400, 2),)

    def evaluate(self, model: nn.Module) -> float:
        return 0.0


PLAN = TrainPlan(
    variants=(Variant("zenray", sparse=True, policy=SyncPolicy.of("int8b")),),
    steps=STEPS, warmup_steps=2, block_steps=2, optimizer="sgd", lr=0.1, config_sha256="",
)  # fmt: skip


def recoverable(context: WorkerContext, keeper: Keeper) -> int:
    model = nn.Linear(4, 4)
    step = keeper.restore([], [ModelState(model)])
    while step < 6:
        step += 1
        keeper.reached(Phase.COMPUTE, step)
        keeper.gate()
        keeper.prepare(step)
    keeper.finish()
    return step


class Strike(NoProbe):
    """Kill rank 1 once."""

    def reached(self, phase: Phase, step: int, keeper: Keeper) -> None:
        if (phase, step, keeper.context.rank, keeper.assignment.attempt) == (Phase.COMPUTE, 4, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)


class Blind(QueueProgram):
    """The real program, except that its trace does not see what a model retains: an under-prediction on purpose."""

    def profile_key(self, request: Mapping[str, Any]) -> str:
        return super().profile_key({**request, "retain": None})

    def profile(self, request: Mapping[str, Any]) -> Any:
        return super().profile({**request, "retain": None})


def queue_two_jobs(folder: Path) -> Any:
    """One that ends, and one that outgrows every plan."""
    model: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 2}
    keys: dict[str, Any] = {"model": model, "batch": 16, "seq": 64, "max_gpus": 1, "recompute": ["none"]}
    actor = ray.remote(JobScheduler).options(num_cpus=0).remote(str(folder), Blind(), "test")  # type: ignore[attr-defined]
    jobs: list[dict[str, Any]] = [
        {"name": "calm", "steps": 200},  # long enough to be measured, which happens once a second
        {"name": "grows", "steps": 12, "retain": {"kib_per_sample": 4096, "calls": 100}},
    ]
    for own in jobs:
        job = JobConfig.model_validate({**keys, **own})
        ray.get(actor.submit.remote(request_of(job)), timeout=60)
    return actor


def main(folder: Path) -> None:
    with local_nodes(0) as nodes:
        nodes._add(num_cpus=8, resources={"zenray_fake_gpu": 1}, labels={"zenray.io/fake-gpu-mib": "24"})
        targets = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes()]
        print("targets " + json.dumps(targets), flush=True)
        queue = queue_two_jobs(folder / "queue")
        with WorkerGroup(2, run_id="trained") as group:
            group.run(partial(train_rank, PLAN, Work()), timeout_s=120)
            print("trained", flush=True)
            with RecoverableGroup(2, run_id="recovered", journal=folder / "journal.jsonl", strategy="PACK") as second:
                second.run(recoverable, timeout_s=60, probe=Strike())
                print("recovered", flush=True)
                deadline = time.monotonic() + 120
                while {row["state"] for row in ray.get(queue.jobs.remote(), timeout=60)} - OVER:
                    assert time.monotonic() < deadline, ray.get(queue.jobs.remote(), timeout=60)
                    time.sleep(0.2)
                print("done", flush=True)
                sys.stdin.read()
        ray.get(queue.close.remote(), timeout=60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
