"""Every scheme keeps replicas bit-identical: 200 optimizer steps on three ranks, compared by digest."""

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.replicas import check_replicas, digest
from collectives.sparse.all_reduce import sparse_all_reduce
from collectives.sparse.schemes import SCHEMES
from collectives.transport import LocalTransport, run_local

RANKS, ROWS, WIDTH, STEPS = 3, 50, 6, 200


def gradient(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A few rows, with duplicates, never the same on two ranks; rank 1 has none in every seventh step."""
    rng = np.random.default_rng((rank, step))
    count = 0 if rank == 1 and step % 7 == 0 else int(rng.integers(1, 9))
    ids = torch.from_numpy(rng.integers(0, ROWS, count))
    return ids, torch.from_numpy(rng.standard_normal((count, WIDTH)).astype(np.float32))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_two_hundred_steps_leave_the_same_bits_everywhere(scheme: str) -> None:
    def train(transport: LocalTransport) -> tuple[str, Tensor]:
        table = torch.zeros(ROWS, WIDTH)
        for step in range(STEPS):
            ids, values = gradient(transport.rank, step)
            reduced = sparse_all_reduce(
                ids, values, (ROWS, WIDTH), "mean", transport=transport, scheme=scheme, step=step
            )
            table[reduced.rows.ids] -= 0.1 * reduced.rows.values
        check_replicas({"table": table}, transport)
        return digest(table), table

    digests, tables = zip(*run_local(RANKS, train), strict=True)
    assert len(set(digests)) == 1
    oracle = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for step in range(STEPS):
        for rank in range(RANKS):
            ids, values = gradient(rank, step)
            oracle.index_add_(0, ids, values.double(), alpha=-0.1 / RANKS)
    torch.testing.assert_close(tables[0].double(), oracle, rtol=1e-4, atol=1e-5)
