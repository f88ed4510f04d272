"""`JobScheduler`: the queue of jobs that name no GPU. Predicts, plans, places, runs, re-plans; survives its own death.

A plain class; wrap it with `ray.remote`, one a cluster and folder. All that it decides comes from pure functions of
`placement`; all that it knows is in the folder (see `actors.job_store`), so after a kill it goes on with every job from
its last checkpoint. Jobs wait here and not in Ray: only groups that fit now are asked for, each bundle pinned to its
node. What this file does not do: know what a job trains (see `actors.job_run.JobProgram`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from actors.card_watch import CardWatch
from actors.job_planner import JobPlanner, Profiler
from actors.job_run import MEMORY_ENDINGS, Assignment, Ending, Grant, JobProgram, JobRun
from actors.job_store import JobStore
from actors.metrics import Metrics
from actors.placer import JobPlacer
from actors.worker import Report, hide_gpus
from placement.data_plans import ModuleProfile, plan_key
from placement.errors import PlacementError
from placement.groups import read_cluster, reap
from placement.inventory import FAKE_RESOURCE
from placement.queue import ON_CARDS, OVER, JobEntry, JobState
from placement.replan import MAX_REPLANS, attempt_of
from placement.resize import MIN_RESIDENCE_S

log = logging.getLogger(__name__)

MAX_LOSSES = 5
"""Worker groups that a job may lose for other reasons than memory."""
REFRESH_S = 1.0
REAP_S = 30.0
MAX_HISTORY = 40
S = JobState


class JobScheduler:
    """See the module. folder: of the queue; checkpoints of jobs lie below it, so all nodes must share it."""

    def __init__(
        self,
        folder: str,
        program: JobProgram,
        image: str = "",
        patience_s: float = 600.0,
        residence_s: float = MIN_RESIDENCE_S,
    ):
        """image: software of the workers, part of the key of what is learned. patience_s, residence_s: see JobPlacer."""
        hide_gpus()
        self.folder, self.program = Path(folder), program
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._store = JobStore(self.folder)
        self._planner = JobPlanner(self._store, program, image)
        self._profiler = Profiler(program)
        self._watch = CardWatch()
        self._queue_id = self.folder.name
        self._placer = JobPlacer(self._planner, patience_s, residence_s)
        self._runs: dict[str, JobRun] = {}
        self._refreshed_s = self._reaped_s = 0.0
        self._closed = False
        self._metrics = Metrics(run=self._queue_id)
        for entry in list(self._store.entries.values()):
            if entry.state in ON_CARDS:
                self._change(entry.job_id, "the scheduler was restarted", state=S.QUEUED)
        self._reap()
        threading.Thread(target=self._loop, daemon=True, name="queue").start()

    # --- what users call ----------------------------------------------------------------------------------------------

    @ray.method
    def submit(self, request: Mapping[str, Any]) -> str:
        """Queue a job and return its id; never waits for a prediction. The same request again changes nothing, so that a
        caller may repeat it after a failure. Raises ConfigError for a wrong request, WorkerError for a name in use."""
        self.program.check(request)
        with self._lock:
            known = self._store.entries.get(str(request["name"]))
            if known is not None and dict(known.request) == dict(request):
                return known.job_id
            entry = JobEntry(job_id=str(request["name"]), request=request, submit_s=time.time())
            self._store.submit(entry)
            self._advance(entry)
        self._wake.set()
        return entry.job_id

    @ray.method
    def cancel(self, job_id: str) -> str:
        """End a job, wherever it is; returns its state. Jobs that are over stay as they are."""
        with self._lock:
            entry = self._entry(job_id)
            if entry.state in OVER:
                return entry.state
            run = self._runs.get(job_id)
            self._change(job_id, "cancelled by its user", state=S.CANCELLED, end_s=time.time())
            if run is not None and not run.evicted:
                run.cancelled = True
                run.stop()
            else:
                self._launch_all(self._placer.drop(job_id))
        return S.CANCELLED

    @ray.method
    def status(self, job_id: str) -> dict[str, Any]:
        """Everything known of one job, with its progress and explanation."""
        with self._lock:
            entry, run = self._entry(job_id), self._runs.get(job_id)
            live = {} if run is None else {"step": run.step, "loss": run.loss, "peak_bytes": run.peak_bytes}
            return {**entry.to_json(), "live": live, "explanation": self._explanation(entry)}

    @ray.method
    def jobs(self) -> list[dict[str, Any]]:
        """One row a job, in order of submission."""
        with self._lock:
            rows = []
            for entry in self._store.entries.values():
                run = self._runs.get(entry.job_id)
                step = entry.done_steps if run is None else max(entry.done_steps, run.step)
                rows.append({**entry.to_json(), "step": step, "loss": run.loss if run else None})
            return rows

    @ray.method
    def explain(self, job_id: str) -> str:
        """Why a job is where it is: which resource it waits for, where, how much is missing, and what would help."""
        with self._lock:
            return self._explanation(self._entry(job_id))

    @ray.method
    def inventory(self) -> list[dict[str, Any]]:
        """The nodes with cards, and where labels, Ray and NVML disagree."""
        with self._lock:
            nodes = self._placer.nodes.values()
            return [{**asdict(node.spec), "disagreements": list(node.disagreements)} for node in nodes]

    @ray.method
    def close(self) -> None:
        """End all runs and close the folder; the jobs stay in it for the next scheduler."""
        with self._lock:
            self._closed = True
            runs = list(self._runs.values())
            for run in runs:
                run.evicted = True
                run.stop()
        for run in runs:
            if run.thread is not None:
                run.thread.join(10.0)
        self._store.close()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closed:
            self._wake.wait(0.25)
            self._wake.clear()
            try:
                self._turn()
            except Exception:  # the queue must outlive any single mishap; the next turn tries again
                log.exception("a turn of the queue failed")

    def _reap(self) -> None:
        """Remove placement groups of this queue that belong to no attempt: of a scheduler that died, or left behind."""
        with self._lock:
            live = {run.run_id for run in self._runs.values()}
        gone = reap(lambda run_id, epoch: run_id.startswith(f"{self._queue_id}.") and run_id not in live)
        for name in gone:
            log.warning("removed the placement group %s that no attempt owns", name)
        self._reaped_s = time.monotonic()

    def _turn(self) -> None:
        if time.monotonic() - self._reaped_s > REAP_S:
            self._reap()
        if time.monotonic() - self._refreshed_s > REFRESH_S:
            self._refresh_nodes()
            self._measure()
            self._choose_moves()
            self._refreshed_s = time.monotonic()
        self._collect_profiles()
        with self._lock:
            if self._closed:
                return
            for entry in list(self._store.entries.values()):
                self._advance(entry)
            self._launch_all(self._placer.tick())
            for entry in list(self._store.entries.values()):
                if entry.state is S.QUEUED and self._planner.needs(entry).mixed and self._placer.ready:
                    self._launch_all(self._placer.mix(entry))

    def _measure(self) -> None:
        """Export how many jobs are where, and the memory of those that run."""
        with self._lock:
            states = [entry.state for entry in self._store.entries.values()]
            runs = [(run.job_id, run.grant.plan.memory.nvml_upper, run.peak_bytes) for run in self._runs.values()]
        for state in JobState:
            self._metrics.set("zenray_jobs", states.count(state), state=state)
        for job_id, predicted_bytes, peak_bytes in runs:
            self._metrics.set("zenray_predicted_memory_bytes", predicted_bytes, job_name=job_id)
            self._metrics.set("zenray_peak_memory_bytes", peak_bytes, job_name=job_id)

    def _advance(self, entry: JobEntry) -> None:
        """Take a job that waits for a prediction or a plan one state further."""
        if entry.state in OVER:
            return
        deadline_s = self._planner.needs(entry).deadline_s
        if deadline_s is not None and time.time() > entry.submit_s + deadline_s:
            self._expire(entry)
        elif entry.state is S.SUBMITTED:
            key = self.program.profile_key(entry.request)
            if key in self._store.profiles:
                self._change(entry.job_id, "", state=S.PREDICTED)
            elif too_large := self._planner.too_large(entry, self._placer.nodes.values()):
                self._change(entry.job_id, too_large, state=S.INFEASIBLE)
            else:
                self._profiler.start(key, entry.request)
        elif entry.state in (S.PREDICTED, S.QUEUED) and self._placer.ready and not self._placer.knows(entry.job_id):
            self._plan(entry)

    def _expire(self, entry: JobEntry) -> None:
        run = self._runs.get(entry.job_id)
        if run is not None:
            run.stop()
        else:
            self._fail(entry.job_id, "its deadline passed before it could end")

    def _collect_profiles(self) -> None:
        for key, found in self._profiler.collect():
            with self._lock:
                if isinstance(found, ModuleProfile):
                    self._store.keep_profile(key, found.to_json())
                    continue
                for entry in list(self._store.entries.values()):
                    if entry.state is S.SUBMITTED and self.program.profile_key(entry.request) == key:
                        self._fail(entry.job_id, f"its memory could not be predicted: {found}")

    # --- plans and nodes ----------------------------------------------------------------------------------------------

    def _plan(self, entry: JobEntry) -> None:
        """Queue a job with its plans, or say what is missing."""
        job_id, planned = entry.job_id, self._placer.plan(entry)
        if planned.refused and entry.attempts:
            self._fail(job_id, planned.refused)
        elif planned.refused:
            if entry.state is not S.INFEASIBLE:
                self._change(job_id, planned.refused, state=S.INFEASIBLE)
        elif entry.state in (S.PREDICTED, S.INFEASIBLE):
            self._change(job_id, planned.waits, state=S.QUEUED)
        self._launch_all(planned.grants)

    def _refresh_nodes(self) -> None:
        """See which nodes came or went."""
        now = self._watch.read()
        with self._lock:
            for name in set(self._placer.nodes) - set(now):
                self._lose(name)
            came = bool(set(now) - set(self._placer.nodes))
            self._launch_all(self._placer.adopt(now, self._holding()))
            for entry in list(self._store.entries.values()) if came else ():
                if entry.state is S.INFEASIBLE and self.program.profile_key(entry.request) in self._store.profiles:
                    self._plan(entry)
                elif entry.state is S.INFEASIBLE and not self._planner.too_large(entry, now.values()):
                    self._change(entry.job_id, "", state=S.SUBMITTED)

    def _holding(self) -> Iterator[tuple[JobEntry, Grant, float]]:
        """What holds cards, and how many steps it has left."""
        for job_id, run in self._runs.items():
            if not run.evicted:
                entry = self._entry(job_id)
                yield entry, run.grant, float(run.needs.steps - max(run.step, entry.done_steps))

    def _lose(self, name: str) -> None:
        """A node is gone: its jobs lose all their cards and queue again."""
        jobs, grants = self._placer.lose(name)
        for job_id in jobs:
            run = self._runs.get(job_id)
            if run is not None:
                run.evicted = True
                run.stop()
            if self._entry(job_id).state in OVER:  # cancelled, its workers were still ending
                self._launch_all(self._placer.drop(job_id))
            else:
                self._change(job_id, f"node {name[:8]} was lost", state=S.QUEUED)
        self._launch_all(grants)

    def _choose_moves(self) -> None:
        """Jobs that shall go on with more or fewer cards do so after their next checkpoint."""
        with self._lock:
            now_s, restart_s, finish_s = time.time(), {}, {}
            for entry, grant, steps_left in self._holding():
                run = self._runs[grant.job_id]
                if run.restart_s and run.step_s and not run.cancelled:
                    finish_s[entry.job_id] = now_s + steps_left * run.step_s
                    if entry.state is S.RUNNING and run.moving_to is None:
                        restart_s[entry.job_id] = run.restart_s
            for job_id, option in self._placer.moves(restart_s, finish_s):
                self._runs[job_id].moving_to = option
                where = f"{option.num_gpus} x {option.gpu_type}"
                self._change(job_id, f"goes on with {where} after its next checkpoint")

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _launch_all(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self._launch(grant)

    def _launch(self, grant: Grant) -> None:
        """A job has its cards: begin an attempt."""
        job_id, plan, nodes = grant.job_id, grant.plan, grant.nodes
        entry, card = self._entry(job_id), self._placer.nodes[nodes[0]]
        if entry.state in (S.PREDICTED, S.INFEASIBLE):
            self._change(job_id, "", state=S.QUEUED)
        self._change(
            job_id,
            f"plan {plan_key(plan)} on {', '.join(n[:8] for n in dict.fromkeys(nodes))}",
            state=S.RESERVED,
            plan=plan_key(plan),
            nodes=nodes,
            starts=entry.starts + 1,
        )
        assignment = Assignment(
            data=plan.data,
            micro_batch=plan.micro_batch,
            recompute=plan.recompute,
            upper_bytes=int(plan.memory.nvml_upper),
            capacity_bytes=card.gpu.memory_bytes,
            fake=card.resource == FAKE_RESOURCE,
            folder=str(self.folder.resolve() / "checkpoints" / job_id),
            shares=grant.shares,
        )
        run = JobRun(
            grant=grant,
            run_id=f"{self._queue_id}.{job_id}.{entry.starts + 1}",
            resource=card.resource,
            needs=self._planner.needs(entry),
            function=self.program.rank_function(entry.request, assignment),
            on_started=self._started,
            on_report=self._reported,
            on_ended=self._ended,
            before=self._runs.get(job_id),
            delay_s=min(8.0, 0.5 * 2**entry.losses) if entry.losses else 0.0,
        )
        self._runs[job_id] = run
        self._change(job_id, "", state=S.STARTING)
        run.start()

    def _started(self, run: JobRun) -> None:
        with self._lock:
            if not run.evicted and not run.cancelled:
                entry = self._entry(run.job_id)
                if entry.start_s is None:
                    self._metrics.observe("zenray_queue_wait_seconds", time.time() - entry.submit_s)
                self._change(run.job_id, "", state=S.RUNNING, start_s=entry.start_s or time.time())

    def _reported(self, run: JobRun, report: Report) -> None:
        kind = report.metrics.get("kind")
        if kind not in ("checkpoint", "alarm", "split"):
            return
        with self._lock:
            if self._entry(run.job_id).state in OVER:
                return
            if kind == "checkpoint":
                step = int(report.metrics["step"])
                self._store.change(run.job_id, done_steps=step)
                if run.moving_to is not None and step < run.needs.steps and not run.evicted:
                    self._change(run.job_id, "moves to another plan", state=S.RESIZING)
                    run.stop()
            elif kind == "alarm":
                self._change(run.job_id, f"memory warning: {report.metrics['text']}")
            else:
                self._change(run.job_id, report.metrics["text"])

    def _ended(self, run: JobRun, ending: Ending, detail: str, result: Mapping[str, Any]) -> None:
        """What follows from the end of an attempt."""
        with self._lock:
            if self._runs.get(run.job_id) is run:
                del self._runs[run.job_id]
            if self._closed or run.evicted or not self._placer.ready:
                return
            job_id, now_s = run.job_id, time.time()
            if run.cancelled:
                self._launch_all(self._placer.drop(job_id))
            elif ending is Ending.DONE:
                self._learn(run, ending)
                memory = run.grant.plan.memory
                outcome = {**result, "predicted_bytes": memory.nvml, "upper_bytes": memory.nvml_upper}
                self._change(job_id, "", state=S.DONE, end_s=now_s, outcome=outcome, done_steps=int(result["step"]))
                self._launch_all(self._placer.drop(job_id))
            elif ending in MEMORY_ENDINGS:
                self._learn(run, ending)
                self._replan(run, ending, detail)
            elif self._entry(job_id).state is S.RESIZING and run.moving_to is not None:
                self._change(job_id, "", state=S.QUEUED)
                self._launch_all([self._placer.resize(job_id, run.moving_to)])
            elif self._is_final(run, ending):
                self._fail(job_id, f"{ending}: {detail}")
            else:
                losses = self._entry(job_id).losses + 1
                self._change(job_id, f"{ending}: {detail}", state=S.QUEUED, losses=losses)
                self._launch_all(self._placer.drop(job_id))  # planned anew in the next turn, at its old place
        self._wake.set()

    def _is_final(self, run: JobRun, ending: Ending) -> bool:
        """Whether another start of the same plan is pointless. A node that died makes a gang impossible as well: that
        job gets other nodes."""
        if ending is Ending.IMPOSSIBLE:
            return {node.node_id for node in read_cluster().nodes} >= set(run.grant.nodes)
        return ending is Ending.ERROR or self._entry(run.job_id).losses >= MAX_LOSSES

    def _replan(self, run: JobRun, ending: Ending, detail: str) -> None:
        """Out of memory, or nearly: the plan is never tried again; the next one goes on from the last checkpoint."""
        entry = self._entry(run.job_id)
        attempts = (*entry.attempts, attempt_of(run.grant.plan, run.needed_bytes or run.grant.plan.memory.nvml))
        self._change(run.job_id, f"{ending}: {detail}", state=S.RESIZING, attempts=attempts)
        self._metrics.add("zenray_replans", cause=ending.name.lower())
        self._launch_all(self._placer.drop(run.job_id))
        if len(attempts) > MAX_REPLANS:
            self._fail(run.job_id, f"{len(attempts)} plans ran out of memory, the last by: {detail}")
            return
        self._change(run.job_id, "waits for another plan", state=S.QUEUED)

    def _learn(self, run: JobRun, ending: Ending) -> None:
        """Let the measured peak move the prediction of its kind; waiting jobs get plans by it when next looked at."""
        card = self._placer.nodes.get(run.grant.nodes[0])
        if card is not None and self._planner.learn(self._entry(run.job_id), run, ending, card.gpu):
            entries = self._store.entries.values()
            self._placer.replan(e.job_id for e in entries if e.state is S.QUEUED and e.job_id not in self._runs)

    def _fail(self, job_id: str, reason: str) -> None:
        self._change(job_id, reason, state=S.FAILED, end_s=time.time())
        self._launch_all(self._placer.drop(job_id))

    def _explanation(self, entry: JobEntry) -> str:
        told = self._placer.tell(entry.job_id) if entry.state is S.QUEUED else ""
        if told:
            return f"QUEUED: {told}. {entry.reason}".rstrip()
        return f"{entry.state}: {entry.reason}" if entry.reason else str(entry.state)

    # --- entries ------------------------------------------------------------------------------------------------------

    def _entry(self, job_id: str) -> JobEntry:
        if job_id not in self._store.entries:
            raise PlacementError(f"no job {job_id} in this queue; `zenray status` without a name lists them")
        return self._store.entries[job_id]

    def _change(self, job_id: str, reason: str, **values: Any) -> None:
        """Change an entry and write a line of its history."""
        entry = self._entry(job_id)
        state = values.get("state", entry.state)
        line = f"{time.time() - entry.submit_s:8.2f} s {state}{': ' + reason if reason else ''}"
        history = (*entry.history, line)[-MAX_HISTORY:]
        self._store.change(job_id, reason=reason, history=history, **values)
