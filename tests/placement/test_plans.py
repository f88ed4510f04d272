from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.catalogue import GIB, gpu_type
from placement.correction import ANALYTIC, Correction, Observation, observe
from placement.errors import PlacementError
from placement.plans import Knowledge, Search, broken_rule, enumerate_plans, pareto
from placement.shapes import Experts, Layout, ModelShape, Setup, ShapeError
from placement.speed import SpeedModel, flops_per_token, step_time

LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, groups=8, seq=4096, vocab=128256, ffn=14336, gated=True, bias=False, norm="rms",
    tied=False, rotary=True,
)  # fmt: skip
TINY = ModelShape(layers=4, hidden=256, heads=4, seq=128, vocab=1000)
MIXTURE = replace(TINY, experts=Experts(num_experts=8, top_k=2, ffn=512))
TYPES = [gpu_type(name) for name in ("A100-40", "A100-80", "H100")]
RULES = {"tensor": 1, "pipeline": 1, "virtual": 1, "context": 1, "expert": 1}


@given(global_batch=st.integers(1, 96), max_gpus=st.integers(1, 64), shape=st.sampled_from([TINY, MIXTURE, LLAMA]))
@settings(max_examples=25, deadline=None)
def test_every_plan_keeps_the_rules(global_batch, max_gpus, shape):
    found = enumerate_plans(shape, Setup(global_batch=global_batch), TYPES, Search(max_gpus=max_gpus))
    for plan in found.plans:
        card = gpu_type(plan.gpu_type)
        assert plan.micro_batch * plan.num_micro * plan.data == global_batch
        assert plan.num_gpus <= max_gpus
        assert plan.memory.nvml_upper <= card.memory_bytes
        assert shape.heads % plan.tensor == shape.ffn_width % plan.tensor == 0
        assert plan.tensor <= card.gpus_per_node
        assert shape.layers % (plan.pipeline * plan.virtual) == 0
        assert plan.num_micro >= plan.pipeline
        assert plan.sequence_parallel == (plan.tensor > 1)
        assert (plan.data * plan.tensor * plan.context) % plan.expert == 0


def test_the_front_of_each_type_falls_in_time_as_it_grows_in_gpus():
    found = enumerate_plans(LLAMA, Setup(global_batch=64), TYPES)
    for card in TYPES:
        mine = sorted((p for p in found.plans if p.gpu_type == card.name), key=lambda p: p.num_gpus)
        assert mine
        times = [plan.step_time_s for plan in mine]
        assert times == sorted(times, reverse=True)
        assert len({plan.num_gpus for plan in mine}) == len(mine)
    assert len(found.plans) <= 70


def test_plans_come_by_goodput_per_weighted_gpu():
    plans = enumerate_plans(LLAMA, Setup(global_batch=64), TYPES).plans
    rates = [plan.samples_per_weighted_gpu_s for plan in plans]
    assert rates == sorted(rates, reverse=True)
    first = plans[0]
    price = gpu_type(first.gpu_type).price
    assert first.samples_per_weighted_gpu_s == pytest.approx(64 / (first.step_time_s * first.num_gpus * price))


def test_recomputation_is_used_only_where_nothing_less_fits():
    needy = replace(LLAMA, seq=16384)
    search = Search(max_gpus=8, micro_batch=(1,), context=(1,), pinned={"pipeline": 1})
    plans = enumerate_plans(needy, Setup(global_batch=8), [gpu_type("A100-80")], search).plans
    assert plans
    assert all(plan.recompute == "full" for plan in plans if plan.tensor == 1)
    roomy = enumerate_plans(TINY, Setup(global_batch=8), [gpu_type("A100-80")]).plans
    assert all(plan.recompute == "none" for plan in roomy)


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ({"tensor": 16}, "cross nodes"), ({"tensor": 3}, "32 heads"), ({"pipeline": 5}, "32 layers"),
        ({"virtual": 2}, "without a pipeline"), ({"pipeline": 8, "virtual": 8}, "p\\*v=64"),
        ({"context": 3}, "sequence 4096"), ({"expert": 2}, "1 experts"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(degrees, reason):
    import re

    assert re.search(reason, broken_rule(LLAMA, gpu_type("H100"), **(RULES | degrees)))


def test_key_value_groups_are_not_replicated():
    few = replace(LLAMA, groups=2)
    assert "key/value" in broken_rule(few, gpu_type("H100"), **(RULES | {"tensor": 4}))
    assert broken_rule(few, gpu_type("H100"), **(RULES | {"tensor": 2})) == ""


def test_rejections_say_how_many_bytes_are_short():
    found = enumerate_plans(LLAMA, Setup(global_batch=8), [gpu_type("A100-40")], Search(max_gpus=8))
    short = [entry for entry in found.rejected if entry.short_bytes]
    broken = [entry for entry in found.rejected if not entry.short_bytes]
    assert short
    assert broken
    assert all("GiB more than the 40 of A100-40" in entry.reason for entry in short)
    one = next(entry for entry in short if entry.degrees["tensor"] == entry.degrees["pipeline"] == 1)
    assert one.short_bytes > 20 * GIB


def test_the_nearest_change_frees_what_the_user_pinned():
    pinned = {"tensor": 1, "pipeline": 1, "data": 1, "context": 1}
    found = enumerate_plans(LLAMA, Setup(global_batch=8), [gpu_type("A100-80")], Search(pinned=pinned))
    assert found.plans == ()
    assert found.nearest == "tensor=4 instead of 1 fits A100-80"


def test_where_nothing_fits_the_distance_is_named():
    found = enumerate_plans(LLAMA, Setup(global_batch=8), [gpu_type("T4")], Search(max_gpus=2))
    assert found.plans == ()
    assert "on T4, lacks" in found.nearest


def test_a_batch_that_no_degrees_divide_is_explained():
    found = enumerate_plans(TINY, Setup(global_batch=3), TYPES, Search(pinned={"micro_batch": 2}))
    assert found.plans == ()
    assert "instead of 2 fits" in found.nearest


def test_misuse_is_an_error():
    with pytest.raises(PlacementError, match="no GPU type"):
        enumerate_plans(TINY, Setup(global_batch=3), [])
    with pytest.raises(ShapeError, match="cannot pin colour"):
        Search(pinned={"colour": 1})


def test_the_scheduler_gets_the_upper_bound():
    plan = enumerate_plans(TINY, Setup(global_batch=8), TYPES).plans[0]
    option = plan.option()
    assert option.memory_bytes >= plan.memory.nvml_upper
    assert (option.num_gpus, option.tp_group) == (plan.num_gpus, plan.tensor)


def test_pareto_keeps_the_unbeaten():
    num_gpus = np.array([1, 2, 2, 4, 8])
    seconds = np.array([8.0, 5.0, 4.0, 4.0, 1.0])
    assert sorted(pareto(num_gpus, seconds).tolist()) == [0, 2, 4]


def test_flops_of_llama_3_8b_are_six_times_its_parameters_and_attention():
    """7.5e9 parameters in matrix products (all but the input embedding), 6 l h s for causal attention."""
    assert flops_per_token(LLAMA) == pytest.approx(6 * 7.504e9 + 6 * 32 * 4096 * 4096, rel=2e-3)


def test_step_time_counts_bubble_and_recomputation():
    layout = Layout.of(micro_batch=1, pipeline=[1, 4], num_micro=8)
    alone, piped = step_time(LLAMA, layout, gpu_type("H100"), 8, SpeedModel())
    assert piped == pytest.approx(alone / 4 * (1 + 3 / 8))
    full = Layout.of(micro_batch=1, num_micro=8, recompute=2)
    assert step_time(LLAMA, full, gpu_type("H100"), 8, SpeedModel())[0] == pytest.approx(alone * 4 / 3)


def test_a_measured_speed_replaces_the_estimate():
    setup = Setup(global_batch=8)
    plain = enumerate_plans(TINY, setup, [TYPES[0]]).plans
    slow = enumerate_plans(TINY, setup, [TYPES[0]], knowledge=Knowledge(speed={"A100-40": SpeedModel(scale=3.0)})).plans
    assert slow[0].step_time_s == pytest.approx(3 * plain[0].step_time_s)


def test_recorded_peaks_decide_what_fits():
    """Thirty runs that needed a third more than predicted: what just fitted does not any more."""
    state = Correction()
    for index in range(30):
        key = ("llama", "A100-80", "", "fused", ANALYTIC)
        state = observe(state, Observation(run_id=str(index), key=key, predicted_bytes=3e9, measured_bytes=4e9))
    card = gpu_type("A100-80")
    taught = Knowledge(correction=state, family="llama")
    layout = Layout.of(micro_batch=1, tensor=4)
    plain, corrected = (who.table(LLAMA, Setup(), layout, card) for who in (Knowledge(), taught))
    assert corrected.allocated[0] / plain.allocated[0] == pytest.approx((4 / 3) ** (30 / 34))
    assert corrected.prediction().static == pytest.approx(plain.prediction().static * (4 / 3) ** (30 / 34))
    tight = replace(card, memory_bytes=int(plain.nvml_upper[0] * 1.02))
    search = Search(pinned={"tensor": 4, "pipeline": 1, "context": 1, "data": 1, "micro_batch": 1}, recompute=("none",))
    assert enumerate_plans(LLAMA, Setup(global_batch=1), [tight], search).plans
    found = enumerate_plans(LLAMA, Setup(global_batch=1), [tight], search, taught)
    assert not found.plans
    assert found.nearest == "tensor=8 instead of 4 fits A100-80"
