"""Error feedback between steps: what each rank's codec lost, kept by parameter name.

a = g + e; p = C(a); e <- a - D(p). Keyed by name, never by bucket: torch's DDP rebuilds its buckets after the first
iteration. The residuals of the parameters of one bucket lie side by side in one buffer, so that a bucket is encoded in
one call; when the layout changes, they move by name.

A step is pending until `commit`; `rollback` leaves every byte as it was before the step (a loss scaler skipped it).
Memory: 4 bytes per element and rank, 8 with `reversible`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collectives.codecs.codec import Residual
from collectives.errors import ConfigError

Layout = tuple[tuple[str, int], ...]
"""Parameter names and their numbers of elements, in the order of a bucket."""


@dataclass
class _Bucket:
    """Residuals of one layout, elements [start, stop) of it: all of it, or the chunk that this rank owns."""

    layout: Layout
    start: int
    stop: int
    value: Tensor
    pending: Tensor
    dirty: bool = False

    def pieces(self) -> list[tuple[str, int, Tensor]]:
        """(name, offset inside the parameter, the residual from there on) of every parameter that is touched."""
        pieces, begin = [], 0
        for name, numel in self.layout:
            low, high = max(begin, self.start), min(begin + numel, self.stop)
            if low < high:
                pieces.append((name, low - begin, self.value[low - self.start : high - self.start]))
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
    buckets: dict[Layout, _Bucket] = field(default_factory=dict, init=False, repr=False)
    owned: dict[Layout, _Bucket] = field(default_factory=dict, init=False, repr=False)
    unplaced: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict, init=False, repr=False)
    """Loaded or displaced residuals of this rank whose bucket is not known yet: (offset, values) by name."""
    unplaced_owned: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict, init=False, repr=False)
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
        unplaced: dict[str, list[tuple[int, Tensor]]],
        layout: Layout,
        start: int,
        stop: int,
    ) -> Residual:
        bucket = buckets.get(layout)
        if bucket is None or (bucket.start, bucket.stop) != (start, stop):
            bucket = self._place(buckets, unplaced, layout, start, stop)
        if self.decay != 1 and not bucket.dirty:
            # The decayed start goes into the pending half, so that the old bytes stay for a rollback.
            torch.mul(bucket.value, self.decay, out=bucket.pending)
            bucket.dirty = True
            return Residual.in_place(bucket.pending)
        bucket.dirty = True
        return Residual(bucket.value, bucket.pending)

    def _place(
        self,
        buckets: dict[Layout, _Bucket],
        unplaced: dict[str, list[tuple[int, Tensor]]],
        layout: Layout,
        start: int,
        stop: int,
    ) -> _Bucket:
        """Make the buffer of a new layout and move in what is known about its parameters."""
        names = {name for name, _ in layout}
        for key in [key for key in buckets if names & {name for name, _ in key}]:
            for name, offset, piece in buckets.pop(key).pieces():
                unplaced.setdefault(name, []).append((offset, piece))
        value = torch.zeros(stop - start)
        bucket = _Bucket(layout, start, stop, value, torch.zeros(stop - start) if self.reversible else value)
        sizes, targets = dict(layout), {(name, offset): piece for name, offset, piece in bucket.pieces()}
        for name in names & unplaced.keys():
            for offset, piece in unplaced.pop(name):
                if offset + piece.numel() > sizes[name]:
                    self.num_dropped += 1
                    continue
                for (target_name, begin), target in targets.items():
                    low, high = max(offset, begin), min(offset + piece.numel(), begin + target.numel())
                    if target_name == name and low < high:
                        target[low - begin : high - begin] = piece[low - offset : high - offset]
        buckets[layout] = bucket
        return bucket

    def commit(self) -> None:
        """The step counts: pending residuals become the residuals."""
        for bucket in self._all():
            if bucket.dirty and self.reversible:
                bucket.value, bucket.pending = bucket.pending, bucket.value
            bucket.dirty = False

    def rollback(self) -> None:
        """The step was skipped: the residuals stay what they were. Needs `reversible`."""
        if not self.reversible:
            raise ConfigError("only ErrorFeedback(reversible=True) can take a step back")
        for bucket in self._all():
            bucket.dirty = False

    def rescale(self, factor: float) -> None:
        """Multiply all residuals: by new/old loss scale when it changes, or by lr before/lr now."""
        for bucket in self._all():
            bucket.value *= factor
        for pieces in (*self.unplaced.values(), *self.unplaced_owned.values()):
            for _, piece in pieces:
                piece *= factor

    def reset(self) -> None:
        """Forget all residuals."""
        for table in (self.buckets, self.owned, self.unplaced, self.unplaced_owned):
            table.clear()

    def norm(self) -> float:
        """2-norm of this rank's residuals; above ten times the gradient's and growing, the codec is too coarse."""
        return sum(float(torch.linalg.vector_norm(b.value)) ** 2 for b in self.buckets.values()) ** 0.5

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(b.value.nbytes + (b.pending.nbytes if b.pending is not b.value else 0) for b in self._all())

    def _all(self) -> list[_Bucket]:
        return [*self.buckets.values(), *self.owned.values()]

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, as (offset, values) pieces. Independent of buckets and groups."""
        return {
            "residuals": _collect(self.buckets, self.unplaced),
            "owner_residuals": _collect(self.owned, self.unplaced_owned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; works before or after the first step. Parameters that the state lacks start from zero."""
        self.reset()
        for target, key in ((self.unplaced, "residuals"), (self.unplaced_owned, "owner_residuals")):
            for name, pieces in state.get(key, {}).items():
                target[name] = [(int(offset), values.clone()) for offset, values in pieces]


def _collect(
    buckets: Mapping[Layout, _Bucket], unplaced: Mapping[str, list[tuple[int, Tensor]]]
) -> dict[str, list[tuple[int, Tensor]]]:
    state: dict[str, list[tuple[int, Tensor]]] = {}
    for bucket in buckets.values():
        for name, offset, piece in bucket.pieces():
            state.setdefault(name, []).append((offset, piece.clone()))
    for name, pieces in unplaced.items():
        state.setdefault(name, []).extend((offset, values.clone()) for offset, values in pieces)
    return {name: sorted(pieces, key=lambda piece: piece[0]) for name, pieces in state.items()}


def reshard(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for every rank of a group of another size, from the states of all old ranks.

    The residual of each parameter is the mean of the old ones, which keeps the mean contribution exactly; the owner
    residuals are put together, and each new rank cuts its own chunk from them on first use.
    """
    residuals: dict[str, list[tuple[int, Tensor]]] = {}
    owned: dict[str, list[tuple[int, Tensor]]] = {}
    for name in sorted({name for state in states for name in state["residuals"]}):
        length = max(o + v.numel() for state in states for o, v in state["residuals"].get(name, []))
        total = torch.zeros(length, dtype=torch.float64)
        for state in states:
            for offset, values in state["residuals"].get(name, []):
                total[offset : offset + values.numel()] += values
        residuals[name] = [(0, (total / len(states)).float())]
    for state in states:
        for name, pieces in state["owner_residuals"].items():
            owned.setdefault(name, []).extend((offset, values.clone()) for offset, values in pieces)
    return {
        "residuals": residuals,
        "owner_residuals": {name: sorted(pieces, key=lambda piece: piece[0]) for name, pieces in owned.items()},
    }
