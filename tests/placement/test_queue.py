"""A job's states: every pair of them, and entries that survive the journal."""

import itertools
import json

import pytest

from placement.errors import PlacementError
from placement.queue import ON_CARDS, OVER, TRANSITIONS, JobEntry, JobState, changed, check_transition, from_json
from placement.replan import Attempt

ENTRY = JobEntry(job_id="a", request={"name": "a"}, submit_s=1.0)
ATTEMPT = Attempt(
    key="k", gpu_type="g", data=1, micro_batch=2, recompute="none", predicted_bytes=3.0, measured_bytes=4.0
)


@pytest.mark.parametrize(("before", "after"), itertools.product(JobState, JobState))
def test_only_the_listed_transitions_are_possible(before: JobState, after: JobState) -> None:
    entry = changed(ENTRY, {"state": before})
    if after in TRANSITIONS[before]:
        check_transition(entry, after)
    else:
        with pytest.raises(PlacementError, match=f"is {before} and cannot become {after}"):
            check_transition(entry, after)


def test_every_state_is_reachable_and_only_the_last_ones_cannot_be_left() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert {s for targets in TRANSITIONS.values() for s in targets} == set(JobState)
    assert {state for state in JobState if not TRANSITIONS[state]} == OVER
    for state in ON_CARDS:
        assert JobState.QUEUED in TRANSITIONS[state], "a job must survive the loss of its cards"
    for state in set(JobState) - OVER:
        assert JobState.CANCELLED in TRANSITIONS[state]


def test_an_entry_survives_json_and_unknown_keys_are_refused() -> None:
    entry = changed(ENTRY, {"state": "RUNNING", "attempts": [ATTEMPT.__dict__], "nodes": ["n", "n"], "history": ["x"]})
    assert (entry.state, entry.attempts, entry.nodes) == (JobState.RUNNING, (ATTEMPT,), ("n", "n"))
    assert from_json(json.loads(json.dumps(entry.to_json()))) == entry
    with pytest.raises(PlacementError, match="shiny"):
        changed(entry, {"shiny": 1})
