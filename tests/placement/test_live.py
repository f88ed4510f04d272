"""The scheduler core while classes come and jobs run already."""

import pytest

from placement.errors import PlacementError
from placement.jobs import JobClass, JobSpec, NodeSpec, PlanOption
from placement.live import LiveScheduler
from placement.resize import propose_moves

NODES = [NodeSpec("a", "small", 2, 100), NodeSpec("b", "large", 4, 400), NodeSpec("c", "large", 4, 400)]


def option(gpu_type: str, num_gpus: int, memory_bytes: int = 90) -> PlanOption:
    return PlanOption(gpu_type, num_gpus, 1, memory_bytes, 1.0)


def spec(job_id: str, class_name: str, submit_s: float = 0.0) -> JobSpec:
    return JobSpec(job_id, class_name, 10.0, submit_s)


def test_classes_come_while_others_run_and_wait() -> None:
    core = LiveScheduler(NODES)
    core.add_class(JobClass("one", (option("small", 2),)))
    [started] = core.submit(spec("j1", "one"), 0.0)
    assert core.submit(spec("j2", "one"), 1.0) == []
    core.add_class(JobClass("two", (option("small", 1), option("large", 4), option("large", 1))))
    [other] = core.submit(spec("j3", "two"), 2.0)
    assert (started.shares[0].node, other.option.num_gpus) == ("a", 4)
    assert core.explain("j2").state == "QUEUED"
    [next_one] = core.finish("j1", 3.0)
    assert next_one.job_id == "j2"
    with pytest.raises(PlacementError, match="known already"):
        core.add_class(JobClass("one", ()))


def test_running_jobs_are_put_back_on_their_cards_and_free_them() -> None:
    core = LiveScheduler(NODES)
    core.add_class(JobClass("big", (option("large", 6),)))
    core.restore(spec("j", "big"), option("large", 6), {"c": 4, "b": 2}, finish_s=50.0)
    assert core.explain("j").state == "RUNNING"
    assert {(share.node, len(share.gpus)) for share in core.start_of(0).shares} == {("b", 2), ("c", 4)}
    core.add_class(JobClass("next", (option("large", 4),)))
    assert core.submit(spec("k", "next"), 0.0) == []
    assert core.earliest_start_s("k") == 50.0
    assert core.tell("k", now_s=20.0) == (
        "2 of 4 large are missing (GPUs on one node, most free ones on node b); not before 30 s from now"
    )
    assert [start.job_id for start in core.finish("j", 20.0)] == ["k"]
    assert core.earliest_start_s("k") == pytest.approx(30.0)


def test_cards_that_are_not_there_cannot_be_restored() -> None:
    core = LiveScheduler(NODES)
    core.add_class(JobClass("c", (option("small", 2),)))
    core.restore(spec("j", "c"), option("small", 2), {"a": 2}, finish_s=1.0)
    with pytest.raises(PlacementError, match="taken meanwhile"):
        core.restore(spec("k", "c"), option("small", 2), {"a": 2}, finish_s=1.0)
    with pytest.raises(PlacementError, match="not in class"):
        core.restore(spec("l", "c"), option("small", 1), {"a": 1}, finish_s=1.0)


def test_a_gang_over_two_types_frees_all_its_cards() -> None:
    core = LiveScheduler(NODES)
    assert core.idle_cards() == {"a": 2, "b": 4, "c": 4}
    core.add_class(JobClass("mix", (option("large", 3),)))
    start = core.restore(spec("j", "mix"), option("large", 3), {"a": 2, "b": 1}, finish_s=9.0)
    assert {(share.node, len(share.gpus)) for share in start.shares} == {("a", 2), ("b", 1)}
    assert core.idle_cards() == {"a": 0, "b": 3, "c": 4}
    core.add_class(JobClass("pair", (option("small", 2),)))
    assert core.submit(spec("k", "pair"), 0.0) == []
    assert core.earliest_start_s("k") is None or core.earliest_start_s("k") == 9.0
    assert core.submit(spec("l", "mix"), 0.0), "seven large cards are idle"
    assert [start.job_id for start in core.finish("j", 2.0)] == ["k"]


def test_a_resized_job_takes_its_new_cards_before_anybody_else_or_keeps_the_old_ones() -> None:
    core = LiveScheduler([NodeSpec("a", "small", 2, 100)])
    core.add_class(JobClass("r", (option("small", 1), option("small", 2))))
    core.submit(JobSpec("j", "r", 10.0, 0.0), 0.0)
    core.expect("j", 100.0)
    start = core.resize("j", option("small", 2), 20.0)
    assert len(start.shares[0].gpus) == 2, "its own card counts, which a move beside the old one would not allow"
    assert core.earliest_start_s("j") == 100.0, "both plans are equally fast"
    core.add_class(JobClass("one", (option("small", 1),)))
    assert core.submit(spec("k", "one"), 21.0) == []
    assert len(core.resize("j", option("small", 1), 30.0).shares[0].gpus) == 1
    assert [core.start_of(int(slot)).job_id for slot in core.tick(31.0)] == ["k"]
    assert len(core.resize("j", option("small", 2), 32.0).shares[0].gpus) == 1, "the other card is taken: as before"
    core.submit(spec("l", "one"), 33.0)
    with pytest.raises(PlacementError, match="only a running job"):
        core.resize("l", option("small", 1), 33.0)


def test_a_running_job_shrinks_for_a_waiting_one_and_only_then() -> None:
    core = LiveScheduler([NodeSpec("a", "small", 2, 100)])
    plans = (PlanOption("small", 2, 1, 90, 1.0), PlanOption("small", 1, 1, 90, 1.6))
    core.add_class(JobClass("r", plans))
    core.submit(JobSpec("j", "r", 5000.0, 0.0), 0.0)
    assert propose_moves(core, 700.0, {"j": 30.0}) == []
    core.submit(JobSpec("k", "r", 100.0, 1.0), 1.0)
    assert propose_moves(core, 500.0, {"j": 30.0}) == [], "its residence is not over"
    assert propose_moves(core, 700.0, {"j": 30.0}) == [("j", plans[1])]


def test_a_class_that_comes_late_changes_nothing_for_many_running_jobs() -> None:
    core = LiveScheduler([NodeSpec(f"n{i}", "small", 8, 100) for i in range(20)])
    core.add_class(JobClass("one", (option("small", 1),)))
    for number in range(100):
        core.submit(spec(f"j{number}", "one"), 5.0)
    before = core.running()
    core.add_class(JobClass("two", (option("small", 2),)))
    assert core.running() == before
    assert {job.placed_s for job in before} == {5.0}
    assert len(core.submit(spec("k", "two"), 6.0)) == 1
    assert core.running()[-1].placed_s == 6.0
