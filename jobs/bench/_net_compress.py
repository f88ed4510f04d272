"""The rank side of `net suite=compress`: dense gradients through every codec, our choice, and torch's own hooks.

torch's hooks run in launches of their own, because some of them end their process on Gloo; each is timed in turn with
plain DDP in the same processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from collectives import movement
from collectives.codec_cost import DenseLoad, codec_speeds, patterns_of, predict
from collectives.codecs import CODECS, Codec, ErrorBoundedSum, Lossless, LowRank, RandomK, TopK
from collectives.codecs.lowrank import PowerSGD
from collectives.cost import Link, probe_link
from collectives.ddp import attach
from collectives.dense import DenseReducer
from collectives.packets import Workspace
from collectives.policy import SyncPolicy
from collectives.reduce import homomorphic, native, one_shot, two_shot
from collectives.segments import Place
from collectives.topology import probe_topology
from collectives.torch_transport import TorchTransport
from jobs.bench.contender import Contender
from jobs.workloads.shapes import gradient_like

COLUMNS = 1024
NAMES = tuple(name for name in CODECS if name not in ("dgc", "lossless"))
MAX_ERROR = {"bf16": 0.01, "fp16": 0.01, "fp8b": 0.1, "int8b": 0.05, "int4b": 0.4}
"""Relative 2-norm of the mean's error, above which a time means nothing; the others drop values on purpose."""
SETTLING_CALLS = 14
"""Calls of the planner's warm-up: plain reductions, then the trials of what it predicts."""


def compress_suite(transport: TorchTransport, config: dict[str, Any]) -> Sequence[Contender]:
    """The mean of `size_mib` of gradient-like fp32 per rank."""
    rows = (config["size_mib"] << 18) // COLUMNS
    data = gradient_like(rows, COLUMNS, 1 + transport.rank).view(-1)
    exact, x = data.clone(), torch.empty_like(data)
    link = probe_link(transport)

    def dense() -> Tensor:
        transport.all_reduce("dense", exact, "mean")
        return exact

    contenders = [Contender("dense", dense, lambda: exact.copy_(data)), gloo_sparse(data)]
    load = DenseLoad(data.numel(), 4, transport.size)
    speeds = codec_speeds(NAMES, transport)
    for name in NAMES:
        expected = predict(name, patterns_of(CODECS[name], load)[0], load, link, speeds[name])
        contenders.append(
            Contender(
                name,
                reduction(CODECS[name], x, transport),
                lambda: x.copy_(data),
                reference=lambda: exact,
                max_relative_error=MAX_ERROR.get(name, 1.5),
                facts={"predicted_s": expected.model_s, "predicted_bytes": expected.wire_bytes},
            )
        )
    contenders.append(
        Contender("auto", automatic(x, data, transport, link), lambda: x.copy_(data), lambda: exact, 0.05)
    )
    return [*contenders, *gathers(data, transport)]


def gloo_sparse(data: Tensor) -> Contender:
    """torch's sparse all-reduce of one value in a hundred, as a user of top-k would send them."""
    index = torch.arange(0, data.numel(), 100)
    gradient: list[Tensor] = []

    def make() -> None:
        values = data[index]
        gradient[:] = [torch.sparse_coo_tensor(index[None], values, tuple(data.shape), is_coalesced=True)]

    def call() -> Tensor:
        dist.all_reduce(gradient[0])
        return gradient[0].values()

    return Contender("gloo_sparse", call, make)


def reduction(codec: Codec, x: Tensor, transport: TorchTransport) -> Callable[[], Tensor]:
    """One all-reduce of x in the pattern that suits the codec; its buffers are kept between calls."""
    space, powersgd = Workspace(), PowerSGD()

    def call() -> Tensor:
        if isinstance(codec, LowRank):
            powersgd.all_reduce({"x": x.view(-1, COLUMNS)}, transport)
        elif isinstance(codec, RandomK):
            native(x, codec, transport, op="mean")
        elif isinstance(codec, TopK):
            one_shot(x, codec, transport, op="mean", workspace=space)
        elif isinstance(codec, ErrorBoundedSum):
            homomorphic(x, codec, transport, op="mean", workspace=space)
        else:
            two_shot(x, codec, transport, op="mean", workspace=space)
        return x

    return call


def automatic(x: Tensor, data: Tensor, transport: TorchTransport, link: Link) -> Callable[[], Tensor]:
    """What the planner makes of x under the default policy, all of the communication being exposed."""
    reducer = DenseReducer(transport, link, SyncPolicy(), probe_topology(transport))
    places = [Place("x", 0, torch.Size((x.numel() // COLUMNS, COLUMNS)), True)]
    steps = iter(range(1, 1 << 30))

    def one() -> None:
        started = time.perf_counter()
        reducer.reduce(x, places, next(steps))
        seconds = time.perf_counter() - started
        reducer.planner.note_step(seconds, seconds)

    def call() -> Tensor:
        if not reducer.planner.measured():
            for _ in range(SETTLING_CALLS):
                one()
                x.copy_(data)
        one()
        return x

    return call


def gathers(data: Tensor, transport: TorchTransport) -> list[Contender]:
    """Parameters to everybody: plain, and through the lossless codec, which never takes part in sums."""
    space, codec = Workspace(), Lossless()
    out = torch.empty_like(data)
    parts = list(out.chunk(transport.size))
    source = data.chunk(transport.size)[transport.rank]

    def plain_gather() -> Tensor:
        dist.all_gather_into_tensor(out, source.contiguous())
        return out

    def lossless() -> Tensor:
        movement.all_gather(parts, codec, transport, workspace=space)
        return out

    plain = Contender("plain_gather", plain_gather)
    expected = torch.empty_like(data)

    def wanted() -> Tensor:
        dist.all_gather_into_tensor(expected, source.contiguous())
        return expected

    return [plain, Contender("lossless_gather", lossless, lambda: parts[transport.rank].copy_(source), wanted)]


# --- torch's own hooks ------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    """One parameter whose gradient is `data`."""

    def __init__(self, data: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(data))

    def forward(self, data: Tensor) -> Tensor:
        return (self.weight * data).sum()


def with_hook(model: DistributedDataParallel, name: str) -> None:
    """Attach one of the hooks by name; "none" leaves plain DDP."""
    group = dist.group.WORLD
    if name == "zenray":
        attach(model)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name != "none":
        hooks = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "quantise_per_tensor": quantization_hooks.quantization_pertensor_hook,
            "quantise_per_channel": quantization_hooks.quantization_perchannel_hook,
        }
        model.register_comm_hook(group, hooks[name])


def measure_hook(transport: TorchTransport, config: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of the backward pass by round: under plain DDP, and with the hook."""
    rows = (config["size_mib"] << 18) // COLUMNS
    data = gradient_like(rows, COLUMNS, 1 + transport.rank)
    models = {name: DistributedDataParallel(Flat(data)) for name in ("none", config["hook"])}
    for name, model in models.items():
        with_hook(model, name)
    warm_up = SETTLING_CALLS if config["hook"] == "zenray" else 3
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(warm_up + config["repeats"]):
        for name, model in models.items():
            loss = model(data)
            dist.barrier()
            started = time.perf_counter()
            loss.backward()
            elapsed_s = time.perf_counter() - started
            if number >= warm_up:
                seconds[name].append(elapsed_s)
            model.zero_grad(set_to_none=False)
    return seconds
