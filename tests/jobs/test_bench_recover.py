"""The recovery benchmark's judgement of two runs from their notes, its ratios and its picture; no cluster."""

import json
from pathlib import Path

import pytest

from actors.keeper import Kept
from jobs.bench._recover_loops import Task, Turn
from jobs.bench.recover import SYSTEMS, figures, judge, plot, steady_figures

STEADY = {
    "0.1": {"overhead": 0.2, "idle_suffices": False},
    "0.2": {"overhead": 0.03, "idle_suffices": True},
    "0.4": {"overhead": 0.02, "idle_suffices": True},
}


def notes(folder: Path, name: str, rows: list[tuple[int, float]]) -> None:
    (folder / f"{name}.jsonl").write_text(
        "".join(json.dumps({"step": s, "time_s": t}) + "\n" for s, t in rows) + "{torn"
    )


def test_a_run_is_judged_from_its_notes(tmp_path: Path) -> None:
    task = Task(str(tmp_path), 1 << 20, 12, 4, 0.0, kill_step=8)
    before = [(step, 100.0 + step) for step in range(1, 8)]
    notes(tmp_path, "kill", [(8, 107.5)])
    notes(tmp_path, "applied-0", [*before, (5, 120.0), (6, 121.0), (7, 122.0), (8, 123.0)])
    notes(tmp_path, "applied-1", [*before[:-1], (5, 120.0), (6, 121.0), (7, 122.5), (8, 124.5)])
    (tmp_path / "state").write_bytes(bytes(10))
    assert judge(tmp_path, task, began=90.0) == {
        "passed_s": 17.0,  # until the slower rank has applied step 8
        "redone_steps": 3.0,  # 5, 6 and 7 of rank 0
        "step_s": 1.0,
        "cold_start_s": 11.0,
        "stored_bytes": 10.0,
    }


def test_ratios_are_those_of_the_same_size_and_the_picture_holds_them(tmp_path: Path) -> None:
    seconds = {"1": (0.5, 10.0, 5.0), "16": (1.0, 12.0, 6.0), "64": (2.0, 14.0, 9.0)}
    rows = {
        size: {name: {"passed_s": value} for name, value in zip(SYSTEMS, values, strict=True)} | {"steady": STEADY}
        for size, values in seconds.items()
    }
    metrics = figures(rows)
    assert metrics["speedup_by_size_mib"]["16"] == {"ray_train": 12.0, "ray_train_tuned": 6.0}
    assert (metrics["speedup_over_ray_train"], metrics["speedup_over_ray_train_tuned"]) == (12.0, 6.0)
    assert metrics["overhead_per_step"] == {size: {"0.1": 0.2, "0.2": 0.03, "0.4": 0.02} for size in rows}
    assert metrics["overhead_where_idle_suffices"] == 0.03
    plot(rows, tmp_path / "recover.png")
    assert (tmp_path / "recover.png").read_bytes().startswith(b"\x89PNG")


def kept(needed_s: float, predicted_s: float) -> Kept:
    return Kept(1, 0, 5, "d", 1 << 20, 0.0, 0.02, 0.0, 0.1, needed_s, predicted_s, 0)


@pytest.mark.parametrize(
    ("cpu_of_copies_s", "exposed_s", "suffices"),
    [(0.10, 0.0, True), (0.13, 0.0, False), (0.10, 0.01, False)],
)
def test_idle_time_suffices_where_both_the_network_and_the_processors_have_enough_of_it(
    cpu_of_copies_s: float, exposed_s: float, suffices: bool
) -> None:
    """Two ranks on two cores: of a step of 0.2 s the network is idle for 0.1 s, in which training computes for 0.04 s."""
    training = Turn(step_s=0.2, network_s=0.1, compute_cpu_s=0.02, all_cpu_s=0.05)
    slower = Turn(step_s=0.199, network_s=0.09, compute_cpu_s=0.02, all_cpu_s=0.05)
    copying = Turn(step_s=0.206, network_s=0.1, compute_cpu_s=0.06, all_cpu_s=0.05 + cpu_of_copies_s / 2)
    rank = {"unprotected": [training] * 5, "protected": [copying] * 5}
    row = steady_figures([rank, rank | {"unprotected": [slower] * 5}], [kept(0.07, exposed_s)] * 3, num_cores=2)
    assert row["overhead"] == pytest.approx(0.03)
    assert row["overhead_by_turn"] == pytest.approx([0.03] * 5)
    assert (row["idle_network_s"], row["needed_network_s"]) == pytest.approx((0.1, 0.07))
    assert (row["idle_cpu_s"], row["needed_cpu_s"]) == pytest.approx((0.16, cpu_of_copies_s))
    assert row["idle_suffices"] is suffices  # 0.8 of 0.16 s are 0.128 s
