"""What the rank processes of the compression tests run: the same small models under torch's hooks and under zenray."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import zenray
from collectives.ddp import SyncHook, attach, reshard_states
from collectives.policy import SyncPolicy
from collectives.replicas import digest
from collectives.transport import Transport


class Net(nn.Module):
    """Two wide layers, over 64 KiB each, with biases and a norm between them."""

    def __init__(self, *, low: torch.dtype = torch.float32, extra: nn.Module | None = None):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.second = nn.Linear(64, 384), nn.LayerNorm(384), nn.Linear(384, 96)
        self.second.to(low)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return self.second(hidden.to(self.second.weight.dtype)).float()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def exact_gradients(size: int, step: int, factor: float = 1.0) -> dict[str, Tensor]:
    model = Net().double()
    for rank in range(size):
        (model(batch(rank, step).double()).square().mean() * factor / size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fixed(codec: str, **options: Any) -> SyncPolicy:
    return SyncPolicy(codecs=(("dp_grad", (codec,)),), fixed=True, **({"dense_steps": 0} | options))


def under_zenray(policy: SyncPolicy, model: nn.Module | None = None, **ddp: Any) -> tuple[nn.Module, SyncHook]:
    wrapped = DistributedDataParallel(model or Net(), **ddp)
    return wrapped, attach(wrapped, policy, timeout_s=30)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}  # type: ignore[union-attr]


def errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    return {n: float((g.double() - exact[n]).norm() / exact[n].norm().clamp(min=1e-30)) for n, g in found.items()}


def outcome(body: Callable[[], object]) -> str:
    """The name of the exception, and its first words, or what `body` returns."""
    try:
        return str(body())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:160]


# --- torch's hooks, as they are ---------------------------------------------------------------------------------------


class WithZeroLayer(nn.Module):
    """One layer takes part, but its gradient is zero everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.idle = nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + 0.0 * self.idle(x)


def zero_layer_steps(model: nn.Module, steps: int) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 200, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
    idle = model.module.idle.weight.grad
    return "nan" if not bool(idle.isfinite().all()) else ("zero" if not bool(idle.any()) else "other")


def torch_power_state(start: int = 2) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=start)


def zero_gradient(rank: int) -> dict[str, str]:
    stock = DistributedDataParallel(WithZeroLayer())
    stock.register_comm_hook(torch_power_state(), powerSGD_hook.powerSGD_hook)
    ours, hook = under_zenray(fixed("powersgd"), WithZeroLayer())
    found = {"torch": zero_layer_steps(stock, 4), "zenray": zero_layer_steps(ours, 4)}
    found["choice"] = hook.segments()[0].choice
    hook.close()
    return found


def hooks_that_refuse_gloo(rank: int) -> dict[str, str]:
    stock = DistributedDataParallel(Net())

    def bf16() -> str:
        stock.register_comm_hook(None, default_hooks.bf16_compress_hook)
        loss_of(stock, rank, 0).backward()
        return "works"

    found = {"torch": outcome(bf16)}
    for codec in ("bf16", "int8b"):
        model, hook = under_zenray(fixed(codec))
        for step in range(2):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        found[codec] = str(max(errors(gradients(model), exact_gradients(dist.get_world_size(), 1)).values()))
        hook.close()
    return found


def half_precision_range(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label, factor in (("large", 1e10), ("tiny", 1e-9)):
        stock = DistributedDataParallel(Net())
        stock.register_comm_hook(None, default_hooks.fp16_compress_hook)
        (loss_of(stock, rank, 0) * factor).backward()
        weight = stock.module.first.weight.grad
        model, hook = under_zenray(fixed("fp16"))
        for step in range(2):
            model.zero_grad()
            (loss_of(model, rank, step) * factor).backward()
        record = hook.role_record()
        ours = model.module.first.weight.grad
        found[label] = {
            "torch": "infinite"
            if not bool(weight.isfinite().all())
            else f"{float((weight == 0).float().mean()):.2f} zero",
            "zenray_finite": bool(ours.isfinite().all()),
            "nonfinite_calls": record.nonfinite_calls,
            "underflow_calls": record.underflow_calls,
        }
        hook.close()
    return found


def second_hook(rank: int) -> dict[str, Any]:
    stock = DistributedDataParallel(Net())
    stock.register_comm_hook(None, default_hooks.fp16_compress_hook)
    twice = outcome(lambda: stock.register_comm_hook(None, default_hooks.fp16_compress_hook))
    model, hook = under_zenray(fixed("int8b"))
    choices = []
    for step, policy in enumerate((fixed("int8b"), fixed("int8b"), fixed("bf16"), SyncPolicy("off"))):
        hook.policy = policy
        model.zero_grad()
        loss_of(model, rank, step).backward()
        choices.append(sorted({row.choice.partition("/")[0] for row in hook.segments()}))
    exact = errors(gradients(model), exact_gradients(dist.get_world_size(), 3))
    hook.close()
    return {"torch": twice, "choices": choices, "last_error": max(exact.values())}


def state_with_other_buckets(rank: int) -> dict[str, Any]:
    state = torch_power_state(start=2)
    for cap in (25.0, 0.05):
        stock = DistributedDataParallel(Net(), bucket_cap_mb=cap)
        stock.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        def steps(model: nn.Module = stock) -> str:
            for step in range(4):
                model.zero_grad()
                loss_of(model, rank, step).backward()
            return "works"

        torch_says = outcome(steps)
    first, hook = under_zenray(fixed("powersgd"))
    for step in range(3):
        first.zero_grad()
        loss_of(first, rank, step).backward()
    saved = pickle.loads(pickle.dumps(hook.state_dict()))
    hook.close()
    second, other = under_zenray(fixed("powersgd"), bucket_cap_mb=0.05)
    other.load_state_dict(saved)
    for step in range(3):
        second.zero_grad()
        loss_of(second, rank, step).backward()
    names = sorted(other.state_dict()["feedback"]["residuals"])
    finite = all(bool(g.isfinite().all()) for g in gradients(second).values())
    other.close()
    return {"torch": torch_says, "residuals": names, "finite": finite, "buckets": len(other.segments())}


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.nothing.sum() + x


class WithEmpty(Net):
    def __init__(self) -> None:
        super().__init__(extra=Empty())

    def forward(self, x: Tensor) -> Tensor:
        assert self.extra is not None
        return self.extra(super().forward(x))


def zero_size_parameter(rank: int) -> dict[str, Any]:
    stock = DistributedDataParallel(WithEmpty())
    stock.register_comm_hook(torch_power_state(), powerSGD_hook.powerSGD_hook)

    def steps(model: nn.Module = stock) -> str:
        for step in range(4):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        return "works"

    model, hook = under_zenray(fixed("powersgd"), WithEmpty())
    found = {"torch": outcome(steps), "zenray": outcome(lambda: steps(model))}
    hook.close()
    return found


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head = nn.Embedding(300, 64, sparse=True), nn.Linear(64, 512)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()


def sparse_embedding(rank: int) -> dict[str, Any]:
    ids = torch.tensor([rank, 7, 9])
    stock = DistributedDataParallel(Words())
    stock.register_comm_hook(None, default_hooks.fp16_compress_hook)
    torch_says = outcome(lambda: stock(ids).backward() or "works")
    model, hook = under_zenray(fixed("int8b"), Words())
    for _ in range(2):
        model.zero_grad()
        model(ids).backward()
    exact = Words().double()
    for other in range(dist.get_world_size()):
        (exact(torch.tensor([other, 7, 9])) / dist.get_world_size()).backward()
    found = model.module.table.weight.grad
    hook.close()
    return {
        "torch": torch_says,
        "layout": str(found.layout),
        "table_error": float((found.to_dense() - exact.table.weight.grad.to_dense()).abs().max()),
        "head": hook.segments()[0].choice,
        "head_error": errors({"w": model.module.head.weight.grad}, {"w": exact.head.weight.grad})["w"],
    }


def mixed_types_and_accumulation(rank: int) -> dict[str, Any]:
    size, micro = dist.get_world_size(), 3
    model, hook = under_zenray(fixed("int4b", error_feedback=True), Net(low=torch.bfloat16))
    before, calls = [], []
    for step in range(3):
        model.zero_grad()
        for number in range(micro):
            with nullcontext() if number == micro - 1 else model.no_sync():
                (loss_of(model, rank, micro * step + number) / micro).backward()
        calls.append(hook.num_backwards)
        before.append(hook.role_record().residual_bytes)
    exact = {n: torch.zeros_like(g) for n, g in exact_gradients(size, 0).items()}
    for number in range(micro):
        for name, g in exact_gradients(size, 2 * micro + number).items():
            exact[name] += g / micro
    found = errors(gradients(model), exact)
    rows = {name: row.choice.partition("/")[0] for row in hook.segments() for name in row.names}
    hook.close()
    return {"calls": calls, "errors": found, "choices": rows, "residual_bytes": before[-1]}


def resume(rank: int) -> dict[str, Any]:
    """Six steps in one go, and three, a restart through pickle, and three more: the same parameters, bit by bit."""
    policy = fixed("int4b", error_feedback=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    def make() -> tuple[nn.Module, SyncHook, torch.optim.Optimizer]:
        model, hook = under_zenray(policy)
        return model, hook, torch.optim.SGD(model.parameters(), lr=0.5)

    straight, hook, optimizer = make()
    train(straight, optimizer, range(3))
    saved = pickle.loads(pickle.dumps((straight.module.state_dict(), hook.state_dict())))
    # DDP forms its buckets anew after the first backward pass, so the first step after a restart is plain too.
    hook.close()
    results = []
    for _ in range(2):
        model, other, optimizer = make()
        model.module.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        train(model, optimizer, range(3, 6))
        results.append({n: digest(p) for n, p in model.module.named_parameters()})
        other.close()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, saved[1])
    together = reshard_states(gathered)
    owed = torch.stack([torch.cat([p[2] for p in s["feedback"]["residuals"]["first.weight"]]) for s in gathered])
    kept = torch.cat([p[2] for p in together["feedback"]["residuals"]["first.weight"]])
    return {
        "same": results[0] == results[1],
        "owed": float(owed.norm()),
        "mean_error": float((owed.mean(0) - kept).norm()),
    }


def loss_scale(rank: int) -> dict[str, Any]:
    """Rank 0 overflows in step 2: the scaler skips it on all ranks, and residuals follow the halved scale."""
    model, hook = under_zenray(fixed("int4b", error_feedback=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    hook.loss_scale = 8.0
    norms, digests = [], []
    for step in range(4):
        optimizer.zero_grad()
        factor = float("inf") if step == 2 and rank == 0 else 1.0
        scaler.scale(loss_of(model, rank, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        hook.loss_scale = scaler.get_scale()
        norms.append(hook._reducer.dense.feedback.norm())
        digests.append(digest(model.module.first.weight))
    hook.close()
    return {"norms": norms, "digests": digests, "scale": scaler.get_scale()}


def explained(rank: int) -> dict[str, Any]:
    """What a user is told about a model with a codec, and about one whose communication is hidden."""
    model, hook = under_zenray(fixed("int8b"))
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    told = zenray.explain(model)
    found: dict[str, Any] = {"text": str(told), "rows": {r.tensor: [r.scheme, r.observed_bytes] for r in told.rows}}
    found["ratio"] = told.roles[0].ratio
    hook.close()
    model, hook = under_zenray(SyncPolicy(codecs=(("dp_grad", ("int8b",)),)))
    for step in range(8):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        hook._reducer.dense.planner.note_step(0.0, 1.0)
    found["hidden"] = [row.reason for row in zenray.explain(model).rows if row.tensor == "first.weight"]
    hook.close()
    return found


CASES = (
    explained,
    zero_gradient,
    hooks_that_refuse_gloo,
    half_precision_range,
    second_hook,
    state_with_other_buckets,
    zero_size_parameter,
    sparse_embedding,
    mixed_types_and_accumulation,
    resume,
    loss_scale,
)


def run_all(transport: Transport, config: Mapping[str, Any]) -> dict[str, Any]:
    return {case.__name__: case(transport.rank) for case in CASES}


def torch_quantisation(transport: Transport, config: Mapping[str, Any]) -> str:
    """In a launch of its own: the failure may end the process."""
    stock = DistributedDataParallel(Net())
    hooks = {"tensor": "quantization_pertensor_hook", "channel": "quantization_perchannel_hook"}
    stock.register_comm_hook(dist.group.WORLD, getattr(quantization_hooks, hooks[config["per"]]))
    loss_of(stock, transport.rank, 0).backward()
    return "works"
