"""Which running jobs of the scheduler should change their size now: prices over the plan lists, and only what pays.

A job grows, or takes another type, if the time it saves over its predicted rest exceeds its restart. It shrinks if a
waiting job is worth more on the cards that come free. Nobody moves before it has spent its residence where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from placement.allocation import allocate
from placement.elastic import config_values, rank_weights
from placement.jobs import PlanOption
from placement.scheduler import RunningJob, Scheduler

MIN_RESIDENCE_S = 600.0
MAX_WAITING = 32
"""Waiting jobs that are looked at; they come first in the queue."""
KEPT = 10.0
"""Times the largest value, added to every plan of a running job: it may shrink, but not end."""
TINY = 1e-12


def propose_moves(
    scheduler: Scheduler, now_s: float, restart_s: Mapping[str, float], residence_s: float = MIN_RESIDENCE_S
) -> list[tuple[str, PlanOption]]:
    """(job, new plan), in an order in which shrinking comes first; the caller carries each out.

    restart_s: measured or predicted checkpoint + restore + start of each job in seconds; a job without one stays.
    """
    jobs = [job for job in scheduler.running() if job.job_id in restart_s]
    settled = [job for job in jobs if now_s - job.placed_s >= residence_s and job.finish_s > now_s]
    if not settled:
        return []
    waiting = scheduler.waiting(MAX_WAITING)
    capacity = _room(scheduler, settled)
    plans = [_fastest(options) for options in [*(job.options for job in settled), *(options for options, _ in waiting)]]
    columns = sorted({key for row in plans for key in row if key[0] in capacity})
    types = {name: t for t, name in enumerate(sorted(capacity))}
    rates = [np.array([1.0 / row[c].step_time_s if c in row else 0.0 for c in columns]) for row in plans]
    steps = [(job.finish_s - now_s) / job.option.step_time_s for job in settled] + [left for _, left in waiting]
    weights = rank_weights(np.array([n / max(rate.max(), TINY) for n, rate in zip(steps, rates, strict=True)]))
    value = np.zeros((len(plans), len(columns)))
    for i, rate in enumerate(rates):
        present, restart = -1, 0.0
        if i < len(settled):
            option, restart = settled[i].option, restart_s[settled[i].job_id]
            present = columns.index((option.gpu_type, option.num_gpus))
        value[i] = config_values(rate, rate > 0, steps[i], present, restart, weights[i])
    running = value[: len(settled)]
    running[running > 0] += KEPT * value.max()
    result = allocate(
        value,
        np.array([types[name] for name, _ in columns], np.int32),
        np.array([gpus for _, gpus in columns], np.int32),
        np.array([capacity[name] for name in sorted(capacity)], np.int64),
    )
    makes_room = bool((result.choice[len(settled) :] >= 0).any())
    moves = []
    for i, job in enumerate(settled):
        if result.choice[i] < 0:
            continue
        new = plans[i][columns[result.choice[i]]]
        saved_s = (job.finish_s - now_s) * (1.0 - new.step_time_s / job.option.step_time_s)
        shrinks = makes_room and new.num_gpus < job.option.num_gpus
        if new != job.option and (shrinks or saved_s > restart_s[job.job_id]):
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


def _fastest(options: Sequence[PlanOption]) -> dict[tuple[str, int], PlanOption]:
    """The fastest plan of each GPU type and count."""
    best: dict[tuple[str, int], PlanOption] = {}
    for option in options:
        key = (option.gpu_type, option.num_gpus)
        if key not in best or option.step_time_s < best[key].step_time_s:
            best[key] = option
    return best
