"""`Crew`: the processes that stand behind the ranks of a recoverable group: standby workers, and a holder on each host.

It starts them, notices which are up, and hands them out. It decides nothing about recovery.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.checkpoints import CheckpointStore
from actors.delivery import Address
from actors.epoch import finished
from actors.group import actor_options, create_actor
from actors.storage import WRITES_AT_ONCE
from actors.worker import GpuWorker
from placement.groups import group_name
from placement.inventory import Gang, Seat
from placement.recovery import Held

ANSWER_S = 2.0
"""How long a holder, a standby or a survivor may take for an answer in a recovery."""
NAME_WAIT_S = 30.0


@dataclass
class Standby:
    """A worker process without a rank: starting, or up once `seat` is known."""

    actor: Any
    bundle: int
    ready: Any
    seat: Seat | None = None
    pid: int = 0


class Crew:
    """Standbys in the bundles of one placement group that no rank uses, and holders. `actors`: everything ever started."""

    def __init__(self, run_id: str, gang: Gang, holder_limit_bytes: int):
        self.run_id, self.gang, self.holder_limit_bytes = run_id, gang, holder_limit_bytes
        self.holders: dict[str, Any] = {}
        """The live holder of each host (Ray node id)."""
        self.addresses: dict[str, Address] = {}
        self.standbys: list[Standby] = []
        self.actors: list[Any] = []
        self._opening: dict[str, tuple[Any, Any]] = {}
        self._function: Any = None

    @property
    def up(self) -> list[Standby]:
        """Standbys that could take a rank."""
        return [standby for standby in self.standbys if standby.seat is not None]

    def fill(self, group: PlacementGroup, used: Iterable[int], epoch: int) -> None:
        """Start a worker in every bundle that has none. In a bundle whose node died Ray starts it when a node joins.

        used: bundles of the ranks.
        """
        free = set(range(len(self.gang.bundles))) - set(used) - {standby.bundle for standby in self.standbys}
        actor_class = ray.remote(**actor_options(self.gang.bundles[0]))(GpuWorker)
        for bundle in sorted(free):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            name = f"{group_name(self.run_id, epoch)}/w{bundle}.{len(self.actors)}"
            options = actor_class.options(name=name, scheduling_strategy=strategy)
            actor = create_actor(options, (self.run_id, epoch, bundle), time.monotonic() + NAME_WAIT_S)
            self.actors.append(actor)
            self.standbys.append(Standby(actor, bundle, actor.sit.remote()))

    def poll(self, rank_hosts: Iterable[str], epoch: int) -> None:
        """Take note of what has come up, and open a holder on every host in use that has none."""
        for standby in [standby for standby in self.standbys if standby.seat is None]:
            if not ray.wait([standby.ready], timeout=0)[0]:
                continue
            if (answer := finished([standby.ready], ANSWER_S)[0]) is not None:
                standby.seat, standby.pid = answer[0]
                standby.actor.warm.remote(self._function)
            else:
                self.standbys.remove(standby)  # died while it started; `fill` orders another
        for host in {*rank_hosts, *(standby.seat.node_id for standby in self.up if standby.seat)}:
            if host not in self.holders and host not in self._opening:
                self._open_holder(host)
        for host, (holder, ready) in list(self._opening.items()):
            if ray.wait([ready], timeout=0)[0]:
                del self._opening[host]
                address, fenced = finished([ready, holder.fence.remote(epoch)], ANSWER_S)
                if address is not None and fenced is not None:
                    self.holders[host], self.addresses[host] = holder, address[0]

    def warm(self, function: Any) -> None:
        """Let standbys, those to come too, load what `function` (an object reference) needs."""
        self._function = function
        for standby in self.up:
            standby.actor.warm.remote(function)

    def wait_warm(self, timeout_s: float) -> None:
        """Return when all standbys that are up have done so."""
        finished([standby.actor.warm.remote(None) for standby in self.up], timeout_s)

    def take(self, epoch: int) -> Standby | None:
        """A standby that answers, made ready for `epoch`; it is no longer one. Those that do not answer are ended."""
        for standby in self.up:
            self.standbys.remove(standby)
            if finished([standby.actor.beat.remote()], ANSWER_S)[0] is not None:
                finished([standby.actor.leave.remote(epoch)], ANSWER_S)
                return standby
            ray.kill(standby.actor)
        return None

    def fence(self, epoch: int) -> tuple[dict[str, Sequence[Held]], list[str]]:
        """Let every holder refuse what is older than `epoch`: what each keeps, and the hosts whose holder is gone."""
        hosts = list(self.holders)
        answers = finished([self.holders[host].fence.remote(epoch) for host in hosts], ANSWER_S)
        reports: dict[str, Sequence[Held]] = {}
        for host, answer in zip(hosts, answers, strict=True):
            if answer is None:
                ray.kill(self.holders.pop(host))
            else:
                reports[host] = answer[0]
        return reports, [host for host in hosts if host not in reports]

    def end_worker(self, actor: Any, host: str, pid: int) -> None:
        """End a worker, also one that is stopped and would not hear Ray: the holder of its host kills the process."""
        ray.kill(actor)
        if (holder := self.holders.get(host)) is not None:
            holder.end_process.remote(pid)

    def _open_holder(self, host: str) -> None:
        groups = {"control": 2, "disk": WRITES_AT_ONCE}
        settings: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": groups}
        holder = (
            ray.remote(**settings)(CheckpointStore)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(host, soft=False))
            .remote(self.run_id, host[:8], self.holder_limit_bytes)
        )
        self.actors.append(holder)
        self._opening[host] = (holder, holder.address.remote())
