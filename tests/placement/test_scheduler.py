"""The scheduler core: what it may never do, whatever the order of events, and what it must do in bounded time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import PlacementError
from placement.jobs import JobClass, JobSpec, NodeSpec, PlanOption, order_options
from placement.ledger import DETACHED, Ledger
from placement.resize import propose_moves
from placement.scheduler import Scheduler

GIB = 1 << 30
NODES = (
    *(NodeSpec(f"big-{i}", "big", 8, 80 * GIB) for i in range(4)),
    *(NodeSpec(f"mid-{i}", "mid", 4, 40 * GIB) for i in range(3)),
    *(NodeSpec(f"one-{i}", "one", 1, 24 * GIB) for i in range(5)),
)
CLASSES = (
    JobClass("gang", (PlanOption("big", 16, 8, 70 * GIB, 1.0), PlanOption("big", 12, 4, 75 * GIB, 1.5))),
    JobClass("group", (PlanOption("mid", 4, 2, 30 * GIB, 1.0), PlanOption("big", 6, 2, 30 * GIB, 0.5))),
    JobClass("wide", (PlanOption("one", 4, 1, 20 * GIB, 1.0), PlanOption("mid", 6, 2, 20 * GIB, 1.0))),
    JobClass("small", (PlanOption("one", 1, 1, 10 * GIB, 2.0), PlanOption("big", 1, 1, 10 * GIB, 1.0))),
)


def check(scheduler, running):
    """Every card has one owner at most, lists and masks agree, and each running job's cards follow its plan."""
    cells, nodes = scheduler.ledger.cells, scheduler.ledger.nodes
    owned = np.zeros(len(nodes), np.int64)
    for start in running.values():
        slot = scheduler._jobs[start.job_id]
        now = scheduler.start_of(slot)
        assert sum(mask.bit_count() for _, mask in now.cards) == now.option.num_gpus
        for node, mask in now.cards:
            assert owned[node] & mask == 0, "a card was given away twice"
            owned[node] |= mask
            assert nodes[node].gpu_type == now.option.gpu_type
            assert mask.bit_count() % now.option.tp_group == 0, "a tensor group crosses nodes"
            assert now.option.memory_bytes <= nodes[node].memory_bytes
            assert mask < 1 << nodes[node].num_gpus
            assert all(cells.owner[node, g] == slot for g in range(cells.owner.shape[1]) if mask >> g & 1)
        assert cells.reserved_bytes[slot] == now.option.memory_bytes
    for node in range(len(nodes)):
        free, held = int(cells.free[node]), int(cells.held[node])
        assert free & held == 0
        assert (free | held) & owned[node] == 0
        if cells.after[node] != DETACHED:
            assert free.bit_count() == cells.num_free[node]
            assert (free | held | owned[node]) & cells.usable[node] == cells.usable[node]
        assert held.bit_count() <= cells.promised[node]
    for pool in range(len(scheduler.ledger.pools)):
        up = (cells.pool == pool) & (cells.after != DETACHED)
        assert cells.tally[pool].sum() == up.sum()
        assert np.array_equal(cells.tally[pool], np.bincount(cells.num_free[up], minlength=cells.tally.shape[1]))


EVENT = st.tuples(st.sampled_from("ssssffftnjmx"), st.integers(0, 10_000), st.floats(1, 4000))


def play(events):
    """Run a list of events; returns every start in order, checking after each event."""
    scheduler = Scheduler(NODES, CLASSES, patience_s=600)
    running, moving, log, now, number = {}, set(), [], 0.0, 0
    for kind, draw, length in events:
        now += length / 10
        starts = []
        if kind == "s":
            number += 1
            job_class = CLASSES[draw % len(CLASSES)].name
            starts = scheduler.submit(JobSpec(f"j{number}", job_class, length, now, boost_s=draw % 50), now)
        elif kind == "f" and scheduler._jobs:
            job = sorted(scheduler._jobs)[draw % len(scheduler._jobs)]
            running.pop(job, None)
            moving.discard(job)
            starts = scheduler.finish(job, now)
        elif kind == "t":
            starts = [scheduler.start_of(int(s)) for s in scheduler.tick(now)]
        elif kind in "nj":
            name = NODES[draw % len(NODES)].name
            if kind == "j":
                starts = scheduler.node_joined(name, now)
            else:
                lost, starts = scheduler.node_lost(name, now)
                for job in lost:
                    running.pop(job)
                    moving.discard(job)
                moving &= set(scheduler._moves)
        elif kind == "x" and running:
            job = sorted(running)[draw % len(running)]
            running.pop(job)
            moving.discard(job)
            starts = scheduler.failed(job, now)
        elif kind == "m" and running:
            job = sorted(running)[draw % len(running)]
            if job in moving:
                moving.discard(job)
                starts = scheduler.end_move(job, now, done=bool(draw % 2))
            else:
                c = int(scheduler._queue.class_of[scheduler._jobs[job]])
                try:
                    scheduler.begin_move(job, CLASSES[c].options[draw % len(CLASSES[c].options)])
                    moving.add(job)
                except PlacementError:
                    pass
        for start in starts:
            assert start.job_id not in running
            running[start.job_id] = start
        log += [(start.job_id, start.option, start.cards) for start in starts]
        if not moving:
            check(scheduler, running)
    return log


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENT, max_size=60))
def test_no_card_is_given_twice_and_groups_stay_whole(events):
    play(events)


@settings(max_examples=15, deadline=None)
@given(st.lists(EVENT, max_size=40))
def test_same_events_same_decisions(events):
    assert play(events) == play(events)


def test_exact_fit_before_least_left_over_before_spread():
    ledger = Ledger([NodeSpec(f"n{i}", "big", 8, 80) for i in range(3)])
    ledger.take(0, ledger.find(0, 4), 1)
    ledger.take(1, ledger.find(0, 6), 1)
    half, full = (cards[0][0] for cards in ledger.cards([0, 1]))
    assert half != full, "6 GPUs do not fit the node that has 4 left"
    assert ledger.find(0, 4).nodes.tolist() == [half]
    assert ledger.find(0, 1).nodes.tolist() == [full]
    gang = ledger.find(0, 12)
    assert gang.takes.tolist() == [8, 4]
    assert gang.nodes.tolist()[1] == half, "the rest of a gang goes to the tightest node"
    assert ledger.find(0, 15) is None


def test_groups_never_use_the_cards_that_do_not_make_a_whole_group():
    ledger = Ledger([NodeSpec(f"n{i}", "big", 6, 80) for i in range(4)])
    assert ledger.find(0, 20, tp_group=4) is None
    assert ledger.find(0, 16, tp_group=4).takes.tolist() == [4, 4, 4, 4]


def test_smallest_sufficient_memory_first_and_no_two_half_cards():
    nodes = [NodeSpec("a", "card", 2, 80 * GIB), NodeSpec("b", "card", 2, 40 * GIB)]
    plan = (
        JobClass("small", (PlanOption("card", 2, 1, 30 * GIB, 1.0),)),
        JobClass("large", (PlanOption("card", 1, 1, 60 * GIB, 1.0),)),
    )
    scheduler = Scheduler(nodes, plan)
    assert scheduler.submit(JobSpec("s", "small", 1, 0), 0)[0].shares[0].node == "b"
    scheduler.card_filled("a", 0, True, 0)
    scheduler.card_filled("a", 1, True, 0)
    assert scheduler.submit(JobSpec("l", "large", 1, 0), 0) == []
    assert scheduler.card_filled("a", 1, False, 0)[0].shares[0].gpus == (1,)


def ledger_state(scheduler):
    cells = scheduler.ledger.cells
    names = ("free", "num_free", "tally", "held", "promised", "owner", "usable")
    rows = [getattr(cells, name).tolist() for name in names]
    return rows, scheduler.ledger.cards(sorted(scheduler._jobs.values()))


def test_a_failed_move_leaves_everything_as_it_was():
    scheduler = Scheduler(NODES, CLASSES)
    scheduler.submit(JobSpec("g", "group", 100, 0), 0)
    scheduler.submit(JobSpec("s", "small", 100, 0), 0)
    before = ledger_state(scheduler)
    move = scheduler.begin_move("g", CLASSES[1].options[1])
    assert move.old.gpu_type == "mid"
    assert move.start.option.gpu_type == "big"
    assert ledger_state(scheduler) != before
    scheduler.end_move("g", 5, done=False)
    assert ledger_state(scheduler) == before
    with pytest.raises(PlacementError, match="not moving"):
        scheduler.end_move("g", 5, done=False)


def test_a_done_move_frees_the_old_cards_and_rescales_the_finish():
    scheduler = Scheduler(NODES, CLASSES)
    scheduler.submit(JobSpec("g", "group", 100, 0), 0)
    scheduler.begin_move("g", CLASSES[1].options[1])
    scheduler.end_move("g", 40, done=True)
    slot = scheduler._jobs["g"]
    assert {share.node[:3] for share in scheduler.start_of(slot).shares} == {"big"}
    assert scheduler._queue.finish_s[slot] == pytest.approx(40 + 60 * 0.5)
    assert scheduler.ledger.cells.reserved_bytes[slot] == 30 * GIB


def test_a_big_job_starts_in_bounded_time_under_a_stream_of_small_ones():
    """Jobs of 1000 s keep all cards busy. Thirty are older: the last of them starts by 1140 s, so the gang by 2150 s."""
    nodes = [NodeSpec(f"n{i}", "big", 8, 80 * GIB) for i in range(2)]
    classes = [
        JobClass("gang", (PlanOption("big", 16, 8, GIB, 1.0),)),
        JobClass("small", (PlanOption("big", 1, 1, GIB, 1.0),)),
    ]
    scheduler = Scheduler(nodes, classes, patience_s=600)
    ends, started = [], {}

    def note(starts, now):
        for start in starts:
            started[start.job_id] = now
            ends.append((now + 1000.0, start.job_id))

    for number, now in enumerate(range(0, 6000, 10)):
        for end in sorted(ends):
            if end[0] <= now:
                ends.remove(end)
                note(scheduler.finish(end[1], now), now)
        note(scheduler.submit(JobSpec(f"s{number}", "small", 1000, now), now), now)
        if now == 300:
            note(scheduler.submit(JobSpec("gang", "gang", 5000, now), now), now)
        note([scheduler.start_of(int(s)) for s in scheduler.tick(now)], now)
    assert 300 + 600 <= started["gang"] <= 2 * 1000 + 150


def test_without_patience_spent_small_jobs_pass_and_short_ones_backfill():
    nodes = [NodeSpec(f"n{i}", "big", 8, 80 * GIB) for i in range(2)]
    classes = [
        JobClass("gang", (PlanOption("big", 16, 8, GIB, 1.0),)),
        JobClass("small", (PlanOption("big", 1, 1, GIB, 1.0),)),
    ]
    scheduler = Scheduler(nodes, classes, patience_s=600)
    assert scheduler.submit(JobSpec("s1", "small", 2000, 0), 0)
    assert scheduler.submit(JobSpec("gang", "gang", 1000, 0), 0) == []
    assert scheduler.submit(JobSpec("s2", "small", 2000, 100), 100), "not patient for long enough yet: others pass"
    assert len(scheduler.tick(700)) == 0
    assert scheduler.reservation == ("gang", 2100.0)
    assert scheduler.submit(JobSpec("long", "small", 5000, 800), 800) == []
    assert scheduler.submit(JobSpec("short", "small", 1000, 800), 800) == []
    backfilled = [scheduler.start_of(int(s)).job_id for s in scheduler.tick(900)]
    assert backfilled == ["short"]
    assert scheduler.finish("s1", 2000) == []
    assert scheduler.finish("short", 2000) == []
    assert [s.job_id for s in scheduler.finish("s2", 2100)] == ["gang"]


def test_boost_and_age_order_the_queue():
    classes = [JobClass("x", (PlanOption("one", 1, 1, GIB, 1.0),)), JobClass("y", (PlanOption("one", 1, 1, GIB, 1.0),))]
    scheduler = Scheduler([NodeSpec("n", "one", 1, GIB)], classes)
    scheduler.submit(JobSpec("first", "x", 1, 0), 0)
    for job in (JobSpec("old", "x", 1, 10), JobSpec("new", "y", 1, 50), JobSpec("boosted", "y", 1, 60, boost_s=55)):
        scheduler.submit(job, job.submit_s)
    order, job = [], "first"
    for now in (100, 200, 300):
        (start,) = scheduler.finish(job, now)
        job = start.job_id
        order.append(job)
    assert order == ["boosted", "old", "new"]


def test_node_loss_queues_whole_jobs_again_at_their_old_place():
    scheduler = Scheduler(NODES, CLASSES)
    (start,) = scheduler.submit(JobSpec("g", "gang", 100, 0), 0)
    lost, starts = scheduler.node_lost(start.shares[0].node, 10)
    assert lost == ["g"]
    assert [s.job_id for s in starts] == ["g"], "it is placed anew on the nodes that are left"
    assert start.shares[0].node not in {share.node for share in starts[0].shares}
    for name in ("big-0", "big-1", "big-2", "big-3"):
        scheduler.node_lost(name, 20)
    assert scheduler.explain("g").state == "INFEASIBLE"
    assert scheduler.node_joined("big-0", 30) == []
    assert [s.job_id for s in scheduler.node_joined("big-1", 31)] == ["g"]


def test_a_new_node_is_used():
    scheduler = Scheduler(NODES[:1], CLASSES)
    assert scheduler.submit(JobSpec("g", "gang", 1, 0), 0) == []
    assert [s.job_id for s in scheduler.add_node(NodeSpec("late", "big", 8, 80 * GIB), 1)] == ["g"]
    with pytest.raises(PlacementError, match="known already"):
        scheduler.add_node(NodeSpec("late", "big", 8, 80 * GIB), 1)
    with pytest.raises(PlacementError, match="new GPU type"):
        scheduler.add_node(NodeSpec("odd", "odd", 8, 80 * GIB), 1)


@pytest.mark.parametrize("width", [8, 16])
def test_events_go_by_the_arrays_of_now(width):
    """The first event packs the arrays; more jobs than there were slots, and a new node, replace them."""
    nodes = [NodeSpec(f"n{i}", "one", width, GIB) for i in range(160 // width)]
    scheduler = Scheduler(nodes, [JobClass("x", (PlanOption("one", 1, 1, GIB, 1.0),))])
    running = {s.job_id: s for i in range(200) for s in scheduler.submit(JobSpec(f"j{i}", "x", 1, i), i)}
    assert sorted(running, key=lambda job: int(job[1:])) == [f"j{i}" for i in range(160)]
    started = scheduler.add_node(NodeSpec("late", "one", width, GIB), 201)
    assert [s.job_id for s in started] == [f"j{160 + i}" for i in range(width)]
    running |= {s.job_id: s for s in started}
    check(scheduler, running)
    lost, started = scheduler.node_lost("n0", 202)
    assert (len(lost), started) == (width, [])
    for job in lost:
        del running[job]
    check(scheduler, running)
    (start,) = scheduler.finish(next(iter(running)), 203)
    assert start.job_id == min(lost, key=lambda job: int(job[1:])), "the oldest of those that wait"


def test_what_is_known_of_a_node_lies_in_one_cache_line():
    scheduler = Scheduler(NODES[:4], CLASSES)
    scheduler.add_node(NodeSpec("late", "big", 8, 80 * GIB), 0)
    cells = scheduler.ledger.cells
    fields = ("pool", "free", "num_free", "after", "before", "held", "promised", "usable", "owner")
    for node in range(5):
        rows = [getattr(cells, name)[node : node + 1] for name in fields]
        assert len({row.ctypes.data // 64 for row in rows}) == 1
        assert (cells.owner[node].ctypes.data + 8 * 4 - 1) // 64 == cells.pool[node : node + 1].ctypes.data // 64


def test_explain_names_resource_node_and_distance():
    scheduler = Scheduler(
        NODES, (*CLASSES, JobClass("huge", (PlanOption("big", 8, 8, 90 * GIB, 1.0), PlanOption("tpu", 1, 1, 1, 1.0))))
    )
    for i in range(3):
        scheduler.submit(JobSpec(f"g{i}", "gang", 100, 0), 0)
    why = scheduler.explain("g2")
    assert why.state == "QUEUED"
    assert why.nearest is not None
    assert why.nearest.short_gpus == 12
    assert why.nearest.resource == "GPUs in groups of 4"
    scheduler.submit(JobSpec("h", "huge", 1, 0), 0)
    why = scheduler.explain("h")
    assert why.state == "INFEASIBLE"
    assert why.nearest is None
    assert {b.resource for b in why.blockers} == {"GPU memory", "GPU type"}
    assert scheduler.explain("g0").state == "RUNNING"


def test_wrong_input_is_told_what_to_do():
    scheduler = Scheduler(NODES, CLASSES)
    with pytest.raises(PlacementError, match="unknown job class 'nope'"):
        scheduler.submit(JobSpec("a", "nope", 1, 0), 0)
    scheduler.submit(JobSpec("a", "small", 1, 0), 0)
    with pytest.raises(PlacementError, match="another id"):
        scheduler.submit(JobSpec("a", "small", 1, 0), 0)
    with pytest.raises(PlacementError, match="never submitted"):
        scheduler.finish("b", 0)
    with pytest.raises(PlacementError, match="whole groups"):
        Scheduler(NODES, [JobClass("bad", (PlanOption("big", 6, 4, 1, 1.0),))])
    with pytest.raises(PlacementError, match="no node"):
        Ledger([])
    with pytest.raises(PlacementError, match="32 GPUs"):
        Ledger([NodeSpec("n", "x", 32, 1)])


def test_options_are_ordered_by_goodput_per_weighted_gpu():
    fast, lean = PlanOption("big", 8, 1, 50, 1.0), PlanOption("one", 1, 1, 20, 4.0)
    assert order_options([fast, lean], {"big": 2.0, "one": 1.0}) == (lean, fast)
    assert order_options([fast, lean], {"big": 0.4, "one": 1.0}) == (fast, lean)


RESIZABLE = JobClass("r", tuple(PlanOption("big", n, 1, GIB, 8.0 / n) for n in (1, 2, 4, 8)))


def test_resize_grows_into_idle_cards_only_when_it_pays_and_after_the_residence():
    scheduler = Scheduler([NodeSpec(f"n{i}", "big", 8, GIB) for i in range(2)], [RESIZABLE])
    scheduler.submit(JobSpec("long", "r", 1000, 0), 0)
    scheduler.submit(JobSpec("short", "r", 90, 0), 0)
    restarts = {"long": 100.0, "short": 700.0}
    assert propose_moves(scheduler, 500, restarts) == [], "both got their cards less than 10 minutes ago"
    assert propose_moves(scheduler, 650, {}) == [], "a restart of unknown cost is not begun"
    moves = propose_moves(scheduler, 650, restarts)
    assert moves == [("long", RESIZABLE.options[3])], "the short job would not win back its restart"
    scheduler.begin_move(*moves[0])
    assert propose_moves(scheduler, 650, restarts) == [], "one move at a time"
    scheduler.end_move("long", 700, done=True)
    check(scheduler, {job: scheduler.start_of(scheduler._jobs[job]) for job in ("long", "short")})
    assert propose_moves(scheduler, 1200, restarts) == []
