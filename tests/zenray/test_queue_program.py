"""What the queue runs: equal numbers under every plan, and memory where it was predicted. One rank, in this process."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.job_run import Assignment
from actors.monitor import CardOutOfMemory
from collectives.errors import ConfigError
from placement.catalogue import GIB
from placement.data_plans import ModuleProfile, predicted
from placement.inventory import fake_card
from placement.plans import Knowledge
from placement.shapes import Recompute
from zenray.job_config import JobConfig, request_of
from zenray.planning import plan
from zenray.queue_program import QueueProgram, train_rank

JOB = JobConfig.model_validate(
    {"model": {"layers": 2, "hidden": 128, "heads": 4}, "batch": 8, "seq": 32, "steps": 4, "checkpoint_every": 2}
)
CARD = fake_card(1024, 1)


def assignment(folder: Path, micro_batch: int, recompute: Recompute, capacity_bytes: int = GIB) -> Assignment:
    return Assignment(
        data=1, micro_batch=micro_batch, recompute=recompute, upper_bytes=capacity_bytes,
        capacity_bytes=capacity_bytes, fake=True, folder=str(folder),
    )  # fmt: skip


def train(job: JobConfig, plan: Assignment) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    torch.set_num_threads(1)
    reports: list[dict[str, Any]] = []
    context: Any = SimpleNamespace(
        run_id="test", epoch=1, rank=0, size=1, device=torch.device("cpu"), report=reports.append
    )
    return train_rank(request_of(job), plan, context), reports


@pytest.fixture(scope="module")
def profile() -> ModuleProfile:
    return QueueProgram().profile(request_of(JOB))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(JOB, assignment(tmp_path_factory.mktemp("whole"), 8, "none"))[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_every_plan_trains_alike_and_stays_below_its_bound(
    tmp_path: Path, profile: ModuleProfile, whole: dict[str, Any], micro_batch: int, recompute: Recompute
) -> None:
    result, _ = train(JOB, assignment(tmp_path, micro_batch, recompute))
    assert result["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    memory = predicted(profile, CARD, micro_batch, recompute, keeps_gradients=micro_batch < 8, knowledge=Knowledge())
    assert result["peak_bytes"] <= memory.nvml_upper
    assert result["peak_bytes"] >= 0.6 * memory.nvml, "a bound that wastes cards is none"
    if micro_batch == 8:
        assert result["peak_bytes"] == pytest.approx(memory.nvml, rel=0.02)


def test_a_job_goes_on_from_its_checkpoint_under_another_plan(tmp_path: Path, whole: dict[str, Any]) -> None:
    half = JOB.model_copy(update={"steps": 2})
    train(half, assignment(tmp_path, 8, "none"))
    result, reports = train(JOB, assignment(tmp_path, 2, "full"))
    assert [r["step"] for r in reports if r["kind"] == "progress"] == [3, 4]
    assert [r["step"] for r in reports if r["kind"] == "checkpoint"] == [4]
    assert result["losses"] == pytest.approx(whole["losses"], rel=1e-4)


def test_a_full_card_says_where_and_with_which_numbers(tmp_path: Path) -> None:
    with pytest.raises(CardOutOfMemory) as caught:
        train(JOB, assignment(tmp_path, 8, "none", capacity_bytes=6 << 20))
    assert (caught.value.step, caught.value.phase, caught.value.limit_bytes) == (0, "training", 6 << 20)


def test_the_floor_is_what_a_card_holds_at_least(profile: ModuleProfile) -> None:
    traced = profile.step.parameters + profile.gradient_bytes + profile.step.optimizer
    assert 0.97 * traced <= QueueProgram().floor_bytes(request_of(JOB)) <= traced


def test_wrong_jobs_are_refused() -> None:
    program = QueueProgram()
    for change, words in (
        ({"workload": "os:system"}, "unknown workload"),
        ({"pin": {"tensor": 2}}, "cannot pin tensor"),
        ({"model": None}, "needs the section"),
        ({"model": JOB.model.model_copy(update={"gated": True})}, "plain decoder"),  # type: ignore[union-attr]
        ({"model": JOB.model.model_copy(update={"vocab": 10})}, "at least 256"),  # type: ignore[union-attr]
    ):
        with pytest.raises(ConfigError, match=words):
            program.check(request_of(JOB.model_copy(update=change)))


def test_a_model_far_larger_than_the_host_is_traced_without_its_weights_and_refused_without_a_trace() -> None:
    large = JobConfig.model_validate(
        {
            "model": {"layers": 200, "hidden": 16384, "heads": 128},
            "batch": 1,
            "seq": 16,
            "steps": 1,
            "recompute": ["none"],
        }
    )
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced = QueueProgram().profile(request_of(large))
    assert traced.gradient_bytes > 2 << 40
    refused = plan(large, ["fake-64"])
    assert not refused.plans
    assert "weights, gradients and optimizer alone take" in refused.nearest
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1 << 20
