"""Ranks adopt a version together or not at all, whatever each of them has heard."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlacementError
from placement.expert_plans import ExpertPlan, PlanBook, make_plan
from placement.experts import POLICIES
from placement.split import Ranks, hosted


def plan(version: int, valid_from: int = 0, seed: int = 0) -> ExpertPlan:
    rng = np.random.default_rng([version, seed])
    return ExpertPlan(version, valid_from, rng.integers(0, 4, (1, 2, 3)).astype(np.int32))


def table(books: list[PlanBook]) -> np.ndarray:
    return np.array([book.record() for book in books], np.int64)


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=30))
def test_ranks_never_use_different_plans(heard: list[list[int]]) -> None:
    """heard[step][rank]: how many further versions have reached the rank by then."""
    published = [plan(version) for version in range(1, 100)]
    books = [PlanBook(plan(0)) for _ in range(3)]
    known = [0, 0, 0]
    for step, news in enumerate(heard):
        for rank, count in enumerate(news):
            books[rank].hear(published[: known[rank] + count])
            known[rank] += count
        local = {book.settle(table(books), step) for book in books}
        assert len(local) == 1
        assert len({book.current.digest for book in books}) == 1
        assert books[0].current.version <= min(known)


def test_all_ranks_that_hear_the_same_use_the_newest() -> None:
    books = [PlanBook(plan(0)) for _ in range(4)]
    for book in books:
        book.hear([plan(1), plan(2)])
    assert not any(book.settle(table(books), 5) for book in books)
    assert {book.current.version for book in books} == {2}


def test_a_rank_that_is_ahead_still_agrees_on_what_all_hold() -> None:
    published = [plan(version) for version in range(1, 9)]
    books = [PlanBook(plan(0)) for _ in range(2)]
    books[0].hear(published[:5])
    books[1].hear(published[:2])
    shown = table(books)
    for book in books:
        book.settle(shown, 5)
    assert {book.current.version for book in books} == {2}
    books[0].hear(published)
    shown = table(books)
    for book in books:
        book.settle(shown, 6)
    assert {book.current.version for book in books} == {2}, "version 2 is no longer held by the first"


def test_a_plan_waits_for_its_step_and_for_the_last_rank() -> None:
    books = [PlanBook(plan(0)) for _ in range(2)]
    books[0].hear([plan(1, valid_from=7)])
    for book in books:
        book.settle(table(books), 7)
    assert [book.current.version for book in books] == [0, 0]
    books[1].hear([plan(1, valid_from=7)])
    for step, version in ((6, 0), (7, 1)):
        shown = table(books)
        for book in books:
            book.settle(shown, step)
        assert [book.current.version for book in books] == [version] * 2


def test_two_planners_raise_on_every_rank() -> None:
    books = [PlanBook(plan(0)) for _ in range(2)]
    books[0].hear([plan(1, seed=0)])
    books[1].hear([plan(1, seed=1)])
    shown = table(books)
    for book in books:
        with pytest.raises(PlacementError, match="version 1"):
            book.settle(shown, 0)


def test_silence_makes_ranks_plan_for_themselves_and_a_planner_that_returns_is_heard() -> None:
    books = [PlanBook(plan(0), stale_limit=3) for _ in range(2)]
    for step in range(6):
        shown = table(books)
        for book in books:
            assert book.settle(shown, step) == (step >= 2)
            if step >= 2:
                book.take_local(plan(50 + step).slots, step)
    assert books[0].current.version == 0
    for book in books:
        book.hear([plan(1)])
    shown = table(books)
    assert not any(book.settle(shown, 6) for book in books)
    assert {(book.current.version, book.num_stale) for book in books} == {(1, 0)}


def test_a_plan_covers_every_layer_and_is_the_same_everywhere() -> None:
    history = np.random.default_rng(0).integers(0, 50, (3, 2, 5)).astype(np.int64)
    ranks = Ranks.equal(3, 3)
    first, second = (make_plan(POLICIES["robust"], history, ranks, None, 4, 9) for _ in range(2))
    assert first.digest == second.digest
    assert first.digest != ExpertPlan(5, 9, first.slots).digest
    assert all(hosted(slots, 5).any(0).all() for slots in first.slots)
