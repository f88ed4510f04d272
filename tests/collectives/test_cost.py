"""The cost model against the schemes' own exact byte counts, and against the published bounds."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.cost import (
    COSTS,
    Link,
    Load,
    dense_wins_on_elements,
    expected_peak,
    lower_bound_bytes,
    predict,
    probe_link,
)
from collectives.kernels.idcoding import coded_bytes
from collectives.sparse.schemes import SCHEMES
from collectives.sparse.workspace import METADATA
from collectives.transport import run_local

GIGABIT = 1e9 / 8
LINK = Link(4, 2e-4, 1e-4, 3e-4, GIGABIT, GIGABIT, 2e9, 8e9)


def zipf_ids(size: int, step: int, num_rows: int = 20_000, draws: int = 2_000) -> list[np.ndarray]:
    """Rows touched independently with probability 1 - (1 - p_r)^draws, p a Mandelbrot-Zipf law, by rank."""
    p = (np.arange(1, num_rows + 1) + 2.7) ** -1.2
    touched = -np.expm1(draws * np.log1p(-p / p.sum()))
    return [np.flatnonzero(np.random.default_rng((step, rank)).random(num_rows) < touched) for rank in range(size)]


def load_of_ids(ids: list[np.ndarray], num_rows: int, width: int, itemsize: int = 4) -> Load:
    return Load(
        k=np.array([len(one) for one in ids], np.int64),
        union=float(len(np.unique(np.concatenate(ids)))),
        num_rows=num_rows,
        width=width,
        itemsize=itemsize,
        id_bytes=np.array([coded_bytes(torch.from_numpy(one), num_rows) for one in ids], np.int64),
    )


def counted_bytes(scheme: str, ids: list[np.ndarray], num_rows: int, width: int, itemsize: int = 4) -> int:
    tables = SCHEMES[scheme].wire_bytes(ids, num_rows, width, itemsize)
    total = np.sum([table for phase, table in tables.items() if phase != METADATA], axis=0)
    return int(max(total.sum(axis=1).max(), total.sum(axis=0).max()))


@pytest.mark.parametrize("scheme", sorted(COSTS))
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("width", [1, 64, 128])
def test_predicted_bytes_are_within_5_percent_of_the_schemes_own_count(scheme: str, size: int, width: int) -> None:
    ids = zipf_ids(size, step=0)
    predicted = predict(scheme, load_of_ids(ids, 20_000, width), LINK).payload_bytes
    assert predicted == pytest.approx(counted_bytes(scheme, ids, 20_000, width), rel=0.05)


@pytest.mark.parametrize("scheme", ["agsparse", "column", "dense"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_schemes_without_hashing_are_predicted_exactly(scheme: str, itemsize: int) -> None:
    ids = [np.arange(0, 64, 2), np.arange(0), np.arange(64), np.arange(3)]
    load = load_of_ids(ids, 64, 8, itemsize)
    assert predict(scheme, load, LINK).payload_bytes == counted_bytes(scheme, ids, 64, 8, itemsize)


@pytest.mark.parametrize("scheme", sorted(COSTS))
@pytest.mark.parametrize("k", [[0, 0, 0], [0, 5, 0], [100, 100, 100]])
def test_empty_and_full_loads_cost_a_finite_time(scheme: str, k: list[int]) -> None:
    load = Load(np.array(k), float(max(k)), 100, 8, 4, np.array(k))
    prediction = predict(scheme, load, replace(LINK, size=3))
    assert prediction.payload_bytes >= 0
    assert 0 < prediction.seconds < math.inf


def test_one_rank_sends_nothing() -> None:
    load = Load(np.array([50]), 50.0, 100, 8, 4, np.array([50]))
    free = Link(1, 0.0, 0.0, 0.0, math.inf, math.inf, 1e9, 1e9)
    assert {predict(scheme, load, free).payload_bytes for scheme in COSTS} == {0}


@given(
    size=st.integers(2, 64),
    mean=st.integers(1, 1000),
    overlap=st.floats(0, 1),
    width=st.sampled_from([1, 16, 64, 512]),
)
def test_no_scheme_is_predicted_below_the_lower_bound(size: int, mean: int, overlap: float, width: int) -> None:
    union = mean + overlap * (size - 1) * mean
    load = Load(np.full(size, mean), union, 10**6, width, 4, np.full(size, mean))
    bound = lower_bound_bytes(load)
    for scheme in COSTS:
        assert COSTS[scheme](load).sent_bytes.mean() >= 0.999 * bound, scheme


def test_the_lower_bound_meets_its_two_limits() -> None:
    dense = Load(np.full(8, 1000), 1000.0, 1000, 1, 4, np.full(8, 1))
    assert lower_bound_bytes(dense) == pytest.approx(2 * 7 / 8 * 1000 * 4)
    disjoint = Load(np.full(8, 100), 800.0, 10_000, 1, 4, np.full(8, 100))
    assert lower_bound_bytes(disjoint) == pytest.approx(7 * 100 * 4)


def test_published_row_workloads_at_16_ranks_match_the_analytic_table() -> None:
    """LSTM, one billion words: 1.13 % of 793,471 x 512, gamma 4.9; megabytes per rank, computed from the formulas."""
    k = round(0.0113 * 793_471)
    load = Load(np.full(16, k), 4.9 * k, 793_471, 512, 4, np.full(16, 4 * k))
    megabytes = {scheme: predict(scheme, load, LINK).payload_bytes / 1e6 for scheme in COSTS}
    assert megabytes["dense"] == pytest.approx(3046.9, rel=0.01)
    assert megabytes["agsparse"] == pytest.approx(276.0, rel=0.01)
    assert megabytes["sparcml"] == pytest.approx(148.0, rel=0.03)
    assert megabytes["zen_rows"] == pytest.approx(102.1, rel=0.03)
    assert lower_bound_bytes(load) / 1e6 == pytest.approx(97.4, rel=0.01)


@pytest.mark.parametrize(
    ("itemsize", "density", "union_density", "wins"),
    [(4, 0.4, 1.0, False), (4, 0.49, 1.0, True), (2, 0.3, 1.0, False), (2, 0.32, 1.0, True), (4, 0.01, 0.05, False)],
)
def test_dense_wins_on_elements_exactly_where_the_inequality_says(
    itemsize: int, density: float, union_density: float, wins: bool
) -> None:
    k = round(1_000_000 * density)
    load = Load(np.full(4, k), 1_000_000 * union_density, 1_000_000, 1, itemsize, np.full(4, k))
    assert dense_wins_on_elements(load) is wins


def test_the_fullest_part_is_the_expected_maximum_of_normals() -> None:
    draws = np.random.default_rng(0).standard_normal((20_000, 16)).max(axis=1).mean()
    assert expected_peak(16) == pytest.approx(draws, rel=0.02)
    assert expected_peak(1) == 0.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_probed_link_is_the_same_bytes_on_all_ranks(size: int) -> None:
    links = run_local(size, probe_link)
    assert len({astuple(link) for link in links}) == 1
    assert links[0].size == size
    assert all(value > 0 for value in astuple(links[0])[4:])
