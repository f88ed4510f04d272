"""The one training loop that `jobs.bench recover` runs under both systems, and how each of them protects it.

Every applied step is noted with its time in a file per rank; a kill is noted before it strikes. All figures of the suite
come from these notes, so both systems are judged by the same means.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actors.keeper import Keeper
from actors.state import ModelState, OptimizerState, RandomState
from actors.worker import WorkerContext

WIDTH = 256
TURNS, TURN_STEPS = 12, 8
FIRST_STEPS = 2
"""Of a turn: they still meet what the turn before left under way."""
TURN_NAMES = ("protected", "unprotected")
ADAM_COPIES = 3
"""Parameters, first and second moments."""


@dataclass(frozen=True)
class Task:
    """What is trained. state_bytes: parameters and Adam's moments; kill_step: rank `kill_rank` dies before it, once.

    compute_s: the gradients of a step take at least so long, as if a device computed them while the host only launches
    its kernels: then the cores are free.
    """

    folder: str
    state_bytes: int
    steps: int
    every_steps: int
    compute_s: float
    kill_step: int | None
    kill_rank: int = 1


def note(task: Task, name: str, **facts: object) -> None:
    """A line in a file of the task's folder."""
    with (Path(task.folder) / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({**facts, "time_s": time.time()}) + "\n")


class Loop:
    """Model, optimizer and one step, the same bytes in every system."""

    def __init__(self, task: Task, rank: int):
        torch.manual_seed(0)
        self.task, self.rank = task, rank
        depth = max(1, task.state_bytes // (ADAM_COPIES * 4 * WIDTH * WIDTH))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
        for parameter in self.model.parameters():  # else numbers dwindle layer by layer, and subnormal ones are slow
            nn.init.normal_(parameter, std=WIDTH**-0.5)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)

    def gradients(self, step: int, busy: AbstractContextManager[object] | None = None) -> None:
        """Forward, backward, mean over ranks: everything up to the update of `step`. busy: held during the last."""
        task = self.task
        if step == task.kill_step and self.rank == task.kill_rank and not (Path(task.folder) / "kill.jsonl").exists():
            note(task, "kill", step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        ready_s = time.monotonic() + task.compute_s
        generator = torch.Generator().manual_seed(step * 1009 + self.rank)
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(torch.randn(16, WIDTH, generator=generator)).square().mean()
        torch.autograd.backward([loss])
        time.sleep(max(0.0, ready_s - time.monotonic()))
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        bucket = torch.cat([gradient.view(-1) for gradient in gradients])
        with busy or nullcontext():
            dist.all_reduce(bucket)
        bucket /= dist.get_world_size()
        for gradient, part in zip(gradients, torch.split(bucket, [g.numel() for g in gradients]), strict=True):
            gradient.view(-1).copy_(part)

    def update(self, step: int) -> None:
        """Apply `step`, and note it."""
        self.optimizer.step()
        note(self.task, f"applied-{self.rank}", step=step)


def protected(task: Task, context: WorkerContext, keeper: Keeper) -> None:
    """Under a `RecoverableGroup`: copies of every step in memory."""
    loop = Loop(task, context.rank)
    step = keeper.restore([RandomState({})], [ModelState(loop.model), OptimizerState(loop.optimizer, loop.model)])
    while step < task.steps:
        loop.gradients(step + 1, keeper.busy())
        keeper.gate()
        step += 1
        loop.update(step)
        keeper.prepare(step)
    keeper.finish()


@dataclass(frozen=True)
class Turn:
    """TURN_STEPS steps of one rank, with or without copies; everything a step.

    step_s counts where copies are under way all the time: not the first steps of a turn, nor the wait for the last commit.
    """

    step_s: float
    network_s: float
    """Of it: training used the network."""
    compute_cpu_s: float
    """Processor time of this process in the rest of it."""
    all_cpu_s: float
    """Processor time of this process and of the holder of its host, waiting for the last commit included."""


class Meter:
    """What one rank spends until now: seconds, seconds of the network, and processor seconds outside of those."""

    def __init__(self) -> None:
        self.network_s = self.network_cpu_s = 0.0

    @contextmanager
    def busy(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Around what uses the network."""
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        with inner:
            yield
        self.network_s += time.perf_counter() - begin_s
        self.network_cpu_s += time.process_time() - begin_cpu_s

    def read(self) -> tuple[float, float, float]:
        """Differences of two readings are what lay between them."""
        return time.perf_counter(), self.network_s, time.process_time() - self.network_cpu_s


def steady(task: Task, context: WorkerContext, keeper: Keeper) -> dict[str, list[Turn]]:
    """What copies cost where nothing fails, in turns with and without them: of each of TURN_NAMES, its turns."""
    loop, meter = Loop(task, context.rank), Meter()
    step = keeper.restore([RandomState({})], [ModelState(loop.model), OptimizerState(loop.optimizer, loop.model)])
    holder = psutil.Process(ray.get(keeper.assignment.holders[0].actor.sit.remote(), timeout=10.0))
    result: dict[str, list[Turn]] = {name: [] for name in TURN_NAMES}
    for turn in range(2 * (TURNS + 1)):
        name = TURN_NAMES[turn % 2]
        dist.barrier()
        used_s = time.process_time() + sum(holder.cpu_times()[:2])
        for number in range(TURN_STEPS):
            if number == FIRST_STEPS:
                begin = meter.read()
            loop.gradients(turn * TURN_STEPS + number + 1, meter.busy(keeper.busy()))
            keeper.gate()
            loop.update(step)
            if name == "protected":
                step += 1
                keeper.prepare(step)
        step_s, network_s, compute_cpu_s = (
            (after - before) / (TURN_STEPS - FIRST_STEPS) for before, after in zip(begin, meter.read(), strict=True)
        )
        keeper.gate()
        dist.barrier()
        used_s = time.process_time() + sum(holder.cpu_times()[:2]) - used_s
        if turn > 1:  # the first ones fill memory and make the plan
            result[name].append(Turn(step_s, network_s, compute_cpu_s, used_s / TURN_STEPS))
    return result


def ray_train_loop(config: Mapping[str, Any]) -> None:
    """Under Ray Train: rank 0 writes a checkpoint to storage every `every_steps`, all restart from the last."""
    task = Task(**config)
    torch.set_num_threads(1)
    loop = Loop(task, ray.train.get_context().get_world_rank())
    providers = [ModelState(loop.model), OptimizerState(loop.optimizer, loop.model)]
    step = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step = _load(Path(folder), providers)
    while step < task.steps:
        loop.gradients(step + 1)
        step += 1
        loop.update(step)
        if step % task.every_steps == 0:
            _report(step, loop.rank, lambda folder, step=step: _save(folder, step, providers))  # type: ignore[misc]


def _report(step: int, rank: int, save: Callable[[Path], None]) -> None:
    if rank:
        ray.train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))


def _save(folder: Path, step: int, providers: list[Any]) -> None:
    tensors = {f"{p.name}/{k}": v for p in providers for k, v in p.state_dict().items() if isinstance(v, Tensor)}
    values = {p.name: {k: v for k, v in p.state_dict().items() if not isinstance(v, Tensor)} for p in providers}
    save_file(tensors, folder / "tensors.safetensors")
    (folder / "values.json").write_text(json.dumps({"step": step, "values": values}))


def _load(folder: Path, providers: list[Any]) -> int:
    facts, tensors = json.loads((folder / "values.json").read_text()), load_file(folder / "tensors.safetensors")
    for provider in providers:
        prefix = f"{provider.name}/"
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        provider.load_state_dict(facts["values"][provider.name] | own)
    return int(facts["step"])
