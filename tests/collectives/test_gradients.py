"""The reducer on threads: any number of ranks, flat buffers with mixed parameters, exact sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collectives.cost import Link
from collectives.errors import CollectiveMismatch
from collectives.gradients import GradientReducer, touched_rows
from collectives.planner import Planner
from collectives.policy import SyncPolicy
from collectives.replicas import check_replicas, clip_grad_norm_, digest
from collectives.segments import Place
from collectives.transport import LocalTransport, run_local

SHAPES = {"a": (7,), "table": (4096, 8), "b": (3, 5), "empty": (0, 4), "other": (2048, 16), "c": (1,)}


def places() -> list[Place]:
    start, found = 0, []
    for name, shape in SHAPES.items():
        found.append(Place(name, start, torch.Size(shape), True))
        start = found[-1].stop
    return found


def gradient(rank: int, step: int, *, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A flat bucket: `rows` touched rows in "table", all of "other", small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    flat = torch.randint(-8, 9, (places()[-1].stop,), generator=generator).to(dtype)
    table = flat[places()[1].start : places()[1].stop].view(4096, 8)
    keep = torch.randperm(4096, generator=generator)[:rows]
    table[torch.ones(4096, dtype=torch.bool).index_fill(0, keep, False)] = 0
    return flat


def reducer(transport: LocalTransport, policy: SyncPolicy | None = None) -> GradientReducer:
    link = Link(transport.size, 1e-5, 1e-5, 1e-5, 1e8, 1e8, 4e9, 1e10)
    return GradientReducer(transport, Planner(link), policy or SyncPolicy())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [0, 40, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_flat_bucket_becomes_the_mean_on_every_rank(size: int, rows: int, dtype: torch.dtype) -> None:
    """Rank 1 touches no row of the table at all."""

    def body(transport: LocalTransport) -> tuple[Tensor, list[str]]:
        made = reducer(transport)
        buffer = gradient(transport.rank, 0, rows=0 if transport.rank == 1 else rows, dtype=dtype)
        made.reduce_flat(buffer, places())
        return buffer, [f"{r.tensor}: {r.scheme}" for r in made.planner.records()]

    results = run_local(size, body)
    exact = torch.stack(
        [gradient(rank, 0, rows=0 if rank == 1 else rows, dtype=torch.float64) for rank in range(size)]
    ).mean(0)
    tolerance = {"rtol": 2e-2, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(results[0][0].double(), exact, **tolerance)
    assert len({digest(buffer) for buffer, _ in results}) == 1
    assert all(records == results[0][1] for _, records in results)


def test_few_touched_rows_travel_alone_and_full_ones_stay_dense() -> None:
    def body(transport: LocalTransport) -> tuple[dict[str, str], int]:
        made = reducer(transport)
        for made.step in range(6):
            made.reduce_flat(gradient(transport.rank, made.step, rows=20), places())
        return {r.tensor: r.scheme for r in made.planner.records()}, transport.traffic.sent_bytes("dense")

    schemes, dense_bytes = run_local(4, body)[0]
    assert schemes["table"] != "dense"
    assert schemes["other"] == "dense"
    rest = sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if name != "table")
    assert dense_bytes == pytest.approx(6 * 2 * 3 / 4 * 4 * rest, rel=0.01)


def test_without_automatic_choice_dense_gradients_are_never_scanned() -> None:
    def body(transport: LocalTransport) -> tuple[int, int]:
        made = reducer(transport, SyncPolicy("column"))
        made.reduce_flat(gradient(transport.rank, 0, rows=20), places())
        return len(made.planner.records()), transport.traffic.sent_bytes("metadata")

    assert run_local(2, body)[0] == (0, 0)


def test_ids_whose_sum_is_zero_stay_and_non_finite_values_pass() -> None:
    def body(transport: LocalTransport) -> Tensor:
        sign = 1.0 if transport.rank == 0 else -1.0
        values = torch.tensor([[sign, sign], [float("inf"), 1.0], [float("nan"), 2.0]])
        grad = torch.sparse_coo_tensor(torch.tensor([[4, 0, 7]]), values, (9, 2), check_invariants=False)
        return reducer(transport).reduce_sparse("t", grad)

    for result in run_local(2, body):
        assert result.is_coalesced()
        assert result.indices()[0].tolist() == [0, 4, 7]
        assert result.values()[1].tolist() == [0.0, 0.0]
        assert result.values()[0].tolist() == [float("inf"), 1.0]
        assert result.values()[2, 0].isnan()


@pytest.mark.parametrize("shape", [(9, 0), (0, 2)])
def test_an_empty_tensor_needs_no_exchange(shape: tuple[int, int]) -> None:
    def body(transport: LocalTransport) -> tuple[int, int]:
        grad = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64), torch.empty((0, shape[1])), shape, check_invariants=False
        )
        return reducer(transport).reduce_sparse("t", grad)._nnz(), transport.traffic.sent_bytes()

    assert run_local(2, body) == [(0, 0), (0, 0)]


def test_element_sparse_gradients_are_reduced_by_element() -> None:
    def body(transport: LocalTransport) -> Tensor:
        dense = torch.zeros(6, 5)
        dense[transport.rank, 3] = dense[5, 4] = 3.0
        return reducer(transport).reduce_sparse("t", dense.to_sparse(2))

    for result in run_local(3, body):
        expected = torch.zeros(6, 5)
        expected[:3, 3], expected[5, 4] = 1.0, 3.0
        assert torch.equal(result.to_dense(), expected)


def test_touched_rows_are_those_with_any_bit_of_value() -> None:
    matrix = torch.zeros(1000, 4)
    matrix[3] = torch.tensor([1.0, -1.0, 0.0, 0.0])
    matrix[700, 2] = float("nan")
    assert touched_rows(matrix).tolist() == [3, 700]
    assert touched_rows(torch.zeros(1000, 4)).tolist() == []
    assert touched_rows(torch.ones(1000, 4)).tolist() == list(range(1000))


# --- replicas and clipping --------------------------------------------------------------------------------------------


def test_replicas_that_differ_are_named_with_the_odd_rank() -> None:
    def body(transport: LocalTransport) -> str:
        same = torch.arange(6.0).view(2, 3)
        odd = torch.ones(3) + (0.5 if transport.rank == 2 else 0.0)
        check_replicas({"same": same, "empty": torch.empty(0)}, transport)
        with pytest.raises(CollectiveMismatch) as caught:
            check_replicas({"same": same, "odd": odd}, transport)
        return str(caught.value)

    for message in run_local(3, body):
        assert "replicas differ in 1 of 2 parameters: 'odd' (rank 2)" in message


def test_digests_see_bits_and_not_memory_layout() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert digest(matrix) == digest(matrix.t().contiguous().t())
    assert digest(matrix) != digest(matrix.view(3, 2))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_counts_coalesced_rows_once(norm_type: float) -> None:
    sparse, dense = torch.nn.Parameter(torch.zeros(5, 2)), torch.nn.Parameter(torch.zeros(3))
    values = torch.tensor([[1.0, 2.0], [3.0, -2.0], [0.5, 0.0]])
    sparse.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 4]]), values, (5, 2), check_invariants=False)
    dense.grad = torch.tensor([1.0, -4.0, 2.0])
    exact = torch.cat([sparse.grad.to_dense().view(-1), dense.grad])
    norm = clip_grad_norm_([sparse, dense], 2.0, norm_type)
    assert float(norm) == pytest.approx(float(exact.norm(norm_type)))
    after = torch.cat([sparse.grad.to_dense().view(-1), dense.grad])
    assert float(after.norm(norm_type)) == pytest.approx(2.0, rel=1e-4)
    assert float(clip_grad_norm_([sparse, dense], 9.0, norm_type)) == pytest.approx(2.0, rel=1e-4)
    assert float(clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], 1.0)) == 0.0
