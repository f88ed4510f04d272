"""The column split with quantised values: close to the exact sum, exact ids, fewer bytes, and residuals by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.cost import Link, Load, predict
from collectives.gradients import GradientReducer
from collectives.planner import Planner, choose_scheme
from collectives.policy import SyncPolicy
from collectives.replicas import digest
from collectives.sparse.columns import ColumnSplit
from collectives.sparse.quantised import QUANTISED, RowFeedback
from collectives.sparse.rows import SparseRows
from collectives.transport import LocalTransport, run_local

NUM_ROWS, WIDTH = 500, 64
ERROR = {"column+bf16": 0.005, "column+int8b": 0.03, "column+int4b": 0.3}


def rows_of(rank: int, step: int = 0, k: int = 60) -> SparseRows:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randperm(NUM_ROWS, generator=generator)[: 0 if rank == 1 and step == 0 else k].sort().values
    return SparseRows(ids, torch.randn(len(ids), WIDTH, generator=generator), NUM_ROWS)


def dense(rows: SparseRows) -> Tensor:
    out = torch.zeros(NUM_ROWS, WIDTH)
    out[rows.ids] = rows.values
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", QUANTISED)
def test_sums_are_close_ids_exact_and_replicas_equal(name: str, size: int) -> None:
    """Rank 1 touches nothing."""

    def body(transport: LocalTransport) -> tuple[SparseRows, SparseRows, int, int]:
        exact = ColumnSplit().all_reduce(rows_of(transport.rank), transport, "mean")
        before = transport.traffic.sent_bytes()
        found = QUANTISED[name].all_reduce(rows_of(transport.rank), transport, "mean")
        return exact, found, before, transport.traffic.sent_bytes() - before

    results = run_local(size, body)
    assert len({digest(found.values) for _, found, _, _ in results}) == 1
    for exact, found, exact_bytes, num_bytes in results:
        assert found.ids.equal(exact.ids)
        assert float((found.values - exact.values).norm() / exact.values.norm()) < ERROR[name]
        if size > 2:
            assert num_bytes < {"column+bf16": 0.6, "column+int8b": 0.4, "column+int4b": 0.3}[name] * exact_bytes


def test_rows_get_later_what_was_lost_and_a_skipped_step_changes_nothing() -> None:
    scheme, steps = QUANTISED["column+int4b"], 30

    def body(transport: LocalTransport) -> tuple[Tensor, Tensor]:
        feedback, with_it, without = RowFeedback(), torch.zeros(NUM_ROWS, WIDTH), torch.zeros(NUM_ROWS, WIDTH)
        rows = rows_of(transport.rank, 1)
        for step in range(steps):
            with_it += dense(scheme.all_reduce(rows, transport, "mean", None, feedback, "t"))
            before = feedback.tables["t"].clone()
            if step == 3:
                feedback.rollback()
                with_it -= dense(scheme.all_reduce(rows, transport, "mean", None, feedback, "t"))
                feedback.rollback()
                assert feedback.tables["t"].equal(before)
                with_it += dense(scheme.all_reduce(rows, transport, "mean", None, feedback, "t"))
            feedback.commit()
            without += dense(scheme.all_reduce(rows, transport, "mean"))
        return with_it, without

    wanted = steps * torch.stack([dense(rows_of(rank, 1)) for rank in range(2)]).mean(0)
    for with_it, without in run_local(2, body):
        assert (with_it - wanted).norm() < 0.5 * (without - wanted).norm()


def test_rows_that_are_not_finite_reach_everybody_as_nan_and_keep_their_residual() -> None:
    def body(transport: LocalTransport) -> bool:
        feedback, rows = RowFeedback(), rows_of(transport.rank, 1)
        scheme = QUANTISED["column+int8b"]
        scheme.all_reduce(rows, transport, "mean", None, feedback, "t")
        feedback.commit()
        before = feedback.tables["t"][rows.ids[0]].clone()
        if transport.rank == 0:
            rows.values[0, 5] = torch.inf
        result = scheme.all_reduce(rows, transport, "mean", None, feedback, "t")
        feedback.commit()
        poisoned = transport.rank != 0 or feedback.tables["t"][rows.ids[0]].equal(before)
        return poisoned and bool(result.values.isnan().any())

    assert run_local(2, body) == [True, True]


def test_the_model_and_the_policy_choose_it_where_bytes_count() -> None:
    load = Load(np.full(8, 4000), 20_000.0, 200_000, 256, 4, np.full(8, 6000))
    link = Link(8, 1e-4, 1e-4, 1e-4, 1.2e8, 1.2e8, 4e9, 1e10)
    exact = predict("column", load, link)
    assert predict("column+int8b", load, link).payload_bytes == pytest.approx(exact.payload_bytes / 3.9, rel=0.05)
    assert choose_scheme(load, link, value_codec="int8b").scheme == "column+int8b"
    assert choose_scheme(load, link).scheme == "column"
    fast = Link(8, 1e-4, 1e-4, 1e-4, 1e11, 1e11, 4e9, 1e10)
    assert "+" not in choose_scheme(load, fast, value_codec="int8b").scheme


@pytest.mark.parametrize("policy", [{"emb": "column+int8b"}, {"emb": "int8b"}, {"emb": "auto"}])
def test_a_gradient_takes_it_only_where_the_user_names_it(policy: dict[str, str]) -> None:
    def body(transport: LocalTransport) -> tuple[str, float, int]:
        link = Link(4, 1e-5, 1e-5, 1e-5, 1e6, 1e6, 4e9, 1e10)
        made = GradientReducer(transport, Planner(link), SyncPolicy.of(policy))
        for made.step in range(3):
            rows = rows_of(transport.rank, 1)
            grad = torch.sparse_coo_tensor(rows.ids[None], rows.values, (NUM_ROWS, WIDTH), check_invariants=False)
            result = made.reduce_sparse("emb", grad)
        wanted = torch.stack([dense(rows_of(rank, 1)) for rank in range(4)]).mean(0)
        error = float((result.to_dense() - wanted).norm() / wanted.norm())
        return made.planner.records()[-1].scheme, error, len(made.dense.state_dict()["rows"])

    for scheme, error, tables in run_local(4, body):
        if policy["emb"] == "auto":
            assert (tables, "+" in scheme) == (0, False)
            assert error < 1e-6
        else:
            assert scheme == "column+int8b"
            assert tables == 1
            assert 1e-5 < error < 0.05
