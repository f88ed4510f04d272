"""The distributed layer against one process that holds all tokens and all experts, in float64."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from collectives import moe
from collectives.errors import CollectiveMismatch
from collectives.expert_state import ExpertState
from collectives.moe import COMBINE, DISPATCH, MoELayer, Routes, ScoredPairs, Selection, Selector, places
from collectives.transport import LocalGroup, LocalTransport, run_local
from placement.experts import POLICIES
from placement.quotas import PairMemory
from placement.quotas import select as draw
from placement.split import Ranks, token_map

WIDTH, HIDDEN, EXPERTS, TOP_K = 6, 10, 7, 2


@dataclass
class Whole:
    """The oracle's parameters: w1 [E, d, f], w2 [E, f, d], gate [E, d]."""

    w1: Tensor
    w2: Tensor
    gate: Tensor


def whole_model() -> Whole:
    generator = torch.Generator().manual_seed(3)  # ranks are threads: the global generator is shared
    shape = [(EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH)]
    return Whole(*(torch.randn(s, dtype=torch.float64, generator=generator).mul_(0.5).requires_grad_() for s in shape))


def oracle(model: Whole, x: Tensor) -> Tensor:
    probabilities = F.softmax(x @ model.gate.T, dim=-1)
    top = probabilities.topk(TOP_K, dim=-1)
    gates = top.values / top.values.sum(1, keepdim=True)
    outputs = torch.einsum("tef,efd->ted", F.gelu(torch.einsum("td,edf->tef", x, model.w1)), model.w2)
    chosen = outputs.gather(1, top.indices[:, :, None].expand(-1, -1, WIDTH))
    return (gates[:, :, None] * chosen).sum(1)


def planner(
    policy: str, num_ranks: int, slots: int, quota: int | None = None, select: Selector | None = None
) -> Callable[[np.ndarray], Routes]:
    ranks = Ranks.equal(num_ranks, slots)

    def plan(counts: np.ndarray) -> Routes:
        hosts = POLICIES[policy].hosts(np.arange(EXPERTS)[None] % 3 + 1, ranks, None)
        split = POLICIES[policy].split(hosts, counts.sum(0), ranks)
        pairs = token_map(counts, split.pairs, ranks)
        kept = None if quota is None else np.minimum(quota, pairs.sum(2))
        return Routes(pairs, hosts, kept, select)

    return plan


def make_layer(
    transport: LocalTransport,
    policy: str,
    slots: int,
    quota: int | None = None,
    select: Selector | None = None,
    **options: object,
) -> tuple[MoELayer, ExpertState, np.ndarray]:
    model, plan = whole_model(), planner(policy, transport.size, slots, quota, select)
    layer = MoELayer(WIDTH, HIDDEN, EXPERTS, slots, TOP_K, transport=transport, plan=plan, **options).double()  # type: ignore[arg-type]
    layer.router.gate.weight.data.copy_(model.gate)
    state = ExpertState([layer.w1, layer.w2], EXPERTS, transport, lr=0.01)
    for expert in range(EXPERTS):
        state.fill(expert, torch.cat([model.w1[expert].flatten(), model.w2[expert].flatten()]).detach())
    hosts = plan(np.zeros((transport.size, EXPERTS), np.int64)).slots
    state.push_weights(hosts)
    return layer, state, hosts


def tokens(size: int, empty_rank: int | None = None) -> list[Tensor]:
    torch.manual_seed(11)
    lengths = [0 if rank == empty_rank else 5 + 3 * rank for rank in range(size)]
    return [torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths]


@pytest.mark.parametrize(
    ("size", "slots", "policy", "empty_rank"),
    [
        (1, 7, "static", None),
        (2, 5, "robust", None),
        (2, 4, "symi_dropless", 1),
        (3, 4, "robust", 0),
        (4, 3, "robust", None),
        (4, 2, "static", 2),
        (5, 3, "eplb", None),
        (8, 2, "robust", 5),
    ],
)
@pytest.mark.parametrize("keep_hidden", [True, False])
def test_forward_and_gradients_equal_one_process(
    size: int, slots: int, policy: str, empty_rank: int | None, keep_hidden: bool
) -> None:
    parts = tokens(size, empty_rank)
    model = whole_model()
    inputs = [part.clone().requires_grad_() for part in parts]
    output = oracle(model, torch.cat(inputs))
    target = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    (output * target).sum().backward()
    offsets = np.cumsum([0] + [len(part) for part in parts])

    def body(transport: LocalTransport) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        layer, state, hosts = make_layer(transport, policy, slots, keep_hidden=keep_hidden)
        x = parts[transport.rank].clone().requires_grad_()
        y, _ = layer(x)
        (y * target[offsets[transport.rank] : offsets[transport.rank + 1]]).sum().backward()
        assert layer.w1.grad is not None, "zeros, never None"
        state.reduce_gradients(hosts)
        assert x.grad is not None
        assert layer.router.gate.weight.grad is not None
        return (
            y.detach(),
            x.grad,
            layer.router.gate.weight.grad,
            state.gradient.clone(),
            float(state.squared_norms().sum()),
        )

    results = run_local(size, body)
    exact = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(torch.cat([r[0] for r in results]), output.detach(), **exact)
    expected_dx = torch.cat([x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs])
    torch.testing.assert_close(torch.cat([r[1] for r in results]), expected_dx, **exact)
    torch.testing.assert_close(torch.stack([r[2] for r in results]).sum(0), model.gate.grad, **exact)
    assert model.w1.grad is not None
    assert model.w2.grad is not None
    flat = torch.cat([model.w1.grad.flatten(1), model.w2.grad.flatten(1)], dim=1)
    torch.testing.assert_close(torch.cat([r[3] for r in results], dim=1), flat, **exact)
    assert len({r[4] for r in results}) == 1
    assert results[0][4] == pytest.approx(float(flat.square().sum()), rel=1e-10)


def sampler(draw_number: int, rank: int) -> Selector:
    def select(pairs: ScoredPairs) -> Selection:
        index, weight, start = [], [], 0
        for target, (count, quota) in enumerate(zip(pairs.count.tolist(), pairs.kept.tolist(), strict=True)):
            run = slice(start, start + count)
            key = [17, draw_number, rank, target]
            scores, place = pairs.scores[run].numpy(), pairs.place[run].numpy()
            kept = draw(scores, pairs.expert[run].numpy(), EXPERTS, quota, key, place)
            index.append(kept.index + start)
            weight.append(kept.weight)
            start += count
        return Selection(torch.from_numpy(np.concatenate(index)), torch.from_numpy(np.concatenate(weight)))

    return select


def test_the_sampled_backward_is_unbiased_keeps_its_quota_and_sends_less() -> None:
    size, slots, draws, quota = 2, 5, 300, 3  # of each rank's pairs at each rank
    parts = tokens(size)

    def one(transport: LocalTransport, draw_number: int | None) -> tuple[Tensor, Tensor, dict[str, int], int]:
        select = None if draw_number is None else sampler(draw_number, transport.rank)
        layer, state, hosts = make_layer(transport, "robust", slots, None if select is None else quota, select=select)
        x = parts[transport.rank].clone().requires_grad_()
        y, _ = layer(x)
        transport.traffic.clear()
        y.square().sum().backward()
        sent = {phase: transport.traffic.sent_bytes(phase) for phase in (DISPATCH, COMBINE)}
        state.reduce_gradients(hosts)
        assert x.grad is not None
        return state.gradient.clone(), x.grad, sent, layer.load.num_kept

    full = run_local(size, lambda t: one(t, None))
    sampled = [run_local(size, lambda t, d=d: one(t, d)) for d in range(draws)]
    for rank in range(size):
        for which in (0, 1):
            values = torch.stack([s[rank][which] for s in sampled])
            error = (values.mean(0) - full[rank][which]).abs()
            allowed = 4.5 * values.std(0) / np.sqrt(draws) + 1e-9
            assert (error <= allowed).float().mean() > 0.995
        assert {s[rank][3] for s in sampled} == {size * quota}
    again = run_local(size, lambda t: one(t, 0))
    torch.testing.assert_close(again[0][0], sampled[0][0][0], rtol=0, atol=0)
    row_bytes = WIDTH * 8
    for phase, beside in ((DISPATCH, 0), (COMBINE, 4)):  # with each output gradient the place of its row
        assert max(r[2][phase] for s in sampled for r in s) <= size * quota * (row_bytes + beside)
        assert sum(r[2][phase] for r in sampled[0]) < 0.6 * sum(r[2][phase] for r in full)


def test_places_one_apart_lie_on_the_same_side_of_all_planes_but_one() -> None:
    sides = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)))
    order = places(sides, torch.eye(4))
    assert sorted(order.tolist()) == list(range(16))
    walk = sides[order.argsort()]
    assert (walk[1:] != walk[:-1]).sum(1).tolist() == [1] * 15
    assert places(torch.zeros(0, 4), torch.eye(4)).tolist() == []
    assert places(torch.tensor([[torch.nan] * 4]), torch.eye(4)).tolist() == [0]


def test_a_plan_that_loses_pairs_or_differs_between_ranks_raises_everywhere() -> None:
    def body(transport: LocalTransport, mistake: str) -> str:
        layer, _, _ = make_layer(transport, "static", 4)
        good = layer.plan

        def bad(counts: np.ndarray) -> Routes:
            routes = good(counts)
            pairs = routes.pairs.copy()
            if mistake == "loses":
                pairs[0, 0, np.argmax(pairs[0, 0])] -= 1
            elif transport.rank == 1:
                source, target, expert = np.argwhere(pairs > 0)[0]
                pairs[source, target, expert] -= 1
                pairs[source, 1 - target, expert] += 1
            return Routes(pairs, routes.slots)

        layer.plan = bad
        with pytest.raises(CollectiveMismatch) as error:
            layer(tokens(2)[transport.rank])
        return str(error.value)

    assert all("must route all" in text for text in run_local(2, lambda t: body(t, "loses")))
    assert all("different expert plans" in text for text in run_local(2, lambda t: body(t, "differs")))


def adam_reference(steps: int) -> Tensor:
    model = whole_model()
    flat = torch.cat([model.w1.flatten(1), model.w2.flatten(1)], dim=1).detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([flat], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        flat.grad = torch.sin(torch.arange(flat.numel(), dtype=torch.float64) + step).reshape(flat.shape)
        optimizer.step()
    return flat.detach()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sharded_adam_equals_torch_and_loads_at_another_size(size: int) -> None:
    def shard_gradients(state: ExpertState, step: int) -> None:
        whole = torch.sin(torch.arange(EXPERTS * state.num_parameters, dtype=torch.float64) + step)
        rank = state.transport.rank
        state.gradient.copy_(whole.reshape(EXPERTS, -1)[:, state.cuts[rank] : state.cuts[rank + 1]])

    def train(transport: LocalTransport, saved: list[dict[str, Tensor]] | None) -> tuple[Tensor, dict[str, Tensor]]:
        _, state, _ = make_layer(transport, "static", 7)
        if saved is not None:
            state.load_state_dict(saved)
        for step in range(2) if saved is None else range(2, 4):
            shard_gradients(state, step)
            state.step()
        return state.master.clone(), state.state_dict()

    first = run_local(size, lambda t: train(t, None))
    saved = [state for _, state in first]
    for other in (1, 2, 5):
        master = torch.cat([m for m, _ in run_local(other, lambda t: train(t, saved))], dim=1)
        torch.testing.assert_close(master, adam_reference(4), rtol=1e-12, atol=1e-12)
    damaged = [dict(saved[0]), *saved[1:]]
    del damaged[0]["3/momentum"]
    with pytest.raises(CollectiveMismatch, match="no momentum of expert 3"):
        run_local(2, lambda t: train(t, damaged))


def test_pushing_weights_fills_any_placement() -> None:
    def body(transport: LocalTransport) -> None:
        layer, state, _ = make_layer(transport, "static", 4)
        model = whole_model()
        hosts = np.array([[6, 0, -1, 0], [3, 1, 2, 4], [5, 6, 6, -1]], np.int32)
        state.push_weights(hosts)
        for slot, expert in enumerate(hosts[transport.rank]):
            expected = model.w1[expert] if expert >= 0 else torch.zeros_like(model.w1[0])
            torch.testing.assert_close(layer.w1[slot].detach(), expected.detach(), rtol=0, atol=0)

    run_local(3, body)


def test_balance_loss_is_one_at_perfect_balance_and_the_bias_moves_against_the_load() -> None:
    def body(transport: LocalTransport) -> None:
        layer, _, _ = make_layer(transport, "static", 7, bias_rate=1e-3)
        layer.router.gate.weight.data.zero_()
        _, routing = layer(torch.randn(14, WIDTH, dtype=torch.float64))
        assert float(routing.balance_loss().detach()) == pytest.approx(1.0)
        layer.router.rebalance(torch.tensor([9, 1, 1, 1, 1, 1, 0]))
        assert layer.router.bias.tolist() == pytest.approx([-1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])

    run_local(1, body)


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors alive at once, of those made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        known = {a.untyped_storage()._cdata for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known | self.seen and storage.nbytes():
                    self.seen.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def free(self, key: int, num_bytes: int) -> None:
        self.seen.discard(key)
        self.live -= num_bytes


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("keep_hidden", [True, False])
def test_the_experts_take_the_memory_that_is_planned(share: float, keep_hidden: bool) -> None:
    width, hidden, slots, rows = 64, 256, 4, 4096
    pairs = slots * rows

    def select(found: ScoredPairs) -> Selection:
        kept = draw(found.scores.numpy(), found.expert.numpy(), slots, int(found.kept[0]), [1], found.place.numpy())
        return Selection(torch.from_numpy(kept.index), torch.from_numpy(kept.weight))

    w1 = torch.randn(slots, width, hidden, requires_grad=True)
    w2 = torch.randn(slots, hidden, width, requires_grad=True)
    count, kept, order = np.array([pairs]), np.array([int(share * pairs)]), torch.arange(pairs)
    transport = LocalGroup(1).transports()[0]
    step = moe._Step(
        dispatch=moe._Rows(transport, DISPATCH, None, 0),
        combine=moe._Rows(transport, COMBINE, None, 0),
        sent=count,
        received=count,
        kept=(kept, kept) if share < 1 else None,
        token=order // slots,
        expert=order // rows,
        slices=[(slot, slice(slot * rows, (slot + 1) * rows)) for slot in range(slots)],
        grouping=order,
        row_of_arrival=order,
        select=select,
        planes=torch.randn(width, moe.PLACE_BITS),
        load=moe.LayerLoad(),
        keep_hidden=keep_hidden,
    )
    tokens = torch.randn(rows, width, requires_grad=True)
    gates = torch.rand(pairs, requires_grad=True)
    gradient = torch.randn(rows, width)
    weights = w1.nbytes + w2.nbytes
    with LiveBytes() as tracker:
        y = moe._Experts.apply(tokens, gates, w1, w2, step)
        forward = tracker.peak - y.nbytes + 2 * weights  # their gradients have a place of their own
        held = tracker.live - y.nbytes
        tracker.peak = 0
        y.backward(gradient)
    backward = tracker.peak - y.nbytes + weights
    memory = PairMemory.of(0, width, hidden, 4, moe.CHUNK_PAIRS, keep_hidden=keep_hidden)
    planned = memory.peak_bytes(slots, pairs, int(share * pairs))
    assert held == pytest.approx(memory.forward_bytes * pairs, rel=0.02)
    assert planned == pytest.approx(max(forward, backward), rel=0.10)


def test_recomputing_the_layer_repeats_its_routing_and_its_sample() -> None:
    parts = tokens(2)

    def one(transport: LocalTransport, recompute: bool) -> tuple[Tensor, Tensor]:
        layer, state, hosts = make_layer(transport, "robust", 5, 4, select=sampler(0, transport.rank))
        x = parts[transport.rank].clone().requires_grad_()
        y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False) if recompute else layer(x)[0]
        y.square().sum().backward()
        state.reduce_gradients(hosts)
        assert x.grad is not None
        return x.grad, state.gradient.clone()

    plain, again = (run_local(2, lambda t, r=r: one(t, r)) for r in (False, True))
    for expected, found in zip(plain, again, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
