"""What recorded runs teach the memory predictor: a factor on the centre and the headroom of the upper bound.

Pure: state and observation in, new state out; the old state stays valid, and `retract` undoes a run exactly. A key is
(model family, GPU type, image, attention, predictor). Its mean of ln(measured / predicted) is shrunk towards its
parent's, which is learned from the parent's other children: so every run counts once, with weight 1 / (n + 5), and one
bad run moves a key by at most a fifth of its error.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from collectives.errors import ConfigError
from placement.memory import MemoryPrediction, MemoryTable

Key = tuple[str, ...]
"""(family, GPU type, image, attention, predictor); a parent is a shorter tuple, the root is ()."""

ANALYTIC, TRACED = "analytic", "traced"
"""The last part of a key: which predictor's error was learned."""

PRIOR_ROWS = 4
"""Rows that the parent's mean counts as."""
MIN_ROWS_FOR_QUANTILE = 100
QUANTILE = 0.99
MAX_LOG_RATIO = math.log(4.0)
"""A run that misses by more than four times tells of a wrong configuration; it counts as four."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One rank's peak of one run. `predicted_bytes` is the centre before any correction, of the same truth
    (allocated, reserved or nvml) as `measured_bytes`."""

    run_id: str
    key: Key
    predicted_bytes: float
    measured_bytes: float
    out_of_memory: bool = False
    """The run ended for want of memory: `measured_bytes` is only a lower bound."""

    def __post_init__(self) -> None:
        for name in ("predicted_bytes", "measured_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"run {self.run_id}: {name} = {value}; a peak is a positive number of bytes")

    @property
    def log_ratio(self) -> float:
        """ln(measured / predicted), bounded; at least 0 for a run that ended for want of memory."""
        ratio = math.log(self.measured_bytes / self.predicted_bytes)
        if self.out_of_memory:
            ratio = max(0.0, ratio)
        return max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, ratio))


@dataclass(frozen=True)
class Tally:
    """Log ratios of one key and all keys below it, ascending. Sums are exact, so order and undoing leave no trace."""

    log_ratios: tuple[float, ...] = ()

    @cached_property
    def total(self) -> float:
        return math.fsum(self.log_ratios)

    def add(self, value: float) -> Tally:
        """With one more."""
        values = list(self.log_ratios)
        insort(values, value)
        return Tally(tuple(values))

    def remove(self, value: float) -> Tally:
        """Without one that was added."""
        index = bisect_left(self.log_ratios, value)
        return Tally(self.log_ratios[:index] + self.log_ratios[index + 1 :])


@dataclass(frozen=True)
class Correction:
    """All that was learned. `version` counts changes, so that a cache can tell states apart."""

    version: int = 0
    runs: Mapping[str, Observation] = field(default_factory=dict)
    tallies: Mapping[Key, Tally] = field(default_factory=dict)


def observe(state: Correction, observation: Observation) -> Correction:
    """The state after one more run. A run that is already known is replaced."""
    if observation.run_id in state.runs:
        state = retract(state, observation.run_id)
    tallies = dict(state.tallies)
    for key in _lineage(observation.key):
        tallies[key] = tallies.get(key, Tally()).add(observation.log_ratio)
    runs = {**state.runs, observation.run_id: observation}
    return Correction(state.version + 1, runs, tallies)


def retract(state: Correction, run_id: str) -> Correction:
    """The state as if this run had never been seen. Raises ConfigError for an unknown run."""
    if run_id not in state.runs:
        raise ConfigError(f"run {run_id} is not among the {len(state.runs)} runs that the correction was learned from")
    observation = state.runs[run_id]
    tallies = dict(state.tallies)
    for key in _lineage(observation.key):
        left = tallies[key].remove(observation.log_ratio)
        if left.log_ratios:
            tallies[key] = left
        else:
            del tallies[key]
    runs = {name: other for name, other in state.runs.items() if name != run_id}
    return Correction(state.version + 1, runs, tallies)


def factor(state: Correction, key: Key) -> float:
    """What the centre is multiplied with."""
    return math.exp(_mean(state, key))


def headroom(state: Correction, key: Key, shipped: float) -> float:
    """Upper bound over corrected centre: the 99 % conformal quantile in the nearest key with enough rows, else
    `shipped`. Never below 1."""
    for ancestor in _lineage(key):
        values = state.tallies.get(ancestor, Tally()).log_ratios
        if len(values) >= MIN_ROWS_FOR_QUANTILE:
            rank = min(len(values), math.ceil((len(values) + 1) * QUANTILE))
            return max(1.0, math.exp(values[rank - 1] - _mean(state, key)))
    return shipped


def correct(state: Correction, key: Key, prediction: MemoryPrediction) -> MemoryPrediction:
    """The prediction with what runs of this key taught; unchanged, also in its confidence, if none did."""
    if not any(ancestor in state.tallies for ancestor in _lineage(key)):
        return prediction
    shipped = prediction.allocated_upper / prediction.allocated
    corrected = prediction.corrected(factor(state, key), headroom(state, key, shipped))
    return corrected if key in state.tallies else replace(corrected, confidence=prediction.confidence)


def correct_table(state: Correction, key: Key, table: MemoryTable) -> MemoryTable:
    """The same for all plans of a job class at once."""
    return replace(table, factor=factor(state, key), headroom=headroom(state, key, table.headroom))


def moved(before: Correction, after: Correction, key: Key) -> float:
    """Relative change of a key's factor between two states; plans of the key are stale beyond 1 %."""
    return abs(factor(after, key) / factor(before, key) - 1)


def _lineage(key: Key) -> list[Key]:
    """The key, its parent, ... and the root."""
    return [key[:length] for length in range(len(key), -1, -1)]


def _mean(state: Correction, key: Key) -> float:
    """Shrunk mean of the log ratios, from the root down; each level sees only rows outside the next."""
    mean = 0.0
    lineage = _lineage(key)[::-1]
    for level, child in zip(lineage, [*lineage[1:], None], strict=True):
        tally = state.tallies.get(level, Tally())
        inner = Tally() if child is None else state.tallies.get(child, Tally())
        rows = len(tally.log_ratios) - len(inner.log_ratios)
        mean = (PRIOR_ROWS * mean + tally.total - inner.total) / (rows + PRIOR_ROWS)
    return mean
