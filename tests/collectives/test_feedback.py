"""Error feedback by parameter name: layouts that change, steps that are taken back, checkpoints, other world sizes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from collectives.codecs import Dgc, Int4Block
from collectives.codecs.codec import Residual
from collectives.codecs.lowrank import PowerSGD, worth_it
from collectives.errors import ConfigError
from collectives.feedback import ErrorFeedback, reshard
from collectives.reduce import one_shot, owner_span, two_shot
from collectives.transport import LocalTransport, run_local

LAYOUT = (("a", 300), ("b", 500), ("c", 7))


def one_step(feedback: ErrorFeedback, x: Tensor, layout: tuple[tuple[str, int], ...] = LAYOUT) -> Tensor:
    residual = feedback.residual(layout)
    before = residual.value.clone()
    packet = Int4Block().encode(x, residual)
    out = torch.empty_like(x)
    Int4Block().decode(packet, out)
    torch.testing.assert_close(out + residual.update, x + before, rtol=1e-5, atol=1e-5)
    return residual.update


def named(feedback: ErrorFeedback) -> dict[str, Tensor]:
    return {name: torch.cat([p.values for p in pieces]) for name, pieces in feedback.state_dict()["residuals"].items()}


def test_residuals_follow_their_parameters_into_another_bucket_layout() -> None:
    feedback = ErrorFeedback()
    one_step(feedback, torch.randn(807))
    feedback.commit()
    before = named(feedback)
    moved = feedback.residual((("b", 500), ("new", 11)))
    assert moved.value[:500].equal(before["b"])
    assert not moved.value[500:].any()
    again = feedback.residual((("c", 7), ("a", 300)))
    assert again.value.equal(torch.cat([before["c"], before["a"]]))
    assert feedback.residual((("b", 500), ("new", 11))).value is moved.value, "an unchanged layout keeps its buffer"
    assert feedback.num_dropped == 0


def test_a_parameter_of_another_size_starts_again_from_zero() -> None:
    feedback = ErrorFeedback()
    one_step(feedback, torch.randn(807))
    feedback.commit()
    assert not feedback.residual((("b", 600),)).value.any()
    assert feedback.num_dropped == 1


def test_a_skipped_step_leaves_every_byte() -> None:
    feedback = ErrorFeedback(reversible=True)
    one_step(feedback, torch.randn(807))
    feedback.commit()
    before = named(feedback)
    for _ in range(2):
        update = one_step(feedback, torch.randn(807))
        feedback.rollback()
        assert all(v.equal(before[name]) for name, v in named(feedback).items())
    update = one_step(feedback, torch.randn(807)).clone()
    feedback.commit()
    assert torch.cat(list(named(feedback).values())).equal(update)
    with pytest.raises(ConfigError, match="reversible"):
        ErrorFeedback().rollback()


def test_a_block_that_is_not_finite_leaves_its_residual() -> None:
    feedback = ErrorFeedback()
    one_step(feedback, torch.randn(807))
    feedback.commit()
    before = torch.cat(list(named(feedback).values()))
    x = torch.randn(807)
    x[40] = torch.inf
    residual = feedback.residual(LAYOUT)
    Int4Block().encode(x, residual)
    assert residual.update[32:64].equal(before[32:64])
    assert not residual.update[:32].equal(before[:32])
    assert bool(residual.update.isfinite().all())


def test_decay_and_loss_scale() -> None:
    feedback = ErrorFeedback(reversible=True, decay=0.5)
    feedback.load_state_dict({"residuals": {"a": [(0, 4, torch.full((4,), 8.0))]}, "owner_residuals": {}})
    residual = feedback.residual((("a", 4),))
    assert residual.value.tolist() == [4.0] * 4
    feedback.rollback()
    assert named(feedback)["a"].tolist() == [8.0] * 4
    feedback.rescale(0.25)
    assert named(feedback)["a"].tolist() == [2.0] * 4
    assert feedback.norm() == pytest.approx(4.0)
    with pytest.raises(ConfigError, match="decay"):
        ErrorFeedback(decay=1.5)


def test_state_survives_a_checkpoint_before_and_after_the_first_step() -> None:
    feedback = ErrorFeedback()
    one_step(feedback, torch.randn(807))
    feedback.commit()
    state = pickle.loads(pickle.dumps(feedback.state_dict()))
    for warm in (False, True):
        other = ErrorFeedback()
        if warm:
            one_step(other, torch.randn(807))
        other.load_state_dict(state)
        assert {n: v.tolist() for n, v in named(other).items()} == {n: v.tolist() for n, v in named(feedback).items()}
        x = torch.randn(807)
        continued, original = other.residual(LAYOUT), feedback.residual(LAYOUT)
        assert continued.value.equal(original.value)
        assert Int4Block().encode(x, continued).equal(Int4Block().encode(x, Residual(original.value, torch.empty(807))))
    ErrorFeedback().load_state_dict({})


def test_resharding_keeps_mean_contribution_and_owner_residuals() -> None:
    layout, codec = (("a", 3000), ("b", 1000)), Int4Block()
    xs = [torch.randn(4000) for _ in range(4)]

    def body(t: LocalTransport) -> ErrorFeedback:
        feedback = ErrorFeedback()
        residual = feedback.residual(layout)
        owner = feedback.owner_residual(layout, owner_span(4000, 4, t.rank, codec))
        two_shot(xs[t.rank].clone(), codec, t, residual=residual, owner_residual=owner)
        feedback.commit()
        return feedback

    old = run_local(4, body, 20)
    mean = torch.stack([f.residual(layout).value for f in old]).double().mean(0)
    owned = torch.cat([f.owner_residual(layout, owner_span(4000, 4, r, codec)).value for r, f in enumerate(old)])
    state = reshard([f.state_dict() for f in old])
    for size in (1, 3, 8):
        parts = []
        for rank in range(size):
            new = ErrorFeedback()
            new.load_state_dict(state)
            torch.testing.assert_close(new.residual(layout).value.double(), mean, rtol=1e-6, atol=1e-8)
            parts.append(new.owner_residual(layout, owner_span(4000, size, rank, codec)).value)
        assert torch.cat(parts).equal(owned)


def test_momentum_of_dgc_is_kept_like_a_residual() -> None:
    """Selection with momentum correction reaches the optimum that plain momentum reaches."""
    codec, target = Dgc(density=0.2, method="exact", momentum=0.9), torch.randn(2, 100)

    def body(t: LocalTransport) -> Tensor:
        weight, layout = torch.zeros(100), (("w", 100),)
        velocity, residual = ErrorFeedback(), ErrorFeedback()
        for step in range(400):
            u, v = velocity.residual(layout), residual.residual(layout)
            x = codec.accelerate(weight - target[t.rank], u, t.size).clone()
            one_shot(x, codec, t, op="mean", residual=v, seed=step)
            codec.clear_sent(u, v)
            velocity.commit()
            residual.commit()
            weight -= 0.01 * x
        return weight

    results = run_local(2, body, 20)
    assert results[0].equal(results[1])
    best = target.mean(0)
    assert float((results[0] - best).norm() / best.norm()) < 0.1


# --- PowerSGD ---------------------------------------------------------------------------------------------------------


def gradients(rank: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    factors = torch.randn(40, 2, generator=torch.Generator().manual_seed(99))
    return {
        "weight": factors @ torch.randn(2, 50, generator=generator) * scale,
        "twin": factors @ torch.randn(2, 50, generator=generator) * scale,
        "zero": torch.zeros(64, 64),
        "conv": torch.randn(16, 8, 3, 3, generator=generator),
        "bias": torch.randn(40, generator=generator),
        "empty": torch.zeros(0, 5),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_powersgd_reduces_low_rank_gradients_and_keeps_zero(size: int) -> None:
    def body(t: LocalTransport) -> dict[str, Tensor]:
        state, g = PowerSGD(rank=2), gradients(t.rank)
        residuals = {name: Residual.in_place(torch.zeros(x.numel())) for name, x in g.items()}
        for _ in range(3):
            g = gradients(t.rank)
            assert not state.all_reduce(g, t, op="mean", residuals=residuals)
        assert not residuals["zero"].value.any()
        return g

    results = run_local(size, body, 20)
    mean = {name: sum(gradients(r)[name] for r in range(size)) / size for name in results[0]}
    for name, value in results[0].items():
        assert all(r[name].equal(value) for r in results)
        assert bool(value.isfinite().all())
    for name in ("bias", "zero", "empty"):
        torch.testing.assert_close(results[0][name], mean[name])
    for name in ("weight", "twin"):
        torch.testing.assert_close(results[0][name], mean[name], rtol=1e-2, atol=5e-2)


def test_powersgd_survives_infinities_and_new_shapes() -> None:
    def body(t: LocalTransport) -> bool:
        state = PowerSGD(rank=2)
        residuals = {name: Residual.in_place(torch.ones(x.numel())) for name, x in gradients(0).items()}
        g = gradients(t.rank)
        g["weight"][3, 3] = torch.inf if t.rank == 1 else 0.0
        flags = state.all_reduce(g, t, residuals=residuals)
        assert flags
        assert bool(g["weight"].isnan().all())
        assert bool((residuals["weight"].value == 1).all())
        assert bool(residuals["conv"].value.isfinite().all())
        state.all_reduce({"weight": torch.randn(100, 30)}, t)
        restored = PowerSGD(rank=2)
        restored.load_state_dict(pickle.loads(pickle.dumps(state.state_dict())))
        return restored.factors["weight"].equal(state.factors["weight"])

    assert all(run_local(2, body, 20))


def test_powersgd_takes_only_what_it_makes_smaller() -> None:
    assert worth_it(torch.Size((40, 50)), 2)
    assert not worth_it(torch.Size((8, 8)), 2)
    assert not worth_it(torch.Size((4000,)), 2)
    assert not worth_it(torch.Size((0, 5)), 1)


@pytest.mark.parametrize("reversible", [True, False])
def test_what_is_owed_is_delivered_once_when_a_codec_without_residual_takes_over(reversible: bool) -> None:
    layout, size = (("a", 3), ("b", 2)), 4
    feedback = ErrorFeedback(reversible=reversible)
    feedback.residual(layout).update.copy_(torch.arange(1.0, 6.0))
    feedback.owner_residual(layout, slice(2, 4)).update.fill_(0.5)
    feedback.commit()
    if reversible:
        skipped = torch.zeros(5)
        feedback.deliver(layout, skipped, size)
        feedback.rollback()
    x = torch.ones(5)
    feedback.deliver(layout, x, size)
    assert x.tolist() == [2, 3, 4 + 2, 5 + 2, 6]
    feedback.commit()
    assert feedback.num_bytes == 0
    feedback.deliver(layout, x, size)
    assert x.tolist() == [2, 3, 6, 7, 6]


def test_what_was_loaded_is_delivered_as_well() -> None:
    layout = (("a", 3),)
    feedback = ErrorFeedback(reversible=True)
    feedback.residual(layout).update.fill_(2.0)
    feedback.commit()
    again = ErrorFeedback(reversible=True)
    again.load_state_dict(feedback.state_dict())
    x = torch.zeros(3)
    again.deliver(layout, x, 2)
    assert x.tolist() == [2, 2, 2]
    again.commit()
    assert again.state_dict() == {"residuals": {}, "owner_residuals": {}}
