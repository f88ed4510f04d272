"""Data-parallel plans of a traced module, and what follows a plan that ran out of memory."""

import json
from dataclasses import replace

import pytest

from placement.catalogue import MIB, GpuType
from placement.correction import Correction, Observation, observe
from placement.data_plans import (
    HEADROOM,
    ModuleProfile,
    correction_key,
    data_plans,
    front,
    plan_key,
    splits,
)
from placement.errors import PlacementError
from placement.inventory import fake_card
from placement.peaks import Peak
from placement.plans import Knowledge
from placement.replan import Attempt, attempt_of, plans_after

SMALL, LARGE = fake_card(32, 2), fake_card(128, 2)


def peak(gradients: float, activations: float) -> Peak:
    return Peak(parameters=4 * MIB, gradients=gradients * MIB, optimizer=8 * MIB, activations=activations * MIB)


PROFILE = ModuleProfile(
    family="test",
    variant="one",
    smallest={"none": peak(0, 4), "full": peak(1, 1)},
    largest={"none": peak(0, 64), "full": peak(1, 16)},
    most=16,
    step=peak(4, 1),
    gradient_bytes=4.0 * MIB,
    largest_gradient_bytes=1.0 * MIB,
    reserved_over_allocated=1.0,
    flops_per_sample=1e9,
    tokens_per_sample=64,
)
CAPACITY = {gpu.name: gpu.memory_bytes for gpu in (SMALL, LARGE)}


def test_memory_is_the_larger_of_the_line_and_the_optimizer_step() -> None:
    assert PROFILE.peak(16, "none", keeps_gradients=False)[0].total == 76 * MIB
    assert PROFILE.peak(16, "none", keeps_gradients=True)[0].total == 81 * MIB
    assert PROFILE.peak(16, "full", keeps_gradients=True)[0].total == (4 + 8 + 16 + 1 + 4 + 1) * MIB
    middle, phase = PROFILE.peak(4, "none", keeps_gradients=False)
    assert (middle.total, phase) == (28 * MIB, "backward")
    step, phase = PROFILE.peak(1, "full", keeps_gradients=False)
    assert (step.total, phase) == (17 * MIB, "optimizer")


def test_a_profile_survives_json() -> None:
    assert ModuleProfile.from_json(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE


@pytest.mark.parametrize("batch", [1, 6, 16])
def test_every_split_keeps_the_global_batch(batch: int) -> None:
    found = splits(batch, 4, 8)
    assert all(d * b * m == batch and d <= 4 and b <= 8 for d, b, m in found)
    assert len(set(found)) == len(found) > 0


def test_what_fits_fits_and_what_does_not_says_by_how_much() -> None:
    found = data_plans(PROFILE, 16, [SMALL, LARGE], max_gpus=4)
    for plan in found.plans:
        assert plan.memory.nvml_upper <= CAPACITY[plan.gpu_type]
        assert plan.data * plan.micro_batch * plan.num_micro == 16
    short = next(r for r in found.rejected if r.degrees == {"data": 1, "micro_batch": 16, "recompute": 0})
    assert short.short_bytes == int(76 * MIB * HEADROOM) - 32 * MIB
    assert {plan.gpu_type for plan in found.plans} == {SMALL.name, LARGE.name}


def test_nothing_fits_and_the_nearest_change_is_named() -> None:
    found = data_plans(PROFILE, 16, [fake_card(8, 1)], max_gpus=4)
    assert not found.plans
    assert "add a node with larger cards" in found.nearest
    with pytest.raises(PlacementError, match="no labelled card"):
        data_plans(PROFILE, 16, [], max_gpus=4)


def test_pinned_degrees_are_kept_and_named_when_they_are_what_does_not_fit() -> None:
    found = data_plans(PROFILE, 16, [LARGE], max_gpus=4, pinned={"data": 2, "micro_batch": 4})
    assert {(plan.data, plan.micro_batch, plan.num_micro) for plan in found.plans} == {(2, 4, 2)}
    wrong = data_plans(PROFILE, 16, [SMALL], max_gpus=4, recompute=["none"], pinned={"micro_batch": 16})
    assert not wrong.plans
    assert wrong.nearest.endswith("fits, without micro_batch=16")
    assert data_plans(PROFILE, 16, [SMALL], max_gpus=4, pinned={"data": 3}).nearest.endswith("without data=3")


def test_the_front_holds_one_plan_a_count_and_none_that_is_beaten() -> None:
    plans = data_plans(PROFILE, 16, [LARGE], max_gpus=4).plans
    kept = front(plans)
    assert len({plan.num_gpus for plan in kept}) == len(kept)
    for plan in kept:
        assert not any(o.num_gpus <= plan.num_gpus and o.step_time_s < plan.step_time_s for o in plans)


def test_runs_that_used_more_raise_the_prediction() -> None:
    key = correction_key(PROFILE, LARGE.name, "image")
    learned = Correction()
    for run in range(20):
        learned = observe(learned, Observation(run_id=str(run), key=key, predicted_bytes=1.0, measured_bytes=1.2))
    known = Knowledge(correction=learned, image="image")
    bare = data_plans(PROFILE, 16, [LARGE], max_gpus=1).plans[0]
    after = {plan_key(p): p for p in data_plans(PROFILE, 16, [LARGE], max_gpus=1, knowledge=known).plans}
    assert after[plan_key(bare)].memory.nvml == pytest.approx(1.2 * bare.memory.nvml, rel=0.05)


# --- the ladder -------------------------------------------------------------------------------------------------------


def plans_on(*gpus: GpuType) -> list:
    return list(data_plans(PROFILE, 16, list(gpus), max_gpus=2).plans)


def test_first_a_smaller_micro_batch_then_recomputation_then_more_cards() -> None:
    plans = plans_on(LARGE)
    failed = next(p for p in plans if (p.data, p.micro_batch, p.recompute) == (1, 16, "none"))
    ladder = plans_after(plans, [attempt_of(failed, failed.memory.nvml)], CAPACITY)
    rungs = [(p.data > 1, p.recompute == "full") for p in ladder]
    assert rungs[0] == (False, False)
    assert rungs == sorted(rungs, key=lambda rung: (rung[0], rung[1] and not rung[0]))
    assert ladder[0].micro_batch == 8


def test_no_plan_twice_and_only_what_the_evidence_allows() -> None:
    plans = plans_on(SMALL, LARGE)
    failed = [p for p in plans if p.gpu_type == SMALL.name][:2]
    attempts = [attempt_of(p, 1.5 * p.memory.nvml) for p in failed]
    ladder = plans_after(plans, attempts, CAPACITY)
    assert not {plan_key(p) for p in ladder} & {a.key for a in attempts}
    assert all(p.memory.nvml_upper * 1.5 <= CAPACITY[p.gpu_type] for p in ladder)
    assert plans_after(plans, [], CAPACITY) == tuple(plans)


def test_no_plan_is_left_when_nothing_can_hold_what_was_seen() -> None:
    plan = plans_on(SMALL)[0]
    attempt: Attempt = replace(attempt_of(plan, plan.memory.nvml), measured_bytes=100 * plan.memory.nvml)
    assert plans_after(plans_on(SMALL, LARGE), [attempt], CAPACITY) == ()
