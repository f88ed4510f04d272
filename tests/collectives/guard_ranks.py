"""What the rank processes of the guards' tests run: FSDP2 and pipelines whose data a codec cannot carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B

from collectives.channel import Channel
from collectives.fsdp import compress_fsdp
from collectives.pipeline import CompressedStage
from collectives.policy import SyncPolicy
from collectives.transport import Transport

WIDTH, ROWS, MICROBATCHES, STEPS = 256, 64, 2, 3


def policy(**roles: str) -> SyncPolicy:
    return SyncPolicy(codecs=tuple((role, (codec,)) for role, codec in roles.items()), fixed=True)


def told(channels: Sequence[Channel]) -> dict[str, Any]:
    records = [channel.record() for channel in channels]
    return {
        "events": [event for channel in channels for event in channel.events],
        "fallbacks": sum(record.fallbacks for record in records),
        "ratios": [record.ratio for record in records],
        "errors": [record.relative_error for record in records],
    }


def sharded(rank: int) -> dict[str, Any]:
    """Gradients [256, 256] of which one column in 32 is a million times the others, on the last rank alone."""
    scale = torch.ones(WIDTH)
    if rank == dist.get_world_size() - 1:
        scale[::32] = 1e6
    found: dict[str, Any] = {}
    for name, made in (("torch", None), ("int4b", policy(fsdp_grad="int4b"))):
        torch.manual_seed(5)
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        fully_shard(model)
        sync = compress_fsdp(model, made, timeout_s=30) if made is not None else None
        gradients = []
        for step in range(STEPS):
            model.zero_grad()
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)) * scale
            model(x).square().sum().backward()
            gradient = model.weight.grad.full_tensor()
            gradients.append([float(gradient[:, 1].norm()), float(gradient.norm())])
        found[name] = {"gradients": gradients} | (told([sync.grads, sync.params]) if sync is not None else {})
    return found


def layers(count: int, bad: int) -> list[nn.Linear]:
    """A chain in which layer `bad` gives one huge value a row, which the next layer ignores."""
    torch.manual_seed(9)
    made = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    with torch.no_grad():
        made[bad].bias[0] = 1e6
        for layer in made[bad + 1 : bad + 2]:
            layer.weight[:, 0] = 0
    return made


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def pipelined(rank: int, stages_a_rank: int) -> dict[str, Any]:
    """Losses by step; nothing is updated, so every step must give the same."""
    size = dist.get_world_size()
    num_stages = size * stages_a_rank
    bad = stages_a_rank - 1
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    exact: Tensor = x
    for layer in layers(num_stages, bad):
        exact = layer(exact)
    made = policy(pp_act="int8b", pp_grad="int8b")
    stages = [
        CompressedStage(
            layers(num_stages, bad)[index], index, num_stages, torch.device("cpu"), policy=made, timeout_s=30
        )
        for index in range(rank, num_stages, size)
    ]
    schedule: Any = ScheduleGPipe(stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)
    if stages_a_rank > 1:
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    losses, num_events = [], []
    for _ in range(STEPS):
        found: list[Tensor] = []
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, target=target, losses=found) if rank == size - 1 else schedule.step(*inputs)
        losses.append([float(loss) for loss in found])
        num_events.append(sum(len(stage.act.events) for stage in stages))
    chunks = zip(exact.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    return {
        "exact": [float(loss_of(y, t)) for y, t in chunks],
        "losses": losses,
        "num_events": num_events,
        "act": told([stage.act for stage in stages]),
        "grad": told([stage.act_grad for stage in stages]),
    }


def run(transport: Transport, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {"sharded": sharded(transport.rank), "pipelined": pipelined(transport.rank, 1)}
    if transport.size == 2:
        found["interleaved"] = pipelined(transport.rank, 2)
    return found
