"""Fit the few constants of the memory predictor on measured runs, and cross-validate by shape class.

The prediction is linear in what is fitted (slack, tensors in transit, copies of routed tokens), so one evaluation of
the predictor per constant gives the design matrix, and each fold is a small bounded robust least squares on relative
errors. Every class weighs the same, however often it was run. A ridge keeps constants that the data do not show at
their prior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from placement.catalogue import MIB, gpu_type
from placement.megatron import Case
from placement.memory import Calibration, predict
from placement.shapes import Floats, ShapeError

FITTED = {
    "slack_bytes": 8.0 * MIB,
    "plain_layer_bytes": 8.0 * MIB,
    "boundary_tensors": 1.0,
    "moe_slack_bytes": 16.0 * MIB,
    "expert_copies": 2.0,
}
"""Fitted constants and the scale of their ridge."""
RIDGE = 0.02
"""Relative error that one scale of departure from the prior costs, over the whole data."""
ROBUST_SCALE = 0.02
"""Residuals beyond this relative error count linearly: a run in another image than stated must not pull the fit."""
MISS_RATE = 0.01
"""Rows allowed above the upper bound."""


@dataclass(frozen=True)
class Evidence:
    """Measured rows: a case, the peak allocated bytes of the last pipeline rank, and the class it belongs to."""

    cases: tuple[Case, ...]
    measured: Floats
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.cases) == len(self.measured) == len(self.classes):
            raise ShapeError(f"{len(self.cases)} cases, {len(self.measured)} peaks and {len(self.classes)} classes")

    def take(self, keep: NDArray[np.bool_]) -> Evidence:
        """The rows where `keep` holds."""
        index = np.flatnonzero(keep)
        return Evidence(
            tuple(self.cases[i] for i in index), self.measured[index], tuple(self.classes[i] for i in index)
        )


def predict_case(case: Case, constants: Calibration | None = None) -> tuple[float, float]:
    """(centre, upper) of the allocated bytes on the last pipeline rank, the one whose peak Megatron logs.

    The upper bound also covers the attention kernel that this image may have fallen back to.
    """
    gpu = gpu_type(case.gpu)
    table = predict(case.shape, case.setup, case.layout, gpu, constants)
    centre = highest = float(table.last.allocated[0])
    if case.fallback is not None:
        highest = max(highest, float(predict(case.shape, case.fallback, case.layout, gpu, constants).last.allocated[0]))
    return centre, highest * table.headroom


def fit(evidence: Evidence, prior: Calibration | None = None) -> Calibration:
    """Constants that fit `evidence`, and the headroom that its own class-wise residuals ask for."""
    base = prior or Calibration()
    design = _design(evidence, base)
    constants = _solve(evidence, base, design)
    held_out = _held_out(evidence, base, design)
    ratios = np.array(
        [
            measured / predict_case(case, replace(fold, headroom=1.0, mixture_headroom=1.0))[1]
            for case, measured, fold in zip(evidence.cases, evidence.measured, held_out, strict=True)
        ]
    )
    mixture = np.array([case.shape.experts is not None for case in evidence.cases])
    return replace(constants, headroom=headroom_of(ratios[~mixture]), mixture_headroom=headroom_of(ratios[mixture]))


def cross_validate(evidence: Evidence, prior: Calibration | None = None) -> tuple[Calibration, ...]:
    """For each row, the constants fitted without its class; the headroom too comes from the other classes alone."""
    by_class = {
        name: fit(evidence.take(np.array([other != name for other in evidence.classes])), prior)
        for name in sorted(set(evidence.classes))
    }
    return tuple(by_class[name] for name in evidence.classes)


def headroom_of(ratios: Floats) -> float:
    """Split-conformal quantile of measured over predicted at `MISS_RATE`, at least 1; the maximum if rows are few."""
    ordered = np.sort(ratios[np.isfinite(ratios)])
    if len(ordered) == 0:
        return 1.0
    rank = int(np.ceil((len(ordered) + 1) * (1 - MISS_RATE)))
    return max(1.0, float(ordered[min(rank, len(ordered)) - 1]))


def _design(evidence: Evidence, base: Calibration) -> tuple[Floats, Floats]:
    """(predictions at the prior [rows], change per scale of each constant [rows, constants])."""
    origin = np.array([predict_case(case, base)[0] for case in evidence.cases])
    columns = []
    for name, scale in FITTED.items():
        bumped = replace(base, **{name: getattr(base, name) + scale})
        columns.append(np.array([predict_case(case, bumped)[0] for case in evidence.cases]) - origin)
    return origin, np.stack(columns, axis=1)


def _solve(
    evidence: Evidence, base: Calibration, design: tuple[Floats, Floats], keep: NDArray[np.bool_] | None = None
) -> Calibration:
    rows = np.arange(len(evidence.cases)) if keep is None else np.flatnonzero(keep)
    if len(rows) == 0:
        return base
    origin, slopes = design[0][rows], design[1][rows]
    measured = evidence.measured[rows]
    _, inverse, counts = np.unique(np.array(evidence.classes)[rows], return_inverse=True, return_counts=True)
    weight = np.sqrt(1.0 / (counts[inverse] * len(counts)))

    def residuals(theta: Floats) -> Floats:
        relative = (origin + slopes @ theta) / measured - 1
        # Robust by hand: the ridge must stay quadratic while the data term turns linear.
        bent = np.sign(relative) * np.sqrt(2 * ROBUST_SCALE**2 * (np.sqrt(1 + (relative / ROBUST_SCALE) ** 2) - 1))
        return np.concatenate([weight * bent, RIDGE * 0.1 * theta])

    lower = np.array([-getattr(base, name) / scale for name, scale in FITTED.items()])
    solution = least_squares(residuals, np.zeros(len(FITTED)), bounds=(lower - 1e-9, np.full(len(FITTED), np.inf)))
    values = {
        name: max(0.0, getattr(base, name) + scale * float(theta))
        for (name, scale), theta in zip(FITTED.items(), solution.x, strict=True)
    }
    return replace(base, **values)


def _held_out(evidence: Evidence, base: Calibration, design: tuple[Floats, Floats]) -> list[Calibration]:
    classes = np.array(evidence.classes)
    by_class = {name: _solve(evidence, base, design, classes != name) for name in sorted(set(evidence.classes))}
    return [by_class[name] for name in evidence.classes]
