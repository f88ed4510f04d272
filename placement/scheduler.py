"""The scheduler core: state + event -> decisions. Pure and deterministic; time comes in with each event.

Jobs name a class, not GPUs; a class brings its ordered plan list. Every event returns the jobs that start because of it.
Events (`submit`, `finish`, node loss and return) look only at what they touch; `tick` runs the full pass and is where
reservations are made, so call it every second or so. Moves of running jobs take two steps: `begin_move` takes the new
cards while the old ones still run, `end_move` gives back either the old (done) or the new ones (failed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np

from placement.errors import PlacementError
from placement.has import (
    Hold,
    Log,
    Queue,
    State,
    bundle,
    dequeue,
    drop_hold,
    enqueue,
    event_pass,
    finish_pass,
    node_pass,
    run_pass,
)
from placement.jobs import Blocker, Explanation, JobClass, JobSpec, NodeSpec, PlanOption, Start
from placement.ledger import DETACHED, Ledger, release, split_entries

PATIENCE_S = 1800.0
"""A blocked job that waited this long, or three times its predicted run if that is shorter, gets the reservation."""


@dataclass(frozen=True)
class Move:
    """A move in progress: the job runs by `old` on its old cards until `end_move`; `start` says where it goes."""

    old: PlanOption
    start: Start


@dataclass(frozen=True)
class RunningJob:
    """A running job: its plan, the plans of its class, its predicted finish and when it got its present cards."""

    job_id: str
    option: PlanOption
    options: tuple[PlanOption, ...]
    finish_s: float
    placed_s: float


class Scheduler:
    """Queue, ledger and reservation of one cluster."""

    def __init__(self, nodes: Sequence[NodeSpec], classes: Sequence[JobClass], patience_s: float = PATIENCE_S):
        self.ledger = Ledger(nodes)
        self.patience_s = patience_s
        self.classes = tuple(classes)
        self._class_index = {c.name: i for i, c in enumerate(classes)}
        self._plans, self._queue = _tables(self.ledger, self.classes)
        self._hold = _no_hold(len(nodes))
        self._jobs: dict[str, int] = {}
        self._specs: list[JobSpec | None] = []
        self._spare: list[int] = []
        self._moves: dict[str, tuple[int, int]] = {}
        self._bundled: tuple[object, ...] = (None,) * 4
        self._resize_scratch()

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return sum(1 for slot in self._jobs.values() if self._queue.option[slot] < 0)

    @property
    def reservation(self) -> tuple[str, float] | None:
        """(job, earliest start) that cards are kept for."""
        slot = int(self._hold.slot[0])
        spec = self._specs[slot] if slot >= 0 else None
        return (spec.job_id, float(self._hold.start_s[0])) if spec else None

    def submit(self, spec: JobSpec, now_s: float) -> list[Start]:
        """Queue a job; it starts at once if nothing of its class waits before it and a plan fits."""
        c = self._class_index.get(spec.class_name)
        if c is None:
            raise PlacementError(f"unknown job class '{spec.class_name}'; add its plans first")
        if spec.job_id in self._jobs:
            raise PlacementError(f"job {spec.job_id} is known already; give it another id")
        slot = self._new_slot(spec)
        alone = self._queue.first[c] < 0
        self._insert(slot, c, spec)
        if not alone and self._queue.first[c] != slot:
            return []
        self._open[:] = False
        self._open[c] = True
        return self._run(now_s)

    def submit_all(self, specs: Sequence[JobSpec]) -> None:
        """Queue many jobs without trying to start them: the next `tick` does."""
        for spec in specs:
            if spec.job_id in self._jobs:
                raise PlacementError(f"job {spec.job_id} is known already; give it another id")
            slot = self._new_slot(spec)
            self._insert(slot, self._class_index[spec.class_name], spec)

    def finish(self, job_id: str, now_s: float) -> list[Start]:
        """A job ended or was cancelled, running or waiting: free its cards and start what may now fit."""
        slot = self._slot(job_id)
        if self._queue.option[slot] >= 0:
            started = self._free(job_id, slot, now_s)
        else:
            if self._hold.slot[0] == slot:
                drop_hold(self.ledger.cells, self._hold)
            dequeue(self._queue, slot)
            started = []
        del self._jobs[job_id]
        self._specs[slot] = None
        self._spare.append(slot)
        return started

    def tick(self, now_s: float) -> np.ndarray:
        """The full pass: start all that fits, renew the reservation. Returns the slots started, int32, by priority.

        `starts_of` turns slots into `Start`s.
        """
        drop_hold(self.ledger.cells, self._hold)
        self._open[:] = True
        num = run_pass(
            self.ledger.cells, self._queue, self._hold, self._open, now_s, self.patience_s, True, self._log
        )  # fmt: skip
        return self._log.placed[:num].copy()

    def start_of(self, slot: int) -> Start:
        """The decision for a running job slot: plan and cards."""
        return self.starts_of(np.array([slot], np.int32))[0]

    def starts_of(self, slots: np.ndarray) -> list[Start]:
        """The decisions for running job slots, int32 [n], such as `tick` returns."""
        return self._starts(slots, self.ledger.cards(slots))

    def failed(self, job_id: str, now_s: float) -> list[Start]:
        """A started job could not start or lost its cards: all of them go back and it queues again at its old place.

        It is not started by this call, so that the caller can exclude what failed; the freed cards serve others.
        """
        slot = self._slot(job_id)
        spec = self._specs[slot]
        assert spec is not None
        if self._queue.option[slot] < 0:
            raise PlacementError(f"job {job_id} is waiting; only a started job can fail")
        started = self._free(job_id, slot, now_s)
        enqueue(self._queue, slot)
        return started

    def node_lost(self, name: str, now_s: float) -> tuple[list[str], list[Start]]:
        """A node is gone: jobs on it lose all their cards, whole, and queue again; moves to it are off.

        Returns the jobs that lost their cards, and what starts on the cards that came free elsewhere.
        """
        node = self._node(name)
        if self.ledger.cells.promised[node]:
            drop_hold(self.ledger.cells, self._hold)
        hit = self.ledger.owners(node)
        for job_id, (shadow, _) in list(self._moves.items()):
            if shadow in hit or self._jobs[job_id] in hit:
                self._cancel_move(job_id)
                hit = self.ledger.owners(node)
        self._open[:] = True
        starts = self._change_node(node, 0, hit, now_s)
        return [spec.job_id for slot in hit if (spec := self._specs[slot]) is not None], starts

    def node_joined(self, name: str, now_s: float) -> list[Start]:
        """A known node is back, with all its cards."""
        return self._grow(self._node(name), now_s)

    def add_node(self, spec: NodeSpec, now_s: float) -> list[Start]:
        """A new node of a known GPU type; O(nodes), unlike the other events."""
        node = self.ledger.add_node(spec)
        self._hold = self._hold._replace(nodes=np.append(self._hold.nodes, np.int32(0)))
        self._resize_scratch()
        return self._grow(node, now_s)

    def card_filled(self, name: str, gpu: int, filled: bool, now_s: float) -> list[Start]:
        """An outside process took memory of a card, or let go of it: a filled card is given to nobody."""
        node = self._node(name)
        if not 0 <= gpu < self.ledger.nodes[node].num_gpus:
            raise PlacementError(f"node {name} has {self.ledger.nodes[node].num_gpus} GPUs, none with index {gpu}")
        if self.ledger.cells.promised[node]:
            drop_hold(self.ledger.cells, self._hold)
        usable = int(self.ledger.cells.usable[node])
        self._open[:] = self._queue.pools[:, self.ledger.cells.pool[node]] & (not filled)
        return self._change_node(node, usable & ~(1 << gpu) if filled else usable | 1 << gpu, (), now_s)

    def begin_move(self, job_id: str, option: PlanOption) -> Move:
        """Take the cards of another plan for a running job while it still holds its own; nothing is freed yet."""
        slot = self._slot(job_id)
        if self._queue.option[slot] < 0 or job_id in self._moves:
            raise PlacementError(f"job {job_id} is not running or is moving already; one move at a time")
        c = int(self._queue.class_of[slot])
        k = next((i for i, plan in enumerate(self._plans[c]) if plan == option), -1)
        if k < 0:
            raise PlacementError(f"plan {option} is not in class {self.classes[c].name}")
        fit = self.ledger.find(int(self._queue.option_pool[c, k]), option.num_gpus, option.tp_group)
        if fit is None:
            raise PlacementError(f"no room for {option.num_gpus} x {option.gpu_type} now; see explain")
        shadow = self._new_slot(None)
        self.ledger.take(shadow, fit, option.memory_bytes)
        self._moves[job_id] = (shadow, k)
        return Move(self._plan(slot), Start(job_id, option, self.ledger.cards([shadow])[0], self.ledger.nodes))

    def end_move(self, job_id: str, now_s: float, done: bool) -> list[Start]:
        """Give back the old cards (done) or the new ones (the move failed: all is as before it began)."""
        if job_id not in self._moves:
            raise PlacementError(f"job {job_id} is not moving")
        shadow, k = self._moves.pop(job_id)
        slot = self._slot(job_id)
        cells = self.ledger.cells
        if done:
            cells.job_entry[slot], cells.job_entry[shadow] = cells.job_entry[shadow], cells.job_entry[slot]
            cells.reserved_bytes[slot] = self._plans[int(self._queue.class_of[slot])][k].memory_bytes
            entry = cells.job_entry[slot]
            while entry >= 0:
                row = cells.owner[cells.entry_node[entry]]
                row[row == shadow] = slot
                entry = cells.entry_after[entry]
            left = max(self._queue.finish_s[slot] - now_s, 0.0)
            c = self._queue.class_of[slot]
            speedup = self._queue.option_step_s[c, k] / self._queue.option_step_s[c, self._queue.option[slot]]
            self._queue.finish_s[slot] = now_s + left * speedup
            self._queue.option[slot], self._queue.placed_s[slot] = k, now_s
        self._touched[:] = False
        release(cells, shadow, self._touched)
        self._spare.append(shadow)
        self._open[:] = self._queue.pools @ self._touched
        return self._run(now_s)

    def running(self) -> list[RunningJob]:
        """What a resize policy needs of every job that runs and is not moving, by slot."""
        queue, found = self._queue, []
        for job_id, slot in self._jobs.items():
            if queue.option[slot] >= 0 and job_id not in self._moves:
                c = int(queue.class_of[slot])
                finish_s, placed_s = float(queue.finish_s[slot]), float(queue.placed_s[slot])
                found.append(RunningJob(job_id, self._plan(slot), self.classes[c].options, finish_s, placed_s))
        return found

    def waiting(self, limit: int) -> list[tuple[tuple[PlanOption, ...], float]]:
        """(plans, steps) of the first `limit` waiting jobs by priority."""
        slots = [slot for slot in self._jobs.values() if self._queue.option[slot] < 0]
        slots.sort(key=lambda slot: float(self._queue.key[slot]))
        return [(self.classes[self._queue.class_of[s]].options, float(self._queue.num_steps[s])) for s in slots[:limit]]

    def explain(self, job_id: str) -> Explanation:
        """Why a job waits: for each plan what is missing, where it is least, and whether waiting can help at all."""
        slot = self._slot(job_id)
        if self._queue.option[slot] >= 0:
            return Explanation(job_id, "RUNNING", (), None)
        c = int(self._queue.class_of[slot])
        blockers = [self._blocker(c, k) for k in range(int(self._queue.num_options[c]))]
        types = {gpu_type for gpu_type, _ in self.ledger.pools}
        for option in self.classes[c].options:
            if option not in self._plans[c]:
                resource = "GPU memory" if option.gpu_type in types else "GPU type"
                blockers.append(Blocker(option, resource, None, option.num_gpus, False))
        blockers.sort(key=lambda b: (not b.possible, b.short_gpus))
        reserved = float(self._hold.start_s[0]) if self._hold.slot[0] == slot else None
        state = "QUEUED" if any(b.possible for b in blockers) else "INFEASIBLE"
        return Explanation(job_id, state, tuple(blockers), reserved)

    def _blocker(self, c: int, k: int) -> Blocker:
        """What one plan lacks now: GPUs on the fullest-free node if one node must do, else whole groups in the pool."""
        queue, cells = self._queue, self.ledger.cells
        option, pool = self._plans[c][k], int(queue.option_pool[c, k])
        mine = np.flatnonzero((cells.pool == pool) & (cells.after != DETACHED))
        widths = np.array([self.ledger.nodes[n].num_gpus for n in mine], np.int64)
        if len(mine) == 0:
            return Blocker(option, "node", None, option.num_gpus, False)
        if option.num_gpus <= cells.width[pool]:
            best = int(mine[np.argmax(cells.num_free[mine])])
            short = option.num_gpus - int(cells.num_free[best])
            possible = bool(np.any(widths >= option.num_gpus))
            return Blocker(option, "GPUs on one node", self.ledger.nodes[best].name, max(short, 0), possible)
        group = option.tp_group
        short = option.num_gpus - int((cells.num_free[mine] // group * group).sum())
        possible = int((widths // group * group).sum()) >= option.num_gpus
        return Blocker(option, f"GPUs in groups of {group}" if group > 1 else "GPUs", None, max(short, 0), possible)

    def _free(self, job_id: str, slot: int, now_s: float) -> list[Start]:
        """Take a running job's cards, and those of its move; start what may now fit."""
        moved = self._cancel_move(job_id)
        started = self._listed(finish_pass(self._state(), slot, now_s))
        if moved:
            self._open[:] = True
            started += self._run(now_s)
        return started

    def _cancel_move(self, job_id: str) -> bool:
        """Give back the new cards of a move, if there is one."""
        shadow, _ = self._moves.pop(job_id, (-1, -1))
        if shadow < 0:
            return False
        release(self.ledger.cells, shadow, self._touched)
        self._spare.append(shadow)
        return True

    def _grow(self, node: int, now_s: float) -> list[Start]:
        """All cards of a node may be given away."""
        self._open[:] = self._queue.pools[:, self.ledger.cells.pool[node]]
        return self._change_node(node, (1 << self.ledger.nodes[node].num_gpus) - 1, (), now_s)

    def _change_node(self, node: int, usable: int, hit: Sequence[int], now_s: float) -> list[Start]:
        return self._listed(node_pass(self._state(), node, usable, np.array(hit, np.int32), now_s))

    def _run(self, now_s: float) -> list[Start]:
        return self._listed(event_pass(self._state(), now_s))

    def _state(self) -> State:
        """The arrays of now as one argument, made anew when one of them was replaced."""
        arrays = (self.ledger.cells, self._queue, self._hold, self._log)
        if not all(map(is_, arrays, self._bundled)):
            self._bundled = arrays
            self._bundle: State = bundle(*arrays, self._open, self._touched)
        return self._bundle

    def _listed(self, num: int) -> list[Start]:
        """The decisions that an event's pass wrote to the log."""
        if num == 0:
            return []
        log = self._log
        used = log.ends[num - 1]
        return self._starts(log.placed[:num], split_entries(log.ends[:num], log.nodes[:used], log.masks[:used]))

    def _starts(self, slots: np.ndarray, cards: Sequence[tuple[tuple[int, int], ...]]) -> list[Start]:
        nodes, option, starts = self.ledger.nodes, self._queue.option.item, []
        for slot, pairs in zip(slots.tolist(), cards, strict=True):
            spec = self._specs[slot]
            assert spec is not None
            plans = self._plans[self._class_index[spec.class_name]]
            starts.append(Start(spec.job_id, plans[option(slot)], pairs, nodes))
        return starts

    def _plan(self, slot: int) -> PlanOption:
        return self._plans[int(self._queue.class_of[slot])][int(self._queue.option[slot])]

    def _slot(self, job_id: str) -> int:
        if job_id not in self._jobs:
            raise PlacementError(f"unknown job {job_id}: it was never submitted or has finished")
        return self._jobs[job_id]

    def _node(self, name: str) -> int:
        if name not in self.ledger.node_index:
            raise PlacementError(f"unknown node {name}; report a new one with add_node")
        return self.ledger.node_index[name]

    def _new_slot(self, spec: JobSpec | None) -> int:
        if self._spare:
            slot = self._spare.pop()
            self._specs[slot] = spec
        else:
            slot = len(self._specs)
            self._specs.append(spec)
            self.ledger.require_slots(slot + 1)
            if slot >= len(self._queue.key):
                self._queue = _more_slots(self._queue, 2 * slot)
                self._resize_scratch()
        self._queue.option[slot] = -1
        return slot

    def _insert(self, slot: int, c: int, spec: JobSpec) -> None:
        queue = self._queue
        queue.class_of[slot], queue.key[slot] = c, spec.submit_s - spec.boost_s
        queue.submit_s[slot], queue.num_steps[slot] = spec.submit_s, spec.num_steps
        enqueue(queue, slot)
        self._jobs[spec.job_id] = slot

    def _resize_scratch(self) -> None:
        slots, cards = len(self._queue.key) + 1, len(self.ledger.cells.entry_node)
        self._log = Log(*(np.zeros(size, np.int32) for size in (slots, slots, cards, cards)))
        self._open = np.zeros(len(self.classes), np.bool_)
        self._touched = np.zeros(len(self.ledger.pools), np.bool_)


def _tables(ledger: Ledger, classes: Sequence[JobClass]) -> tuple[list[list[PlanOption]], Queue]:
    """Plans as arrays: each option once for every pool of its type whose cards hold it, smallest memory first."""
    rows: list[list[tuple[PlanOption, int]]] = []
    for job_class in classes:
        row = []
        for option in job_class.options:
            if option.num_gpus < 1 or option.tp_group < 1 or option.num_gpus % option.tp_group:
                raise PlacementError(
                    f"class {job_class.name}: {option.num_gpus} GPUs are not whole groups of {option.tp_group}"
                )
            for p, (gpu_type, memory) in enumerate(ledger.pools):
                fits = option.memory_bytes <= memory and option.tp_group <= ledger.cells.width[p]
                if gpu_type == option.gpu_type and fits:
                    row.append((option, p))
        rows.append(row)
    shape = (len(classes), max([len(row) for row in rows], default=0))
    pool, gpus, group = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.ones(shape, np.int32)
    memory_bytes, step_s = np.zeros(shape, np.int64), np.zeros(shape)
    pools = np.zeros((len(classes), len(ledger.pools)), np.bool_)
    for c, row in enumerate(rows):
        for k, (option, p) in enumerate(row):
            pool[c, k], gpus[c, k], group[c, k] = p, option.num_gpus, option.tp_group
            memory_bytes[c, k], step_s[c, k], pools[c, p] = option.memory_bytes, option.step_time_s, True
    nobody = np.full(len(classes), -1, np.int32)
    slots, times = np.full(64, -1, np.int32), np.zeros(64)
    return [[option for option, _ in row] for row in rows], Queue(
        pool, gpus, group, memory_bytes, step_s, np.array([len(row) for row in rows], np.int32), pools, nobody,
        nobody.copy(), slots, slots.copy(), slots.copy(), times, times.copy(), times.copy(), slots.copy(), times.copy(),
        times.copy(),
    )  # fmt: skip


def _more_slots(queue: Queue, num_slots: int) -> Queue:
    def grown(array: np.ndarray) -> np.ndarray:
        larger = np.full(num_slots, -1 if array.dtype == np.int32 else 0, array.dtype)
        larger[: len(array)] = array
        return larger

    names = ("after", "before", "class_of", "key", "submit_s", "num_steps", "option", "finish_s", "placed_s")
    return queue._replace(**{name: grown(getattr(queue, name)) for name in names})


def _no_hold(num_nodes: int) -> Hold:
    return Hold(
        slot=np.full(1, -1, np.int32),
        option=np.full(1, -1, np.int32),
        start_s=np.full(1, np.inf),
        num_nodes=np.zeros(1, np.int32),
        nodes=np.zeros(num_nodes, np.int32),
    )
