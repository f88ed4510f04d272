"""Vectors of every placement rule, the balance theorem of window-fill, and the exact split against a linear program."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from collectives.errors import ConfigError
from placement.errors import PlacementError
from placement.expert_baselines import eplb_hosts, llep_split, symi_counts, symi_hosts
from placement.experts import POLICIES, num_moves, relabel, robust_hosts, spread_hosts, window_fill
from placement.split import Ranks, even_split, exact_split, hosted, token_map


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("popularity", "shape", "counts", "max_over_mean"),
    [
        (ints(10, 20, 30, 40), (2, 4), [1, 2, 2, 3], 1.1),
        (ints(100, 1, 1, 1), (2, 2), [1, 1, 1, 1], 1.961),
        (ints(0, 0, 7, 1), (2, 3), [1, 1, 3, 1], 1.417),
        (ints(130, 90, 5, 5, 40, 10, 10, 10), (4, 4), [6, 4, 1, 1, 1, 1, 1, 1], 1.178),
    ],
)
def test_symi_vectors(popularity: np.ndarray, shape: tuple[int, int], counts: list[int], max_over_mean: float) -> None:
    ranks = Ranks.equal(*shape)
    assert symi_counts(popularity, ranks.num_slots).tolist() == counts
    load = np.zeros(len(ranks))
    slots = symi_hosts(popularity, ranks)
    for rank, expert in zip(*np.nonzero(slots >= 0), strict=True):
        load[rank] += popularity[slots[rank, expert]] / counts[slots[rank, expert]]
    assert load.max() / load.mean() == pytest.approx(max_over_mean, abs=6e-4)


def test_symi_slots_and_guards() -> None:
    assert symi_hosts(ints(10, 20, 30, 40), Ranks.equal(2, 4)).tolist() == [[0, 1, 1, 2], [2, 3, 3, 3]]
    assert symi_counts(ints(0, 0, 0), 6).tolist() == [2, 2, 2]
    with pytest.raises(PlacementError, match="5 experts need as many slots"):
        symi_counts(ints(1, 1, 1, 1, 1), 4)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=24), st.integers(0, 40))
def test_symi_uses_every_slot_and_every_expert(popularity: list[int], spare: int) -> None:
    counts = symi_counts(np.array(popularity, np.int64), len(popularity) + spare)
    assert counts.sum() == len(popularity) + spare
    assert counts.min() >= 1


EPLB_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


def test_eplb_vectors() -> None:
    ranks = Ranks.equal(8, 2)
    expected = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]
    for loads, slots in zip(EPLB_LOADS, expected, strict=True):
        assert eplb_hosts(ints(*loads), ranks, 4, 2).reshape(-1).tolist() == slots
    flat = eplb_hosts(ints(*EPLB_LOADS[0]), ranks, 1, 1).reshape(-1).tolist()
    assert flat == [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1]
    assert eplb_hosts(ints(*EPLB_LOADS[0]), ranks, 3, 2).reshape(-1).tolist() == flat, "groups not divisible by nodes"


def test_llep_vector() -> None:
    split = llep_split(ints(130, 90, 5, 5, 40, 10, 10, 10), 4, min_chunk=1)
    assert split.pairs.sum(1).tolist() == [75, 75, 75, 75]
    assert split.pairs[:, 0].tolist() == [0, 65, 10, 55], "home still waits for expert 1, so all of expert 0 spills"
    assert np.flatnonzero(split.pairs[:, 1]).tolist() == [0, 2]
    assert split.weight_sends == 4
    calm = llep_split(ints(10, 10, 11, 10), 2)
    assert calm.weight_sends == 0
    assert calm.pairs.tolist() == [[10, 10, 0, 0], [0, 0, 11, 10]]


@pytest.mark.parametrize(
    ("w", "shape", "hosts", "loads"),
    [
        (ints(130, 90, 5, 5, 40, 10, 10, 10), (4, 4), [{6, 7, 4, 1}, {2, 3, 5, 1}, {1, 0}, {0}], [75, 75, 75, 75]),
        (ints(10, 20, 30, 40), (2, 4), [{0, 1, 2}, {2, 3}], [50, 50]),
        (ints(0, 0, 7, 1), (2, 3), [{1, 3, 2}, {0, 2}], [4, 4]),
    ],
)
def test_window_fill_vectors(w: np.ndarray, shape: tuple[int, int], hosts: list[set[int]], loads: list[int]) -> None:
    x, slots = window_fill(w, *shape)
    assert x.sum(1).tolist() == loads
    assert sorted(map(sorted, ({int(e) for e in row if e >= 0} for row in slots))) == sorted(map(sorted, hosts))


def test_window_fill_is_perfect_in_ten_thousand_cases() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10_000):
        num_ranks, slots = int(rng.integers(1, 9)), int(rng.integers(2, 7))
        num_experts = int(rng.integers(1, num_ranks * (slots - 1) + 2))
        w = np.floor(rng.pareto(0.7, num_experts) * rng.integers(0, 40, num_experts)).astype(np.int64) % 10**6
        x, hosts = window_fill(w, num_ranks, slots)
        mask = hosted(hosts, num_experts)
        assert (x.sum(0) == w).all()
        assert x.sum(1).max() == -(-w.sum() // num_ranks)
        assert (mask | (x == 0)).all(), "an expert is computed only where it is hosted"
        assert mask.any(0).all(), "every expert is hosted, also without load"


def test_window_fill_refuses_too_few_slots() -> None:
    with pytest.raises(PlacementError, match="needs 19 slots for 16 experts on 4 ranks; there are 16"):
        window_fill(np.ones(16, np.int64), 4, 4)


@st.composite
def instances(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Ranks]:
    num_ranks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, num_ranks * slots))
    w = np.array(draw(st.lists(st.integers(0, 2000), min_size=num_experts, max_size=num_experts)), np.int64)
    speeds = tuple(draw(st.sampled_from([1.0, 1.0, 1.5, 3.0])) for _ in range(num_ranks))
    ranks = Ranks((slots,) * num_ranks, tuple(range(num_ranks)), speeds, (10**9,) * num_ranks)
    return w, spread_hosts(w, ranks), ranks


@settings(max_examples=60, deadline=None)
@given(instances())
def test_exact_split_equals_the_linear_program(case: tuple[np.ndarray, np.ndarray, Ranks]) -> None:
    w, slots, ranks = case
    x = exact_split(slots, w, ranks)
    mask = hosted(slots, len(w))
    assert (x >= 0).all()
    assert (x[~mask] == 0).all()
    assert (x.sum(0) == w).all()
    variables = [(n, e) for n in range(len(ranks)) for e in range(len(w)) if mask[n, e]]
    demand = np.zeros((len(w), len(variables) + 1))
    time = np.zeros((len(ranks), len(variables) + 1))
    for i, (n, e) in enumerate(variables):
        demand[e, i], time[n, i] = 1, ranks.seconds_per_pair[n]
    time[:, -1] = -1
    cost = np.r_[np.zeros(len(variables)), 1]
    bound = linprog(cost, A_ub=time, b_ub=np.zeros(len(ranks)), A_eq=demand, b_eq=w, method="highs").fun
    reached = (x.sum(1) * np.array(ranks.seconds_per_pair)).max()
    assert bound - 1e-6 <= reached <= bound + max(ranks.seconds_per_pair), "an integer split is at most one pair above"


def test_exact_split_keeps_memory_limits_or_names_them() -> None:
    slots = np.array([[0, 1], [1, 2]], np.int32)
    ranks = Ranks((2, 2), (0, 1), (1.0, 1.0), (40, 100))
    x = exact_split(slots, ints(30, 50, 20), ranks)
    assert x.sum(1).tolist() == [40, 60]
    with pytest.raises(PlacementError, match=r"60 pairs must run on rank\(s\) \[0\], whose memory holds 40"):
        exact_split(slots, ints(60, 0, 0), ranks)
    with pytest.raises(PlacementError, match="expert 3 has 5 pairs and no host"):
        exact_split(slots, ints(1, 1, 1, 5), ranks)


def test_token_map_prefers_the_own_rank_then_the_own_node() -> None:
    ranks = Ranks.equal(4, 2, ranks_per_node=2)
    a = np.array([[5], [5], [0], [6]], np.int64)
    x = np.array([[8], [0], [8], [0]], np.int64)
    routes = token_map(a, x, ranks)[:, :, 0]
    assert (routes.sum(1) == a[:, 0]).all()
    assert (routes.sum(0) == x[:, 0]).all()
    assert routes.tolist() == [[5, 0, 0, 0], [3, 0, 2, 0], [0, 0, 0, 0], [0, 0, 6, 0]]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize(
    ("num_ranks", "slots", "num_experts"), [(1, 8, 8), (3, 4, 7), (4, 4, 8), (5, 3, 11), (8, 2, 3)]
)
def test_every_policy_hosts_every_expert_and_keeps_every_pair(
    name: str, num_ranks: int, slots: int, num_experts: int
) -> None:
    rng = np.random.default_rng(num_ranks)
    ranks = Ranks.equal(num_ranks, slots)
    for w in (rng.integers(0, 1000, num_experts), np.zeros(num_experts, int), np.eye(1, num_experts, 0, int)[0] * 977):
        counts = np.stack([w, w]).astype(np.int64)
        hosts = POLICIES[name].hosts(counts, ranks, None)
        assert hosts.shape == (num_ranks, slots)
        assert hosted(hosts, num_experts).any(0).all()
        split = POLICIES[name].split(hosts, counts[-1], ranks)
        assert (split.pairs.sum(0) + split.dropped == counts[-1]).all()
        assert (split.pairs >= 0).all()
        if name not in ("symi_cap",):
            assert split.dropped.sum() == 0
        if name != "llep":
            assert (split.pairs[~hosted(hosts, num_experts)] == 0).all()


def test_robust_serves_unequal_ranks() -> None:
    ranks = Ranks((3, 2, 4), (0, 1, 2), (1.0, 2.0, 1.0), (10**9,) * 3)
    w = ints(50, 40, 30, 20, 10, 5)
    slots = robust_hosts(w, ranks)
    assert [(row >= 0).sum() for row in slots] == [3, 2, 4], "every slot that exists is used, none that does not"
    seconds = exact_split(slots, w, ranks).sum(1) * np.array(ranks.seconds_per_pair)
    assert seconds.max() <= 1.02 * w.sum() / (1 + 0.5 + 1) + 2


def test_relabelling_moves_little_and_keeps_the_plan() -> None:
    ranks = Ranks.equal(4, 2, ranks_per_node=2)
    before = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.int32)
    permuted = before[[3, 2, 0, 1]].copy()
    permuted[0, 0] = 0
    after = relabel(permuted, before, ranks, 8)
    assert num_moves(after, before, 8) == 1
    assert sorted(map(tuple, after.tolist())) == sorted(map(tuple, permuted.tolist()))


def test_even_split_counts_whole_pairs() -> None:
    slots = np.array([[0, 0], [0, 1]], np.int32)
    assert even_split(slots, ints(10, 3)).tolist() == [[6, 0], [4, 3]]


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="non-negative"):
        POLICIES["robust"].hosts(np.full((1, 4), -1), Ranks.equal(2, 4), None)


def optimum(w: np.ndarray, num_ranks: int, slots: int) -> float:
    """Hottest rank of the best hosts with a free split: the mixed-integer program, solved exactly."""
    num_experts = len(w)
    pairs = num_ranks * num_experts
    rows, low, high = [], [], []

    def add(coefficients: dict[int, float], lower: float, upper: float) -> None:
        row = np.zeros(2 * pairs + 1)
        for column, value in coefficients.items():
            row[column] = value
        rows.append(row)
        low.append(lower)
        high.append(upper)

    for n in range(num_ranks):
        add({n * num_experts + e: 1.0 for e in range(num_experts)} | {2 * pairs: -1.0}, -np.inf, 0)
        add({pairs + n * num_experts + e: 1.0 for e in range(num_experts)}, 0, slots)
        for e in range(num_experts):
            add({n * num_experts + e: 1.0, pairs + n * num_experts + e: -float(w[e])}, -np.inf, 0)
    for e in range(num_experts):
        add({n * num_experts + e: 1.0 for n in range(num_ranks)}, w[e], w[e])
        add({pairs + n * num_experts + e: 1.0 for n in range(num_ranks)}, 1, np.inf)
    result = milp(
        np.r_[np.zeros(2 * pairs), 1],
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.r_[np.zeros(pairs), np.ones(pairs), 0],
        bounds=Bounds(0, np.r_[np.full(pairs, np.inf), np.ones(pairs), np.inf]),
        options={"mip_rel_gap": 1e-6, "time_limit": 20},
    )
    return float(result.fun)


def test_robust_is_near_the_optimum_where_slots_are_few() -> None:
    rng = np.random.default_rng(3)
    gaps = []
    for num_ranks, slots, num_experts in ((4, 2, 6), (3, 3, 8), (4, 3, 10)):
        for _ in range(12):
            w = np.floor(rng.pareto(1.0, num_experts) * 300).astype(np.int64) + 1
            ranks = Ranks.equal(num_ranks, slots)
            reached = exact_split(robust_hosts(w, ranks), w, ranks).sum(1).max()
            gaps.append(reached / max(optimum(w, num_ranks, slots), -(-w.sum() // num_ranks)))
    assert np.mean(gaps) <= 1.01
    assert max(gaps) <= 1.05
