import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import ConfigError
from placement.catalogue import gpu_type
from placement.correction import Correction, Observation, correct, factor, headroom, moved, observe, retract
from placement.memory import predict
from placement.shapes import Layout, ModelShape, Setup

KEY = ("gpt", "H100", "image-1", "flash", "A")
SIBLING = ("gpt", "H100", "image-1", "fused", "A")
STRANGER = ("bert", "A100", "image-2", "flash", "A")


def seen(run: int | str, ratio: float, key: tuple[str, ...] = KEY, **more: bool) -> Observation:
    return Observation(run_id=str(run), key=key, predicted_bytes=1e9, measured_bytes=1e9 * ratio, **more)


def learned(ratios: list[float], key: tuple[str, ...] = KEY) -> Correction:
    state = Correction()
    for index, ratio in enumerate(ratios):
        state = observe(state, seen(f"{key[0]}-{index}", ratio, key))
    return state


def test_nothing_learned_changes_nothing():
    assert factor(Correction(), KEY) == 1.0
    assert headroom(Correction(), KEY, 1.1) == 1.1


def test_the_mean_is_shrunk_by_four_rows():
    state = learned([1.2] * 6)
    assert math.log(factor(state, KEY)) == pytest.approx(math.log(1.2) * 6 / 10)


@given(
    st.lists(st.floats(0.5, 2.0), max_size=12),
    st.lists(st.floats(0.5, 2.0), max_size=12),
    st.floats(0.01, 100.0),
    st.sampled_from([KEY, SIBLING, STRANGER]),
)
@settings(deadline=None)
def test_one_run_moves_a_key_by_at_most_a_fifth_of_its_error(own, others, bad, where):
    state = learned(own)
    for index, ratio in enumerate(others):
        state = observe(state, seen(f"s{index}", ratio, SIBLING))
    after = observe(state, seen("bad", bad, where))
    before_log, after_log = (math.log(factor(s, KEY)) for s in (state, after))
    bounded = max(-math.log(4), min(math.log(4), math.log(bad)))
    error = abs(bounded - before_log) if where == KEY else max(abs(bounded), abs(bounded - before_log))
    assert abs(after_log - before_log) <= 0.2 * error + 1e-12


@given(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=20), st.integers(0, 19))
@settings(deadline=None)
def test_a_run_can_be_taken_back_exactly(ratios, index):
    state = learned(ratios)
    name = f"gpt-{index % len(ratios)}"
    again = observe(retract(state, name), state.runs[name])
    assert dict(again.tallies) == dict(state.tallies)
    assert factor(again, KEY) == factor(state, KEY)
    empty = state
    for run_id in list(state.runs):
        empty = retract(empty, run_id)
    assert (dict(empty.tallies), dict(empty.runs)) == ({}, {})


@given(st.permutations([0.9, 1.0, 1.1, 1.25, 1.02]))
@settings(deadline=None)
def test_order_does_not_matter(ratios):
    state = Correction()
    for ratio in ratios:
        state = observe(state, seen(ratio, ratio))
    assert factor(state, KEY) == factor(learned([0.9, 1.0, 1.1, 1.25, 1.02]), KEY)


def test_a_new_key_starts_from_its_siblings_rather_than_from_strangers():
    state = learned([1.3] * 20, SIBLING)
    for index in range(20):
        state = observe(state, seen(f"stranger-{index}", 0.8, STRANGER))
    assert 1.15 < factor(state, KEY) < 1.3
    assert factor(state, STRANGER) < 0.9


def test_the_headroom_is_the_quantile_of_the_nearest_key_with_enough_rows():
    ratios = [1.0 + index / 1000 for index in range(200)]
    state = learned(ratios)
    rank = math.ceil(201 * 0.99)
    assert headroom(state, KEY, 9.0) == pytest.approx(ratios[rank - 1] / factor(state, KEY))
    assert headroom(state, SIBLING, 9.0) == pytest.approx(ratios[rank - 1] / factor(state, SIBLING))
    assert headroom(learned(ratios[:99]), KEY, 9.0) == 9.0


def test_headroom_is_never_below_one():
    assert headroom(learned([1.0] * 150), KEY, 9.0) == 1.0


def test_a_run_that_ran_out_of_memory_never_lowers_the_prediction():
    """It tells that the need was larger than the prediction, and at least what was measured."""
    state = learned([1.0, 1.0])
    low = observe(state, seen("oom", 0.6, out_of_memory=True))
    high = observe(state, seen("oom", 1.5, out_of_memory=True))
    assert factor(low, KEY) == 1.0
    assert factor(high, KEY) > 1.0


def test_a_known_run_is_replaced_not_counted_twice():
    state = observe(learned([1.2]), seen("gpt-0", 1.1))
    assert math.log(factor(state, KEY)) == pytest.approx(math.log(1.1) / 5)


def test_states_are_versions_and_old_ones_stay():
    before = learned([1.1])
    after = observe(before, seen("x", 1.5))
    assert after.version == before.version + 1
    assert len(before.runs) == 1
    assert moved(before, after, KEY) > 0.01


def test_a_corrected_prediction_scales_and_says_so():
    shape = ModelShape(layers=4, hidden=256, heads=4, seq=128, vocab=1000)
    card = gpu_type("H100")
    plain = predict(shape, Setup(), Layout.of(micro_batch=4), card).prediction(0)
    state = learned([1.2] * 40)
    better = correct(state, KEY, plain)
    assert better.allocated == pytest.approx(plain.allocated * factor(state, KEY))
    assert better.nvml == pytest.approx(better.reserved + plain.context)
    assert better.nvml_upper == pytest.approx(better.reserved * plain.allocated_upper / plain.allocated + plain.context)
    assert better.confidence == "measured"
    assert correct(Correction(), KEY, plain) == plain
    assert correct(state, STRANGER, plain).confidence == "known"


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="positive number"):
        seen("x", 0.0)
    with pytest.raises(ConfigError, match="positive number"):
        seen("x", math.nan)
    with pytest.raises(ConfigError, match="not among the 1 runs"):
        retract(learned([1.0]), "unknown")
