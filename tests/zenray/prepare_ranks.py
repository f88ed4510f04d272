"""What the rank processes of the prepare_model tests run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zenray
from collectives.ddp import hook_of
from collectives.transport import Transport


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8, sparse=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()


def loop(transport: Transport, config: Mapping[str, Any]) -> dict[str, Any]:
    """A user's loop, and the single reductions beside it."""
    model = zenray.prepare_model(Model(), timeout_s=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([step, 10 + transport.rank])).backward()
        zenray.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    explained = zenray.explain(model)
    hook = hook_of(model)
    assert hook is not None
    hook.check_replicas()
    hook.close()

    indices, values = torch.tensor([transport.rank, 7, 7]), torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 0.0]])
    mean = zenray.sparse_all_reduce(indices, values, (9, 2), timeout_s=20)
    total = zenray.sparse_all_reduce(indices, values, (9, 2), op="sum", scheme="column", timeout_s=20)
    empty = zenray.sparse_all_reduce(torch.empty(0, dtype=torch.int64), torch.empty(0, 2), (9, 2), timeout_s=20)
    try:
        zenray.sparse_all_reduce(indices, values, (9, 2) if transport.rank else (10, 2), timeout_s=20)
    except zenray.CollectiveMismatch as error:
        mismatch = str(error)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return {
        "rows": [[r.tensor, r.scheme, r.predicted_bytes, r.observed_bytes, r.observed_s] for r in explained.rows],
        "text": str(explained),
        "mean": mean.to_dense().tolist(),
        "total": total.to_dense().tolist(),
        "ids": total.indices()[0].tolist(),
        "empty_nnz": empty._nnz(),
        "mismatch": mismatch,
        "default_group_still_works": math.isclose(float(ones), transport.size),
    }
