"""Which job gets how many GPUs of which type: prices from the dual of the relaxed program, then repair.

The program of Sia (placement/ilp.py) has one capacity row per GPU type. At given prices every job takes the
configuration of largest value minus rent, on its own; prices are raised where demand exceeds capacity. A basic optimum
of the relaxation leaves at most as many jobs fractional as there are types, so rounding loses a few jobs at most.
The gap between the dual bound and the allocation in hand says which configurations can still improve it; only those
enter the exchange search that ends the repair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

PRICE_SWEEPS = 12
BISECTIONS = 18
MAX_EXCHANGE_ROUNDS = 60
EXCHANGE_PAIRS = 400_000
"""Pairs of moves looked at in one round of the exchange search; keeps large instances in milliseconds."""


@dataclass(frozen=True)
class Allocated:
    """choice int32 [J]: configuration or -1; value: the sum reached; bound: no allocation is worth more; prices [T]."""

    choice: np.ndarray
    value: float
    bound: float
    prices: np.ndarray


def allocate(
    value: np.ndarray,
    gpu_type: np.ndarray,
    num_gpus: np.ndarray,
    capacity: np.ndarray,
    pinned: np.ndarray | None = None,
    prices: np.ndarray | None = None,
) -> Allocated:
    """Maximise the summed value under GPU capacities, at most one configuration per job.

    value float64 [J, K], not positive = never chosen; gpu_type, num_gpus int32 [K]; capacity int [T].
    pinned int32 [J]: a configuration the job must keep, else -1; its GPUs are taken out first.
    prices float64 [T]: where to start, such as the last round's; the result hardly depends on them, the time does.
    """
    num_jobs = value.shape[0]
    room = capacity.astype(np.int64).copy()
    choice = np.full(num_jobs, -1, np.int32)
    free = np.ones(num_jobs, np.bool_)
    fixed = 0.0
    if pinned is not None:
        for job in np.flatnonzero(pinned >= 0):
            room[gpu_type[pinned[job]]] -= num_gpus[pinned[job]]
            choice[job] = pinned[job]
            fixed += float(value[job, pinned[job]])
        free = pinned < 0
    rows = np.flatnonzero(free)
    start = np.zeros(len(room)) if prices is None else prices.astype(np.float64)
    if len(rows) == 0 or value.shape[1] == 0:
        return Allocated(choice, fixed, fixed, start)
    work = np.ascontiguousarray(value[rows])
    types, gpus = gpu_type.astype(np.int32), num_gpus.astype(np.int32)
    room = np.maximum(room, 0)
    final, bound = find_prices(work, types, gpus, room, start)
    picked = round_and_repair(work, types, gpus, room, final, bound)
    choice[rows] = picked
    chosen = np.flatnonzero(picked >= 0)
    reached = float(work[chosen, picked[chosen]].sum())
    return Allocated(choice, reached + fixed, bound + fixed, final)


@njit(nogil=True, cache=True)
def _take_best(
    value: np.ndarray, gpu_type: np.ndarray, num_gpus: np.ndarray, prices: np.ndarray, choice: np.ndarray
) -> float:
    """Each job's configuration of largest surplus; returns the summed surplus. Ties go to fewer GPUs."""
    total = 0.0
    size = value.shape[1]
    rent = np.empty(size)
    for k in range(size):
        rent[k] = prices[gpu_type[k]] * num_gpus[k]
    for i in range(value.shape[0]):
        row = value[i]
        best, which = 0.0, -1
        for k in range(size):
            surplus = row[k] - rent[k]
            if surplus > best + 1e-12 or (surplus > best - 1e-12 and which >= 0 and num_gpus[k] < num_gpus[which]):
                best, which = max(surplus, best), k
        choice[i] = which
        total += best
    return total


@njit(nogil=True, cache=True)
def find_prices(
    value: np.ndarray, gpu_type: np.ndarray, num_gpus: np.ndarray, room: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, float]:
    """Prices at which demand fits, by bisection type after type; and the least dual bound seen on the way."""
    num_jobs, num_types = value.shape[0], room.shape[0]
    prices, demand = start.copy(), np.zeros(num_types, np.int64)
    choice = np.empty(num_jobs, np.int32)
    highest = np.zeros(num_types)
    for k in range(value.shape[1]):
        for i in range(num_jobs):
            highest[gpu_type[k]] = max(highest[gpu_type[k]], value[i, k] / num_gpus[k])
    bound, best = np.inf, start.copy()
    for sweep in range(PRICE_SWEEPS):
        moved = 0.0
        for t in range(num_types):
            low, high = 0.0, highest[t]
            if sweep > 0:
                low, high = max(prices[t] * 0.5 - 1e-9, 0.0), min(prices[t] * 2.0 + 1e-3 * highest[t], highest[t])
            old = prices[t]
            for step in range(BISECTIONS):
                prices[t] = low if step == 0 else 0.5 * (low + high)
                dual = _take_best(value, gpu_type, num_gpus, prices, choice)
                demand[:] = 0
                for i in range(num_jobs):
                    if choice[i] >= 0:
                        demand[gpu_type[choice[i]]] += num_gpus[choice[i]]
                for u in range(num_types):
                    dual += prices[u] * room[u]
                if dual < bound:
                    bound = dual
                    best[:] = prices
                if demand[t] > room[t]:
                    low = prices[t]
                elif step == 0:
                    high = low
                    break
                else:
                    high = prices[t]
            prices[t] = high
            moved = max(moved, abs(high - old) / (highest[t] + 1e-12))
        if moved < 1e-4:
            break
    return best, bound


@njit(nogil=True, cache=True)
def round_and_repair(
    value: np.ndarray, gpu_type: np.ndarray, num_gpus: np.ndarray, room: np.ndarray, prices: np.ndarray, bound: float
) -> np.ndarray:
    """An allocation within capacity, int32 [J]: take at prices, shed the least surplus per GPU, fill, exchange."""
    num_jobs = value.shape[0]
    choice = np.empty(num_jobs, np.int32)
    _take_best(value, gpu_type, num_gpus, prices, choice)
    left = room.copy()
    for i in range(num_jobs):
        if choice[i] >= 0:
            left[gpu_type[choice[i]]] -= num_gpus[choice[i]]
    _shed(value, gpu_type, num_gpus, prices, choice, left)
    _fill(value, gpu_type, num_gpus, choice, left)
    for _ in range(MAX_EXCHANGE_ROUNDS):
        if not _exchange(value, gpu_type, num_gpus, prices, bound, choice, left):
            break
        _fill(value, gpu_type, num_gpus, choice, left)
    return choice


@njit(nogil=True, cache=True)
def _shed(
    value: np.ndarray,
    gpu_type: np.ndarray,
    num_gpus: np.ndarray,
    prices: np.ndarray,
    choice: np.ndarray,
    left: np.ndarray,
) -> None:
    """While a type is over-asked, make the cheapest step down: to another configuration or to none."""
    while True:
        over = -1
        for t in range(left.shape[0]):
            if left[t] < 0:
                over = t
        if over < 0:
            return
        least, job, into = np.inf, -1, -1
        for i in range(value.shape[0]):
            now = choice[i]
            if now < 0 or gpu_type[now] != over:
                continue
            row = value[i]
            for k in range(-1, value.shape[1]):
                freed, worth, rent = num_gpus[now], 0.0, 0.0
                if k >= 0:
                    if row[k] <= 0.0 or (gpu_type[k] != over and left[gpu_type[k]] < num_gpus[k]):
                        continue
                    freed -= num_gpus[k] if gpu_type[k] == over else 0
                    worth, rent = row[k], 0.0 if gpu_type[k] == over else prices[gpu_type[k]] * num_gpus[k]
                if freed <= 0:
                    continue
                loss = (row[now] - worth + rent) / min(freed, -left[over])
                if loss < least:
                    least, job, into = loss, i, k
        left[over] += num_gpus[choice[job]]
        choice[job] = into
        if into >= 0:
            left[gpu_type[into]] -= num_gpus[into]


@njit(nogil=True, cache=True)
def _fill(value: np.ndarray, gpu_type: np.ndarray, num_gpus: np.ndarray, choice: np.ndarray, left: np.ndarray) -> None:
    """While some job gains by a move that fits what is left, make the one of largest gain per GPU taken."""
    while True:
        most, job, into = 0.0, -1, -1
        for i in range(value.shape[0]):
            row, now = value[i], choice[i]
            worth = row[now] if now >= 0 else 0.0
            for k in range(value.shape[1]):
                delta = row[k] - worth
                if delta <= 1e-12 or k == now:
                    continue
                taken = num_gpus[k]
                if now >= 0 and gpu_type[now] == gpu_type[k]:
                    taken -= num_gpus[now]
                if taken <= left[gpu_type[k]] and delta / max(taken, 1) > most:
                    most, job, into = delta / max(taken, 1), i, k
        if job < 0:
            return
        _move(gpu_type, num_gpus, choice, left, job, into)


@njit(nogil=True, cache=True)
def _move(
    gpu_type: np.ndarray, num_gpus: np.ndarray, choice: np.ndarray, left: np.ndarray, job: int, into: int
) -> None:
    if choice[job] >= 0:
        left[gpu_type[choice[job]]] += num_gpus[choice[job]]
    if into >= 0:
        left[gpu_type[into]] -= num_gpus[into]
    choice[job] = into


@njit(nogil=True, cache=True)
def _exchange(
    value: np.ndarray,
    gpu_type: np.ndarray,
    num_gpus: np.ndarray,
    prices: np.ndarray,
    bound: float,
    choice: np.ndarray,
    left: np.ndarray,
) -> bool:
    """Make the best improving pair of moves of two jobs; False if there is none among those that can matter.

    A configuration whose surplus lies further below its job's best than the gap to the bound is in no better
    allocation, so it is not tried.
    """
    num_jobs, size = value.shape
    reached = 0.0
    for i in range(num_jobs):
        if choice[i] >= 0:
            reached += value[i, choice[i]]
    gap = bound - reached
    jobs, into = np.empty(num_jobs * (size + 1), np.int32), np.empty(num_jobs * (size + 1), np.int32)
    worth, loss = np.empty(num_jobs * (size + 1)), np.empty(num_jobs * (size + 1))
    num_moves = 0
    for i in range(num_jobs):
        row, now = value[i], choice[i]
        present = row[now] if now >= 0 else 0.0
        top = 0.0
        for k in range(size):
            top = max(top, row[k] - prices[gpu_type[k]] * num_gpus[k])
        for k in range(-1, size):
            if k == now or (k >= 0 and row[k] <= 0.0):
                continue
            surplus = row[k] - prices[gpu_type[k]] * num_gpus[k] if k >= 0 else 0.0
            if top - surplus > gap:
                continue
            jobs[num_moves], into[num_moves] = i, k
            worth[num_moves] = (row[k] if k >= 0 else 0.0) - present
            loss[num_moves] = top - surplus
            num_moves += 1
    order = np.argsort(loss[:num_moves])
    limit = min(num_moves, int(np.sqrt(2.0 * EXCHANGE_PAIRS)))
    most, first, second = 1e-9, -1, -1
    need = np.zeros(left.shape[0], np.int64)
    for x in range(limit):
        a = order[x]
        for y in range(x + 1, limit):
            b = order[y]
            delta = worth[a] + worth[b]
            if delta <= most or jobs[a] == jobs[b]:
                continue
            need[:] = left
            for m in (a, b):
                old = choice[jobs[m]]
                if old >= 0:
                    need[gpu_type[old]] += num_gpus[old]
                if into[m] >= 0:
                    need[gpu_type[into[m]]] -= num_gpus[into[m]]
            fits = True
            for t in range(need.shape[0]):
                fits = fits and need[t] >= 0
            if fits:
                most, first, second = delta, a, b
    if first < 0:
        return False
    _move(gpu_type, num_gpus, choice, left, jobs[first], into[first])
    _move(gpu_type, num_gpus, choice, left, jobs[second], into[second])
    return True
