"""The scheduler core for a cluster that lives: classes that come with their jobs, and jobs that run already.

The core is built for tables known beforehand. Here a class may be added or given new plans while others run, and after
a restart, or when a new kind of node appears, running jobs are put back on the nodes where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from placement.errors import PlacementError
from placement.has import dequeue, drop_hold
from placement.jobs import JobClass, JobSpec, NodeSpec, PlanOption, Start
from placement.ledger import Fit
from placement.scheduler import PATIENCE_S, Scheduler, _tables


class LiveScheduler(Scheduler):
    """See `Scheduler`; times are seconds of any clock that goes on over restarts."""

    def __init__(self, nodes: Sequence[NodeSpec], patience_s: float = PATIENCE_S):
        super().__init__(nodes, (), patience_s)

    def knows(self, class_name: str) -> bool:
        """Whether the class has been added."""
        return class_name in self._class_index

    def add_class(self, job_class: JobClass) -> None:
        """A new class at the end of the tables; queues and running jobs stay as they are."""
        if self.knows(job_class.name):
            raise PlacementError(f"job class '{job_class.name}' is known already; give the changed plans a new name")
        before = self._queue
        self.classes = (*self.classes, job_class)
        self._class_index[job_class.name] = len(self.classes) - 1
        self._plans, tables = _tables(self.ledger, self.classes)
        nobody = np.full(1, -1, np.int32)
        slots = ("after", "before", "class_of", "key", "submit_s", "num_steps", "option", "finish_s", "placed_s")
        self._queue = tables._replace(
            first=np.append(before.first, nobody),
            last=np.append(before.last, nobody),
            **{name: getattr(before, name) for name in slots},
        )
        self._resize_scratch()

    def restore(self, spec: JobSpec, option: PlanOption, cards: Mapping[str, int], finish_s: float) -> Start:
        """A job that runs already, or begins outside the pass: `cards` of each node by name.

        Cards of several types are one gang; its option names one of them. Raises PlacementError if the ledger cannot give
        them.
        """
        slot = self._new_slot(spec)
        c = self._class_index[spec.class_name]
        self._insert(slot, c, spec)
        dequeue(self._queue, slot)
        nodes = np.array([self._node(name) for name in cards], np.int32)
        places, present = self._queue.option_pool[c], self.ledger.cells.pool[nodes]
        k = next((i for i, plan in enumerate(self._plans[c]) if plan == option and places[i] in present), -1)
        if k < 0:
            raise PlacementError(f"plan {option} is not in class {spec.class_name} for the cards of {list(cards)}")
        fit = Fit(int(places[k]), nodes, np.array(list(cards.values()), np.int32))
        self.ledger.take(slot, fit, option.memory_bytes)
        self._queue.option[slot], self._queue.finish_s[slot] = k, finish_s
        return self.start_of(slot)

    def idle_cards(self) -> dict[str, int]:
        """Cards of each node that nobody holds and no reservation keeps."""
        return {node.name: int(n) for node, n in zip(self.ledger.nodes, self.ledger.cells.num_free, strict=True)}

    def expect(self, job_id: str, finish_s: float) -> None:
        """A running job's finish as its measured speed has it; reservations and moves go by it."""
        slot = self._jobs.get(job_id)
        if slot is not None and self._queue.option[slot] >= 0:
            self._queue.finish_s[slot] = finish_s

    def resize(self, job_id: str, option: PlanOption, now_s: float) -> Start:
        """Another plan of its class for a job whose workers have ended: gives back its cards and takes the new ones in one
        step, so that nobody comes between. The start is the old one if the new cards are not there."""
        slot = self._slot(job_id)
        queue, ledger = self._queue, self.ledger
        if queue.option[slot] < 0:
            raise PlacementError(f"job {job_id} is waiting; only a running job can be resized")
        c, old = int(queue.class_of[slot]), int(queue.option[slot])
        cards = ledger.cards([slot])[0]
        drop_hold(ledger.cells, self._hold)  # or a reservation would swallow the cards; the next tick renews it
        ledger.release(slot)
        chosen, fit = old, None
        for k, plan in enumerate(self._plans[c]):
            if plan == option and fit is None:
                chosen, fit = k, ledger.find(int(queue.option_pool[c, k]), option.num_gpus, option.tp_group)
        if fit is None:
            chosen = old
            nodes, masks = zip(*cards, strict=True)
            takes = np.array([mask.bit_count() for mask in masks], np.int32)
            fit = Fit(int(queue.option_pool[c, old]), np.array(nodes, np.int32), takes)
        ledger.take(slot, fit, self._plans[c][chosen].memory_bytes)
        left = max(queue.finish_s[slot] - now_s, 0.0)
        queue.finish_s[slot] = now_s + left * queue.option_step_s[c, chosen] / queue.option_step_s[c, old]
        queue.option[slot], queue.placed_s[slot] = chosen, now_s
        return self.start_of(slot)

    def tell(self, job_id: str, now_s: float) -> str:
        """For people: what a waiting job lacks, where it is nearest, and before when it cannot start."""
        nearest = self.explain(job_id).nearest
        if nearest is None:
            return "the cluster as it is now can run none of its plans"
        start_s, option = self.earliest_start_s(job_id), nearest.option
        where = f", most free ones on node {nearest.node[:8]}" if nearest.node else ""
        when = "" if start_s is None else f"; not before {max(0.0, start_s - now_s):.0f} s from now"
        missing = f"{nearest.short_gpus} of {option.num_gpus} {option.gpu_type} are missing"
        return f"{missing} ({nearest.resource}{where}){when}"

    def earliest_start_s(self, job_id: str) -> float | None:
        """No start of a waiting job is predicted before this time: its reservation, or the next predicted finish on
        cards it could use. None if nothing runs there."""
        slot = self._slot(job_id)
        if self._hold.slot[0] == slot:
            return float(self._hold.start_s[0])
        usable = self._queue.pools[int(self._queue.class_of[slot])]
        finishes = [
            float(self._queue.finish_s[other])
            for other in self._jobs.values()
            if self._queue.option[other] >= 0
            and usable[self._queue.option_pool[self._queue.class_of[other], self._queue.option[other]]]
        ]
        return min(finishes, default=None)
