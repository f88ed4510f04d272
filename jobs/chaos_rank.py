"""What runs in the workers of `jobs.chaos`: a small training with every kind of state, and the faults that strike it."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

from actors.frames import HEADER_BYTES, Bytes
from actors.keeper import Keeper, Phase
from actors.state import DataPosition, ModelState, OptimizerState, RandomState, ResidualState, StateProvider
from actors.worker import WorkerContext
from collectives.feedback import ErrorFeedback
from collectives.replicas import digest

FULL_DISK_BYTES = 4096
STRICKEN_S = 60.0
"""How long a rank on a node that is being removed waits for its end."""


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    HANG = "hang"
    NODE = "node"
    HOLDER = "holder"
    DISK_FULL = "disk_full"
    DELAY = "delay"
    SLOW = "slow"
    """From the step on, every copy that the rank sends takes long."""
    CORRUPT = "corrupt"
    RECOVER = "recover"
    """A worker is killed, and another one while the group recovers."""


@dataclass(frozen=True)
class Fault:
    """One fault: strikes `rank` when it reaches `phase` of `step`, once. second_rank: of RECOVER."""

    seed: int
    kind: Kind
    rank: int
    phase: Phase
    step: int
    second_rank: int = 0
    delay_s: float = 0.0


@dataclass
class Striker:
    """The probe of a faulty run. Everything it does is noted in `folder` first: proof that the fault took place."""

    fault: Fault
    folder: Path
    _done: bool = field(default=False, init=False)

    def reached(self, phase: Phase, step: int, keeper: Keeper) -> None:
        """Strike if this is the place."""
        fault, rank, attempt = self.fault, keeper.context.rank, keeper.assignment.attempt
        if fault.kind is Kind.RECOVER and (phase, rank, attempt) == (Phase.RECOVER, fault.second_rank, 1):
            self._end(signal.SIGKILL, phase)
        if (phase, step, rank, attempt) != (fault.phase, fault.step, fault.rank, 0) or self._done:
            return
        self._done = True
        match fault.kind:
            case Kind.KILL | Kind.RECOVER:
                self._end(signal.SIGKILL, phase)
            case Kind.HANG:
                self._end(signal.SIGSTOP, phase)
            case Kind.NODE:
                keeper.context.report({"remove_node_of_rank": rank})
                time.sleep(STRICKEN_S)
            case Kind.HOLDER:
                pid = _holder_pid(keeper, fault.seed % len(keeper.assignment.holders))
                note(self.folder, "fault", phase=phase)
                os.kill(pid, signal.SIGKILL)
            case Kind.DISK_FULL:
                resource.prlimit(
                    _holder_pid(keeper, 0), resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.RLIM_INFINITY)
                )
                note(self.folder, "fault", phase=phase)
            case Kind.DELAY:
                note(self.folder, "fault", phase=phase)
                time.sleep(fault.delay_s)
            case Kind.CORRUPT | Kind.SLOW:
                pass  # see `sending`

    def sending(self, step: int, keeper: Keeper, data: Bytes) -> Bytes:
        """CORRUPT: one flipped bit, in header or payload, the first time that the step is sent. SLOW: see `Kind`."""
        fault = self.fault
        if fault.kind is Kind.SLOW and keeper.context.rank == fault.rank and step >= fault.step:
            if not (self.folder / "fault.jsonl").exists():
                note(self.folder, "fault", phase=Phase.REPLICATE)
            time.sleep(fault.delay_s / 4)
        at_place = (step, keeper.context.rank, keeper.assignment.attempt) == (fault.step, fault.rank, 0)
        if fault.kind is not Kind.CORRUPT or not at_place or (self.folder / "fault.jsonl").exists():
            return data
        draw = random.Random(fault.seed)
        damaged = data.copy()
        position = draw.randrange(HEADER_BYTES if draw.random() < 0.3 else damaged.size)
        damaged[position] ^= 1 << draw.randrange(8)
        note(self.folder, "fault", phase=Phase.REPLICATE)
        return damaged

    def _end(self, how: signal.Signals, phase: Phase) -> None:
        note(self.folder, "fault", phase=phase)
        os.kill(os.getpid(), how)


def _holder_pid(keeper: Keeper, index: int) -> int:
    return int(ray.get(keeper.assignment.holders[index].actor.sit.remote(), timeout=10.0))


def note(folder: Path, name: str, **facts: object) -> None:
    """Append a line to `folder/name.jsonl`; on disk before this returns."""
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({**facts, "time_s": time.time()}) + "\n")
        file.flush()


@dataclass(frozen=True)
class Training:
    """The training of one seed: a model with dropout, Adam, bf16 gradients with error feedback, noise from NumPy."""

    steps: int
    hidden: int
    folder: Path

    def __call__(self, context: WorkerContext, keeper: Keeper) -> dict[str, Any]:
        """Train on this rank; returns the digests of all parameters."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(32, self.hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(self.hidden, self.hidden), nn.ReLU(),
            nn.Linear(self.hidden, 1),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        feedback, position = ErrorFeedback(), DataPosition()
        for seeded in (torch.manual_seed, np.random.seed, random.seed):
            seeded(1000 + context.rank)
        own: list[StateProvider] = [RandomState({}), position, ResidualState(feedback)]
        step = keeper.restore(own, [ModelState(model), OptimizerState(optimizer, model)])
        while step < self.steps:
            step += 1
            keeper.reached(Phase.COMPUTE, step)
            optimizer.zero_grad(set_to_none=True)
            model(self._batch(position.consumed, context.rank)).square().mean().backward()
            self._reduce(model, feedback, context, keeper, step)
            keeper.gate()
            keeper.reached(Phase.UPDATE, step)
            optimizer.step()
            position.consumed += 1
            note(self.folder, f"applied-{context.rank}", attempt=keeper.assignment.attempt, step=step)
            keeper.prepare(step)
        keeper.finish()
        return {name: digest(parameter) for name, parameter in model.named_parameters()}

    @staticmethod
    def _batch(index: int, rank: int) -> Tensor:
        """[16, 32]: a pure function of (index, rank), plus noise that only the random states determine."""
        generator = torch.Generator().manual_seed(index * 1009 + rank)
        noise = np.random.standard_normal((16, 32)) * random.random()
        return torch.randn(16, 32, generator=generator) + 0.1 * torch.from_numpy(noise).float()

    def _reduce(
        self, model: nn.Module, feedback: ErrorFeedback, context: WorkerContext, keeper: Keeper, step: int
    ) -> None:
        """Mean gradient over ranks, each rank's part rounded to bf16 with error feedback; in two collectives."""
        parameters = dict(model.named_parameters())
        layout = [(name, parameter.numel()) for name, parameter in parameters.items()]
        residual = feedback.residual(layout)
        wanted = torch.cat([p.grad.reshape(-1) for p in parameters.values() if p.grad is not None]) + residual.value
        sent = wanted.bfloat16().float()
        residual.update.copy_(wanted - sent)
        feedback.commit()
        half = sent.numel() // 2
        with keeper.busy():
            context.transport.all_reduce("first half", sent[:half])
            keeper.reached(Phase.REDUCE, step)
            context.transport.all_reduce("second half", sent[half:])
        sent /= context.size
        for parameter, gradient in zip(parameters.values(), torch.split(sent, [n for _, n in layout]), strict=True):
            parameter.grad = gradient.view_as(parameter).clone()


def describe(fault: Fault) -> dict[str, Any]:
    """For records."""
    return asdict(fault)
