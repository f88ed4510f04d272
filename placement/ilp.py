"""Sia's allocation as an integer program (Jayaram Subramanya et al., SOSP'23, section 3.4), solved by HiGHS.

This is the baseline that the price-based allocation is held against: same matrix, same capacities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from placement.errors import PlacementError

FAIRNESS_POWER = -0.5
UNALLOCATED_COST = 1.1
MAX_COST = 3000.0
INFEASIBLE_GOODPUT = 1e-4
RELATIVE_GAP = 1e-4
TIME_LIMIT_S = 60.0


@dataclass(frozen=True)
class Assignment:
    """choice int32 [J]: configuration of each job or -1; gain: sum over allocated jobs of UNALLOCATED_COST - cost."""

    choice: np.ndarray
    gain: float
    proven: bool
    """Whether the solver closed the gap within its time."""


def restart_factor(age_s: float, num_restarts: int, restart_s: float) -> float:
    """r_i: what a move away from the present configuration is worth, from a job's age and its restarts so far."""
    if age_s < restart_s:
        return 1.0
    return max(age_s - num_restarts * restart_s, 0.0) / (age_s + restart_s)


def sia_costs(goodput: np.ndarray, feasible: np.ndarray, present: int, factor: float, min_gpus: int = 1) -> np.ndarray:
    """Cost row of one job, float64 [K].

    goodput float64 [K]; feasible bool [K]; present: the current configuration or -1; factor: `restart_factor`.
    A job without any feasible configuration costs `INFEASIBLE_GOODPUT ** FAIRNESS_POWER` everywhere: never chosen.
    """
    normal = np.full(len(goodput), INFEASIBLE_GOODPUT)
    usable = feasible & (goodput > 0)
    if usable.any():
        normal[usable] = goodput[usable] / goodput[usable].min() * min_gpus
        move = usable.copy()
        if present >= 0:
            move[present] = False
        normal[move] *= factor
    with np.errstate(divide="ignore"):
        return np.minimum(np.round(normal**FAIRNESS_POWER, 2), MAX_COST)


def solve(
    costs: np.ndarray,
    gpu_type: np.ndarray,
    num_gpus: np.ndarray,
    capacity: np.ndarray,
    pinned: np.ndarray | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Assignment:
    """Minimise sum_i [ sum_j A_ij C_ij + 1.1 (1 - sum_j A_ij) ] under one capacity row per type.

    costs float64 [J, K]; gpu_type, num_gpus int [K]; capacity int [T] GPUs. pinned int32 [J]: a configuration that a
    job inside a restart must keep, else -1. Raises PlacementError if the pinned jobs alone exceed the cluster.
    """
    num_jobs = len(costs)
    pinned = np.full(num_jobs, -1) if pinned is None else pinned
    useful = (costs < UNALLOCATED_COST) & (pinned[:, None] < 0)
    kept = np.flatnonzero(pinned >= 0)
    useful[kept, pinned[kept]] = True
    job, config = np.nonzero(useful)
    if len(job) == 0:
        return Assignment(np.full(num_jobs, -1, np.int32), 0.0, True)
    columns = np.arange(len(job))
    at_most_one = csr_array((np.ones(len(job)), (job, columns)), shape=(num_jobs, len(job)))
    used = csr_array((num_gpus[config].astype(float), (gpu_type[config], columns)), shape=(len(capacity), len(job)))
    result = milp(
        costs[job, config] - UNALLOCATED_COST,
        constraints=[
            LinearConstraint(at_most_one, lb=(pinned >= 0).astype(float), ub=np.ones(num_jobs)),
            LinearConstraint(used, ub=capacity.astype(float)),
        ],
        integrality=np.ones(len(job)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": RELATIVE_GAP, "time_limit": time_limit_s},
    )
    if result.x is None:
        raise PlacementError(
            f"HiGHS found no allocation of {num_jobs} jobs within {time_limit_s:g} s: {result.message}"
        )
    choice = np.full(num_jobs, -1, np.int32)
    chosen = result.x > 0.5
    choice[job[chosen]] = config[chosen]
    return Assignment(choice, assignment_gain(costs, choice), result.status == 0)


def assignment_gain(costs: np.ndarray, choice: np.ndarray) -> float:
    """Sum over allocated jobs of UNALLOCATED_COST - cost."""
    rows = np.flatnonzero(choice >= 0)
    return float((UNALLOCATED_COST - costs[rows, choice[rows]]).sum())
