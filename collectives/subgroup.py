"""Some ranks of a transport as a transport of their own, over the parent's wires.

All ranks of the parent make the same calls, each in the subgroup it belongs to: exchanges are numbered on the parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from collectives.errors import ConfigError
from collectives.transport import Exchange, Parcel, ReduceOp, Traffic, Transport


class SubTransport:
    """Rank i of the subgroup is rank ranks[i] of `parent`. Counts its bytes at the parent, by the parent's ranks."""

    def __init__(self, parent: Transport, ranks: Sequence[int]):
        if parent.rank not in ranks or len(set(ranks)) != len(ranks):
            raise ConfigError(
                f"a subgroup of rank {parent.rank} needs distinct ranks that include it, not {list(ranks)}"
            )
        self.parent, self.ranks = parent, list(ranks)
        self.rank, self.size, self.timeout_s = self.ranks.index(parent.rank), len(ranks), parent.timeout_s
        self.traffic: Traffic = parent.traffic

    @property
    def device(self) -> torch.device:
        return self.parent.device

    def exchange(self, phase: str, recvs: Sequence[Parcel]) -> _SubExchange:
        mapped = [Parcel(self.ranks[parcel.peer], parcel.data) for parcel in recvs]
        return _SubExchange(self.parent.exchange(phase, mapped), self.ranks)

    def all_reduce(self, phase: str, data: Tensor, op: ReduceOp = "sum") -> None:
        raise ConfigError(f"no native all-reduce in a subgroup (phase '{phase}'); use two_shot or one_shot")

    def abort(self) -> None:
        self.parent.abort()


class _SubExchange:
    def __init__(self, inner: Exchange, ranks: Sequence[int]):
        self.inner, self.ranks = inner, ranks

    def send(self, peer: int, data: Tensor) -> None:
        self.inner.send(self.ranks[peer], data)

    def arrivals(self) -> Iterator[Parcel]:
        for parcel in self.inner.arrivals():
            yield Parcel(self.ranks.index(parcel.peer), parcel.data)

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.__exit__(kind, error, trace)
