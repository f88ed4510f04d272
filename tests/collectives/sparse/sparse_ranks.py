"""What the ranks of the Gloo test do: every scheme on real processes. Started by jobs.ranks."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from collectives.sparse.all_reduce import reduce_rows
from collectives.sparse.rows import SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.torch_transport import TorchTransport
from collectives.transport import Transport

NUM_ROWS, WIDTH = 300, 24
IN_BFLOAT16 = ("dense", "zen_rows", "two_level")


def rows_of(rank: int, dtype: torch.dtype) -> SparseRows:
    """A tenth of the rows, none on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randperm(NUM_ROWS, generator=generator)[: 0 if rank == 1 else 30].sort().values
    return SparseRows(ids, torch.randn((len(ids), WIDTH), generator=generator).to(dtype), NUM_ROWS)


def every_scheme(transport: Transport, config: dict[str, Any]) -> dict[str, Any]:
    """Digest of the result, and bytes by phase, of each scheme.

    The dense scheme sums float32 in the library's order, so it is compared in bfloat16, where it uses its own.
    """
    outcomes = {}
    for name in SCHEMES:
        rows = rows_of(transport.rank, torch.bfloat16 if name in IN_BFLOAT16 else torch.float32)
        reduced = reduce_rows(rows, "mean", transport=transport, scheme=name, name=name)
        data = reduced.rows.values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.blake2b(data + str(reduced.rows.ids.tolist()).encode(), digest_size=8).hexdigest()
        outcomes[name] = [digest, reduced.stats.sent_bytes]
    return outcomes


def on_groups(transport: Transport, config: dict[str, Any]) -> dict[str, Any]:
    """`every_scheme` on groups of the first n ranks, for each n of config["sizes"]."""
    outcomes = {}
    for size in config["sizes"]:
        group = dist.new_group(list(range(size)), backend="gloo")
        if transport.rank < size:
            outcomes[str(size)] = every_scheme(TorchTransport(group, timeout_s=60), {})
    dist.barrier()
    return outcomes
