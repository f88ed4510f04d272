"""Gangs as Ray placement groups: checked before they are asked for, bounded in time, removed on every path.

The one file of this room that touches Ray. A group is named after its run and epoch, so that whoever finds it later can
tell whether it is still wanted (`reap`). Ray's own `ready()` has no deadline and says nothing about an impossible
group: here a gang that can never fit raises before anything is created, and one that does not fit in time is removed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray._private.state import available_resources_per_node
from ray.exceptions import RaySystemError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from placement.errors import GangDoesNotFit, PlacementError
from placement.inventory import Gang, Inventory, Obstacle, find_obstacle, read_inventory

_NAME = re.compile(r"zenray/(?P<run_id>[^/]+)/e(?P<epoch>\d+)")
_POLL_S = 0.05


@dataclass(frozen=True)
class Reservation:
    """A created placement group. node_ids[b] is the node that holds bundle b. borrowed: somebody else removes it."""

    name: str
    group: PlacementGroup
    node_ids: tuple[str, ...]
    borrowed: bool = False


def read_cluster() -> Inventory:
    """The live nodes of the connected cluster, with what they have and what is free right now."""
    if not ray.is_initialized():
        raise PlacementError("this process is not connected to Ray: call ray.init() first, or run it as a job")
    # Ray offers free resources by node only here; the public call sums over nodes, which hides where they are.
    return read_inventory(ray.nodes(), available_resources_per_node())  # type: ignore[no-untyped-call]


def group_name(run_id: str, epoch: int) -> str:
    """The cluster-wide name of the placement group of one run and epoch."""
    name = f"zenray/{run_id}/e{epoch}"
    if not _NAME.fullmatch(name):
        raise PlacementError(f"run id '{run_id}' or epoch {epoch} cannot be part of a name: no '/', nothing negative")
    return name


def reserve(gang: Gang, *, run_id: str, epoch: int, timeout_s: float) -> Reservation:
    """Create the placement group of `gang` and wait until its bundles are held.

    Raises GangDoesNotFit at once if the cluster could not hold the gang even when idle, and after `timeout_s` if others
    keep what it needs. Nothing is left behind when this raises.
    """
    if obstacle := find_obstacle(gang, read_cluster(), "total"):
        raise _does_not_fit(obstacle, "never")
    deadline = time.monotonic() + timeout_s
    name = group_name(run_id, epoch)
    group = _create(gang, name, deadline)
    try:
        while not group.wait(1):  # whole seconds: Ray cuts fractions off
            if _scheduling_state(group) == "INFEASIBLE":
                raise _does_not_fit(_explain(gang, "total"), "never")
            if time.monotonic() > deadline:
                raise _does_not_fit(_explain(gang, "free"), "busy")
        by_bundle = _table(group)["bundles_to_node_id"]
        return Reservation(name, group, tuple(by_bundle[b] for b in range(len(gang.bundles))))
    except BaseException:
        remove_placement_group(group)
        raise


def borrow(gang: Gang) -> Reservation:
    """The placement group that this process runs in, such as that of a trial, whose bundles are to hold `gang`.

    Raises PlacementError if there is none, or if its bundles are others.
    """
    group = get_current_placement_group()
    bundles = [] if group is None else [dict(bundle) for bundle in group.bundle_specs]
    if group is None or bundles != [dict(bundle) for bundle in gang.bundles]:
        raise PlacementError(
            f"a gang of {[dict(bundle) for bundle in gang.bundles]} cannot run inside the placement group of this "
            f"process, which has the bundles {bundles or None}"
        )
    row = _table(group)
    by_bundle = row["bundles_to_node_id"]
    return Reservation(row["name"], group, tuple(by_bundle[b] for b in range(len(bundles))), borrowed=True)


def release(reservation: Reservation, *, timeout_s: float = 10.0) -> None:
    """Remove the group, which also ends the actors in it, and wait until Ray says so. Idempotent.

    A borrowed group is left to its owner.
    """
    if reservation.borrowed:
        return
    remove_placement_group(reservation.group)
    _wait_until(lambda: _table(reservation.group).get("state") in (None, "REMOVED"), reservation.name, timeout_s)


def reap(is_dead: Callable[[str, int], bool]) -> list[str]:
    """Remove the groups of runs that `is_dead(run_id, epoch)` confirms dead; returns the names of those removed.

    For groups that outlived their run: Ray removes a group with the job or actor that created it, but not when a trial
    is stopped inside a job that goes on.
    """
    removed = []
    for row in placement_group_table().values():
        match = _NAME.fullmatch(row["name"])
        if match and row["state"] != "REMOVED" and is_dead(match["run_id"], int(match["epoch"])):
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(row["placement_group_id"]))))
            removed.append(row["name"])
    return removed


def _create(gang: Gang, name: str, deadline: float) -> PlacementGroup:
    """Ask Ray for the group. A run that was killed keeps its name for a moment: wait for that, not for a live run."""
    while True:
        try:
            group: PlacementGroup = placement_group(
                [dict(bundle) for bundle in gang.bundles],
                strategy=gang.strategy,
                name=name,
                bundle_label_selector=[dict(selector) for selector in gang.selectors] or None,
            )
            return group
        except RaySystemError as error:
            if "already exists" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"placement group {name} already exists: another live job uses this run id. End it, or choose "
                    f"another run id."
                ) from None
            time.sleep(_POLL_S)


def _table(group: PlacementGroup) -> Mapping[str, Any]:
    table: Mapping[str, Any] = placement_group_table(group)
    return table


def _scheduling_state(group: PlacementGroup) -> str:
    return str(_table(group).get("stats", {}).get("scheduling_state", "UNKNOWN"))


def _explain(gang: Gang, amounts: Any) -> Obstacle:
    """The obstacle as the nodes stand now; where our model sees none, say that Ray decided."""
    obstacle = find_obstacle(gang, read_cluster(), amounts)
    return obstacle or Obstacle(0, gang.bundles[0], None, "Ray found no placement of all bundles together")


def _does_not_fit(obstacle: Obstacle, reason: str) -> GangDoesNotFit:
    best = obstacle.best
    has = {} if best is None else best.total if reason == "never" else best.free
    return GangDoesNotFit(
        bundle=obstacle.bundle,
        need=obstacle.need,
        best_node="" if best is None else f"{best.address} ({best.node_id[:8]})",
        has={name: has.get(name, 0.0) for name in obstacle.need},
        reason=reason,
        why=obstacle.why,
    )


def _wait_until(done: Callable[[], bool], name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise PlacementError(
                f"placement group {name} was not removed within {timeout_s:g} s; the head is overloaded"
            )
        time.sleep(_POLL_S)
