"""Error feedback between steps: what each rank's codec lost, kept by parameter name.

a = g + e; p = C(a); e <- a - D(p). Keyed by name, never by bucket: torch's DDP rebuilds its buckets after the first
iteration. The residuals of the parameters of one bucket lie side by side in one buffer, so that a bucket is encoded in
one call; when the layout changes, they move by name.

A step is pending until `commit`; `rollback` leaves every byte as it was before the step (a loss scaler skipped it).
Memory: 4 bytes per element and rank, 8 with `reversible`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collectives.codecs.codec import Residual
from collectives.errors import ConfigError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

Layout = tuple[tuple[str, int], ...]
"""Parameter names and their numbers of elements, in the order of a bucket."""


class Piece(NamedTuple):
    """Residuals of elements [offset, offset + len(values)) of a parameter of `numel` elements."""

    offset: int
    numel: int
    values: Tensor


Pieces = dict[str, list[Piece]]
"""By parameter name."""


@dataclass
class _Bucket:
    """Residuals of one layout, elements [start, stop) of it: all of it, or the chunk that this rank owns."""

    layout: Layout
    start: int
    stop: int
    value: Tensor
    pending: Tensor
    dirty: bool = False
    leaving: bool = False
    """Delivered in this step: gone once the step counts."""

    def pieces(self) -> list[tuple[str, Piece]]:
        """Name and part of every parameter that lies in [start, stop); the values are views."""
        pieces, begin = [], 0
        for name, numel in self.layout:
            low, high = max(begin, self.start), min(begin + numel, self.stop)
            if low < high:
                pieces.append((name, Piece(low - begin, numel, self.value[low - self.start : high - self.start])))
            begin += numel
        return pieces


@dataclass
class ErrorFeedback:
    """The residuals of one rank.

    reversible: keep the old residuals until `commit`, so that a step can be taken back.
    decay: each step starts from decay * e; 1 keeps all of it.
    """

    reversible: bool = False
    decay: float = 1.0
    device: torch.device = CPU
    """Where the gradients live, and with them the residuals; states are on the CPU."""
    buckets: dict[Layout, _Bucket] = field(default_factory=dict, init=False, repr=False)
    owned: dict[Layout, _Bucket] = field(default_factory=dict, init=False, repr=False)
    unplaced: Pieces = field(default_factory=dict, init=False, repr=False)
    """Loaded or displaced residuals of this rank whose bucket is not known yet."""
    unplaced_owned: Pieces = field(default_factory=dict, init=False, repr=False)
    num_dropped: int = field(default=0, init=False)
    """Residuals that were set to zero because their parameter changed its size."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"decay must be in [0, 1], not {self.decay}")

    def residual(self, layout: Sequence[tuple[str, int]]) -> Residual:
        """The residual (fp32, flat) of a bucket that holds these parameters in this order; zeros at first."""
        key = tuple(layout)
        numel = sum(n for _, n in key)
        return self._open(self.buckets, self.unplaced, key, 0, numel)

    def owner_residual(self, layout: Sequence[tuple[str, int]], span: slice) -> Residual:
        """The residual of this rank's chunk [span) of a bucket, for the second encode of a two-shot reduction."""
        return self._open(self.owned, self.unplaced_owned, tuple(layout), span.start, span.stop)

    def _open(
        self,
        buckets: dict[Layout, _Bucket],
        unplaced: Pieces,
        layout: Layout,
        start: int,
        stop: int,
    ) -> Residual:
        bucket = buckets.get(layout)
        if bucket is None or (bucket.start, bucket.stop) != (start, stop):
            bucket = self._place(buckets, unplaced, layout, start, stop)
        if self.decay != 1:
            # The decayed start goes into the pending half, so that the old bytes stay for a rollback.
            torch.mul(bucket.value, self.decay, out=bucket.pending)
            bucket.dirty = True
            return Residual.in_place(bucket.pending)
        bucket.dirty = True
        return Residual(bucket.value, bucket.pending)

    def _place(
        self,
        buckets: dict[Layout, _Bucket],
        unplaced: Pieces,
        layout: Layout,
        start: int,
        stop: int,
    ) -> _Bucket:
        """Make the buffer of a new layout and move in what is known about its parameters."""
        names = {name for name, _ in layout}
        for key in [key for key in buckets if names & {name for name, _ in key}]:
            for name, piece in buckets.pop(key).pieces():
                unplaced.setdefault(name, []).append(piece)
        value = torch.zeros(stop - start, device=self.device)
        bucket = _Bucket(layout, start, stop, value, torch.zeros_like(value) if self.reversible else value)
        for name, target in bucket.pieces():
            for piece in unplaced.get(name, []):
                self._move(name, piece, target)
        for name in names & unplaced.keys():
            del unplaced[name]
        buckets[layout] = bucket
        return bucket

    def _move(self, name: str, piece: Piece, target: Piece) -> None:
        """Copy what two parts of one parameter have in common."""
        if piece.numel != target.numel:
            self.num_dropped += 1
            logger.warning(
                "residual of %s dropped: it has %d elements, the parameter %d", name, piece.numel, target.numel
            )
            return
        low = max(piece.offset, target.offset)
        high = min(piece.offset + len(piece.values), target.offset + len(target.values))
        if low < high:
            target.values[low - target.offset : high - target.offset] = piece.values[
                low - piece.offset : high - piece.offset
            ]

    def deliver(self, layout: Sequence[tuple[str, int]], x: Tensor, size: int) -> None:
        """Add to the gradient x (flat, of this layout, a mean over `size` ranks) all that is owed: from now on it travels in a
        way that loses nothing worth keeping. Afterwards nothing is owed, unless the step is taken back.
        """
        key = tuple(layout)
        names = {name for name, _ in key}
        for buckets, unplaced, factor in ((self.buckets, self.unplaced, 1), (self.owned, self.unplaced_owned, size)):
            if key not in buckets and names & unplaced.keys():
                self._place(buckets, unplaced, key, 0, x.numel())
            if key in buckets:
                bucket = buckets[key]
                x[bucket.start : bucket.stop] += factor * bucket.value
                bucket.leaving = True

    def commit(self) -> None:
        """The step counts: pending residuals become the residuals."""
        for table in (self.buckets, self.owned):
            for key in [key for key, bucket in table.items() if bucket.leaving]:
                del table[key]
        for bucket in self._all():
            if bucket.dirty and self.reversible:
                bucket.value, bucket.pending = bucket.pending, bucket.value
            bucket.dirty = False

    def rollback(self) -> None:
        """The step was skipped: the residuals stay what they were. Needs `reversible`."""
        if not self.reversible:
            raise ConfigError("only ErrorFeedback(reversible=True) can take a step back")
        for bucket in self._all():
            bucket.dirty = bucket.leaving = False

    def rescale(self, factor: float) -> None:
        """Multiply all residuals: by new/old loss scale when it changes, or by lr before/lr now."""
        for bucket in self._all():
            bucket.value *= factor
        for pieces in (*self.unplaced.values(), *self.unplaced_owned.values()):
            for piece in pieces:
                piece.values.mul_(factor)

    def reset(self) -> None:
        """Forget all residuals."""
        for table in (self.buckets, self.owned, self.unplaced, self.unplaced_owned):
            table.clear()

    def norm(self) -> float:
        """2-norm of this rank's residuals; above ten times the gradient's and growing, the codec is too coarse."""
        return math.hypot(*(float(torch.linalg.vector_norm(b.value)) for b in self.buckets.values()))

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(b.value.nbytes + (b.pending.nbytes if b.pending is not b.value else 0) for b in self._all())

    def _all(self) -> list[_Bucket]:
        return [*self.buckets.values(), *self.owned.values()]

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals: lists of (offset, numel, values) by parameter name, free of buckets and groups."""
        return {
            "residuals": _collect(self.buckets, self.unplaced),
            "owner_residuals": _collect(self.owned, self.unplaced_owned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; works before or after the first step. Parameters that the state lacks start from zero."""
        self.reset()
        for target, key in ((self.unplaced, "residuals"), (self.unplaced_owned, "owner_residuals")):
            for name, pieces in state.get(key, {}).items():
                target[name] = _copied(pieces)


def _copied(pieces: Iterable[tuple[int, int, Tensor]]) -> list[Piece]:
    copies = [Piece(int(offset), int(numel), values.to(CPU, copy=True)) for offset, numel, values in pieces]
    return sorted(copies, key=lambda piece: piece.offset)


def _collect(buckets: Mapping[Layout, _Bucket], unplaced: Pieces) -> Pieces:
    state: Pieces = {}
    for bucket in buckets.values():
        for name, piece in bucket.pieces():
            state.setdefault(name, []).append(piece)
    for name, pieces in unplaced.items():
        state.setdefault(name, []).extend(pieces)
    return {name: _copied(pieces) for name, pieces in state.items()}


def reshard(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for every rank of a group of another size, from the states of all old ranks.

    The residual of each parameter is the mean of the old ones, which keeps the mean contribution exactly; the owner
    residuals are put together, and each new rank cuts its own chunk from them on first use.
    """
    residuals, owned = {}, {}
    for name in sorted({name for state in states for name in state["residuals"]}):
        pieces = [Piece(*piece) for state in states for piece in state["residuals"].get(name, [])]
        total = torch.zeros(pieces[0].numel, dtype=torch.float64)
        for piece in pieces:
            total[piece.offset : piece.offset + len(piece.values)] += piece.values
        residuals[name] = [Piece(0, len(total), (total / len(states)).float())]
    for name in sorted({name for state in states for name in state["owner_residuals"]}):
        owned[name] = _copied(piece for state in states for piece in state["owner_residuals"].get(name, []))
    return {"residuals": residuals, "owner_residuals": owned}
