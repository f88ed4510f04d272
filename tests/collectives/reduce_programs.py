"""What the ranks of the reduction tests do, on threads and on processes. Started by jobs.ranks."""

import hashlib
import os
import time
from typing import Any

import torch
from torch import Tensor

from collectives.codecs import CODECS, ErrorBoundedSum
from collectives.errors import CollectiveError
from collectives.movement import all_gather, broadcast
from collectives.reduce import homomorphic, one_shot, reduce_scatter, two_hop, two_shot
from collectives.transport import Transport


def digest(x: Tensor) -> str:
    return hashlib.blake2b(x.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def tensor(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def workout(transport: Transport, config: dict[str, Any]) -> dict[str, Any]:
    """Digests of every pattern and several codecs, and the bytes of each phase."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in ("bf16", "int8b", "int4b", "eb", "sq", "topk"):
        for numel in (0, 5, 10_001, 3 << 19):
            if numel > 1 << 18 and name != "int8b":
                continue
            for reduce in (two_shot, one_shot):
                x = tensor(transport.rank, numel)
                reduce(x, CODECS[name], transport, op="mean", seed=3)
                found[f"{reduce.__name__} {name} {numel}"] = digest(x)
    x, out = tensor(transport.rank, 3000), torch.empty(3000 // transport.size)
    homomorphic(x, ErrorBoundedSum(), transport)
    reduce_scatter(tensor(transport.rank, 3000), out, CODECS["int8b"], transport)
    found |= {"homomorphic": digest(x), "reduce_scatter": digest(out)}
    x = tensor(transport.rank, 3000)
    two_hop(x, CODECS["bf16"], CODECS["int4b"], transport, ranks_per_node=2)
    parts = [tensor(r, 100 * r) for r in range(transport.size)]
    all_gather(parts, CODECS["eb"], transport)
    y = tensor(transport.rank, 777)
    broadcast(y, CODECS["lossless"], transport, root=1)
    found |= {"two_hop": digest(x), "all_gather": digest(torch.cat(parts)), "broadcast": digest(y)}
    return found | {"bytes": {phase: row.tolist() for phase, row in transport.traffic.sent.items()}}


def workout_then_death(transport: Transport, config: dict[str, Any]) -> dict[str, Any]:
    """After the workout the last rank dies; the others note what the next reduction tells them, and when."""
    found = workout(transport, config)
    if transport.rank == transport.size - 1:
        os._exit(9)
    started = time.monotonic()
    try:
        two_shot(tensor(transport.rank, 1 << 20), CODECS["int8b"], transport)
    except CollectiveError as error:
        return found | {"error": type(error).__name__, "seconds": time.monotonic() - started}
    return found | {"error": "none", "seconds": 0.0}
