"""What the rank processes of the hook's tests run: small models, trained by zenray and by an exact fp64 oracle."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives.ddp import attach, hook_of
from collectives.replicas import clip_grad_norm_, digest
from collectives.transport import Transport, all_gather_records

STEPS = 4
VOCABULARY = 300
LR = 0.5


class Net(nn.Module):
    """Two sparse tables, one dense table with few touched rows, a linear layer, an empty parameter, an optional table."""

    def __init__(self, *, sparse: bool, with_extra: bool = False, low_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16, sparse=sparse, padding_idx=0)
        self.bag = nn.EmbeddingBag(VOCABULARY, 16, sparse=sparse, mode="sum")
        self.dense_table = nn.Embedding(2048, 16)
        self.linear = nn.Linear(16, 8)
        self.low = nn.Linear(8, 8).to(low_dtype)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.extra = nn.Embedding(VOCABULARY, 16, sparse=sparse) if with_extra else None

    def forward(self, ids: Tensor, use_extra: bool = False) -> Tensor:
        hidden = self.words(ids).mean(1) + self.bag(ids) + self.dense_table(ids * 5).mean(1)
        if use_extra:
            assert self.extra is not None
            hidden = hidden + self.extra(ids).mean(1)
        out = self.linear(hidden.tanh())
        low = self.low(out.to(self.low.weight.dtype)).to(out.dtype)
        return (low.square().mean() + out.sin().mean()) * 10 + self.empty.sum()


@dataclass(frozen=True)
class Case:
    """One training run. batch(rank, step) -> ids; extra_on: ranks whose forward uses the optional table."""

    ddp: Mapping[str, Any] = field(default_factory=dict)
    policy: Any = "auto"
    micro_batches: int = 1
    clip: float | None = None
    extra_on: tuple[int, ...] | None = None
    low_dtype: torch.dtype = torch.float32
    padding_only_on: int | None = None
    tolerance: float = 2e-5


SPARSE_SCHEMES = ("agsparse", "column", "dense")
CASES: dict[str, Case] = {
    "auto": Case(),
    **{f"scheme_{name}": Case(policy=name) for name in SPARSE_SCHEMES},
    "by_name": Case(policy={"words.*": "column", "dense_table.*": "agsparse", "bag.*": "off"}),
    "accumulation": Case(micro_batches=3),
    "many_buckets": Case(ddp={"bucket_cap_mb": 0.001}),
    "bucket_view": Case(ddp={"gradient_as_bucket_view": True}),
    "static_graph": Case(ddp={"static_graph": True}),
    "unused_on_some_ranks": Case(ddp={"find_unused_parameters": True}, extra_on=(0,)),
    "unused_everywhere": Case(ddp={"find_unused_parameters": True}, extra_on=()),
    "mixed_bfloat16": Case(low_dtype=torch.bfloat16, tolerance=2e-2),
    "mixed_float64": Case(low_dtype=torch.float64),
    "clipping": Case(clip=0.05),
    "padding_only": Case(padding_only_on=0),
}


def batch(case: Case, rank: int, step: int, micro: int) -> Tensor:
    if case.padding_only_on == rank:
        return torch.zeros(4, 6, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = (VOCABULARY * torch.rand(4, 6, generator=generator) ** 3).long()
    ids[0, 0] = ids[0, 1] = 0
    return ids


def uses_extra(case: Case, rank: int) -> bool:
    return case.extra_on is not None and rank in case.extra_on


def make(case: Case, *, sparse: bool) -> Net:
    torch.manual_seed(7)
    return Net(sparse=sparse, with_extra=case.extra_on is not None, low_dtype=case.low_dtype)


def train(case: Case, transport: Transport) -> tuple[DistributedDataParallel, list[float]]:
    model = DistributedDataParallel(make(case, sparse=True), **case.ddp)
    attach(model, case.policy, timeout_s=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            with nullcontext() if last else model.no_sync():
                loss = model(batch(case, transport.rank, step, micro), uses_extra(case, transport.rank))
                (loss / case.micro_batches).backward()
        if case.clip is not None:
            norms.append(float(clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
    return model, norms


def oracle(case: Case, size: int) -> tuple[Net, list[float]]:
    """The same steps in float64 on one process: the mean of all ranks' gradients, dense."""
    model = make(case, sparse=False)
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            for micro in range(case.micro_batches):
                loss = model(batch(case, rank, step, micro), uses_extra(case, rank))
                (loss / (size * case.micro_batches)).backward()
        if case.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
    return model, norms


def compare(case: Case, transport: Transport) -> dict[str, Any]:
    model, norms = train(case, transport)
    exact, exact_norms = oracle(case, transport.size)
    expected = exact.state_dict()
    errors = {}
    for name, parameter in model.module.state_dict().items():
        scale = max(1.0, float(expected[name].abs().max())) if parameter.numel() else 1.0
        errors[name] = float((parameter.double() - expected[name]).abs().max()) / scale if parameter.numel() else 0.0
    hook = hook_of(model)
    assert hook is not None
    result = {
        "errors": errors,
        "digests": {name: digest(p) for name, p in model.module.named_parameters()},
        "schemes": {r.tensor: r.scheme for r in hook.records()},
        "norms": [norms, exact_norms],
        "num_backwards": hook.num_backwards,
    }
    hook.close()
    return result


def run_cases(transport: Transport, config: Mapping[str, Any]) -> dict[str, Any]:
    results = {}
    for name in config["cases"]:
        started = time.monotonic()
        results[name] = compare(CASES[name], transport)
        all_gather_records(transport, "metadata", [0])
        print(name, time.monotonic() - started, flush=True)
    return results
