"""Traced against real training steps on CPU: the exact peak of torch's allocator, from the profiler's memory events."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from placement.catalogue import gpu_type
from placement.errors import PlacementError
from placement.traced import default_loss, default_optimizer, predict_module, repeated_block

MIB = 1 << 20


class Block(nn.Module):
    """A pre-norm transformer layer. Attention: fused (causal), or eager with its scores kept."""

    def __init__(self, hidden: int, heads: int, dropout: float, eager: bool = False, mlp: nn.Module | None = None):
        super().__init__()
        self.heads, self.dropout, self.eager = heads, dropout, eager
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = mlp or nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        if self.eager:
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(h // self.heads)
            mask = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
            y = F.dropout(scores.masked_fill(mask, -math.inf).softmax(-1), self.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, s, h)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Learned positions, tied head, loss in fp32."""

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, seq: int, dropout: float = 0.1, **block: Any):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads, dropout, **block) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(self.embed(ids) + positions, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


class Mixture(nn.Module):
    """Top-2 of experts with a fixed capacity, one batched product for all experts."""

    def __init__(self, hidden: int, ffn: int, num_experts: int):
        super().__init__()
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, hidden, ffn) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, ffn, hidden) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights = self.router(flat).softmax(-1)
        capacity = 2 * len(flat) // weights.shape[1]
        chosen, tokens = weights.t().topk(capacity, dim=1)
        out = F.silu(flat[tokens] @ self.up) @ self.down
        out = (out * chosen.unsqueeze(-1)).reshape(-1, flat.shape[1])
        return torch.zeros_like(flat).index_add(0, tokens.reshape(-1), out).view_as(x)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank trainable one beside it."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Gated(nn.Module):
    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def with_mixture() -> nn.Module:
    model = GPT(512, 64, 2, 4, 64, dropout=0.0)
    for block in model.blocks:
        block.mlp = Mixture(64, 128, 4)
    return model


def with_adapters() -> nn.Module:
    model = GPT(512, 128, 2, 4, 64).requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv, 8)
    return model


def with_gates() -> nn.Module:
    model = GPT(512, 96, 2, 4, 64, dropout=0.0)
    for block in model.blocks:
        block.mlp = Gated(96, 256)
    return model


def in_half() -> nn.Module:
    return GPT(512, 128, 2, 4, 64).to(torch.bfloat16)


class VisionTransformer(nn.Module):
    """Patches by one convolution, a class token, learned positions."""

    def __init__(self, hidden: int, layers: int, size: int, patch: int):
        super().__init__()
        self.patch = nn.Conv2d(3, hidden, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, hidden))
        self.blocks = nn.Sequential(*(Block(hidden, 4, 0.0, eager=True) for _ in range(layers)))
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(400, 48), nn.GRUCell(48, 64), nn.Linear(64, 400)

    def forward(self, ids: Tensor) -> Tensor:
        state = torch.zeros(ids.shape[0], 64, device=ids.device)
        loss = torch.zeros((), device=ids.device)
        for column in range(ids.shape[1] - 1):
            state = self.cell(self.embed(ids[:, column]), state)
            loss = loss + F.cross_entropy(self.head(state), ids[:, column + 1])
        return loss


def ids(vocab: int = 512, batch: int = 4, seq: int = 64) -> tuple[Tensor]:
    return (torch.randint(0, vocab, (batch, seq)),)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@dataclass
class Example:
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]] = ids
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(default=default_optimizer)


MODELS = {
    "fused attention": Example(lambda: GPT(512, 128, 6, 4, 64)),
    "eager attention": Example(lambda: GPT(512, 64, 2, 4, 128, eager=True), lambda: ids(seq=128)),
    "no dropout, large vocabulary": Example(lambda: GPT(8000, 64, 2, 4, 64, dropout=0.0), lambda: ids(8000)),
    "bf16": Example(in_half),
    "gated MLP": Example(with_gates),
    "mixture of experts": Example(with_mixture),
    "low-rank adapters on frozen weights": Example(with_adapters),
    "vision transformer": Example(lambda: VisionTransformer(64, 5, 64, 8), lambda: (torch.randn(8, 3, 64, 64),)),
    "recurrent": Example(Recurrent, lambda: ids(400, 16, 12)),
    "SGD with momentum": Example(lambda: GPT(512, 128, 2, 4, 64), ids, momentum),
    "optimizer step above backward": Example(
        lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), lambda: (torch.randn(2, 512),)
    ),
}


def real_peak(model: nn.Module, inputs: tuple[Tensor, ...], make: Callable[[Any], torch.optim.Optimizer]) -> int:
    """Exact peak of the second training step: what is held before it, and the highest sum of memory events in it."""
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])

    def step() -> None:
        loss = default_loss(model(*inputs))
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    state = [leaf for group in optimizer.state.values() for leaf in group.values() if isinstance(leaf, Tensor)]
    held = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *inputs, *state])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return held + peak


@pytest.mark.parametrize("name", MODELS)
def test_traced_peaks_are_the_real_ones(name):
    example = MODELS[name]
    torch.manual_seed(0)
    model, inputs = example.build(), example.inputs()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    traced = predict_module(model, inputs, optimizer=example.optimizer, device="cpu")
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert traced.extrapolated == (repeated_block(model) is not None)
    assert traced.allocated == pytest.approx(real_peak(model, inputs, example.optimizer), rel=0.01)


def test_a_small_gpt_needs_what_was_measured_elsewhere():
    """123.4 MiB for (V, h, l, a, s, b) = (1000, 256, 2, 4, 256, 8) in fp32 with Adam."""
    traced = predict_module(GPT(1000, 256, 2, 4, 256), ids(1000, 8, 256), device="cpu")
    assert traced.allocated / MIB == pytest.approx(123.4, abs=0.1)


def test_twelve_layers_follow_from_two_and_three():
    model, inputs = GPT(512, 64, 12, 4, 64), ids()
    few = predict_module(model, inputs)
    whole = predict_module(model, inputs, full=True)
    assert (few.depths, few.extrapolated) == ((2, 3, 4), True)
    assert (whole.depths, whole.extrapolated) == ((12,), False)
    assert few.forward_backward.total == pytest.approx(whole.forward_backward.total, rel=0.005)
    assert few.step.total == pytest.approx(whole.step.total, rel=0.005)
    assert few.reserved == pytest.approx(whole.reserved, rel=0.25, abs=40 * MIB)


@pytest.mark.slow
def test_forty_eight_layers_follow_from_two_and_three():
    """GPT-2 XL, built without memory; its full trace takes about half a minute."""
    with torch.device("meta"):
        model = GPT(50257, 1600, 48, 25, 1024)
    inputs = (torch.zeros(4, 1024, dtype=torch.long, device="meta"),)
    few = predict_module(model, inputs)
    whole = predict_module(model, inputs, full=True, timeout_s=600)
    assert few.allocated == pytest.approx(whole.allocated, rel=0.005)
    assert few.reserved == pytest.approx(whole.reserved, rel=0.05)


def test_a_model_without_memory_is_traced_like_a_real_one():
    with torch.device("meta"):
        model = GPT(512, 64, 2, 4, 64)
    assert predict_module(model, ids()).allocated == predict_module(GPT(512, 64, 2, 4, 64), ids()).allocated


def test_cuda_keeps_a_byte_where_the_cpu_keeps_a_float_of_noise():
    model, inputs = GPT(512, 64, 2, 4, 64), ids()
    cpu, cuda = (predict_module(model, inputs, device=device) for device in ("cpu", "cuda"))
    dropped = 5 * 4 * 64 * 64
    difference = cpu.forward_backward.total - cuda.forward_backward.total
    assert 2 * dropped < difference < 4 * dropped


def test_frozen_weights_carry_neither_gradients_nor_state():
    model = with_adapters()
    traced = predict_module(model, ids(), device="cpu")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert traced.step.gradients == trained
    assert traced.step.optimizer == pytest.approx(2 * trained, rel=0.01)


def test_the_peak_is_the_larger_of_both_phases():
    example = MODELS["optimizer step above backward"]
    traced = predict_module(example.build(), example.inputs(), device="cpu")
    assert traced.peak == traced.step
    prediction = traced.prediction(gpu_type("H100"))
    assert prediction.peak_phase == "optimizer"
    assert prediction.allocated == traced.allocated + prediction.workspace
    assert prediction.allocated < prediction.reserved < prediction.nvml < prediction.nvml_upper


class Uneven(GPT):
    """Each further layer works on a longer sequence: memory is not linear in depth."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(torch.cat([x, x], dim=1)[:, : x.shape[1] + 32])
        return x.mean()


def test_a_model_that_is_not_linear_in_depth_is_traced_in_full():
    model = Uneven(64, 32, 5, 4, 512)
    traced = predict_module(model, ids(64, 2, 32), device="cpu")
    assert (traced.depths, traced.extrapolated) == ((5,), False)


def test_a_second_question_is_answered_from_the_cache():
    cache: dict[str, Any] = {}
    model, inputs = GPT(64, 32, 2, 4, 16), ids(64, 2, 16)
    first = predict_module(model, inputs, cache=cache)
    assert predict_module(model, inputs, cache=cache) is first
    assert len(cache) == 1
    predict_module(model, ids(64, 3, 16), cache=cache)
    predict_module(model, inputs, optimizer=momentum, cache=cache)
    model.blocks[0].requires_grad_(False)
    predict_module(model, inputs, cache=cache)
    assert len(cache) == 4


def aborts(ids: Tensor) -> Tensor:
    import os

    os._exit(134)


def test_an_abort_of_the_tracer_is_an_error_not_an_end():
    model = nn.Linear(4, 4)
    with pytest.raises(PlacementError, match="exit code 134"):
        predict_module(model, (torch.zeros(2, 4),), loss=aborts)


def test_a_slow_trace_ends_at_its_deadline():
    def sleeps(output: Tensor) -> Tensor:
        import time

        time.sleep(60)
        return output.mean()

    with pytest.raises(PlacementError, match="time limit"):
        predict_module(nn.Linear(4, 4), (torch.zeros(2, 4),), loss=sleeps, timeout_s=1.0)


def test_what_cannot_be_trained_says_why():
    with pytest.raises(PlacementError, match="nothing to train"):
        predict_module(nn.Linear(4, 4).requires_grad_(False), (torch.zeros(2, 4),))
    with pytest.raises(PlacementError, match="same reduction dim"):
        predict_module(nn.Linear(4, 4), (torch.zeros(2, 5),))
