"""A transport for tensors on a card whose wire reaches host memory only: Gloo between processes that share a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from collectives.transport import Exchange, Parcel, ReduceOp, Traffic, Transport


class StagedTransport:
    """`inner` for tensors on `device`: each message is copied to host memory before it is sent and back on arrival.

    Every copy waits for the device, so nothing overlaps: for correctness on few cards, not for speed.
    """

    def __init__(self, inner: Transport, device: torch.device):
        self.inner, self._device = inner, device
        self.rank, self.size, self.timeout_s = inner.rank, inner.size, inner.timeout_s
        self.traffic: Traffic = inner.traffic

    @property
    def device(self) -> torch.device:
        return self._device

    def exchange(self, phase: str, recvs: Sequence[Parcel]) -> StagedExchange:
        staged = [Parcel(parcel.peer, torch.empty_like(parcel.data, device="cpu")) for parcel in recvs]
        return StagedExchange(self.inner.exchange(phase, staged), recvs)

    def all_reduce(self, phase: str, data: Tensor, op: ReduceOp = "sum") -> None:
        staged = data.cpu()
        self.inner.all_reduce(phase, staged, op)
        data.copy_(staged)

    def abort(self) -> None:
        self.inner.abort()


class StagedExchange:
    """See `Exchange`."""

    def __init__(self, inner: Exchange, recvs: Sequence[Parcel]):
        self.inner, self.receiving = inner, list(recvs)
        self.staged = inner.arrivals()

    def send(self, peer: int, data: Tensor) -> None:
        self.inner.send(peer, data.cpu())

    def arrivals(self) -> Iterator[Parcel]:
        while self.receiving:
            parcel = self.receiving.pop(0)
            parcel.data.copy_(next(self.staged).data)
            yield parcel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for _ in self.arrivals():
                pass
        self.inner.__exit__(kind, error, trace)
