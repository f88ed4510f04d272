"""How bytes move between ranks: one protocol, and the in-process transport that counts them exactly.

Everything above this file is written once, as SPMD code against `Transport`, and runs unchanged on threads in one
process (`LocalTransport`) and on a torch process group (`TorchTransport` in torch_transport.py).

What always holds: both sides of a transfer know its size before it starts (a metadata round, see `all_gather_records`);
zero-size parcels are skipped on both sides; every wait ends by `timeout_s`; after an error the transport is broken and
each later call raises. Payloads are opaque: the transport never looks into them and never converts them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout

ReduceOp = Literal["sum", "mean"]

MAX_PARCELS = 256
"""Parcels one rank may send to one peer within one exchange; the tag space of the wire is divided by it."""


@dataclass(frozen=True)
class Parcel:
    """One message: a contiguous tensor of any shape and dtype, to or from `peer`. Never to oneself."""

    peer: int
    data: Tensor


@dataclass
class Traffic:
    """Exact byte counts of one rank, per phase: `sent[phase][peer]` and `received[phase][peer]`, int64."""

    size: int
    sent: dict[str, np.ndarray] = field(default_factory=dict)
    received: dict[str, np.ndarray] = field(default_factory=dict)
    _num_sent: int = 0
    _num_received: int = 0

    def add(self, table: dict[str, np.ndarray], phase: str, peer: int, num_bytes: int) -> None:
        """Note bytes in `sent` or `received`, whichever `table` is."""
        if phase not in table:
            table[phase] = np.zeros(self.size, np.int64)
        table[phase][peer] += num_bytes
        if table is self.sent:
            self._num_sent += num_bytes
        else:
            self._num_received += num_bytes

    def sent_bytes(self, phase: str | None = None) -> int:
        """Bytes this rank sent, in one phase or in all."""
        return self._num_sent if phase is None else _sum_of(self.sent.get(phase))

    def received_bytes(self, phase: str | None = None) -> int:
        """Bytes this rank received, in one phase or in all."""
        return self._num_received if phase is None else _sum_of(self.received.get(phase))

    def clear(self) -> None:
        self.sent.clear()
        self.received.clear()
        self._num_sent = self._num_received = 0


def _sum_of(row: np.ndarray | None) -> int:
    return 0 if row is None else int(row.sum())


class Exchange(Protocol):
    """Point-to-point transfers in flight. Its receives are posted before any send.

    Leave the `with` block to finish: on a normal exit every receive has arrived and every sent buffer may be reused. On
    an exception the transport aborts, so that peers notice.
    """

    def send(self, peer: int, data: Tensor) -> None:
        """Start sending; returns at once. The k-th parcel to a peer meets that peer's k-th receive from this rank."""

    def arrivals(self) -> Iterator[Parcel]:
        """Yield the receives in the order in which they were posted, each as soon as it is complete."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Transport(Protocol):
    """A fixed group of ranks. All ranks make the same calls in the same order."""

    rank: int
    size: int
    timeout_s: float
    traffic: Traffic

    @property
    def device(self) -> torch.device:
        """Where payloads must live: cpu for threads and Gloo, the rank's card for NCCL."""

    def exchange(self, phase: str, recvs: Sequence[Parcel]) -> Exchange:
        """Post `recvs` (preallocated, filled in place) and return the open exchange. Several may be open at once."""

    def all_reduce(self, phase: str, data: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce `data` over all ranks in place, in the backend's own way (Gloo: ring): the dense baseline.

        "mean" divides inside the reduction, without a pass over the data of its own; for floating-point types.
        """

    def abort(self) -> None:
        """Make every pending and later operation fail, here and soon at the peers. Idempotent."""


def as_bytes(data: Tensor) -> Tensor:
    """A uint8 view [num_bytes] of a contiguous tensor; so bf16, fp8 and int16, unknown to Gloo, pass as well."""
    assert data.is_contiguous()
    flat = data.detach().view(-1)
    if flat.numel() < 2:  # contiguous whatever its stride, which torch wants to be 1
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def others(transport: Transport) -> list[int]:
    """The other ranks, starting after this one, so that at no time all ranks send to the same peer."""
    return [(transport.rank + k) % transport.size for k in range(1, transport.size)]


def all_gather_records(transport: Transport, phase: str, record: Sequence[int]) -> np.ndarray:
    """The metadata round: every rank contributes the same number of int64; returns int64 [size, len(record)]."""
    table = np.empty((transport.size, len(record)), np.int64)
    table[transport.rank] = record
    if transport.size == 1:
        return table
    staged, peers = torch.from_numpy(table).to(transport.device), others(transport)
    with transport.exchange(phase, [Parcel(peer, staged[peer]) for peer in peers]) as exchange:
        for peer in peers:
            exchange.send(peer, staged[transport.rank])
    return staged.cpu().numpy()


def all_gather(transport: Transport, phase: str, outputs: Sequence[Tensor]) -> None:
    """Give `outputs[rank]` to everybody: each rank passes one buffer per rank, its own already filled."""
    with transport.exchange(phase, [Parcel(peer, outputs[peer]) for peer in others(transport)]) as exchange:
        for peer in others(transport):
            exchange.send(peer, outputs[transport.rank])


def all_to_all(transport: Transport, phase: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Send `inputs[j]` to rank j and receive rank j's part into `outputs[j]`; sizes may differ and may be zero."""
    with transport.exchange(phase, [Parcel(peer, outputs[peer]) for peer in others(transport)]) as exchange:
        for peer in others(transport):
            exchange.send(peer, inputs[peer])
        outputs[transport.rank].copy_(inputs[transport.rank])


def broadcast_bytes(transport: Transport, phase: str, payload: bytes | None, root: int = 0) -> bytes:
    """Hand `payload` of `root` to all ranks (other ranks pass None). For plans and settings, not for tensors."""
    length = len(payload) if transport.rank == root and payload is not None else 0
    length = int(all_gather_records(transport, phase, [length])[root, 0])
    if transport.rank == root:
        data = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[:length].to(transport.device)
    else:
        data = torch.empty(length, dtype=torch.uint8, device=transport.device)
    recvs = [] if transport.rank == root else [Parcel(root, data)]
    with transport.exchange(phase, recvs) as exchange:
        if transport.rank == root:
            for peer in others(transport):
                exchange.send(peer, data)
    return data.cpu().numpy().tobytes()


# --- n ranks in one process -------------------------------------------------------------------------------------------


class LocalGroup:
    """The shared mailbox of n `LocalTransport`s. A key names one parcel: (source, destination, exchange, ordinal)."""

    def __init__(self, size: int, timeout_s: float = 60.0):
        self.size, self.timeout_s = size, timeout_s
        self.mail: dict[tuple[int, int, int, int], Tensor] = {}
        self.changed = threading.Condition()
        self.broken: str | None = None

    def transports(self) -> list[LocalTransport]:
        return [LocalTransport(self, rank) for rank in range(self.size)]

    def put(self, key: tuple[int, int, int, int], data: Tensor) -> None:
        with self.changed:
            self.mail[key] = data
            self.changed.notify_all()

    def take(self, key: tuple[int, int, int, int], phase: str, expected_bytes: int) -> Tensor:
        with self.changed:
            arrived = self.changed.wait_for(lambda: key in self.mail or self.broken is not None, self.timeout_s)
            if key in self.mail:
                return self.mail.pop(key)
            if not arrived:
                raise CollectiveTimeout(
                    rank=key[1], phase=phase, missing=[key[0]], expected_bytes=expected_bytes, timeout_s=self.timeout_s
                )
            raise CollectiveError(f"rank {key[1]}: group aborted in phase '{phase}': {self.broken}")

    def abort(self, reason: str) -> None:
        with self.changed:
            self.broken = self.broken or reason
            self.changed.notify_all()


class LocalTransport:
    """One of n ranks that are threads of this process. Exact in bytes and order; says nothing about time."""

    def __init__(self, group: LocalGroup, rank: int):
        self.group, self.rank, self.size, self.timeout_s = group, rank, group.size, group.timeout_s
        self.traffic = Traffic(group.size)
        self.num_exchanges = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def exchange(self, phase: str, recvs: Sequence[Parcel]) -> LocalExchange:
        if self.group.broken is not None:
            raise CollectiveError(f"rank {self.rank}: group aborted before phase '{phase}': {self.group.broken}")
        self.num_exchanges += 1
        return LocalExchange(self, phase, recvs, self.num_exchanges)

    def all_reduce(self, phase: str, data: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce-scatter, then all-gather, summed in rank order; the bytes of a ring: 2(n-1)/n of the buffer."""
        flat = data.view(-1)
        cuts = [flat.numel() * j // self.size for j in range(self.size + 1)]
        parts = [flat[cuts[j] : cuts[j + 1]] for j in range(self.size)]
        received = [torch.empty_like(parts[self.rank]) for _ in range(self.size)]
        all_to_all(self, phase, received, parts)
        total = received[0]
        for contribution in received[1:]:
            total = total + contribution
        if op == "mean":
            total = total / self.size
        parts[self.rank].copy_(total)
        all_gather(self, phase, parts)

    def abort(self) -> None:
        self.group.abort(f"rank {self.rank} aborted")


class LocalExchange:
    """See `Exchange`."""

    def __init__(self, transport: LocalTransport, phase: str, recvs: Sequence[Parcel], number: int):
        self.transport, self.phase, self.number = transport, phase, number
        self.num_sent: dict[int, int] = {}
        self.waiting: list[tuple[int, Parcel]] = []
        ordinals: dict[int, int] = {}
        for parcel in recvs:
            ordinal = ordinals[parcel.peer] = ordinals.get(parcel.peer, -1) + 1
            self.waiting.append((ordinal, parcel))

    def send(self, peer: int, data: Tensor) -> None:
        ordinal = self.num_sent[peer] = self.num_sent.get(peer, -1) + 1
        assert peer != self.transport.rank
        assert ordinal < MAX_PARCELS
        if data.nbytes == 0:
            return
        traffic = self.transport.traffic
        traffic.add(traffic.sent, self.phase, peer, data.nbytes)
        self.transport.group.put((self.transport.rank, peer, self.number, ordinal), data.detach().clone())

    def arrivals(self) -> Iterator[Parcel]:
        while self.waiting:
            ordinal, parcel = self.waiting.pop(0)
            if parcel.data.nbytes:
                self._receive(ordinal, parcel)
            yield parcel

    def _receive(self, ordinal: int, parcel: Parcel) -> None:
        transport = self.transport
        key = (parcel.peer, transport.rank, self.number, ordinal)
        data = transport.group.take(key, self.phase, parcel.data.nbytes)
        if data.nbytes != parcel.data.nbytes:
            raise CollectiveMismatch(
                f"rank {transport.rank}: rank {parcel.peer} sent {data.nbytes} bytes in phase '{self.phase}', "
                f"{parcel.data.nbytes} expected. The ranks disagree about sizes: exchange them before the data."
            )
        transport.traffic.add(transport.traffic.received, self.phase, parcel.peer, data.nbytes)
        as_bytes(parcel.data).copy_(as_bytes(data))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.transport.group.abort(f"rank {self.transport.rank}: {error!r}")
            return
        for _ in self.arrivals():
            pass


R = TypeVar("R")


def run_local(size: int, body: Callable[[LocalTransport], R], timeout_s: float = 60.0) -> list[R]:
    """Run `body` as `size` ranks in threads of this process and return its results by rank.

    When a rank raises, the group is aborted and the first error (in time) is raised here.
    """
    group = LocalGroup(size, timeout_s)
    errors: list[tuple[float, BaseException]] = []

    def one(transport: LocalTransport) -> R | None:
        try:
            return body(transport)
        except BaseException as error:
            errors.append((time.monotonic(), error))
            group.abort(f"rank {transport.rank}: {error!r}")
            return None

    with ThreadPoolExecutor(max_workers=size) as pool:
        results = list(pool.map(one, group.transports()))
    if errors:
        raise min(errors, key=lambda item: item[0])[1]
    return results  # type: ignore[return-value]
