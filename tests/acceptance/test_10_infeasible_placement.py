"""Row 10: a placement group that cannot be placed hangs. Here: an error in under 5 s that says what would help."""

import time
from collections.abc import Mapping

import pytest
from ray.util import placement_group_table

import placement.groups
from actors.group import GroupState, WorkerGroup
from placement.errors import GangDoesNotFit, PlacementError
from placement.groups import reserve
from placement.inventory import Gang

GRACE = 3
"""A loaded machine is granted three times what a user would accept."""


def test_10_an_impossible_group_raises_with_bundle_need_and_best_node(ray_cluster: Mapping[str, str]) -> None:
    group = WorkerGroup(2, resources_per_worker={"CPU": 1, "GPU": 1})
    begin = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        group.start()
    assert time.monotonic() - begin < 5 * GRACE
    error = caught.value
    assert isinstance(error, GangDoesNotFit)
    assert (error.bundle, error.need, error.reason) == (0, {"CPU": 1, "GPU": 1}, "never")
    assert error.best_node
    assert error.has == {"CPU": 8, "GPU": 0}
    assert group.state is GroupState.BROKEN
    group.shutdown()


def test_10_what_only_ray_finds_impossible_raises_as_early(
    ray_cluster: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where our model sees no obstacle, Ray's own verdict counts, and the group is removed."""
    monkeypatch.setattr(placement.groups, "find_obstacle", lambda *_: None)
    begin = time.monotonic()
    with pytest.raises(GangDoesNotFit, match="Ray found no placement"):
        reserve(Gang(({"CPU": 64},)), run_id="blind", epoch=1, timeout_s=60)
    assert time.monotonic() - begin < 5 * GRACE
    assert {row["state"] for row in placement_group_table().values() if row["name"] == "zenray/blind/e1"} <= {"REMOVED"}
