"""Cases of users of GPU schedulers, by the numbers of docs/user-cases-scheduling.md: those that need no cluster of cards.

The others are `test_case_NN_...` in tests/actors/test_scheduler.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util import placement_group_table

from actors.errors import WorkerError, WorkerLost, WorkerTimeout
from actors.group import WorkerGroup
from actors.job_run import Ending, classify
from actors.monitor import CardOutOfMemory, HostOutOfMemory
from collectives.errors import PeerLost
from placement.catalogue import GIB
from placement.errors import GangDoesNotFit, PlacementError
from placement.groups import read_cluster, reap, release, reserve
from placement.inventory import NODE_ID_LABEL, CardReport, Gang, Inventory, Node, Seat, gpu_nodes, number_ranks
from placement.jobs import JobClass, JobSpec, NodeSpec, PlanOption
from placement.live import LiveScheduler
from placement.plans import Search, enumerate_plans
from placement.replan import Attempt, plans_after
from placement.shapes import ModelShape, Setup

SHAPE = ModelShape(layers=8, hidden=2048, heads=16, seq=2048, vocab=32000)


ROOT = Path(__file__).resolve().parents[2]


def test_every_case_of_the_list_has_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "docs/user-cases-scheduling.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 22))
    tested = {
        place: {int(n) for name in re.findall(r"def test_case_([\d_]+)_", path.read_text()) for n in name.split("_")}
        for place, path in (("A", Path(__file__)), ("S", ROOT / "tests/actors/test_scheduler.py"))
    }
    for number, where in rows:
        borrowed = re.search(r"cases? (\d+)", where)
        wanted = int(borrowed[1] if borrowed else number)
        for place in {"A", "S"} & set(re.findall(r"\b[AS]\b", where)):
            assert wanted in tested[place], f"case {number}: no test_case_{wanted:02d} in {place}"
        assert re.search(r"\b[AS]\b", where), f"case {number} says neither where it is tested nor why not"


def cluster(*nodes: tuple[str, str, int, int]) -> LiveScheduler:
    return LiveScheduler([NodeSpec(name, kind, gpus, gib * GIB) for name, kind, gpus, gib in nodes])


def submit(core: LiveScheduler, job: str, *options: PlanOption, at: float = 0.0) -> list[Any]:
    core.add_class(JobClass(job, options))
    return core.submit(JobSpec(job, job, 10.0, at), at)


def option(kind: str, gpus: int, group: int = 1, gib: int = 1) -> PlanOption:
    return PlanOption(kind, gpus, group, gib * GIB, 1.0)


def test_case_01_an_impossible_job_is_told_how_far_off_it_is() -> None:
    core = cluster(("a", "A100-40", 4, 40))
    assert submit(core, "j", option("A100-40", 8), option("A100-80", 1, gib=60)) == []
    told = core.explain("j")
    assert (told.state, told.nearest) == ("INFEASIBLE", None)
    assert {blocker.resource for blocker in told.blockers} >= {"GPU type"}
    assert min(blocker.short_gpus for blocker in told.blockers) > 0


def test_case_02_an_impossible_group_raises_before_ray_is_asked(ray_cluster: Mapping[str, str]) -> None:
    before = len(placement_group_table())
    with pytest.raises(GangDoesNotFit) as caught:
        reserve(Gang(({"CPU": 10_000},)), run_id="case02", epoch=1, timeout_s=30)
    assert (caught.value.reason, caught.value.bundle, caught.value.need) == ("never", 0, {"CPU": 10_000})
    assert len(placement_group_table()) == before


@pytest.mark.parametrize("num_workers", [1, 3])
def test_case_04_bundles_are_one_rank_each(num_workers: int) -> None:
    gang = WorkerGroup(num_workers, resources_per_worker={"CPU": 1, "GPU": 1}).gang
    assert gang.bundles == ({"CPU": 1, "GPU": 1},) * num_workers


def test_case_05_cards_are_whole() -> None:
    with pytest.raises(WorkerError, match=r"whole GPUs, not 0\.9"):
        WorkerGroup(2, resources_per_worker={"GPU": 0.9})


def test_case_06_tensor_groups_stay_inside_a_node_and_ranks_follow_nodes() -> None:
    core = cluster(("a", "T", 3, 16), ("b", "T", 4, 16), ("c", "T", 3, 16))
    [start] = submit(core, "j", option("T", 8, group=2))
    assert sum(len(share.gpus) for share in start.shares) == 8
    assert all(len(share.gpus) % 2 == 0 for share in start.shares)
    seats = [Seat(bundle, f"n{bundle % 2}", f"10.0.0.{1 + bundle % 2}", (str(bundle // 2),)) for bundle in range(8)]
    places = number_ranks(seats)
    assert [place.seat.node_id for place in places] == ["n0"] * 4 + ["n1"] * 4
    assert [place.seat.gpu_ids for place in places[:4]] == [("0",), ("1",), ("2",), ("3",)]


def test_case_07_gpu_ids_come_from_the_workers_and_order_the_ranks() -> None:
    seats = [Seat(0, "n", "h", ("10",)), Seat(1, "n", "h", ("9",)), Seat(2, "n", "h", ("0",))]
    assert [place.seat.bundle for place in number_ranks(seats)] == [2, 1, 0]


def test_case_08_only_groups_of_dead_runs_are_reaped(ray_cluster: Mapping[str, str]) -> None:
    node = read_cluster().nodes[0].node_id
    gang = Gang(({"CPU": 1},), selectors=({NODE_ID_LABEL: node},))
    dead = reserve(gang, run_id="queue.dead.1", epoch=1, timeout_s=10)
    live = reserve(gang, run_id="queue.live.1", epoch=1, timeout_s=10)
    assert reap(lambda run_id, epoch: run_id.startswith("queue.") and run_id != "queue.live.1") == [dead.name]
    release(live)


def test_case_10_two_gangs_and_room_for_one_start_one_after_the_other() -> None:
    core = cluster(("a", "T", 4, 16))
    [first] = submit(core, "first", option("T", 3))
    assert submit(core, "second", option("T", 3), at=1.0) == []
    assert core.explain("second").nearest is not None
    assert [start.job_id for start in core.finish(first.job_id, 2.0)] == ["second"]


def test_case_11_a_move_holds_the_old_cards_until_the_new_ones_run() -> None:
    core = cluster(("a", "T", 2, 16), ("b", "T", 4, 16))
    core.add_class(JobClass("j", (option("T", 2), option("T", 4))))
    core.submit(JobSpec("j", "j", 10.0, 0.0), 0.0)
    move = core.begin_move("j", option("T", 4))
    assert {share.node for share in move.start.shares} == {"b"}
    assert submit(core, "k", option("T", 2), at=1.0) == [], "neither the old nor the new cards are free"
    assert [start.job_id for start in core.end_move("j", 2.0, done=False)] == ["k"], "it failed: the new ones are free"
    assert core.explain("j").state == "RUNNING"


def test_case_12_two_half_free_cards_are_no_whole_one() -> None:
    core = cluster(("a", "A100-40", 2, 40), ("b", "A100-80", 1, 80))
    [start] = submit(core, "j", option("A100-40", 1, gib=60), option("A100-80", 1, gib=60))
    assert start.option.gpu_type == "A100-80"
    assert submit(core, "k", option("A100-40", 1, gib=60), at=1.0) == []
    assert core.explain("k").state == "INFEASIBLE"


@pytest.mark.parametrize(("gib", "expected"), [(39.4, "A100-40"), (79.2, "A100-80")])
def test_case_13_nvml_says_which_a100_it_is_and_contradictions_are_flagged(gib: float, expected: str) -> None:
    labels = {"zenray.io/gpu": "H100"}
    node = Node("n", "10.0.0.1", {"GPU": 1, "TPU": 4}, {}, labels)
    [found] = gpu_nodes(Inventory((node,)), [CardReport("n", 0, "NVIDIA A100-SXM4", int(gib * GIB), 0)])
    assert found.gpu.name == expected
    assert "labelled H100, NVML says NVIDIA A100-SXM4" in found.disagreements[0]


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (
            CardOutOfMemory(rank=0, step=1, phase="p", planned_bytes=1, used_bytes=2, limit_bytes=1),
            Ending.CARD_FULL,
        ),
        (HostOutOfMemory(rank=0, step=1, phase="p", cause="c"), Ending.HOST_FULL),
        (ray.exceptions.OutOfMemoryError("killed"), Ending.HOST_FULL),
        (WorkerLost(rank=0, epoch=1, node="n", pid=1, cause="the node was running low on memory."), Ending.HOST_FULL),
        (WorkerLost(rank=0, epoch=1, node="n", pid=1, cause="SIGSEGV."), Ending.LOST),
        (PeerLost(rank=0, phase="p", peer=1, expected_bytes=1, cause="closed"), Ending.LOST),
        (WorkerTimeout(phase="start", epoch=1, missing=[0], timeout_s=1.0), Ending.LOST),
        (WorkerTimeout(phase="run", epoch=1, missing=[0], timeout_s=1.0), Ending.ERROR),
        (PlacementError("busy"), Ending.NO_PLACE),
        (ValueError("a bug of the model"), Ending.ERROR),
        (torch.OutOfMemoryError("not told apart by a worker"), Ending.ERROR),
    ],
)
def test_case_17_ends_are_told_apart(error: BaseException, ending: Ending) -> None:
    assert classify(error) is ending


def test_case_18_a_plan_that_ran_out_of_memory_is_excluded_and_others_are_tried_later() -> None:
    from placement.catalogue import gpu_type

    gpus = [gpu_type("A100-40"), gpu_type("A100-80")]
    plans = enumerate_plans(SHAPE, Setup(global_batch=8), gpus, Search(max_gpus=4)).plans
    failed = plans[0]
    key = f"{failed.gpu_type} d={failed.data} b={failed.micro_batch} recompute={failed.recompute}"
    attempt = Attempt(
        key=key,
        gpu_type=failed.gpu_type,
        data=failed.data,
        micro_batch=failed.micro_batch,
        recompute=failed.recompute,
        predicted_bytes=failed.memory.nvml,
        measured_bytes=1.2 * failed.memory.nvml,
    )
    left = plans_after(plans, [attempt], {gpu.name: gpu.memory_bytes for gpu in gpus})
    assert left
    assert failed not in left
    assert all(plan.memory.nvml_upper * 1.2 <= gpu_type(plan.gpu_type).memory_bytes for plan in left)


def test_case_21_the_reason_names_resource_node_and_distance() -> None:
    core = cluster(("a", "T", 4, 16), ("b", "T", 2, 16))
    submit(core, "first", option("T", 3))
    submit(core, "second", option("T", 4), at=1.0)
    nearest = core.explain("second").nearest
    assert nearest is not None
    assert (nearest.resource, nearest.node, nearest.short_gpus, nearest.possible) == ("GPUs on one node", "b", 2, True)
