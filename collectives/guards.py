"""When a codec has to go: the limits of what it may lose, and what one look at a tensor found.

Shared by the planner of dense gradients, which looks at results, and by the channels of all other roles, which look at
what they send. A codec that is taken back takes all coarser ones with it. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from collectives.codecs.codec import Codec

MAX_NONFINITE = 8
"""Non-finite results in a row; a loss scaler that looks for its scale produces a few."""

MAX_RELATIVE_ERROR: Mapping[str, float] = {"bf16": 0.02, "fp16": 0.02, "int8b": 0.1, "fp8b": 0.2, "int4b": 0.5}
"""Against the exact mean or the tensor that was sent, without a residual; several times what the codec does on gradients."""
MAX_VANISHED = 0.8
"""Share of the non-zero values that become zero, in codecs that are named above: the others choose what to drop. Outliers
that take all of a scale leave the relative error small, 0.006 where int4b loses 96 % of the values; on Gaussian values
int4b loses 13 %, on Cauchy values 68 %."""
COARSENESS = ("bf16", "fp16", "int8b", "fp8b", "int4b", "eb", "eb_sum", "sq", "topk", "powersgd", "sign", "randomk")
"""From fine to coarse: a demotion allows what is left of the codec it bans. Exact codecs are not here."""

WORST = 1e9
"""Stands for an error that is infinite or no number."""
PIECE_VALUES = 1 << 18
"""A look takes a tensor in pieces of this many values, so that it needs no copy of all of it."""


def coarser(codec: str) -> tuple[str, ...]:
    """The codec and all that are coarser; nothing for an exact one."""
    return COARSENESS[COARSENESS.index(codec) :] if codec in COARSENESS else ()


def violation(codec: str, relative_error: float, num_nonfinite: int) -> str:
    """Why the codec must go, or nothing. num_nonfinite: results in a row."""
    limit = MAX_RELATIVE_ERROR.get(codec, WORST)
    if relative_error > limit or relative_error >= WORST:
        return f"relative error {relative_error:.3g}, at most {limit:.3g} expected"
    if num_nonfinite >= MAX_NONFINITE:
        return f"{num_nonfinite} results in a row were not finite, or lost small values"
    return ""


def ppm(value: float) -> int:
    """For an exchange of int64; `WORST` at most."""
    return round(min(value, WORST) * 1e6) if value == value else round(WORST * 1e6)


@dataclass(frozen=True)
class Look:
    """What one encode and decode did to a tensor, or the worst of several ranks' tensors.

    relative_error: ||D(C(x)) - x|| / ||x||, `WORST` where a finite tensor did not come back finite. vanished: share of
    the non-zero values that came back as zero. spreads: finite values beside non-finite ones came back non-finite.
    """

    relative_error: float = 0.0
    vanished: float = 0.0
    spreads: bool = False

    def record(self) -> list[int]:
        """This rank's part of an agreement."""
        return [ppm(self.relative_error), ppm(self.vanished), int(self.spreads)]

    @classmethod
    def worst(cls, records: Sequence[Sequence[int]]) -> Self:
        """Of the ranks' records."""
        error, vanished, spreads = (max(column) for column in zip(*records, strict=True))
        return cls(error / 1e6, vanished / 1e6, bool(spreads))

    def violation(self, codec: str, num_nonfinite: int) -> str:
        """Why the codec must go, or nothing. num_nonfinite: looks in a row that spread."""
        if codec in MAX_RELATIVE_ERROR and self.vanished > MAX_VANISHED:
            return f"{self.vanished:.0%} of the values became zero, at most {MAX_VANISHED:.0%} expected"
        return violation(codec, self.relative_error, num_nonfinite)


def look(codec: Codec, x: Tensor, seed: int = 0) -> Look:
    """Encode and decode x (fp32, flat, contiguous), which is left as it is; nothing travels."""
    lost = whole = 0.0
    num_nonzero = num_left = 0
    spreads, is_finite = False, True
    codec = codec.for_tensor(x)
    for piece in torch.split(x, PIECE_VALUES) if x.numel() else ():
        decoded = torch.empty_like(piece)
        codec.decode(codec.encode(piece, seed=seed), decoded)
        num_nonzero += int(torch.count_nonzero(piece))
        num_left += int(torch.count_nonzero(decoded))
        difference = decoded.sub_(piece)
        error = _norm(difference)
        if math.isfinite(error):
            lost += error**2
            whole += _norm(piece) ** 2
        else:
            was_finite = torch.isfinite(piece)
            is_finite = is_finite and bool(was_finite.all())
            spreads = spreads or bool((was_finite & ~torch.isfinite(difference)).any())
    if spreads and is_finite:
        return Look(WORST)
    vanished = 1 - num_left / num_nonzero if num_nonzero else 0.0
    return Look(math.sqrt(lost / whole) if whole > 0 else 0.0, vanished, spreads)


def _norm(x: Tensor) -> float:
    """Of values whose squares may not fit into fp32, too, at four times the cost."""
    norm = float(torch.linalg.vector_norm(x))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(x, dtype=torch.float64))
