"""The chooser: right answers on clear cases, the same answer everywhere, and convergence to the truly fastest."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.cost import COSTS, Link, Load, predict
from collectives.errors import CollectiveMismatch, ConfigError
from collectives.planner import (
    ELEMENT_SCHEMES,
    MAX_SCAN_PAUSE,
    RECONSIDER_CALLS,
    ROW_SCHEMES,
    Planner,
    choose_scheme,
    predicted_union,
)
from collectives.sparse.schemes import SCHEMES

GIGABIT = 1e9 / 8


def link(size: int, latency_s: float = 1e-4) -> Link:
    return Link(size, latency_s, latency_s, latency_s, GIGABIT, GIGABIT, 4e9, 1e10)


def load(
    size: int, k: int, gamma: float, num_rows: int, width: int, itemsize: int = 4, *, is_dense: bool = False
) -> Load:
    return Load(np.full(size, k), gamma * k, num_rows, width, itemsize, np.full(size, k), is_dense)


def test_candidates_have_a_formula_and_an_implementation() -> None:
    assert {*ROW_SCHEMES, *ELEMENT_SCHEMES} <= set(COSTS) <= set(SCHEMES)


# --- clear cases ---


@pytest.mark.parametrize("width", [1, 256])
def test_two_ranks_use_agsparse(width: int) -> None:
    choice = choose_scheme(load(2, 50_000, 1.8, 1_000_000, width), link(2))
    assert choice.scheme == "agsparse"


def test_many_rows_on_many_ranks_use_the_column_split() -> None:
    choice = choose_scheme(load(16, 9_000, 4.9, 793_471, 512), link(16))
    assert choice.scheme == "column"
    assert choice.predicted_bytes < 0.05 * next(p.payload_bytes for p in choice.alternatives if p.scheme == "dense")


def test_many_elements_on_many_ranks_use_zen() -> None:
    assert choose_scheme(load(16, 500_000, 6.0, 10_000_000, 1), link(16)).scheme == "zen"


@pytest.mark.parametrize("size", [4, 8, 16])
def test_tiny_tensors_use_few_rounds(size: int) -> None:
    assert choose_scheme(load(size, 3, 2.0, 100_000, 16), link(size)).scheme in ("sparcml", "agsparse")


@given(
    size=st.integers(2, 32),
    itemsize=st.sampled_from([2, 4]),
    density=st.floats(0.01, 1.0),
    spread=st.floats(0.0, 1.0),
)
def test_elements_go_dense_where_the_inequality_fails(size: int, itemsize: int, density: float, spread: float) -> None:
    num_rows = 1_000_000
    k = max(1, int(density * num_rows))
    union = k + spread * (min(num_rows, size * k) - k)
    tensor = Load(np.full(size, k), union, num_rows, 1, itemsize, np.full(size, k))
    if (itemsize + 4) * k / num_rows / itemsize + union / num_rows + 1 / (8 * itemsize) >= 2:
        choice = choose_scheme(tensor, link(size))
        assert choice.scheme == "dense"
        assert "too dense" in choice.reason


def test_dense_gradients_stay_dense_and_row_sparse_ones_do_not() -> None:
    full = choose_scheme(load(4, 4096, 1.0, 4096, 64, is_dense=True), link(4))
    assert full.scheme == "dense"
    few = choose_scheme(load(4, 100, 2.0, 100_000, 64, is_dense=True), link(4))
    assert few.scheme != "dense"


@given(
    st.integers(1, 64),
    st.integers(0, 10_000),
    st.floats(1.0, 64.0),
    st.sampled_from([1, 8, 512]),
    st.sampled_from([*COSTS, None]),
)
def test_the_choice_is_pure_and_an_override_holds(
    size: int, k: int, gamma: float, width: int, override: str | None
) -> None:
    tensor = load(size, k, min(gamma, size), 100_000, width)
    first = choose_scheme(tensor, link(size), override)
    assert first == choose_scheme(replace(tensor, k=tensor.k.copy()), link(size), override)
    assert first.scheme == (override or first.scheme)
    assert first.predicted_bytes == predict(first.scheme, tensor, link(size)).payload_bytes
    expected = {p.scheme for p in first.alternatives} | {first.scheme}
    assert expected >= set(ROW_SCHEMES if width > 1 else ELEMENT_SCHEMES)


def test_an_unknown_override_names_the_schemes() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme 'zenn'; schemes are column"):
        choose_scheme(load(4, 10, 1.0, 100, 8), link(4), "zenn")


def test_the_current_scheme_is_kept_unless_another_gains() -> None:
    tensor = load(4, 1000, 2.0, 100_000, 64)
    ranking = sorted(ROW_SCHEMES, key=lambda name: predict(name, tensor, link(4)).seconds)
    known = dict.fromkeys(ROW_SCHEMES, 1.0)
    second = predict(ranking[1], tensor, link(4)).seconds / predict(ranking[0], tensor, link(4)).seconds
    near = known | {ranking[1]: 1.02 / second}
    assert choose_scheme(tensor, link(4), None, near, ranking[1]).scheme == ranking[1]
    far = known | {ranking[1]: 1.2 / second}
    assert choose_scheme(tensor, link(4), None, far, ranking[1]).scheme == ranking[0]


def test_the_union_is_predicted_from_gamma_within_its_limits() -> None:
    k = np.array([100, 200, 300])
    assert predicted_union(k, 1.5, 10_000) == 300
    assert predicted_union(k, 2.0, 10_000) == 400
    assert predicted_union(k, 9.0, 10_000) == 600
    assert predicted_union(k, 2.0, 350) == 350
    assert predicted_union(np.zeros(3, np.int64), None, 10) == 0
    independent = predicted_union(k, None, 1000)
    assert independent == pytest.approx(1000 * (1 - 0.9 * 0.8 * 0.7))


# --- the planner over many calls: every rank is one Planner, the metadata round is a stack of records ---


class Ranks:
    """n planners of one tensor; `truth` says how long a scheme really takes, by rank."""

    def __init__(self, size: int, truth: dict[str, float], tensor: Load, noise: float = 0.0):
        self.planners = [Planner(link(size)) for _ in range(size)]
        self.truth, self.tensor, self.noise = truth, tensor, np.random.default_rng(0).normal(1, noise, 10_000)
        self.call = 0

    def step(self, override: str | None = None, union: int | None = None) -> str:
        table = np.array([planner.record("t") for planner in self.planners])
        for planner in self.planners:
            planner.settle("t", table)
        schemes = [planner.choose("t", self.tensor, override).scheme for planner in self.planners]
        assert len(set(schemes)) == 1
        for rank, planner in enumerate(self.planners):
            self.call += 1
            seconds = self.truth[schemes[0]] * (1 + 0.1 * rank) * abs(self.noise[self.call])
            count = round(self.tensor.union) if union is None else union
            planner.observe("t", self.tensor, count, 1000 + rank, seconds)
        return schemes[0]


@pytest.mark.parametrize("best", ROW_SCHEMES)
def test_auto_ends_within_10_percent_of_the_fastest_scheme(best: str) -> None:
    """The model is wrong by up to a factor of two either way, the times scatter by 5 %, the slowest rank counts."""
    tensor = load(4, 1000, 2.0, 20_000, 64)
    model = {name: predict(name, tensor, link(4)).seconds for name in ROW_SCHEMES}
    fastest = min(model.values())
    truth = {name: 1.5 * max(seconds, fastest) for name, seconds in model.items()}
    truth[best] = 0.6 * min(truth.values()) if model[best] < 2 * fastest else truth[best]
    ranks = Ranks(4, truth, tensor, noise=0.05)
    for _ in range(40):
        last = ranks.step()
    assert truth[last] <= 1.10 * min(truth.values())


def test_observed_times_of_the_slowest_rank_are_what_counts() -> None:
    ranks = Ranks(3, dict.fromkeys(ROW_SCHEMES, 0.5), load(3, 100, 2.0, 10_000, 16))
    ranks.step()
    ranks.step()
    agreed = [planner.records()[0] for planner in ranks.planners]
    assert agreed[0] == agreed[1] == agreed[2]
    assert agreed[0].observed_s == pytest.approx(0.6)
    assert agreed[0].observed_bytes == 1002


def test_gamma_follows_the_results_and_predicts_the_next_union() -> None:
    tensor = load(4, 1000, 2.5, 100_000, 64)
    ranks = Ranks(4, dict.fromkeys(ROW_SCHEMES, 1e-3), tensor)
    for _ in range(3):
        ranks.step("column")
    predicted = ranks.planners[0].choices["t"].predicted_bytes
    assert predicted == pytest.approx(predict("column", tensor, link(4)).payload_bytes, rel=0.001)


def test_a_rank_whose_state_differs_is_named() -> None:
    ranks = Ranks(3, dict.fromkeys(ROW_SCHEMES, 1e-3), load(3, 100, 2.0, 10_000, 16))
    ranks.step()
    ranks.planners[2].load_state_dict({"size": 3, "digest": 0, "tensors": {}, "shapes": {}})
    with pytest.raises(CollectiveMismatch, match=r"tensor 't': .* rank\(s\) \[2\] differs"):
        ranks.step()


def test_fallbacks_and_switches_are_events() -> None:
    dense = load(4, 900, 1.05, 1000, 8)
    ranks = Ranks(4, dict.fromkeys(ROW_SCHEMES, 1e-3), dense)
    ranks.step("column")
    assert ranks.step("dense") == "dense"
    ranks.planners[0].choices["t"] = replace(ranks.planners[0].choices["t"], reason="fastest")
    ranks.planners[0].observe("t", dense, 950, 0, 1e-3)
    events = [record.event for record in ranks.planners[0].records()]
    assert events[0] == ""
    assert events[-1] == "dense fallback"
    assert ranks.planners[1].records()[-1].event == "switched from column"


def test_scanning_pauses_double_while_it_is_in_vain_and_end_when_it_helps() -> None:
    planner = Planner(link(4))
    full, few = load(4, 4096, 1.0, 4096, 64, is_dense=True), load(4, 10, 2.0, 4096, 64, is_dense=True)
    scanned = []
    for call in range(200):
        if planner.scan_due("t"):
            scanned.append(call)
            planner.choose("t", full)
    assert scanned == [0, 2, 6, 14, 30, 62, 126, 191]
    assert max(np.diff(scanned)) == MAX_SCAN_PAUSE + 1
    while not planner.scan_due("t"):
        pass
    assert planner.choose("t", few).scheme != "dense"
    assert planner.scan_due("t")


def test_state_survives_a_restart_and_is_dropped_for_another_number_of_ranks() -> None:
    tensor = load(4, 1000, 2.0, 20_000, 64)
    ranks = Ranks(4, {name: predict(name, tensor, link(4)).seconds for name in ROW_SCHEMES}, tensor)
    for _ in range(12):
        ranks.step()
    state = json.loads(json.dumps(pickle.loads(pickle.dumps(ranks.planners[0].state_dict()))))
    restarted = Planner(link(4))
    restarted.load_state_dict(state)
    assert restarted.record("t")[0] == ranks.planners[0].record("t")[0]
    assert restarted.choose("t", tensor) == ranks.planners[0].choose("t", tensor)
    smaller = Planner(link(3))
    smaller.load_state_dict(state)
    assert smaller.record("t")[0] == Planner(link(3)).record("t")[0]


def test_a_rank_that_measured_something_else_of_the_same_shape_is_named() -> None:
    """Tensors of one shape share measurements, so what another tensor did belongs to the state that must agree."""
    tensor = load(2, 100, 2.0, 10_000, 16)
    planners = [Planner(link(2)) for _ in range(2)]
    for planner, seconds in zip(planners, (0.1, 0.2), strict=True):
        planner.settle("a", np.array([planner.record("a")] * 2))
        planner.choose("a", tensor)
        planner.observe("a", tensor, 150, 1000, seconds)
        planner.settle("a", np.array([planner.record("a")] * 2))
    with pytest.raises(CollectiveMismatch, match=r"tensor 'b': .* rank\(s\) \[1\] differs"):
        planners[0].settle("b", np.array([planner.record("b") for planner in planners]))


def test_a_settled_tensor_keeps_its_scheme_and_compares_again_when_its_rows_change() -> None:
    tensor = load(4, 1000, 2.0, 20_000, 64)
    ranks = Ranks(4, {name: predict(name, tensor, link(4)).seconds for name in ROW_SCHEMES}, tensor)
    for _ in range(30):
        settled = ranks.step()
    planner, kept = ranks.planners[0], "the last comparison"

    def mark() -> None:
        planner.choices["t"] = replace(planner.choices["t"], reason=kept)

    mark()
    ranks.step()
    assert planner.choices["t"].reason == kept
    assert planner.choices["t"].predicted_bytes == predict(settled, tensor, link(4)).payload_bytes
    for _ in range(RECONSIDER_CALLS):
        ranks.step()
    assert planner.choices["t"].reason != kept
    ranks.step()
    mark()
    ranks.tensor = load(4, 1200, 2.0, 20_000, 64)
    ranks.step()
    assert planner.choices["t"].reason != kept
