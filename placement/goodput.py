"""Goodput of a data-parallel job as a policy can know it: a throughput model fitted to what ran, times efficiency.

Formulas of Pollux (Qiao et al., OSDI'21) and Sia (Jayaram Subramanya et al., SOSP'23):
T_acc = a_c + b_c b; T_net = a + b max(R - 2, 0), with one pair across nodes and one inside a node, 0 for one replica;
T_opt = (T_acc^g + T_net^g)^(1/g); throughput = R b (acc + 1) / (acc T_acc + T_opt);
gain = (var + sqr) / (var / scale + sqr), efficiency = gain / scale, scale = batch / initial batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

NUM_BATCH_CANDIDATES = 50
TINY = 1e-8
MAX_FIT_STEPS = 60
"""Parameters of one GPU type, in this order: a_c, b_c, a_n, b_n, a_r, b_r, g."""
NUM_PARAMS = 7


@dataclass(frozen=True)
class Configs:
    """K allocations that an elastic job may take: GPU type index, nodes, GPUs; int32 [K] each."""

    gpu_type: np.ndarray
    num_nodes: np.ndarray
    num_gpus: np.ndarray

    def __len__(self) -> int:
        return len(self.gpu_type)


@njit(nogil=True, cache=True)
def step_times(params: np.ndarray, num_nodes: int, replicas: int, local_batch: float) -> tuple[float, float]:
    """(T_acc, T_opt) in seconds of one type's parameters float64 [7]."""
    accumulate = params[0] + params[1] * local_batch
    if replicas <= 1:
        return accumulate, accumulate
    if num_nodes > 1:
        network = params[2] + params[3] * max(replicas - 2, 0)
    else:
        network = params[4] + params[5] * max(replicas - 2, 0)
    if network <= 0.0:
        return accumulate, accumulate
    gamma = params[6]
    larger, smaller = max(accumulate, network), min(accumulate, network)
    return accumulate, larger * (1.0 + (smaller / larger) ** gamma) ** (1.0 / gamma)


@njit(nogil=True, cache=True)
def gain(grad_sqr: float, grad_var: float, scale: float) -> float:
    """Progress of one step at `scale` times the initial batch, in steps at the initial batch."""
    return (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)


@njit(nogil=True, cache=True)
def goodput_table(
    params: np.ndarray,
    borrow: np.ndarray,
    gpu_type: np.ndarray,
    num_nodes: np.ndarray,
    num_gpus: np.ndarray,
    min_local: np.ndarray,
    max_local: np.ndarray,
    batch_limits: tuple[int, int],
    grad: tuple[float, float],
    goodput: np.ndarray,
    local_batch: np.ndarray,
    accumulation: np.ndarray,
) -> None:
    """Fill goodput (initial-batch steps per second; 0 = infeasible), batch per replica and accumulation steps, all [K].

    params float64 [T, 7]. borrow int32 [T]: the type whose scaling a type without multi-GPU data takes over, or -1:
    thr(R, A) = thr(1, A) / thr(1, B) thr(R, B). min_local [T] and max_local [K] bound the batch per replica: memory.
    batch_limits: initial and largest batch. grad: (sqr, var) as last measured.
    """
    initial, largest = batch_limits
    for k in range(gpu_type.shape[0]):
        own, replicas = gpu_type[k], num_gpus[k]
        model = borrow[own] if borrow[own] >= 0 and replicas > 1 else own
        low = max(initial, min_local[own] * replicas)
        goodput[k], local_batch[k], accumulation[k] = 0.0, 0, 0
        if low > largest or max_local[k] < 1:
            continue
        ratio = (largest / low) ** (1.0 / (NUM_BATCH_CANDIDATES - 1))
        candidate = float(low)
        for _ in range(NUM_BATCH_CANDIDATES):
            per_replica = int(np.ceil(candidate / replicas - 1e-6))
            candidate *= ratio
            steps = (per_replica + max_local[k] - 1) // max_local[k]
            atomic = (per_replica + steps - 1) // steps
            accumulate, optimise = step_times(params[model], num_nodes[k], replicas, atomic)
            if model != own:
                slower = (params[own, 0] + params[own, 1] * atomic) / accumulate
                accumulate, optimise = accumulate * slower, optimise * slower
            batch = replicas * atomic * steps
            value = gain(grad[0], grad[1], batch / initial) / ((steps - 1) * accumulate + optimise)
            if value > goodput[k]:
                goodput[k], local_batch[k], accumulation[k] = value, atomic, steps - 1


@njit(nogil=True, cache=True)
def _residuals(z: np.ndarray, active: np.ndarray, samples: np.ndarray, params: np.ndarray, out: np.ndarray) -> float:
    for i in range(active.shape[0]):
        p = active[i]
        params[p] = 1.0 + 9.0 / (1.0 + np.exp(-z[i])) if p == 6 else np.exp(z[i])
    total = 0.0
    for s in range(samples.shape[0]):
        accumulate, optimise = step_times(params, int(samples[s, 0]), int(samples[s, 1]), samples[s, 2])
        out[2 * s] = np.log(accumulate) - samples[s, 3]
        out[2 * s + 1] = np.log(optimise) - samples[s, 4]
        total += out[2 * s] ** 2 + out[2 * s + 1] ** 2
    return total


@njit(nogil=True, cache=True)
def fit_params(samples: np.ndarray, active: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Least squares on log times (Levenberg-Marquardt in log parameters); returns params float64 [7].

    samples float64 [S, 5]: nodes, replicas, batch per replica, log T_acc, log T_opt. active: indices of the parameters
    that the samples determine; the others keep their value in `start` (0 for a network term that was never seen).
    """
    params = start.copy()
    num, rows = active.shape[0], 2 * samples.shape[0]
    z, trial = np.empty(num), np.empty(num)
    for i in range(num):
        p = active[i]
        if p == 6:
            share = min(max((params[6] - 1.0) / 9.0, 1e-3), 1.0 - 1e-3)
            z[i] = np.log(share / (1.0 - share))
        else:
            z[i] = np.log(max(params[p], TINY))
    base, moved, jacobian = np.empty(rows), np.empty(rows), np.empty((rows, num))
    error, damping = _residuals(z, active, samples, params, base), 1e-2
    for _ in range(MAX_FIT_STEPS):
        for i in range(num):
            trial[:] = z
            trial[i] += 1e-5
            _residuals(trial, active, samples, params, moved)
            jacobian[:, i] = (moved - base) / 1e-5
        normal, slope = jacobian.T @ jacobian, jacobian.T @ base
        improved = False
        for _ in range(8):
            system = normal.copy()
            for i in range(num):
                system[i, i] += damping * (normal[i, i] + 1e-6)
            step = np.linalg.solve(system, slope)
            for i in range(num):
                trial[i] = min(max(z[i] - min(max(step[i], -3.0), 3.0), -18.0), 8.0)
            candidate = _residuals(trial, active, samples, params, moved)
            if candidate < error:
                improved = candidate < error * (1.0 - 1e-4)
                z[:] = trial
                base[:] = moved
                error, damping = candidate, damping * 0.3
                break
            damping *= 4.0
        if not improved:
            break
    _residuals(z, active, samples, params, base)
    return params


class Throughput:
    """Step times that ran and one fit per GPU type: of one job, or of all jobs of one class.

    single float64 [n, 2] per type: the one-GPU profile (batch per replica, T_acc in s) of each type, Sia's bootstrap.
    """

    def __init__(self, single: Sequence[np.ndarray]):
        self.version = 0
        """Grows whenever a prediction may have changed."""
        self.max_replicas = 0
        """Most GPUs that ever ran, on any type."""
        self._samples = [
            np.column_stack([np.ones((len(s), 2)), s[:, 0], np.log(s[:, 1]), np.log(s[:, 1])]) for s in single
        ]
        self._seen: set[tuple[int, int, int, int]] = set()
        self.params = np.tile(np.array([0.1, 0.01, 0.0, 0.0, 0.0, 0.0, 1.5]), (len(single), 1))
        self.min_local = np.array([int(s[:, 0].min()) for s in single], np.int64)
        self.most_replicas = np.ones(len(single), np.int32)
        """[T] most GPUs that ever ran on each type."""
        for gpu_type in range(len(single)):
            self._refit(gpu_type)

    def observe(
        self, gpu_type: int, num_nodes: int, replicas: int, local_batch: int, accumulate_s: float, step_s: float
    ) -> None:
        """Add what one configuration showed: T_acc and T_opt in seconds. Repeats are ignored."""
        key = (gpu_type, num_nodes, replicas, local_batch)
        if key in self._seen:
            return
        self._seen.add(key)
        row = [[num_nodes, replicas, local_batch, np.log(accumulate_s), np.log(step_s)]]
        self._samples[gpu_type] = np.append(self._samples[gpu_type], row, axis=0)
        self.max_replicas = max(self.max_replicas, replicas)
        self.most_replicas[gpu_type] = max(self.most_replicas[gpu_type], replicas)
        self._refit(gpu_type)

    def borrowed(self) -> np.ndarray:
        """int32 [T]: for a type without multi-GPU data, the type with the most of it; else -1."""
        best = int(np.argmax(self.most_replicas))
        unseen = (self.most_replicas <= 1) & (self.most_replicas[best] > 1)
        return np.where(unseen, best, -1).astype(np.int32)

    def _refit(self, gpu_type: int) -> None:
        samples = self._samples[gpu_type]
        nodes, replicas = samples[:, 0], samples[:, 1]
        across, inside = nodes > 1, (nodes == 1) & (replicas > 1)
        active = [0, 1]
        active += [2] * bool(across.any()) + [3] * bool((replicas[across] > 2).any())
        active += [4] * bool(inside.any()) + [5] * bool((replicas[inside] > 2).any())
        active += [6] * (len(active) > 2)
        start = self.params[gpu_type].copy()
        for p in active:
            if start[p] <= TINY:
                start[p] = 0.1 if p in (2, 4) else 0.01
        self.params[gpu_type] = fit_params(samples, np.array(active, np.int64), start)
        self.version += 1


class Estimator:
    """Goodput of one job: a throughput model, its own or its class's, and the gradient statistics it last measured."""

    def __init__(self, throughput: Throughput, batch_limits: tuple[int, int]):
        self.throughput = throughput
        self.batch_limits = batch_limits
        """Initial and largest batch."""
        self.grad: tuple[float, float] | None = None
        """(grad_sqr, grad_var), or None before the job ran."""

    def table(self, configs: Configs, max_local: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(goodput float64, batch per replica int64, accumulation steps int64), each [K].

        Before the job ran its gradient statistics count as equal, as if every sample told half of what it could.
        """
        size, model = len(configs), self.throughput
        out = np.zeros(size), np.zeros(size, np.int64), np.zeros(size, np.int64)
        goodput_table(
            model.params, model.borrowed(), configs.gpu_type, configs.num_nodes, configs.num_gpus, model.min_local,
            max_local, self.batch_limits, self.grad or (1.0, 1.0), *out,
        )  # fmt: skip
        return out
