"""Dense gradients with codecs inside, on threads: exact exempt parameters, residuals by name, skipped steps, resume."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives.cost import Link
from collectives.dense import DenseReducer
from collectives.feedback import reshard
from collectives.policy import SyncPolicy
from collectives.segments import Place, cut
from collectives.topology import Topology
from collectives.transport import LocalTransport, run_local

SHAPES = {
    "w0": (130, 300),
    "b0": (300,),
    "w1": (40, 900),
    "norm": (77,),
    "off.w": (130, 200),
    "w2": (128, 256),
    "e": (0,),
}
COMPRESSED = ("w0", "w1", "w2")


def places() -> list[Place]:
    start, found = 0, []
    for name, shape in SHAPES.items():
        found.append(Place(name, start, torch.Size(shape), True))
        start = found[-1].stop
    return found


NUMEL = places()[-1].stop


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + rank))


def mean(size: int, step: int) -> Tensor:
    return torch.stack([gradient(rank, step).double() for rank in range(size)]).mean(0)


def slow_link(size: int) -> Link:
    return Link(size, 1e-5, 1e-5, 1e-5, 1e7, 1e7, 4e9, 1e10)


def reducer(transport: LocalTransport, policy: Any, per_node: int = 1) -> DenseReducer:
    made = SyncPolicy.of(policy) if not isinstance(policy, SyncPolicy) else policy
    topology = Topology(tuple(rank // per_node for rank in range(transport.size)))
    return DenseReducer(transport, slow_link(transport.size), made, topology)


def fixed(codec: str, **options: Any) -> SyncPolicy:
    options = {"dense_steps": 0} | options
    return SyncPolicy(by_name=(("off.*", "off"),), codecs=(("dp_grad", (codec,)),), fixed=True, **options)


def steps(transport: LocalTransport, policy: Any, count: int, per_node: int = 1) -> tuple[DenseReducer, list[Tensor]]:
    made, results = reducer(transport, policy, per_node), []
    for step in range(count):
        buffer = gradient(transport.rank, step)
        made.reduce(buffer, places(), step)
        made.planner.note_step(0.5, 1.0)
        results.append(buffer)
    return made, results


def part(buffer: Tensor, name: str) -> Tensor:
    place = next(p for p in places() if p.name == name)
    return buffer[place.start : place.stop].double()


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def test_a_bucket_is_cut_at_large_exempt_parameters_and_keeps_small_ones_as_holes() -> None:
    codecs = {name: ("int8b",) if name in COMPRESSED else () for name in SHAPES}
    first, second = cut(places(), codecs, 4)
    assert (first.label, [p.name for p in first.holes]) == ("w0 and 1 more", ["b0"])
    assert (second.label, second.holes) == ("w2", ())
    assert first.stop == places()[2].stop
    assert cut(places(), dict.fromkeys(SHAPES, ()), 4) == []


LOSS = {"bf16": 4e-3, "fp16": 1e-3, "int8b": 0.02, "fp8b": 0.06, "int4b": 0.2, "eb": 0.1, "eb_sum": 0.1}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", LOSS)
def test_compressed_means_are_close_exempt_ones_exact_and_all_replicas_equal(size: int, codec: str) -> None:
    results = run_local(size, lambda t: steps(t, fixed(codec), 3)[1])
    for step in range(3):
        exact = mean(size, step)
        assert all(other[step].equal(results[0][step]) for other in results)
        for name in SHAPES:
            if not part(exact, name).numel():
                continue
            limit = LOSS[codec] if name in COMPRESSED and step and size > 1 else 1e-6
            assert relative_error(part(results[0][step], name), part(exact, name)) < limit, (name, step)
        if step and size > 1:
            assert relative_error(part(results[0][step], "w0"), part(exact, "w0")) > 1e-5


@pytest.mark.parametrize("codec", ["sq", "topk", "randomk", "powersgd", "sign", "int4b"])
def test_with_error_feedback_what_is_lost_arrives_later(codec: str) -> None:
    """The sum of all results must approach the sum of all gradients."""
    rounds = 40
    policy = fixed(codec, error_feedback=True)

    def body(transport: LocalTransport) -> tuple[Tensor, Tensor]:
        made, total = reducer(transport, policy), torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(rounds):
            buffer = gradient(transport.rank, step)
            made.reduce(buffer, places(), step)
            total += buffer.double()
        assert not made.planner.events
        return total, buffer

    (total, last), other = run_local(2, body)
    assert total.equal(other[0])
    wanted = torch.stack([mean(2, step) for step in range(rounds)]).sum(0)
    once = relative_error(part(last, "w0"), part(mean(2, rounds - 1), "w0"))
    assert relative_error(part(total, "w0"), part(wanted, "w0")) < 0.85 * once
    assert relative_error(part(total, "b0"), part(wanted, "b0")) < 1e-6


def test_int4_between_nodes_and_int8_inside_in_two_hops() -> None:
    policy = fixed("int4b")
    results = run_local(4, lambda t: steps(t, policy, 2, per_node=2))
    assert all(buffers[1].equal(results[0][1][1]) for _, buffers in results)
    assert relative_error(part(results[0][1][1], "w0"), part(mean(4, 1), "w0")) < 0.3


def test_a_step_that_is_not_finite_or_is_taken_back_leaves_every_residual() -> None:
    policy = fixed("int4b", error_feedback=True)

    def body(transport: LocalTransport) -> list[bool]:
        made, seen = reducer(transport, policy), []

        def residuals() -> list[tuple[str, list[float]]]:
            kinds = made.state_dict()["feedback"].values()
            return [(name, torch.cat([p.values for p in ps]).tolist()) for kind in kinds for name, ps in kind.items()]

        def one(step: int, spoil: Callable[[Tensor], None] | None = None) -> None:
            buffer = gradient(transport.rank, step)
            if spoil is not None:
                spoil(buffer)
            made.reduce(buffer, places(), step)

        one(0)
        one(1)
        before = residuals()
        one(2, lambda x: x[5:6].fill_(torch.inf) if transport.rank == 1 else None)
        seen.append(residuals() == before)
        one(3, lambda x: x[places()[3].start].fill_(torch.nan) if transport.rank == 0 else None)
        seen.append(residuals() == before)
        one(4)
        made.was_skipped = True
        seen.append(residuals() == before)
        one(5)
        seen.append(residuals() != before)
        return seen

    assert run_local(2, body) == [[True] * 4] * 2


def test_nothing_is_compressed_while_communication_is_hidden_and_the_reason_is_told() -> None:
    def body(transport: LocalTransport) -> list[str]:
        made = reducer(transport, "auto")
        for step in range(12):
            made.reduce(gradient(transport.rank, step), places(), step)
            made.planner.note_step(0.05, 1.0)
        return [f"{row.choice}: {row.reason}" for row in made.report()]

    for rows in run_local(2, body):
        assert set(rows) == {"off: communication is hidden: 5.0% of the step is exposed"}


def test_state_goes_through_pickle_to_the_same_and_to_another_number_of_ranks() -> None:
    policy = fixed("int4b", error_feedback=True)

    def body(transport: LocalTransport) -> tuple[dict[str, Any], Tensor]:
        made, _ = steps(transport, policy, 4)
        state = pickle.loads(pickle.dumps(made.state_dict()))
        again = reducer(transport, policy)
        again.load_state_dict(state)
        one, two = gradient(transport.rank, 9), gradient(transport.rank, 9)
        made.reduce(one, places(), 9)
        again.reduce(two, places(), 9)
        assert one.equal(two)
        return state, one

    states = [state for state, _ in run_local(3, body)]
    together = {**states[0], "feedback": reshard([state["feedback"] for state in states])}
    owed = torch.stack([torch.cat([p.values for p in s["feedback"]["residuals"]["w0"]]) for s in states]).mean(0)

    def fewer(transport: LocalTransport) -> Tensor:
        made = reducer(transport, policy)
        made.load_state_dict(pickle.loads(pickle.dumps(together)))
        buffer = gradient(transport.rank, 9)
        made.reduce(buffer, places(), 9)
        return made.feedback.residual(next(iter(made.feedback.buckets))).value[: owed.numel()].clone()

    assert owed.norm() > 0
    for value in run_local(2, fewer):
        torch.testing.assert_close(value, owed)


def test_bytes_are_predicted_within_one_percent_and_counted_per_role() -> None:
    def body(transport: LocalTransport) -> list[tuple[int, int]]:
        made, _ = steps(transport, fixed("int8b"), 6)
        record = made.record()
        assert record.role == "dp_grad"
        assert record.residual_bytes == 0
        assert record.buffer_bytes > 0
        assert 1.5 < record.ratio < 4
        return [(row.predicted_bytes, row.observed_bytes) for row in made.report()]

    for size in (2, 3):
        for rows in run_local(size, body):
            assert len(rows) == 2
            for predicted, observed in rows:
                assert predicted == pytest.approx(observed, rel=0.01)


def test_half_precision_gradients_go_through_fp32() -> None:
    def body(transport: LocalTransport) -> Tensor:
        made, buffer = reducer(transport, fixed("int8b")), gradient(transport.rank, 1).bfloat16()
        made.reduce(buffer, places(), 1)
        return buffer

    results = run_local(2, body)
    assert results[0].equal(results[1])
    assert relative_error(part(results[0], "w0"), part(mean(2, 1), "w0")) < 0.03
