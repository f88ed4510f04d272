"""The public call: agreement before data, the choice of a scheme, layouts, order, and the problems users had."""

import contextlib

import numpy as np
import pytest
import torch

from collectives.errors import CollectiveMismatch, ConfigError, GradientError
from collectives.sparse import agreement
from collectives.sparse.agreement import Layout, negotiate
from collectives.sparse.all_reduce import ReduceQueue, default_choice, reduce_rows, sparse_all_reduce
from collectives.sparse.ids import normalise, to_coo
from collectives.sparse.rows import SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.transport import all_gather_records, run_local

EMPTY = torch.empty(0, dtype=torch.int64)


def sparse(ids, width=4, value=1.0):
    return torch.tensor(ids, dtype=torch.int64), torch.full((len(ids), width), value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_user_04_empty_on_one_rank(scheme) -> None:
    def body(t):
        ids, values = sparse([] if t.rank == 1 else [2, 5])
        return sparse_all_reduce(ids, values, (8, 4), transport=t, scheme=scheme).rows

    for rows in run_local(3, body):
        assert rows.ids.tolist() == [2, 5]
        assert bool((rows.values == 2.0).all())


def test_user_05_missing_gradient_still_takes_part() -> None:
    def body(t):
        ids, values = (None, None) if t.rank == 0 else sparse([7])
        return sparse_all_reduce(ids, values, (8, 4), transport=t)

    for reduced in run_local(3, body):
        assert reduced.rows.ids.tolist() == [7]
        assert reduced.rows.values.tolist() == [[2.0] * 4]
        assert reduced.agreement.layouts == (Layout.MISSING, Layout.SPARSE, Layout.SPARSE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_user_06_the_result_is_the_sum_and_the_input_stays(scheme, make_rows, oracle) -> None:
    rows = make_rows("one_empty", 4, 60, 8)
    before = [one.values.clone() for one in rows]
    results = run_local(4, lambda t: reduce_rows(rows[t.rank], transport=t, scheme=scheme).rows)
    union, total = oracle(rows)
    for result in results:
        np.testing.assert_allclose(result.values.numpy(), total, rtol=1e-5, atol=1e-5)
        assert result.ids.tolist() == union.tolist()
    assert all(torch.equal(a, b.values) for a, b in zip(before, rows, strict=True))


def test_user_07_sizes_are_exact_not_padded() -> None:
    counts = [1000, 1, 0, 3]

    def body(t):
        ids, values = sparse(list(range(counts[t.rank])), width=8)
        return sparse_all_reduce(ids, values, (4096, 8), transport=t, scheme="agsparse").stats

    for rank, stats in enumerate(run_local(4, body)):
        assert stats.sent_bytes.get("push", 0) == 3 * counts[rank] * (4 + 8 * 4)
        assert stats.received_bytes["push"] == (sum(counts) - counts[rank]) * (4 + 8 * 4)


def test_user_10_infinity_after_coalescing_is_known_to_all_ranks() -> None:
    def body(t):
        values = torch.full((2, 1), 40000.0 if t.rank == 1 else 1.0, dtype=torch.float16)
        return sparse_all_reduce(torch.tensor([3, 3]), values, (8, 1), transport=t)

    for reduced in run_local(3, body):
        assert reduced.agreement.found_inf
        assert reduced.rows.values.item() == float("inf")


def test_user_14_sum_and_mean_are_explicit() -> None:
    def body(t):
        ids, values = sparse([t.rank, 5])
        outcomes = [
            sparse_all_reduce(ids, values, (8, 4), op, transport=t).rows.values[-1, 0] for op in ("sum", "mean")
        ]
        with pytest.raises(ConfigError, match="op 'avg'"):
            sparse_all_reduce(ids, values, (8, 4), "avg", transport=t)
        with pytest.raises(ConfigError, match="scheme 'column2'"):
            sparse_all_reduce(ids, values, (8, 4), transport=t, scheme="column2")
        return [float(x) for x in outcomes]

    assert run_local(4, body) == [[4.0, 1.0]] * 4


def test_user_15_dense_here_sparse_there_and_automatic_dense_fallback() -> None:
    def mixed(t):
        if t.rank == 0:
            dense = torch.zeros(8, 4)
            dense[2] = 1.0
            return sparse_all_reduce(None, dense, (8, 4), transport=t)
        ids, values = sparse([2, 6])
        return sparse_all_reduce(ids, values, (8, 4), transport=t)

    for reduced in run_local(3, mixed):
        assert reduced.agreement.layouts == (Layout.DENSE, Layout.SPARSE, Layout.SPARSE)
        assert reduced.rows.ids.tolist() == [2, 6]
        assert reduced.rows.values[:, 0].tolist() == [3.0, 2.0]

    def full(t):
        return sparse_all_reduce(torch.arange(64), torch.ones(64), (64,), transport=t)

    for reduced in run_local(4, full):
        assert reduced.stats.scheme == "dense"
        assert reduced.rows.values.view(-1).tolist() == [4.0] * 64


def test_user_16_duplicates_everywhere_give_one_sorted_row_each() -> None:
    def body(t):
        ids, values = sparse([5, 1, 5, 5])
        return sparse_all_reduce(ids, values, (8, 4), transport=t)

    for reduced in run_local(3, body):
        assert reduced.rows.ids.tolist() == [1, 5]
        assert reduced.rows.values[:, 0].tolist() == [3.0, 9.0]
        assert reduced.agreement.k.tolist() == [2, 2, 2]


def test_user_17_handles_may_be_awaited_in_any_order() -> None:
    def body(t):
        queue = ReduceQueue(t)
        handles = [
            queue.submit(torch.tensor([i]), torch.ones(1, 4), (8, 4), name=f"table{i}", step=3) for i in range(6)
        ]
        order = list(range(6)) if t.rank % 2 else list(reversed(range(6)))
        found = {i: handles[i].result(timeout=30).rows for i in order}
        queue.close()
        return [(found[i].ids.tolist(), found[i].values[0, 0].item()) for i in range(6)]

    assert run_local(3, body) == [[([i], 3.0) for i in range(6)]] * 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_user_18_zero_size_parts_are_skipped_on_both_sides(scheme) -> None:
    """Everything of every rank belongs to one owner, so most transfers have no bytes."""

    def body(t):
        ids, values = sparse([0] if t.rank in (1, 4) else [], width=1)
        result = sparse_all_reduce(ids, values, (1000, 1), transport=t, scheme=scheme)
        return result.rows, t.traffic

    outcomes = run_local(5, body)
    for rows, _ in outcomes:
        assert rows.ids.tolist() == [0]
        assert rows.values.item() == 2.0
    for phase in {phase for _, traffic in outcomes for phase in traffic.sent}:
        nothing = np.zeros(5, np.int64)
        sent = np.stack([traffic.sent.get(phase, nothing) for _, traffic in outcomes])
        received = np.stack([traffic.received.get(phase, nothing) for _, traffic in outcomes])
        assert sent.tolist() == received.T.tolist()


@pytest.mark.parametrize(
    ("change", "field", "detail"),
    [
        ({"shape": (9, 4)}, "num_rows", r"\[9, 4\]"),
        ({"width": 5}, "width", r"\[8, 5\]"),
        ({"dtype": torch.float16}, "dtype", "float16"),
        ({"op": "mean"}, "op", "mean"),
        ({"name": "other.weight"}, "tensor name", "rank 1: 'other.weight'"),
        ({"step": 8}, "step", "step 8"),
    ],
)
def test_user_19_disagreement_raises_on_all_ranks_before_data_moves(change, field, detail) -> None:
    def body(t):
        mine = {"shape": (8, 4), "op": "sum", "name": "emb.weight", "step": 7, "width": 4, "dtype": torch.float32}
        if t.rank == 1:
            mine |= change
        ids, values = sparse([1, 2], mine["width"])
        shape = (mine["shape"][0], mine["width"])
        with pytest.raises(CollectiveMismatch, match=f"disagree about {field}.*{detail}") as caught:
            sparse_all_reduce(
                ids, values.to(mine["dtype"]), shape, mine["op"], transport=t, name=mine["name"], step=mine["step"]
            )
        assert "rank 0: 'emb.weight' step 7 [8, 4] float32 sum k=2" in str(caught.value)
        return set(t.traffic.sent)

    assert run_local(3, body, timeout_s=20) == [{"metadata"}] * 3


def test_damaged_metadata_is_noticed_on_all_ranks(monkeypatch) -> None:
    def damaged(transport, phase, record):
        table = all_gather_records(transport, phase, record)
        table[1, agreement.FIELDS.index("k")] ^= 1 << 40
        return table

    monkeypatch.setattr(agreement, "all_gather_records", damaged)

    def body(t):
        with pytest.raises(CollectiveMismatch, match=r"metadata of rank\(s\) \[1\] arrived damaged"):
            sparse_all_reduce(*sparse([1]), (8, 4), transport=t)
        return set(t.traffic.sent)

    assert run_local(3, body, timeout_s=20) == [{"metadata"}] * 3


def test_an_input_that_is_invalid_on_one_rank_stops_all_ranks_at_once() -> None:
    def body(t):
        ids, values = sparse([9 if t.rank == 1 else 1])
        expected = GradientError if t.rank == 1 else CollectiveMismatch
        with pytest.raises(expected, match=r"'emb\.weight'"):
            sparse_all_reduce(ids, values, (8, 4), transport=t, name="emb.weight")
        return sparse_all_reduce(*sparse([1]), (8, 4), transport=t).rows.ids.tolist()

    assert run_local(3, body, timeout_s=20) == [[1]] * 3


def test_user_20_metadata_is_over_before_data_moves() -> None:
    def body(t):
        phases, exchange = [], t.exchange

        @contextlib.contextmanager
        def recorded(phase, recvs):
            phases.append(f"open {phase}")
            with exchange(phase, recvs) as inner:
                yield inner
            phases.append(f"close {phase}")

        t.exchange = recorded
        sparse_all_reduce(*sparse([t.rank, 5]), (8, 4), transport=t, scheme="column")
        return phases

    expected = ["open metadata", "close metadata", "open push", "open pull", "close pull", "close push"]
    assert run_local(3, body) == [expected] * 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_user_21_empty_on_every_rank(scheme) -> None:
    def body(t):
        return sparse_all_reduce(EMPTY, torch.empty(0, 4), (8, 4), transport=t, scheme=scheme).rows

    for rows in run_local(4, body):
        assert rows.ids.shape == (0,)
        assert rows.values.shape == (0, 4)


def test_user_25_a_batch_of_padding_alone() -> None:
    def body(t):
        ids, values = sparse([0, 0] if t.rank == 0 else [0, 3])
        return sparse_all_reduce(ids, values, (8, 4), transport=t, padding_id=0)

    for reduced in run_local(2, body):
        assert reduced.rows.ids.tolist() == [3]
        assert reduced.agreement.k.tolist() == [0, 1]


def test_user_27_dense_gradient_and_touched_ids() -> None:
    def body(t):
        gradient = torch.zeros(8, 4)
        gradient[t.rank] = 1.0
        touched = torch.tensor([t.rank, 6])
        return sparse_all_reduce(None, gradient, (8, 4), transport=t, touched=touched).rows

    for rows in run_local(3, body):
        assert rows.ids.tolist() == [0, 1, 2, 6]
        assert rows.values[:, 0].tolist() == [1, 1, 1, 0]


def test_coo_in_coo_out_equals_the_dense_sum() -> None:
    def body(t):
        gradient = torch.sparse_coo_tensor(torch.tensor([[t.rank, 5, 5]]), torch.ones(3, 4), (8, 4))
        rows = sparse_all_reduce(None, gradient, gradient.shape, "mean", transport=t).rows
        return to_coo(rows, (8, 4)).to_dense()

    dense = torch.zeros(8, 4)
    dense[:3], dense[5] = 1 / 3, 2.0
    for result in run_local(3, body):
        torch.testing.assert_close(result, dense)


def test_the_chooser_sees_what_all_ranks_agreed_on() -> None:
    def body(t):
        seen = []
        reduced = sparse_all_reduce(
            *sparse([1, t.rank]), (8, 4), transport=t, choose=lambda a: seen.append(a) or "hashed_rows"
        )
        return seen[0], reduced.stats.scheme

    for agreed, scheme in run_local(3, body):
        assert scheme == "hashed_rows"
        assert (agreed.num_rows, agreed.width, agreed.itemsize, agreed.index_bytes) == (8, 4, 4, 4)
        assert agreed.k.tolist() == [2, 1, 2]
        assert agreed.sizes.shape == (3, 2)
        assert agreed.granularity == "row"


def test_default_choices() -> None:
    def choice(size, num_rows, width, count):
        def body(t):
            ids = torch.arange(count)
            rows = SparseRows(ids, torch.ones(count, width), num_rows)
            return default_choice(negotiate(rows, t, name="x", op="sum"))

        (name,) = set(run_local(size, body))
        return name

    assert choice(2, 100, 4, 5) == "agsparse"
    assert choice(4, 100, 4, 5) == "column"
    assert choice(5, 100, 4, 5) == "hashed_rows"
    assert choice(4, 1000, 1, 5) == "zen"
    assert choice(4, 100, 1, 90) == "dense"


def test_stats_report_bytes_and_seconds_of_this_call_alone(make_rows) -> None:
    rows = make_rows("disjoint", 3, 60, 6)
    expected = SCHEMES["column"].wire_bytes([one.ids.numpy() for one in rows], 60, 6, 4)

    def body(t):
        return [reduce_rows(rows[t.rank], transport=t, scheme="column").stats for _ in range(2)]

    for rank, (first, second) in enumerate(run_local(3, body)):
        assert first.sent_bytes == second.sent_bytes
        assert {phase: first.sent_bytes[phase] for phase in ("push", "pull")} == {
            phase: int(expected[phase][rank].sum()) for phase in ("push", "pull")
        }
        assert {"negotiate", "reduce", "pack"} <= set(second.seconds)


def test_results_survive_the_next_call(make_rows) -> None:
    """Scratch buffers are reused; results are not scratch."""
    for scheme in SCHEMES:

        def body(t, scheme=scheme):
            first = sparse_all_reduce(*sparse([1, 2]), (8, 4), transport=t, scheme=scheme).rows
            kept = first.values.clone(), first.ids.clone()
            sparse_all_reduce(*sparse([0, 3, 4], value=9.0), (8, 4), transport=t, scheme=scheme)
            return torch.equal(first.values, kept[0]) and torch.equal(first.ids, kept[1])

        assert run_local(2, body) == [True, True], scheme


def test_normalised_rows_of_one_rank_are_returned_as_a_copy() -> None:
    rows = normalise(*sparse([1, 2]), (8, 4))
    for scheme in SCHEMES:
        (result,) = run_local(1, lambda t, scheme=scheme: reduce_rows(rows, transport=t, scheme=scheme).rows)
        assert result.values.data_ptr() != rows.values.data_ptr(), scheme
        assert torch.equal(result.values, rows.values)
