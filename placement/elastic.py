"""The product's own policy for jobs that may change their size: prices over predicted progress, few restarts.

Every round each job offers its configurations with a value, and `allocation.allocate` finds the most valuable set that
fits. The value of a configuration is the speed it gives, as a share of the job's best, weighted by the job's rank: those
that can be done soon come first, which lowers the mean completion time, and the more jobs there are the more it spreads
GPUs over them. A move is charged with its restart, as measured, over the time in which it can pay back, and a job that
others push aside with the restart that they cause. Jobs of one class share what ran, so that a second job of a class
starts at a size that the first one had to find.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placement.allocation import allocate
from placement.ilp import restart_factor
from placement.policies import Cluster, Decisions, JobView

HORIZON_S = 2400.0
"""Over how long a restart must pay back at most; less if the job ends sooner."""
SPEED_POWER = 0.6
"""Below 1 speed pays less the more of it a job has, which spreads GPUs over jobs when they are short."""
PUSHED_ASIDE = 5e-4
"""Value lost for each second of restart that a job is put through by others, in weights of the longest job."""

GROWTH = 4
"""Times the GPUs that were tried, a job may ask for; a second restart costs more than a wrong guess does."""
AGE_POWER = 0.2
"""A job's weight grows by this power of its age in hours (plus one), which bounds what long jobs give up for short ones."""


def rank_weights(left_s: np.ndarray) -> np.ndarray:
    """Weight of each job, float64 [J]: sqrt(2 r - 1) for the r-th from the longest predicted rest, so the longest has 1.

    The weights under which the most valuable split of a pool is heSRPT's, the optimum of mean completion time for
    speed-ups k^0.5 (Berg, Vesilo and Harchol-Balter, 2020). left_s float64 [J]: predicted rest at full speed.
    """
    rank = np.empty(len(left_s))
    rank[np.argsort(-left_s, kind="stable")] = np.arange(1, len(left_s) + 1)
    weights: np.ndarray = np.sqrt(2.0 * rank - 1.0)
    return weights


def move_share(left_s: np.ndarray, restart_s: float) -> np.ndarray:
    """Share of the time after a move that is work: 1 - restart / (restart + what is left, at most the horizon).

    left_s float64 [K]: predicted rest of the job on each configuration.
    """
    span = np.minimum(left_s + restart_s, HORIZON_S)
    return np.maximum(1.0 - restart_s / np.maximum(span, restart_s), 0.0)


def config_values(
    goodput: np.ndarray,
    allowed: np.ndarray,
    progress_left: float,
    present: int,
    restart_s: float,
    weight: float = 1.0,
    factor: float = 1.0,
) -> np.ndarray:
    """Value of each configuration of one job, float64 [K]; 0 = not allowed.

    goodput float64 [K] in progress per second; allowed bool [K]; progress_left in the same unit; present: the
    configuration it holds, or -1; restart_s: what a change costs; weight: of the job; factor: Sia's r against thrash,
    for every change.
    """
    usable = allowed & (goodput > 0)
    if not usable.any():
        return np.zeros(len(goodput))
    share = np.full(len(goodput), factor)
    kept = np.zeros(len(goodput))
    if present >= 0:
        share *= move_share(progress_left / np.maximum(goodput, 1e-12), restart_s)
        share[present] = 1.0
        kept[goodput >= goodput[present]] = PUSHED_ASIDE * restart_s
    value: np.ndarray = np.where(usable, weight * (share * goodput / goodput.max()) ** SPEED_POWER + kept, 0.0)
    return value


class Elastic:
    """GPU counts, types and batches of all jobs anew in every round, by prices."""

    name = "ours"

    def __init__(self, shares_profiles: bool = True):
        self.shares_profiles = shares_profiles

    def decide(self, now_s: float, jobs: Sequence[JobView], cluster: Cluster) -> Decisions:
        """Allocate and realise; jobs inside a restart keep what they have."""
        cluster.sync(jobs)
        if not jobs:
            return {}
        configs = cluster.configs
        value = np.zeros((len(jobs), len(configs)))
        pinned = np.full(len(jobs), -1, np.int32)
        age_h = np.array([now_s - job.submit_s for job in jobs]) / 3600
        weights = rank_weights(np.array([job.progress_left / job.goodput(configs).max() for job in jobs]))
        weights *= (1.0 + age_h) ** AGE_POWER
        for i, job in enumerate(jobs):
            present = cluster.config_of(job.allocation)
            restart_s = job.measured_restart_s or job.restart_s
            factor = restart_factor(now_s - job.submit_s, job.num_restarts, restart_s)
            goodput, allowed = job.goodput(configs), configs.num_gpus <= job.growth_limit(GROWTH)
            value[i] = config_values(goodput, allowed, job.progress_left, present, restart_s, weights[i], factor)
            if job.restarting:
                pinned[i] = present
        result = allocate(value, configs.gpu_type, configs.num_gpus, cluster.capacity, pinned)
        return cluster.realise(jobs, result.choice)
