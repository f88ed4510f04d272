"""Placement groups of a real Ray: created whole, removed on every path, reaped by name."""

from collections.abc import Mapping

import pytest
import ray
from ray.util import placement_group_table

from placement.errors import GangDoesNotFit, PlacementError
from placement.groups import borrow, group_name, read_cluster, reap, release, reserve
from placement.inventory import NODE_ID_LABEL, Gang


@pytest.fixture(scope="module")
def node_id(ray_cluster: Mapping[str, str]) -> str:
    return read_cluster().nodes[0].node_id


def states(name: str) -> list[str]:
    return [row["state"] for row in placement_group_table().values() if row["name"] == name]


def test_the_model_shows_what_ray_has_and_what_is_free(node_id: str) -> None:
    [node] = read_cluster().nodes
    assert node.total["CPU"] == 8
    assert node.labels[NODE_ID_LABEL] == node_id
    reservation = reserve(Gang(({"CPU": 3},)), run_id="free", epoch=1, timeout_s=10)
    try:
        assert read_cluster().nodes[0].free["CPU"] <= node.free["CPU"] - 3
    finally:
        release(reservation)


def test_a_reservation_names_run_and_epoch_and_is_gone_after_release(node_id: str) -> None:
    gang = Gang(({"CPU": 1},) * 2, "STRICT_PACK", ({NODE_ID_LABEL: node_id},) * 2)
    reservation = reserve(gang, run_id="one", epoch=3, timeout_s=10)
    assert reservation.name == group_name("one", 3) == "zenray/one/e3"
    assert reservation.node_ids == (node_id, node_id)
    assert states(reservation.name) == ["CREATED"]
    release(reservation)
    release(reservation)
    assert set(states(reservation.name)) <= {"REMOVED"}


def test_a_busy_gang_ends_at_its_deadline_and_leaves_nothing(node_id: str) -> None:
    holder = reserve(Gang(({"CPU": 7},)), run_id="holder", epoch=1, timeout_s=10)
    try:
        with pytest.raises(GangDoesNotFit) as caught:
            reserve(Gang(({"CPU": 5},)), run_id="waiter", epoch=1, timeout_s=1)
        assert (caught.value.reason, caught.value.need, caught.value.bundle) == ("busy", {"CPU": 5}, 0)
        assert caught.value.has["CPU"] == 1
    finally:
        release(holder)
    reservation = reserve(Gang(({"CPU": 5},)), run_id="waiter", epoch=1, timeout_s=10)
    release(reservation)


def test_a_name_in_use_is_an_error_and_not_a_second_group(node_id: str) -> None:
    gang = Gang(({"CPU": 1},))
    reservation = reserve(gang, run_id="twice", epoch=1, timeout_s=10)
    try:
        with pytest.raises(PlacementError, match="another live job uses this run id"):
            reserve(gang, run_id="twice", epoch=1, timeout_s=0.2)
    finally:
        release(reservation)


@pytest.mark.parametrize("run_id", ["", "a/b"])
def test_a_run_id_that_cannot_be_part_of_a_name_is_refused(run_id: str) -> None:
    with pytest.raises(PlacementError, match="cannot be part of a name"):
        group_name(run_id, 1)


def test_the_reaper_removes_the_groups_of_dead_runs_only(node_id: str) -> None:
    gang = Gang(({"CPU": 1},))
    alive = reserve(gang, run_id="alive", epoch=1, timeout_s=10)
    stale = reserve(gang, run_id="run", epoch=1, timeout_s=10)
    fresh = reserve(gang, run_id="run", epoch=2, timeout_s=10)
    stranger = ray.util.placement_group([{"CPU": 1}], name="not-ours")
    assert stranger.wait(10)
    assert reap(lambda run_id, epoch: run_id == "run" and epoch < 2) == [stale.name]
    release(stale)  # waits until it is gone
    assert (states(alive.name), states(fresh.name), states("not-ours")) == (["CREATED"],) * 3
    for reservation in (alive, fresh):
        release(reservation)
    ray.util.remove_placement_group(stranger)


def test_outside_of_a_placement_group_there_is_none_to_borrow(node_id: str) -> None:
    with pytest.raises(PlacementError, match="cannot run inside the placement group of this process"):
        borrow(Gang(({"CPU": 1},)))
