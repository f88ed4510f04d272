"""Index sets of published sparse training workloads: Zipf embeddings, categorical logs, and top-k gradients.

Rows are sorted by frequency and worker w touches row r independently with probability q_r = 1 - (1 - p_r)^T, where
p_r ~ (r + 2.7)^-s and T is solved for the published density d. The density of the union of n workers is then
mean(1 - (1 - q)^n), so densification and skew are analytic and what is sampled can be checked against them. Densities,
widths and parameter counts are those of Wang et al., OSDI'25; exponents are fitted to its other figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

ZIPF_OFFSET = 2.7

CRITEO_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the 26 categorical fields of the Criteo-Kaggle click log."""


@dataclass(frozen=True, eq=False)
class RowWorkload:
    """A table whose rows are touched independently, row r with probability `touch[r]` per worker and step."""

    name: str
    width: int
    touch: np.ndarray
    draws: float | None = None
    """T, the tokens per worker and step that were solved for; None where the model has none."""

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.touch)

    def density(self, num_workers: int = 1) -> float:
        """Expected share of rows touched by the union of `num_workers` workers: d, or D(n)."""
        return float(np.mean(1 - (1 - self.touch) ** num_workers))

    def gamma(self, num_workers: int) -> float:
        """Densification D(n) / d: 1 where all workers touch the same rows, n where no two share one."""
        return self.density(num_workers) / self.density()

    def skew(self, num_parts: int) -> float:
        """Largest density among `num_parts` equal contiguous parts over d: 1 to num_parts."""
        cuts = self.num_rows * np.arange(num_parts + 1) // num_parts
        parts = np.add.reduceat(self.touch, cuts[:-1]) / np.diff(cuts)
        return float(parts.max() / self.touch.mean())

    def rows(self, worker: int, step: int = 0, seed: int = 0) -> np.ndarray:
        """Touched rows of one worker, sorted: int64 [k]."""
        rng = np.random.default_rng([seed, worker, step])
        return np.flatnonzero(rng.random(self.num_rows) < self.touch)


@dataclass(frozen=True)
class TopKWorkload:
    """The largest `share` of |g|, g = N(0, 1) * exp(sigma * a_row), a = rho * shared + sqrt(1 - rho^2) * private.

    Elements of a [num_lines, line] matrix; a workload of rows of width one for the schemes.
    """

    name: str
    num_lines: int = 2560
    line: int = 10240
    share: float = 0.05
    sigma: float = 1.0
    rho: float = 0.5
    width: int = 1

    @property
    def num_rows(self) -> int:
        """Elements."""
        return self.num_lines * self.line

    def rows(self, worker: int, step: int = 0, seed: int = 0) -> np.ndarray:
        """Kept elements of one worker, sorted: int64 [k], k = share * num_rows exactly."""
        shared = np.random.default_rng([seed, step]).standard_normal(self.num_lines)
        rng = np.random.default_rng([seed, worker, step])
        private = rng.standard_normal(self.num_lines)
        scale = np.exp(self.sigma * (self.rho * shared + np.sqrt(1 - self.rho**2) * private)).astype(np.float32)
        magnitude = rng.standard_normal((self.num_lines, self.line), dtype=np.float32)
        np.abs(magnitude, out=magnitude)
        magnitude *= scale[:, None]
        flat = magnitude.reshape(-1)
        num_kept = int(self.num_rows * self.share)
        threshold = np.partition(flat, -num_kept)[-num_kept]
        kept = np.flatnonzero(flat >= threshold)
        ties = kept[flat[kept] == threshold]
        return np.setdiff1d(kept, ties[: len(kept) - num_kept], assume_unique=True) if len(kept) > num_kept else kept


def zipf_probabilities(num_rows: int, exponent: float, offset: float = ZIPF_OFFSET) -> np.ndarray:
    """p_r ~ (r + offset)^-exponent for r = 1 .. num_rows, float64 [num_rows], sum 1."""
    weights = (np.arange(1, num_rows + 1) + offset) ** -exponent
    return np.asarray(weights / weights.sum())


def touch_probabilities(p: np.ndarray, draws: float) -> np.ndarray:
    """1 - (1 - p)^draws, without cancellation."""
    return np.asarray(-np.expm1(draws * np.log1p(-p)))


def solve_draws(p: np.ndarray, density: float) -> float:
    """T with mean(1 - (1 - p)^T) = density, by bisection on a log scale to 1e-6."""
    low, high = 0.0, 40.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if touch_probabilities(p, np.exp(middle)).mean() < density:
            low = middle
        else:
            high = middle
    return float(np.exp(low))


def _zipf(num_rows: int, width: int, exponent: float, density: float) -> Callable[[str], RowWorkload]:
    def build(name: str) -> RowWorkload:
        p = zipf_probabilities(num_rows, exponent)
        draws = solve_draws(p, density)
        return RowWorkload(name, width, touch_probabilities(p, draws), draws)

    return build


def _deepfm_a(name: str) -> RowWorkload:
    """The split that reproduces 2.8 % per worker and 5.2 % after eight, which no Zipf law with s <= 3 does."""
    touch = np.full(418_000, 0.0035155)
    touch[: round(0.02457 * len(touch))] = 1.0
    return RowWorkload(name, 512, touch)


def _deepfm_b(name: str) -> RowWorkload:
    """26 fields capped at 40 000 values, one draw per field and sample, batch 1024; calibrated for density only."""
    fields = [zipf_probabilities(min(size, 40_000), 0.93, 0.0) for size in CRITEO_CARDINALITIES]
    return RowWorkload(name, 512, np.concatenate([touch_probabilities(p, 1024) for p in fields]), 1024)


_BUILDERS: dict[str, Callable[[str], RowWorkload | TopKWorkload]] = {
    "lstm": _zipf(793_471, 512, 1.70, 0.0113),
    "lstm_steep": _zipf(793_471, 512, 2.04, 0.0113),
    "nmt": _zipf(109_375, 1024, 1.145, 0.0247),
    "bert": _zipf(30_522, 768, 1.031, 0.0106),
    "deepfm_a": _deepfm_a,
    "deepfm_b": _deepfm_b,
    "dgc_llm": TopKWorkload,
    "lstm20": _zipf(39_674, 512, 1.70, 0.0113),
    "nmt20": _zipf(5_469, 1024, 1.145, 0.0247),
}

WORKLOADS = tuple(_BUILDERS)
"""Names: the published models, and `lstm20` and `nmt20` with a twentieth of the rows for small machines."""


@cache
def workload(name: str) -> RowWorkload | TopKWorkload:
    """One of `WORKLOADS`. Solving T takes up to two seconds; the result is kept."""
    return _BUILDERS[name](name)
