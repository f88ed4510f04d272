"""The transport over an existing `torch.distributed` group: Gloo on CPUs, NCCL on GPUs.

Gloo reaches line rate only when every receive is posted before any send (its own `all_to_all_single` gets about half),
so `exchange` posts all receives at once and `send` starts at once; messages meet by tag. NCCL has no tags and needs one
grouped launch, so there an exchange is collected and launched as one batch.

Limits: on NCCL time limits are those of the group's own watchdog, and every send of an exchange must precede its first
arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.errors import CollectiveError
from collectives.gloo_watch import RESERVED_TAG, GlooWatch, post_recv, post_send
from collectives.transport import MAX_PARCELS, Exchange, Parcel, ReduceOp, Traffic, as_bytes

_SIZE_VALUES = 4093
"""Tags carry the size modulo this prime, in 12 bits."""
NUM_EXCHANGE_TAGS = RESERVED_TAG // (MAX_PARCELS << 12)
"""Exchange numbers repeat after this many, far more than can be open at once."""


def parcel_tag(exchange_number: int, ordinal: int, num_bytes: int) -> int:
    """The tag of one parcel, non-negative and below the reserved ones: 11 bits exchange, 8 ordinal, 12 size.

    Gloo does not notice when a message is shorter than its receive buffer and would leave a stale tail. With the size
    in the tag the two never meet, and the exchange ends in `CollectiveMismatch` at its deadline.
    """
    assert 0 <= ordinal < MAX_PARCELS
    return ((exchange_number % NUM_EXCHANGE_TAGS) * MAX_PARCELS + ordinal) << 12 | num_bytes % _SIZE_VALUES


class TorchTransport:
    """`Transport` over `group` (default: the world). All its ranks make one; one at a time is in use.

    Ranks are those of the group, also where the group holds only some ranks of the world. On Gloo timeout_s bounds
    every single wait, by at most 0.4 s more. After an error the group is torn down; the caller must make a new one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0):
        group = dist.group.WORLD if group is None and dist.is_initialized() else group
        if group is None or dist.get_rank(group) < 0:
            raise CollectiveError("this process is no rank of the group: call init_process_group on every rank first")
        self.group, self.timeout_s = group, timeout_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic(self.size)
        backends = dist.get_backend_config(group)
        self.on_nccl = "nccl" in backends and torch.cuda.is_available()
        if not self.on_nccl and "gloo" not in backends:
            raise CollectiveError(f"a group with backend '{backends}' is not supported; use gloo or nccl")
        self.watch = None if self.on_nccl else GlooWatch.of(group, timeout_s)
        self.aborted: str | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.on_nccl else torch.device("cpu")

    def exchange(self, phase: str, recvs: Sequence[Parcel]) -> Exchange:
        self._refuse_if_broken(phase)
        if self.watch is None:
            return NcclExchange(self, phase, recvs)
        self.watch.num_exchanges += 1
        return GlooExchange(self, self.watch, phase, recvs)

    def all_reduce(self, phase: str, data: Tensor, op: ReduceOp = "sum") -> None:
        self._refuse_if_broken(phase)
        self._count_ring(phase, data)
        try:
            native_op = dist.ReduceOp.AVG if op == "mean" else dist.ReduceOp.SUM
            work = dist.all_reduce(data, op=native_op, group=self.group, async_op=True)
            assert work is not None
            if self.watch is None:
                work.wait()  # ends: by the watchdog of the NCCL group
            else:
                self.watch.wait(work, self.timeout_s)
        except RuntimeError as error:
            if self.watch is None:
                raise CollectiveError(
                    f"rank {self.rank}: all-reduce of {data.nbytes} bytes in phase '{phase}'"
                ) from error
            raise self.watch.diagnose(phase, [], data.nbytes, self.timeout_s, error) from error

    def abort(self) -> None:
        reason = f"rank {self.rank} aborted"
        if self.watch is not None:
            self.watch.tear_down(reason)
        elif self.aborted is None:
            self.aborted = reason
            self.group.abort()

    def count(self, phase: str, peer: int, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """Note bytes of `phase`, at the time they are posted."""
        if sent_bytes:
            self.traffic.add(self.traffic.sent, phase, peer, sent_bytes)
        if received_bytes:
            self.traffic.add(self.traffic.received, phase, peer, received_bytes)

    def _count_ring(self, phase: str, data: Tensor) -> None:
        """A ring hands on every part but one to the next rank, once while it reduces and once while it gathers."""
        if self.size == 1:
            return
        cuts = [data.numel() * j // self.size * data.element_size() for j in range(self.size + 1)]
        parts = [cuts[j + 1] - cuts[j] for j in range(self.size)]

        def sent_by(rank: int) -> int:
            return 2 * data.nbytes - parts[(rank + 1) % self.size] - parts[(rank + 2) % self.size]

        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.count(phase, after, sent_bytes=sent_by(self.rank))
        self.count(phase, before, received_bytes=sent_by(before))

    def _refuse_if_broken(self, phase: str) -> None:
        reason = self.aborted if self.watch is None else self.watch.broken
        if reason is not None:
            raise CollectiveError(
                f"rank {self.rank}: cannot start phase '{phase}' on a broken group ({reason}). Make a new group."
            )


class GlooExchange:
    """See `Exchange`. Each Work is waited for exactly once."""

    def __init__(self, transport: TorchTransport, watch: GlooWatch, phase: str, recvs: Sequence[Parcel]):
        self.transport, self.watch, self.phase, self.number = transport, watch, phase, watch.num_exchanges
        self.num_sent: dict[int, int] = {}
        self.sending: list[tuple[Parcel, dist.Work]] = []
        self.receiving: list[tuple[Parcel, dist.Work | None]] = []
        ordinals: dict[int, int] = {}
        for parcel in recvs:
            assert parcel.peer != transport.rank
            ordinal = ordinals[parcel.peer] = ordinals.get(parcel.peer, -1) + 1
            self.receiving.append((parcel, self._post(parcel, ordinal) if parcel.data.nbytes else None))

    def _post(self, parcel: Parcel, ordinal: int) -> dist.Work:
        num_bytes = parcel.data.nbytes
        self.transport.count(self.phase, parcel.peer, received_bytes=num_bytes)
        tag = parcel_tag(self.number, ordinal, num_bytes)
        try:
            return post_recv(self.transport.group, parcel.peer, as_bytes(parcel.data), tag)
        except RuntimeError as error:
            raise self._failure([parcel.peer], num_bytes, error) from error

    def send(self, peer: int, data: Tensor) -> None:
        assert peer != self.transport.rank
        ordinal = self.num_sent[peer] = self.num_sent.get(peer, -1) + 1
        if data.nbytes == 0:
            return
        self.transport.count(self.phase, peer, sent_bytes=data.nbytes)
        tag = parcel_tag(self.number, ordinal, data.nbytes)
        try:
            work = post_send(self.transport.group, peer, as_bytes(data), tag)
        except RuntimeError as error:
            raise self._failure([peer], data.nbytes, error) from error
        self.sending.append((Parcel(peer, data), work))

    def arrivals(self) -> Iterator[Parcel]:
        while self.receiving:
            parcel, work = self.receiving.pop(0)
            if work is not None:
                self._wait(parcel, work, self.receiving)
            yield parcel

    def _wait(self, parcel: Parcel, work: dist.Work, later: Sequence[tuple[Parcel, dist.Work | None]]) -> None:
        try:
            self.watch.wait(work, self.transport.timeout_s, parcel.peer)
        except RuntimeError as error:
            open_parcels = [parcel, *(p for p, w in later if w is not None and not self._is_done(w))]
            awaited = list(dict.fromkeys(p.peer for p in open_parcels))
            num_bytes = sum(p.data.nbytes for p in open_parcels)
            raise self._failure(awaited, num_bytes, error) from error

    def _failure(self, awaited: Sequence[int], num_bytes: int, error: RuntimeError) -> CollectiveError:
        return self.watch.diagnose(self.phase, awaited, num_bytes, self.transport.timeout_s, error)

    def _is_done(self, work: dist.Work) -> bool:
        """Only asked once the connections are closed: asking closes them, and `diagnose` must see which peer did."""
        return self.watch.gave_up and self.watch.had_completed(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.watch.tear_down(f"rank {self.transport.rank} failed in phase '{self.phase}': {error!r}")
            return
        for _ in self.arrivals():
            pass
        while self.sending:
            parcel, work = self.sending.pop(0)
            self._wait(parcel, work, self.sending)


class NcclExchange:
    """See `Exchange`. Waits order the current stream after the transfers; they do not block the host."""

    def __init__(self, transport: TorchTransport, phase: str, recvs: Sequence[Parcel]):
        self.transport, self.phase = transport, phase
        self.receiving = list(recvs)
        self.launched = False
        self.operations: list[dist.P2POp] = []
        for parcel in recvs:
            transport.count(phase, parcel.peer, received_bytes=parcel.data.nbytes)
            self._collect(dist.irecv, parcel.peer, parcel.data)

    def _collect(self, operation: Callable[..., object], peer: int, data: Tensor) -> None:
        if data.nbytes:
            self.operations.append(dist.P2POp(operation, as_bytes(data), group=self.transport.group, group_peer=peer))

    def send(self, peer: int, data: Tensor) -> None:
        if self.launched:
            raise CollectiveError(f"phase '{self.phase}': on NCCL every send must precede the first arrival")
        self.transport.count(self.phase, peer, sent_bytes=data.nbytes)
        self._collect(dist.isend, peer, data)

    def arrivals(self) -> Iterator[Parcel]:
        self._launch()
        while self.receiving:
            yield self.receiving.pop(0)

    def _launch(self) -> None:
        if self.launched:
            return
        self.launched = True
        try:
            for work in dist.batch_isend_irecv(self.operations) if self.operations else []:
                work.wait()  # ends: by the watchdog of the NCCL group
        except RuntimeError as error:
            raise CollectiveError(f"rank {self.transport.rank}: phase '{self.phase}' failed: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.transport.abort()
            return
        self._launch()
