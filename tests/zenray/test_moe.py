"""Expert balancing in training: the same for any number of ranks, exact budgets, odd cases, checkpoints at other sizes."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actors.errors import CheckpointError
from actors.folder import Stamp
from actors.state import CheckpointFolder
from collectives.errors import ConfigError
from collectives.moe import MoELayer, Routes, ScoredPairs, Selection, Selector, channels_for
from collectives.policy import SyncPolicy
from collectives.transport import LocalTransport, run_local
from placement.errors import PlacementError
from placement.experts import POLICIES
from placement.quotas import SHARES, Retention, sampling_variances
from zenray.moe import ExpertBalancer
from zenray.moe_state import ExpertsState, load_experts

WIDTH, HIDDEN, EXPERTS, TOP_K, TOKENS = 8, 16, 7, 2, 48


def no_plan(counts: np.ndarray) -> Routes:
    raise AssertionError


def make(transport: LocalTransport, slots: int = 0, **options: object) -> tuple[MoELayer, ExpertBalancer]:
    slots = slots or (EXPERTS if options.get("policy") == "llep" else -(-2 * EXPERTS // transport.size))
    channels = options.pop("channels", None)
    layer = MoELayer(WIDTH, HIDDEN, EXPERTS, slots, TOP_K, transport=transport, plan=no_plan, channels=channels)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    layer.router.gate.weight.data.copy_(torch.randn(EXPERTS, WIDTH, generator=generator))
    return layer, ExpertBalancer([layer], transport, **{"rho": 1.0, "lr": 0.01, **options})  # type: ignore[arg-type]


def batch(step: int, rank: int, size: int, empty: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    if empty is None:
        return x[rank::size]
    others = [r for r in range(size) if r != empty]
    return x[:0] if rank == empty else x[others.index(rank) :: len(others)]


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    gate: Tensor
    balancer: ExpertBalancer


def train(transport: LocalTransport, steps: int = 4, first: int = 0, **options: object) -> Trained:
    empty = options.pop("empty", None)
    layer, balancer = make(transport, **options)
    return go_on(layer, balancer, steps, first, empty)  # type: ignore[arg-type]


def go_on(layer: MoELayer, balancer: ExpertBalancer, steps: int, first: int, empty: int | None = None) -> Trained:
    transport, losses, norms = balancer.transport, [], []
    for step in range(first, first + steps):
        x = batch(step, transport.rank, transport.size, empty)
        balancer.begin(step)
        y, _ = layer(x)
        loss = (y - x.roll(1, 1)).square().sum() / TOKENS
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(balancer.layers[0].state.total(float(loss.detach())))
        norms.append(balancer.reduce_gradients())
        balancer.step()
    gate = layer.router.gate.weight.grad
    assert gate is not None
    return Trained(losses, norms, gate, balancer)


def test_losses_gradients_and_norms_do_not_depend_on_ranks_or_policy() -> None:
    one = run_local(1, train)[0]
    for size in (2, 3, 4):
        for policy in ("static", "symi_dropless", "eplb", "robust", "llep"):
            if policy == "eplb" and size == 3:
                continue
            trained = run_local(size, lambda t, p=policy: train(t, policy=p))
            for result in trained:
                np.testing.assert_allclose(result.losses, one.losses, rtol=1e-5)
                np.testing.assert_allclose(result.norms, one.norms, rtol=1e-4)
            torch.testing.assert_close(sum(r.gate for r in trained), one.gate, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("empty", [0, 2])
def test_a_rank_without_tokens_takes_part(empty: int) -> None:
    one = run_local(1, train)[0]
    for result in run_local(3, lambda t: train(t, empty=empty)):
        np.testing.assert_allclose(result.losses, one.losses, rtol=1e-5)


def test_capacity_drops_in_training_and_never_in_evaluation() -> None:
    def body(transport: LocalTransport) -> tuple[int, int, Tensor]:
        layer, balancer = make(transport, policy="symi_cap")
        x = batch(0, transport.rank, transport.size)
        balancer.begin(0)
        layer(x)
        dropped, computed = balancer.load.dropped, int(balancer.load.pairs.sum())
        with balancer.evaluation():
            y, _ = layer(x)
        assert balancer.load.dropped == dropped
        return dropped, computed, y.detach()

    def exact(transport: LocalTransport) -> Tensor:
        layer, balancer = make(transport, policy="robust")
        balancer.begin(0)
        y, _ = layer(batch(0, transport.rank, transport.size))
        return y.detach()

    results = run_local(2, body)
    assert results[0][0] > 0
    assert all(dropped + computed == TOKENS * TOP_K for dropped, computed, _ in results)
    for (_, _, y), expected in zip(results, run_local(2, exact), strict=True):
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("sampler", ["scored", "uniform", "top_q"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_keeps_exactly_its_budget_and_a_repeated_step_the_same_pairs(size: int, sampler: str) -> None:
    def body(transport: LocalTransport) -> list[tuple[int, int, Tensor]]:
        layer, balancer = make(transport, rho=0.4, sampler=sampler)
        seen = []
        for _ in range(2):
            balancer.begin(3)
            y, _ = layer(batch(0, transport.rank, transport.size))
            layer.zero_grad()
            y.square().sum().backward()
            balancer.reduce_gradients()
            kept = int(balancer.load.kept[0, transport.rank])
            seen.append((layer.load.num_kept, kept, balancer.layers[0].state.gradient.clone()))
        return seen

    share = 0.4 * TOKENS * TOP_K / size
    for first, second in run_local(size, body):
        assert first[0] == first[1] <= share
        assert first[0] == second[0]
        torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)


def test_micro_batches_add_up_and_recomputed_ones_count_once() -> None:
    def body(transport: LocalTransport, micro_batches: int, recompute: bool) -> tuple[int, int, float]:
        layer, balancer = make(transport)
        whole = batch(0, transport.rank, transport.size)
        for number, x in enumerate(whole.chunk(micro_batches)):
            balancer.begin(0, number)
            x = x.clone().requires_grad_()
            y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False) if recompute else layer(x)[0]
            y.square().sum().backward()
        return int(balancer.load.counts.sum()), int(balancer.load.kept.sum()), balancer.reduce_gradients()

    expected = run_local(2, lambda t: body(t, 1, recompute=False))[0]
    assert expected[:2] == (TOKENS * TOP_K,) * 2
    for micro_batches, recompute in ((1, True), (3, False), (3, True)):
        found = run_local(2, lambda t, m=micro_batches, r=recompute: body(t, m, r))[0]
        assert found[:2] == expected[:2]
        assert found[2] == pytest.approx(expected[2], rel=1e-4)


def test_the_share_in_the_backward_is_chosen_from_what_is_measured() -> None:
    def body(transport: LocalTransport) -> list[Retention]:
        layer, balancer = make(transport, rho="auto", num_steps=100)
        states = []
        for step in range(12):
            go_on(layer, balancer, 1, step)
            states.append(balancer.retention)
        return states

    results = run_local(2, body)
    states = results[0]
    assert all(other == states for other in results)
    assert [state.rho for state in states[:4]] == [1.0] * 4
    assert all(np.diff(states[4].variance) < 0)
    assert states[4].variance[-1] == 0
    assert states[4].rho < 1
    assert states[9].variance != states[4].variance


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_measured_norms_are_those_of_the_full_gradient(size: int) -> None:
    """At any share, within what sampling adds; exactly where nothing is sampled. In micro-batches as in one."""

    def body(transport: LocalTransport, rho: float) -> tuple[float, float]:
        layer, balancer = make(transport, rho="auto", num_steps=100)
        balancer.retention = replace(balancer.retention, rho=rho, step=4)
        for number, x in enumerate(batch(0, transport.rank, transport.size).chunk(2)):
            balancer.begin(0, number)
            layer(x)[0].square().sum().backward()
        balancer.reduce_gradients(0.5)
        state = balancer.layers[0].state
        exact = float(np.sqrt(state.squared_norms(layer.w1[0].numel())).sum()) / 0.5
        assert balancer.load.variance is not None
        return balancer.load.squared_norm, exact - float(np.interp(rho, SHARES, balancer.load.variance))

    for rho in (1.0, 0.5):
        for found, expected in run_local(size, lambda t, rho=rho: body(t, rho)):
            assert found == pytest.approx(expected)
    whole = run_local(size, lambda t: body(t, 1.0))[0][0]
    assert whole == pytest.approx(run_local(1, lambda t: body(t, 1.0))[0][0], rel=1e-3)


def test_a_budget_of_less_than_one_pair_a_source_leaves_the_gradient_unbiased() -> None:
    """Four ranks keep one pair each, of four sources: each source takes its turn, with weights that count for the others."""
    size, draws = 4, 400

    def body(transport: LocalTransport) -> np.ndarray:
        layer, balancer = make(transport, rho=0.05)
        x = batch(0, transport.rank, size)

        def gradient(step: int, rho: float) -> Tensor:
            balancer.retention = replace(balancer.retention, rho=rho)
            balancer.begin(step)
            layer(x)[0].square().sum().backward()
            balancer.reduce_gradients()
            layer.zero_grad()
            assert rho == 1 or (balancer.load.kept == 1).all()
            return balancer.layers[0].state.gradient.clone()

        exact = gradient(0, 1.0)
        return np.array(
            [float((gradient(draw, 0.05) * exact).sum()) for draw in range(draws)] + [float(exact.square().sum())]
        )

    found = np.sum(run_local(size, body), axis=0)  # each rank holds its part of every expert's gradient
    along = found[:-1] / found[-1]
    error = along.std() / np.sqrt(draws)
    assert error < 0.1
    assert abs(along.mean() - 1) < 4 * error


def test_forwards_before_one_backward_keep_their_own_draws_and_drops() -> None:
    """Two micro-batches of unequal shares, summed before the backward, and with each layer computed twice."""
    size, draws = 4, 300
    generator = torch.Generator().manual_seed(5)
    parts = [[torch.randn(n, WIDTH, generator=generator) for n in counts] for counts in ([20, 4, 4, 4], [4, 20, 4, 4])]

    def gradient(layer: MoELayer, balancer: ExpertBalancer, step: int, summed: bool, again: bool = False) -> Tensor:
        losses = []
        for number, part in enumerate(parts):
            balancer.begin(step, number)
            x = part[balancer.transport.rank].clone().requires_grad_()
            y = checkpoint(lambda z: layer(z)[0], x, use_reentrant=False) if again else layer(x)[0]
            losses.append(y.square().sum())
            if not summed:
                losses.pop().backward()
        if summed:
            sum(losses).backward()  # type: ignore[union-attr]
        balancer.reduce_gradients()
        layer.zero_grad()
        return balancer.layers[0].state.gradient.clone()

    def body(transport: LocalTransport) -> np.ndarray:
        layer, balancer = make(transport, rho=0.05)
        balancer.retention = replace(balancer.retention, rho=1.0)
        exact = gradient(layer, balancer, 0, summed=False)
        balancer.retention = replace(balancer.retention, rho=0.05)
        along = [float((gradient(layer, balancer, step, summed=True) * exact).sum()) for step in range(draws)]
        return np.array([*along, float(exact.square().sum())])

    found = np.sum(run_local(size, body), axis=0)
    along = found[:-1] / found[-1]
    assert abs(along.mean() - 1) < 4 * along.std() / np.sqrt(draws) < 0.5

    def dropping(transport: LocalTransport) -> tuple[Tensor, Tensor]:
        layer, balancer = make(transport, policy="symi_cap")
        return gradient(layer, balancer, 3, summed=False), gradient(layer, balancer, 3, summed=True, again=True)

    for plain, recomputed in run_local(size, dropping):
        torch.testing.assert_close(recomputed, plain)


def test_the_planned_peak_is_that_of_one_micro_batch_and_counts_the_rows_of_a_rank_that_holds_all_tokens() -> None:
    def body(transport: LocalTransport, batches: int) -> int:
        layer, balancer = make(transport, rho=0.5)
        for number in range(batches):
            balancer.begin(0, number)
            x = batch(0, 0, 1) if transport.rank == 0 else batch(0, 0, 1)[:0]
            layer(x)[0].square().sum().backward()
        hosted = int((balancer.layers[0].slots[0] >= 0).sum())
        kept = int(balancer.load.kept.sum()) // batches
        assert balancer.load.peak_bytes == balancer.layers[0].memory.peak_bytes(hosted, TOKENS * TOP_K, kept)
        return balancer.load.peak_bytes

    once, thrice = (run_local(4, lambda t, n=n: body(t, n)) for n in (1, 3))
    assert once == thrice


def test_a_share_is_chosen_where_each_rank_has_few_pairs_of_each_other() -> None:
    def body(transport: LocalTransport) -> tuple[int, float]:
        layer, balancer = make(transport, rho="auto", num_steps=100)
        go_on(layer, balancer, 5, 0)
        assert balancer.load.variance is not None
        return int(np.isfinite(balancer.load.variance).all()), balancer.load.variance[0]

    for finite, variance in run_local(8, body):
        assert finite
        assert variance > 0


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_estimated_variance_is_that_of_many_draws(spread: float) -> None:
    """Pairs that contribute alike: far less than independent draws would add. Pairs that do not: about as much."""
    share, draws = 0.3, 300
    generator = torch.Generator().manual_seed(5)
    kinds = torch.randn(6, WIDTH, generator=generator)[torch.arange(240) % 6]
    x = kinds + spread * torch.randn(240, WIDTH, generator=generator)
    target = 3 * kinds.roll(1, 1) + spread * torch.randn(240, WIDTH, generator=generator)

    def body(transport: LocalTransport) -> tuple[float, float, float]:
        layer, balancer = make(transport, rho="auto", num_steps=100)
        first, state = layer.w1[0].numel(), balancer.layers[0].state
        scores: list[np.ndarray] = []
        plan = layer.plan

        def noting(pairs: ScoredPairs, select: Selector) -> Selection:
            scores[:] = [pairs.scores.numpy(), pairs.expert.numpy()]
            return select(pairs)

        def watched(counts: np.ndarray) -> Routes:
            routes = plan(counts)
            return replace(routes, select=routes.select and partial(noting, select=routes.select))

        layer.plan = watched

        def gradient(step: int, rho: float, *, choose: bool = False) -> Tensor:
            balancer.retention = replace(balancer.retention, rho=rho, step=4 if choose else 0)
            balancer.begin(step)
            assert balancer.choosing == choose
            (layer(x)[0] - target).square().sum().backward()  # type: ignore[no-untyped-call]
            balancer.reduce_gradients()
            layer.zero_grad()
            return state.gradient[:, first:].clone()

        exact = gradient(0, 1.0, choose=True)
        assert balancer.load.variance is not None
        estimate = float(balancer.load.variance[SHARES.index(share)])
        norms = np.sqrt(exact.square().sum(1).numpy())
        weights = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
        independent = sampling_variances(scores[0], round(share * len(scores[0])), scores[1], EXPERTS) @ weights
        seen = [(gradient(draw, share) - exact).square().sum(1).numpy() @ weights for draw in range(draws)]
        return estimate, float(np.mean(seen)), float(independent)

    estimate, seen, independent = run_local(1, body)[0]
    assert 0.6 < estimate / seen < 1.7
    assert (seen < 0.5 * independent) == (spread < 1)


def test_one_expert_takes_all_and_scores_that_are_not_numbers() -> None:
    def body(transport: LocalTransport) -> tuple[int, int, float]:
        layer, balancer = make(transport, rho=0.5)
        layer.router.gate.weight.data.zero_()
        layer.router.bias[:2] = torch.tensor([2.0, 1.0])
        go_on(layer, balancer, 2, 0)  # the second step knows where the load is
        balancer.begin(2)
        y, _ = layer(batch(2, transport.rank, transport.size))
        bad = torch.ones_like(y)
        bad[0, 0] = torch.nan
        y.backward(bad)
        hottest = int(balancer.load.pairs.max())
        return hottest, balancer.load.num_nonfinite, balancer.reduce_gradients()

    results = run_local(4, body)
    assert all(result[0] == TOKENS * TOP_K // 4 for result in results)
    assert sum(result[1] for result in results) >= 1
    assert all(np.isnan(result[2]) for result in results), "the gradient's norm tells every rank"


def test_memory_limits_the_backward_or_says_what_does_not_fit() -> None:
    def body(transport: LocalTransport, free_bytes: int) -> tuple[int, int]:
        layer, balancer = make(transport, slots=7, free_bytes=free_bytes)
        go_on(layer, balancer, 1, 0)
        return balancer.load.peak_bytes, int(balancer.load.kept.sum())

    roomy = run_local(2, lambda t: body(t, 1 << 20))[0]
    tight = run_local(2, lambda t: body(t, roomy[0] - 2000))[0]
    assert roomy[1] == TOKENS * TOP_K
    assert tight[0] <= roomy[0] - 2000
    assert 0 < tight[1] < roomy[1]
    with pytest.raises(PlacementError, match="are free"):
        run_local(2, lambda t: body(t, 1000))


@pytest.mark.parametrize(("old", "new"), [(2, 2), (4, 3), (1, 5)])
def test_a_checkpoint_goes_on_at_another_size_and_policy(old: int, new: int, tmp_path: Path) -> None:
    def write(transport: LocalTransport) -> list[float]:
        layer, balancer = make(transport)
        go_on(layer, balancer, 3, 0)
        folder = CheckpointFolder(tmp_path, transport.rank, old)
        folder.save(Stamp("r", 3, 0, transport.rank, old, "c"), [ExpertsState(balancer)])
        return go_on(layer, balancer, 3, 3).losses

    def resume(transport: LocalTransport) -> list[float]:
        layer, balancer = make(transport, policy="symi_dropless")
        load_experts(CheckpointFolder(tmp_path, transport.rank, new), 3, ExpertsState(balancer))
        return go_on(layer, balancer, 3, 3).losses

    def own_shard(transport: LocalTransport) -> list[float]:
        layer, balancer = make(transport)
        CheckpointFolder(tmp_path, transport.rank, old).load(3, [ExpertsState(balancer)], "c")
        return go_on(layer, balancer, 3, 3).losses

    expected = run_local(old, write)[0]
    for losses in run_local(new, resume):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for losses in run_local(old, own_shard):
        np.testing.assert_allclose(losses, expected, rtol=1e-6)

    def other_model(transport: LocalTransport) -> None:
        layer = MoELayer(WIDTH, HIDDEN, 3, 3, TOP_K, transport=transport, plan=no_plan)
        load_experts(CheckpointFolder(tmp_path, 0, 1), 3, ExpertsState(ExpertBalancer([layer], transport)))

    with pytest.raises(CheckpointError, match="another model"):
        run_local(1, other_model)


def test_a_planner_of_no_help_leaves_training_as_it_is() -> None:
    class Silent:
        """A planner that died."""

        def submit(self, step: int, counts: np.ndarray, newest: int) -> None: ...

        def poll(self, newest: int) -> list[object]:
            return []

    expected = run_local(1, lambda t: train(t, steps=30))[0].losses
    for result in run_local(2, lambda t: train(t, steps=30, source=Silent())):
        np.testing.assert_allclose(result.losses, expected, rtol=1e-4)
        assert result.balancer.book.num_stale == 30
        assert result.balancer.book.current.valid_from == 30, "ranks plan for themselves"


def test_rows_may_travel_through_codecs() -> None:
    policy = SyncPolicy(codecs=(("moe_dispatch", ("bf16",)), ("moe_combine", ("bf16",))), fixed=True)

    def body(transport: LocalTransport, compress: bool) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        channels = channels_for(policy, transport) if compress else None
        layer = MoELayer(256, 32, EXPERTS, EXPERTS, TOP_K, transport=transport, plan=no_plan, channels=channels)
        balancer = ExpertBalancer([layer], transport, policy="static", rho=0.5)
        layer.router.gate.weight.data.copy_(torch.ones(EXPERTS, 256).tril())
        x = torch.randn(128, 256, generator=torch.Generator().manual_seed(transport.rank))
        balancer.begin(0)
        transport.traffic.clear()
        y, _ = layer(x)
        y.square().sum().backward()
        return y.detach(), transport.traffic.sent_bytes("moe_dispatch")

    plain, packed = (run_local(2, lambda t, c=c: body(t, c)) for c in (False, True))
    for (y, sent), (y_packed, sent_packed) in zip(plain, packed, strict=True):
        assert (y - y_packed).norm() < 0.02 * y.norm()
        assert sent_packed < 0.6 * sent


def test_wrong_settings_are_named() -> None:
    def body(transport: LocalTransport) -> None:
        layer, balancer = make(transport, policy="llep")
        with pytest.raises(ConfigError, match="unknown policy"):
            ExpertBalancer([layer], transport, policy="best")
        with pytest.raises(ConfigError, match="rho = 0"):
            ExpertBalancer([layer], transport, rho=0.0)
        with pytest.raises(ConfigError, match="micro-batch"):
            balancer.begin(0, micro_batch=1)
        other = MoELayer(WIDTH, HIDDEN, EXPERTS, 3, TOP_K, transport=transport, plan=no_plan)
        with pytest.raises(ConfigError, match="alike"):
            ExpertBalancer([layer, other], transport)

    run_local(1, body)
    assert set(POLICIES) >= {"static", "symi_cap", "symi_dropless", "eplb", "window_fill", "robust", "llep"}
