"""How a flat bucket of gradients is cut: stretches that may travel with a codec, and what must stay exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.feedback import Layout
from collectives.policy import MIN_COMPRESSED_BYTES

IN_PLACE_BYTES = 1 << 20
"""Exempt pieces from this size on are reduced where they lie, smaller ones as one packed message."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its flat bucket."""

    name: str
    start: int
    shape: torch.Size
    is_contiguous: bool

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a bucket: parameters with the same codecs, and exempt ones (`holes`) between them."""

    places: tuple[Place, ...]
    holes: tuple[Place, ...]
    codecs: tuple[str, ...]

    @property
    def start(self) -> int:
        return self.places[0].start

    @property
    def stop(self) -> int:
        return self.places[-1].stop

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def label(self) -> str:
        """The first parameter's name and how many others follow."""
        others = len(self.places) - len(self.holes) - 1
        return self.places[0].name + (f" and {others} more" if others else "")

    @property
    def layout(self) -> Layout:
        return tuple((place.name, place.shape.numel()) for place in self.places)


def cut(places: Sequence[Place], codecs: Mapping[str, tuple[str, ...]], itemsize: int) -> list[Segment]:
    """Segments of a bucket, from neighbours with equal `codecs`; small parameters without any become holes."""
    segments: list[Segment] = []
    run: list[Place] = []

    def close() -> None:
        while run and not codecs[run[-1].name]:
            run.pop()
        if run:
            holes = tuple(place for place in run if not codecs[place.name])
            segments.append(Segment(tuple(run), holes, codecs[run[0].name]))
        run.clear()

    for place in places:
        mine = codecs[place.name]
        is_hole = not mine and place.shape.numel() * itemsize < MIN_COMPRESSED_BYTES
        joins = bool(run) and place.start == run[-1].stop and (is_hole or mine == codecs[run[0].name])
        if not joins:
            close()
        if joins or mine:
            run.append(place)
    close()
    return segments


def contiguous_runs(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Neighbours merged into (start, stop); empty ones left out."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if place.start == place.stop:
            continue
        if runs and runs[-1][1] == place.start:
            runs[-1] = (runs[-1][0], place.stop)
        else:
            runs.append((place.start, place.stop))
    return runs


@contextmanager
def exempt_pieces(buffer: Tensor, places: Sequence[Place], segments: Sequence[Segment]) -> Iterator[list[Tensor]]:
    """Pieces of the bucket that no segment compresses, to be reduced by the caller; put back at the end.

    Holes of segments, and other pieces below `IN_PLACE_BYTES`, come as one copy, and are zero meanwhile.
    """
    inside = {place.name for segment in segments for place in segment.places}
    holes = contiguous_runs([place for segment in segments for place in segment.holes])
    outside = [buffer[a:b] for a, b in contiguous_runs([place for place in places if place.name not in inside])]
    small = [buffer[a:b] for a, b in holes] + [piece for piece in outside if piece.nbytes < IN_PLACE_BYTES]
    packed = torch.cat(small) if small else buffer[:0]
    for piece in small:
        piece.zero_()
    yield [*([packed] if small else []), *(piece for piece in outside if piece.nbytes >= IN_PLACE_BYTES)]
    for piece, values in zip(small, torch.split(packed, [piece.numel() for piece in small]), strict=True):
        piece.copy_(values)
