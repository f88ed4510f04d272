"""What the rank processes of the hook's tests run: small models, trained by zenray and by an exact fp64 oracle."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives.ddp import SyncHook, attach, hook_of
from collectives.errors import ZenrayError
from collectives.policy import SyncPolicy
from collectives.replicas import clip_grad_norm_, digest
from collectives.transport import Transport, all_gather_records

STEPS = 4
VOCABULARY = 300
LR = 1.0


class Net(nn.Module):
    """Two sparse tables, a dense one with few touched rows, two linear layers, an empty parameter, an optional table."""

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
        return low.square().mean() + out.sin().mean() + self.empty.sum()


@dataclass(frozen=True)
class Case:
    """One training run. extra_on: ranks whose forward uses the optional table. padding_only_on: a rank without words."""

    ddp: Mapping[str, Any] = field(default_factory=dict)
    policy: SyncPolicy | str | Mapping[str, str] = "auto"
    micro_batches: int = 1
    clip: float | None = None
    extra_on: tuple[int, ...] | None = None
    low_dtype: torch.dtype = torch.float32
    padding_only_on: int | None = None


SPARSE_SCHEMES = ("agsparse", "column", "zen_rows", "hashed_rows", "sparcml", "dense")
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
    "mixed_bfloat16": Case(low_dtype=torch.bfloat16),
    "mixed_float64": Case(low_dtype=torch.float64),
    "clipping": Case(clip=0.3),
    "padding_only_on_one_rank": Case(padding_only_on=0),
}


def batch(case: Case, rank: int, step: int, micro: int = 0) -> Tensor:
    """Token ids [4, 6], skewed, with repetitions and padding."""
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


def train(case: Case, model: DistributedDataParallel, rank: int) -> list[float]:
    """All steps on this rank's batches; returns the norms before clipping."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.micro_batches):
            with nullcontext() if micro == case.micro_batches - 1 else model.no_sync():
                loss = model(batch(case, rank, step, micro), uses_extra(case, rank))
                (loss / case.micro_batches).backward()
        if case.clip is not None:
            norms.append(float(clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
    return norms


def oracle(case: Case, size: int) -> tuple[Net, list[float]]:
    """The same steps in float64 on one process, densely: the mean of all ranks' gradients."""
    model = make(case, sparse=False).double()
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


def reference(case: Case, transport: Transport) -> tuple[nn.Module, list[float]]:
    """The oracle; for 16-bit layers, whose own rounding dwarfs any difference, plain dense DDP."""
    if case.low_dtype != torch.bfloat16:
        return oracle(case, transport.size)
    model = DistributedDataParallel(make(case, sparse=False), **case.ddp)
    return model.module, train(case, model, transport.rank)


def distance(ours: nn.Module, theirs: nn.Module) -> dict[str, float]:
    """Largest difference of each parameter, relative to its largest value or to 1."""
    expected = theirs.state_dict()
    return {
        name: float((value.double() - expected[name].double()).abs().max() / expected[name].abs().max().clamp(min=1))
        for name, value in ours.state_dict().items()
        if value.numel()
    }


def attached(model: nn.Module) -> SyncHook:
    hook = hook_of(model)
    assert hook is not None
    return hook


def compare(case: Case, transport: Transport) -> dict[str, Any]:
    model = DistributedDataParallel(make(case, sparse=True), **case.ddp)
    with attach(model, case.policy, timeout_s=20) as hook:
        norms = train(case, model, transport.rank)
    expected, expected_norms = reference(case, transport)
    words = model.module.words.weight
    return {
        "errors": distance(model.module, expected),
        "moved": distance(make(case, sparse=True), expected),
        "digests": {name: digest(p) for name, p in model.module.named_parameters()},
        "records": [[r.tensor, r.call, r.scheme, r.reason, r.predicted_bytes, r.event] for r in hook.records()],
        "norms": [norms, expected_norms],
        "num_backwards": hook.num_backwards,
        "num_parameters": len(hook.parameters),
        "padding_row_unchanged": bool((words[0] == make(case, sparse=True).words.weight[0]).all()),
        "thread_alive": hook._thread is not None and hook._thread.is_alive(),
    }


# --- single behaviours ------------------------------------------------------------------------------------------------


def synchronised(case: Case | None = None, **policy: Any) -> DistributedDataParallel:
    """A fresh model under zenray; close its hook at the end."""
    case = case or Case()
    model = DistributedDataParallel(make(case, sparse=True), **case.ddp)
    attach(model, SyncPolicy(**policy) if policy else case.policy, timeout_s=20)
    return model


def error_of(body: Callable[[], object]) -> list[str]:
    try:
        body()
    except ZenrayError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def one_gradient(transport: Transport) -> dict[str, Any]:
    """A gradient as the optimizer sees it: coalesced, sparse, the mean, without the padding row."""
    case, model = Case(), synchronised()
    model(batch(case, transport.rank, 0)).backward()
    grad = model.module.words.weight.grad
    exact = make(case, sparse=False).double()
    for rank in range(transport.size):
        (exact(batch(case, rank, 0)) / transport.size).backward()
    touched = {int(i) for rank in range(transport.size) for i in batch(case, rank, 0).unique()} - {0}
    attached(model).close()
    return {
        "layout": str(grad.layout),
        "is_coalesced": grad.is_coalesced(),
        "ids_are_the_touched_ones": set(grad.indices()[0].tolist()) == touched,
        "error": float((grad.to_dense() - exact.words.weight.grad).abs().max()),
        "largest": float(exact.words.weight.grad.abs().max()),
    }


def sparse_adam(transport: Transport) -> dict[str, Any]:
    """SparseAdam for the tables, Adam for the rest; in step 1 all ranks see nothing but padding."""
    case, model = Case(), synchronised()
    tables = [model.module.words.weight, model.module.bag.weight]
    rest = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(rest, lr=0.1)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids = batch(case, transport.rank, step)
        model(torch.zeros_like(ids) if step == 1 else ids).backward()
        if step == 1:
            words_k = model.module.words.weight.grad._nnz()
        for optimizer in optimizers:
            optimizer.step()
    attached(model).close()
    return {"words_k": words_k, "digests": {name: digest(p) for name, p in model.module.named_parameters()}}


def loss_scaling(transport: Transport) -> dict[str, Any]:
    """In step 1 rank 0 alone overflows: every rank must skip that step and halve its scale."""
    case, model = Case(), synchronised()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    digests, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and transport.rank == 0 else 1.0
        scaler.scale(model(batch(case, transport.rank, step)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        digests.append(digest(model.module.words.weight))
        scales.append(scaler.get_scale())
    attached(model).close()
    return {"digests": digests, "scales": scales}


def diverged_replicas(transport: Transport) -> dict[str, Any]:
    """Rank 1 changes one value behind our back: found on demand, and by itself every other backward pass."""
    case, model = Case(), synchronised(check_replicas_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    attached(model).check_replicas()

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(case, transport.rank, number)).backward()
        optimizer.step()

    step(0)
    if transport.rank == 1:
        with torch.no_grad():
            model.module.linear.weight[0, 0] += 1e-3
    step(1)
    automatic = error_of(lambda: step(2))
    later = error_of(lambda: attached(model).check_replicas())
    attached(model).close()
    fresh = synchronised()
    if transport.rank == 1:
        with torch.no_grad():
            fresh.module.words.weight[3, 3] += 1e-3
    on_demand = error_of(lambda: attached(fresh).check_replicas())
    attached(fresh).close()
    return {"automatic": automatic, "later": later, "on_demand": on_demand}


class Float64Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum()


def bad_inputs(transport: Transport) -> dict[str, Any]:
    """Errors of the communication thread end backward on every rank and name the parameter."""
    model = DistributedDataParallel(Float64Table())
    hook = attach(model, timeout_s=20)
    unsupported = error_of(lambda: model(torch.tensor([1, 2])).backward())
    hook.close()
    model = synchronised()
    twice = error_of(lambda: attach(model))
    model(batch(Case(), transport.rank, 0)).backward()
    if transport.rank == 0:
        attached(model).load_state_dict({"planner": {"size": transport.size, "digest": 0, "tensors": {}, "shapes": {}}})
    differing = error_of(lambda: model(batch(Case(), transport.rank, 1)).backward())
    after = error_of(lambda: model(batch(Case(), transport.rank, 1)).backward())
    attached(model).close()
    model = synchronised()
    attached(model).close()
    attached(model).close()
    closed = error_of(lambda: model(batch(Case(), transport.rank, 0)).backward())
    checked = error_of(attached(model).check_replicas)
    return {
        "unsupported": unsupported,
        "twice": twice,
        "differing": differing,
        "after": after,
        "closed": closed,
        "checked": checked,
    }


def changed_policy(transport: Transport) -> list[str]:
    """The policy changes between two steps, behind the one hook that DDP accepts."""
    case, model = Case(), synchronised(scheme="column")
    for step, policy in enumerate(("column", "agsparse", "off", {"words.*": "sparcml"})):
        attached(model).policy = policy
        model.zero_grad()
        model(batch(case, transport.rank, step)).backward()
    attached(model).close()
    return [r.scheme for r in attached(model).records() if r.tensor == "words.weight"]


def restored_state(transport: Transport) -> dict[str, Any]:
    """The planner's state goes through JSON into a new hook, which then decides as the old one would have."""
    case, model = Case(), synchronised()
    for step in range(3):
        model.zero_grad()
        model(batch(case, transport.rank, step)).backward()
    state = json.loads(json.dumps(attached(model).state_dict()))
    restored = synchronised()
    attached(restored).load_state_dict(state)
    same = attached(restored).state_dict() == attached(model).state_dict()
    restored(batch(case, transport.rank, 3)).backward()
    calls = {r.tensor: r.call for r in attached(restored).records()}
    attached(model).close()
    attached(restored).close()
    return {"same": same, "calls": calls, "names": sorted(state["planner"]["tensors"])}


class Zipf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, 32, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()


def predictions(transport: Transport) -> dict[str, Any]:
    """Six steps on a stationary Zipf law under every scheme: what was predicted and what was counted."""
    p = (torch.arange(1, 20_001) + 2.7) ** -1.2
    generator = torch.Generator().manual_seed(transport.rank)
    result = {}
    for scheme in SPARSE_SCHEMES:
        model = DistributedDataParallel(Zipf())
        with attach(model, scheme, timeout_s=20) as hook:
            for _ in range(6):
                model.zero_grad()
                model(torch.multinomial(p, 3000, replacement=True, generator=generator)).backward()
        result[scheme] = [asdict(record) for record in hook.records()]
    return result


BEHAVIOURS = (
    one_gradient,
    sparse_adam,
    loss_scaling,
    diverged_replicas,
    bad_inputs,
    changed_policy,
    restored_state,
    predictions,
)


def run_all(transport: Transport, config: Mapping[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    todo = {name: lambda case=case: compare(case, transport) for name, case in CASES.items()}
    todo |= {behaviour.__name__: lambda behaviour=behaviour: behaviour(transport) for behaviour in BEHAVIOURS}
    for name, body in todo.items():
        if name in config["without"]:
            continue
        started = time.monotonic()
        results[name] = body()
        all_gather_records(transport, "metadata", [0])
        print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
    return results


def die_in_backward(transport: Transport, config: Mapping[str, Any]) -> list[str]:
    """The last rank is killed while the others reduce; they must raise, naming a parameter, before the deadline."""
    case, model = Case(), synchronised()
    model(batch(case, transport.rank, 0)).backward()
    if transport.rank == transport.size - 1:
        model.module.words.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    error = error_of(lambda: model(batch(case, transport.rank, 1)).backward())
    elapsed_s = time.monotonic() - started
    attached(model).close()
    return [*error, f"{elapsed_s:.3f}"]
