"""Every scheme: right sums, the same bytes on all ranks, and exactly the traffic that was counted without values."""

import itertools

import numpy as np
import pytest
import torch

from collectives.sparse.baselines import DenseRing
from collectives.sparse.columns import ColumnSplit, column_cuts
from collectives.sparse.doubling import goes_dense
from collectives.sparse.rows import SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.sparse.two_level import TwoLevel
from collectives.sparse.zen import block_unit
from collectives.transport import run_local

SIZES = (1, 2, 3, 4, 5, 8, 16)
CASES = [
    ("all_empty", 40, 6, torch.float32),
    ("one_empty", 200, 32, torch.float32),
    ("one_full", 33, 54, torch.float32),
    ("equal", 97, 1, torch.float32),
    ("disjoint", 64, 256, torch.bfloat16),
    ("skewed", 50, 192, torch.float16),
    ("one_empty", 3, 1, torch.float32),
    ("one_full", 1, 7, torch.float32),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_oracle_replicas_and_bytes(scheme, size, make_rows, oracle, bits) -> None:
    inputs = [make_rows(pattern, size, num_rows, width, dtype) for pattern, num_rows, width, dtype in CASES]

    def body(transport):
        outcomes = []
        for i, rows in enumerate(inputs):
            transport.traffic.clear()
            op = "mean" if i % 2 else "sum"
            result = SCHEMES[scheme].all_reduce(rows[transport.rank], transport, op)
            outcomes.append((result, {k: v.copy() for k, v in transport.traffic.sent.items()}))
        return outcomes

    by_rank = run_local(size, body)
    for i, (rows, (_, num_rows, width, dtype)) in enumerate(zip(inputs, CASES, strict=True)):
        union, total = oracle(rows)
        total /= size if i % 2 else 1
        results = [outcomes[i][0] for outcomes in by_rank]
        for result in results:
            assert result.ids.dtype == torch.int64
            assert result.ids.tolist() == union.tolist()
            assert result.values.shape == (len(union), width)
            assert result.values.dtype == dtype
            assert bits(result.values) == bits(results[0].values)
        error = np.abs(results[0].values.double().numpy() - total).max(initial=0)
        assert error <= TOLERANCE[dtype] * max(1.0, np.abs(total).max(initial=0))
        predicted = SCHEMES[scheme].wire_bytes([one.ids.numpy() for one in rows], num_rows, width, dtype.itemsize)
        for phase in {*predicted, *(phase for outcomes in by_rank for phase in outcomes[i][1])}:
            nothing = np.zeros(size, np.int64)
            counted = np.stack([outcomes[i][1].get(phase, nothing) for outcomes in by_rank])
            expected = predicted.get(phase, np.zeros((size, size), np.int64))
            assert counted.tolist() == expected.tolist(), (phase, CASES[i])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_and_infinity_pass_and_cancelled_rows_arrive(scheme) -> None:
    ids = torch.tensor([1, 4, 6, 9])
    values = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), -1.0], [0.0, 0.0]])

    def body(transport):
        sign = 1 if transport.rank % 2 else -1
        row = values.clone()
        row[0] *= sign
        return SCHEMES[scheme].all_reduce(SparseRows(ids, row, 12), transport, "sum")

    for result in run_local(4, body):
        assert result.ids.tolist() == [1, 4, 6, 9]
        assert result.values[0].tolist() == [0.0, 0.0]
        assert torch.isnan(result.values[1, 0])
        assert result.values[2].tolist() == [float("inf"), -4.0]
        assert result.values[3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scheme", sorted({*SCHEMES} - {"sparcml", "two_level", "dense"}))
def test_sums_in_rank_order_with_float32_accumulators(scheme) -> None:
    """1e8 + 1 - 1e8 is 0 in this order and 1 in another; fp16 needs a wider accumulator for 2048 + 1 + 1."""
    wide, half = torch.tensor([1e8, 1.0, -1e8]), torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16)

    def body(transport):
        return [
            SCHEMES[scheme].all_reduce(
                SparseRows(torch.tensor([3]), column[transport.rank].view(1, 1), 8), transport, "sum"
            )
            for column in (wide, half)
        ]

    for first, second in run_local(3, body):
        assert first.values.item() == 0.0
        assert second.values.item() == 2050.0


@pytest.mark.parametrize("scheme", ["column", "agsparse", "hashed_rows", "hashed_blocks", "sparse_ps", "sparcml"])
def test_user_09_ids_beyond_int32(scheme) -> None:
    """A table of 2**33 rows: int64 ids on the wire and in every offset, and no memory in proportion to the table."""
    num_rows = 2**33
    ids = torch.tensor([0, 2**31 - 1, 2**31, 2**32 + 5, num_rows - 1])

    def body(transport):
        values = torch.full((5, 128), float(transport.rank + 1))
        result = SCHEMES[scheme].all_reduce(SparseRows(ids, values, num_rows), transport, "sum")
        return result, transport.traffic.sent_bytes("push")

    results = run_local(3, body)
    predicted = SCHEMES[scheme].wire_bytes([ids.numpy()] * 3, num_rows, 128, 4)
    for rank, (result, pushed) in enumerate(results):
        assert result.ids.tolist() == ids.tolist()
        assert bool((result.values == 6.0).all())
        assert pushed == predicted["push"][rank].sum()


def test_column_bytes_are_the_formula(make_rows) -> None:
    """(n-1) ids, (n-1)/n (k + K) D v: evaluated with what each rank holds."""
    size, num_rows, width = 4, 300, 32
    ids = [one.ids.numpy() for one in make_rows("one_empty", size, num_rows, width)]
    tables = ColumnSplit().wire_bytes(ids, num_rows, width, 4)
    union = len(np.unique(np.concatenate(ids)))
    assert tables["pull"].sum(axis=1).tolist() == [(size - 1) * union * width * 4 // size] * size
    for rank, one in enumerate(ids):
        values = (size - 1) * len(one) * width * 4 // size
        id_bytes = tables["push"][rank].sum() - values
        assert 0 <= id_bytes <= (size - 1) * (1 + 4 * len(one))


def test_hashed_bytes_are_the_formula(make_rows) -> None:
    """k (v + i) out, K v + N/8 back, (n-1)/n of each in the mean over ranks."""
    size, num_rows = 4, 4096
    ids = [one.ids.numpy() for one in make_rows("one_empty", size, num_rows, 1)]
    pushed, owned = SCHEMES["zen"].partition(ids, num_rows, 1)
    assert pushed.sum(axis=1).tolist() == [len(one) for one in ids]
    assert owned.sum() == len(np.unique(np.concatenate(ids)))
    tables = SCHEMES["zen"].wire_bytes(ids, num_rows, 1, 4)
    assert tables["push"].sum() == 8 * (pushed.sum() - np.trace(pushed))
    assert tables["pull"].sum() == (size - 1) * (4 * owned.sum() + num_rows // 8)


def test_dense_ring_moves_twice_the_tensor_less_one_part() -> None:
    tables = DenseRing().wire_bytes([np.arange(3)] * 4, 100, 16, 4)
    assert tables["all_reduce"].sum(axis=1).tolist() == [2 * 3 * 100 * 16 * 4 // 4] * 4


def test_uneven_columns_cover_the_width_once() -> None:
    for width, size in itertools.product((1, 2, 5, 54, 512), (1, 2, 3, 5, 16)):
        cuts = column_cuts(width, size)
        assert (cuts[0], cuts[-1]) == (0, width)
        assert max(np.diff(cuts)) <= -(-width // size)


def test_blocks_divide_the_row() -> None:
    assert [block_unit(width) for width in (1, 54, 64, 96, 512, 768, 1024, 130)] == [1, 54, 64, 96, 64, 64, 64, 65]


def test_recursive_doubling_goes_dense_when_ids_do_not_pay() -> None:
    assert not goes_dense(49, 100, 1, 4)
    assert goes_dense(50, 100, 1, 4)
    assert goes_dense(0, 0, 1, 4)


@pytest.mark.parametrize("node_size", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_two_level_for_every_node_size(node_size, width, make_rows, oracle, bits) -> None:
    rows = make_rows("one_empty", 8, 60, width)
    results = run_local(8, lambda t: TwoLevel(node_size).all_reduce(rows[t.rank], t, "sum"))
    union, total = oracle(rows)
    for result in results:
        assert result.ids.tolist() == union.tolist()
        np.testing.assert_allclose(result.values.numpy(), total, rtol=1e-5, atol=1e-5)
        assert bits(result.values) == bits(results[0].values)


def test_a_rank_that_dies_in_the_data_phase_breaks_the_others_off(make_rows) -> None:
    rows = make_rows("one_full", 4, 50, 8)
    seen = []

    def body(transport):
        if transport.rank == 2:
            exchange = transport.exchange
            transport.exchange = lambda phase, recvs: (
                exchange(phase, recvs) if phase == "metadata" else (_ for _ in ()).throw(RuntimeError("killed"))
            )
        try:
            SCHEMES["column"].all_reduce(rows[transport.rank], transport, "sum")
        except Exception as error:
            seen.append((transport.rank, type(error).__name__))
            raise

    with pytest.raises(RuntimeError, match="killed"):
        run_local(4, body, timeout_s=20)
    assert sorted(rank for rank, _ in seen) == [0, 1, 2, 3]
