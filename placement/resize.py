"""Which running jobs of the scheduler should change their size now: prices over the plan lists, and only what pays.

A move is proposed if the time it saves over the predicted rest exceeds its restart, and not before a job has spent
`MIN_RESIDENCE_S` where it is. Cards for waiting jobs come first: resizing is called after a pass, with what is left.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from placement.allocation import allocate
from placement.elastic import config_values
from placement.jobs import PlanOption
from placement.scheduler import RunningJob, Scheduler

MIN_RESIDENCE_S = 600.0


def propose_moves(scheduler: Scheduler, now_s: float, restart_s: Mapping[str, float]) -> list[tuple[str, PlanOption]]:
    """(job, new plan), in an order in which shrinking comes first; the caller begins each with `begin_move`.

    restart_s: measured or predicted checkpoint + restore + start of each job in seconds; a job without one stays.
    """
    jobs = [job for job in scheduler.running() if job.job_id in restart_s]
    settled = [job for job in jobs if now_s - job.placed_s >= MIN_RESIDENCE_S and job.finish_s > now_s]
    if not settled:
        return []
    capacity = _room(scheduler, settled)
    columns = sorted({(o.gpu_type, o.num_gpus) for job in settled for o in job.options if o.gpu_type in capacity})
    types = {name: t for t, name in enumerate(sorted(capacity))}
    plans = [_fastest(job) for job in settled]
    value = np.zeros((len(settled), len(columns)))
    for i, job in enumerate(settled):
        rate = np.array([1.0 / plans[i][c].step_time_s if c in plans[i] else 0.0 for c in columns])
        present = columns.index((job.option.gpu_type, job.option.num_gpus))
        steps_left = (job.finish_s - now_s) / job.option.step_time_s
        value[i] = config_values(rate, rate > 0, steps_left, present, restart_s[job.job_id])
    result = allocate(
        value,
        np.array([types[name] for name, _ in columns], np.int32),
        np.array([gpus for _, gpus in columns], np.int32),
        np.array([capacity[name] for name in sorted(capacity)], np.int64),
    )
    moves = []
    for i, job in enumerate(settled):
        if result.choice[i] < 0:
            continue
        new = plans[i][columns[result.choice[i]]]
        left_s = job.finish_s - now_s
        saved_s = left_s * (1.0 - new.step_time_s / job.option.step_time_s)
        if new != job.option and saved_s > restart_s[job.job_id]:
            moves.append((job.job_id, new))
    held = {job.job_id: job.option.num_gpus for job in settled}
    return sorted(moves, key=lambda move: (move[1].num_gpus - held[move[0]], move[0]))


def _room(scheduler: Scheduler, jobs: list[RunningJob]) -> dict[str, int]:
    """GPUs by type that are free or held by these jobs."""
    cells = scheduler.ledger.cells
    free = np.bincount(cells.pool, cells.num_free, len(scheduler.ledger.pools))
    room: dict[str, int] = {}
    for (gpu_type, _), num_free in zip(scheduler.ledger.pools, free, strict=True):
        room[gpu_type] = room.get(gpu_type, 0) + int(num_free)
    for job in jobs:
        room[job.option.gpu_type] += job.option.num_gpus
    return room


def _fastest(job: RunningJob) -> dict[tuple[str, int], PlanOption]:
    """The fastest plan of each GPU type and count."""
    best: dict[tuple[str, int], PlanOption] = {}
    for option in job.options:
        key = (option.gpu_type, option.num_gpus)
        if key not in best or option.step_time_s < best[key].step_time_s:
            best[key] = option
    return best
