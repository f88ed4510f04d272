"""The transport of actors that have cards but no torch process group: CuPy's NCCL communicator, with time limits.

Transfers run on a stream of their own, after what the caller's stream has queued; a finished exchange is complete, and
the caller's stream ordered behind it. NCCL has no time limits: every wait here polls the communicator and aborts it at
the deadline. NCCL has no tags either, so an exchange is collected and launched as one group, and every send must
precede the first arrival.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from collectives.errors import CollectiveError, CollectiveTimeout, ConfigError, PeerLost
from collectives.transport import Parcel, ReduceOp, Traffic, others

POLL_S = 0.0005
_ID_KEY = "nccl-unique-id"
SUM, AVG = 0, 4
"""Of ncclRedOp_t."""
UINT8 = 1
DTYPES = {
    torch.int8: 0,
    torch.uint8: UINT8,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""To ncclDataType_t. Other types, fp8 among them, travel as bytes but cannot be summed."""


def load_nccl() -> Any:
    """CuPy's `nccl` module. torch is imported first, above: the other order has loaded a second NCCL beside torch's."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConfigError(
            f"NCCL is not to be had ({error}): install the extra cuda12 or cuda13, and NCCL itself, which torch's CUDA "
            f"builds bring along, or else the package nvidia-nccl-cu12 or nvidia-nccl-cu13"
        ) from error
    return nccl


def new_unique_id() -> tuple[int, ...]:
    """Made by one rank and handed to all of them, by whatever connects them already (a named actor, a store)."""
    return tuple(load_nccl().get_unique_id())


def join(store: Store, rank: int, size: int, device: torch.device, *, timeout_s: float) -> NcclTransport:
    """Make the transport of this rank; rank 0 hands the unique id round through `store`, which all ranks share."""
    if rank == 0:
        store.set(_ID_KEY, np.array(new_unique_id(), np.int8).tobytes().hex())
    unique_id = np.frombuffer(bytes.fromhex(store.get(_ID_KEY).decode()), np.int8).tolist()
    return NcclTransport(unique_id, rank, size, device, timeout_s=timeout_s)


class NcclTransport:
    """`Transport` over a new NCCL communicator; returns when all ranks have made theirs.

    unique_id: from `new_unique_id`, the same on all ranks. timeout_s bounds making it and every exchange. After an error
    the communicator is gone; make a new one with a new id. Raises CollectiveTimeout where a rank stays away.
    """

    def __init__(
        self, unique_id: Sequence[int], rank: int, size: int, device: torch.device, *, timeout_s: float = 60.0
    ):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.traffic = Traffic(size)
        self.aborted: str | None = None
        self._device, self._nccl = device, load_nccl()
        self._communicator: Any = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        make = self._nccl.NcclCommunicator
        self._communicator = self._guarded("start", 0, lambda: make(size, tuple(unique_id), rank))

    @property
    def device(self) -> torch.device:
        return self._device

    def exchange(self, phase: str, recvs: Sequence[Parcel]) -> NcclExchange:
        self._refuse_if_broken(phase)
        return NcclExchange(self, phase, recvs)

    def all_reduce(self, phase: str, data: Tensor, op: ReduceOp = "sum") -> None:
        self._refuse_if_broken(phase)
        assert data.is_contiguous()
        if data.dtype not in DTYPES:
            raise ConfigError(f"NCCL cannot add {data.dtype}; reduce it with a codec, or convert it first")
        args = (data.data_ptr(), data.data_ptr(), data.numel(), DTYPES[data.dtype], AVG if op == "mean" else SUM)
        communicator = self._communicator
        self.run(phase, 2 * data.nbytes, lambda: communicator.allReduce(*args, self._stream.cuda_stream))

    def abort(self) -> None:
        self._abort(f"rank {self.rank} aborted")

    def run_group(self, phase: str, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        """Send and receive everything, in order; complete on return."""
        stream, communicator = self._stream.cuda_stream, self._communicator

        def enqueue() -> None:
            self._nccl.groupStart()
            try:
                for parcel in sends:
                    communicator.send(parcel.data.data_ptr(), parcel.data.nbytes, UINT8, parcel.peer, stream)
                for parcel in recvs:
                    communicator.recv(parcel.data.data_ptr(), parcel.data.nbytes, UINT8, parcel.peer, stream)
            finally:
                self._nccl.groupEnd()

        if sends or recvs:
            self.run(phase, sum(parcel.data.nbytes for parcel in (*sends, *recvs)), enqueue)

    def run(self, phase: str, num_bytes: int, enqueue: Callable[[], None]) -> None:
        """Queue work behind the caller's stream, wait for it, and put the caller's stream behind it."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        deadline = time.monotonic() + self.timeout_s
        self._guarded(phase, num_bytes, enqueue)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        while not done.query():
            self._check_peers(phase, num_bytes)
            if time.monotonic() > deadline:
                raise self._timed_out(phase, num_bytes)
            time.sleep(POLL_S)
        caller.wait_event(done)

    def _check_peers(self, phase: str, num_bytes: int) -> None:
        try:
            self._communicator.check_async_error()
        except RuntimeError as error:
            self._abort(f"NCCL failed in phase '{phase}': {error}")
            peers = others(self)
            raise PeerLost(
                rank=self.rank, phase=phase, peer=peers[0], expected_bytes=num_bytes, cause=f"NCCL: {error}"
            ) from error

    def _guarded(self, phase: str, num_bytes: int, call: Callable[[], Any]) -> Any:
        """Run a call that may block until peers join in, on a thread that can be left behind."""
        outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def body() -> None:
            try:
                with torch.cuda.device(self._device):
                    outcome.put((True, call()))
            except BaseException as error:
                outcome.put((False, error))

        threading.Thread(target=body, name="nccl", daemon=True).start()
        try:
            good, value = outcome.get(timeout=self.timeout_s)
        except queue.Empty:
            raise self._timed_out(phase, num_bytes) from None
        if not good:
            self._abort(f"NCCL refused phase '{phase}': {value}")
            raise CollectiveError(f"rank {self.rank}: NCCL refused phase '{phase}': {value}") from value
        return value

    def _timed_out(self, phase: str, num_bytes: int) -> CollectiveTimeout:
        self._abort(f"no answer in phase '{phase}' within {self.timeout_s:g} s")
        return CollectiveTimeout(
            rank=self.rank, phase=phase, missing=others(self), expected_bytes=num_bytes, timeout_s=self.timeout_s
        )

    def _abort(self, reason: str) -> None:
        if self.aborted is None:
            self.aborted = reason
            if self._communicator is not None:
                self._communicator.abort()

    def _refuse_if_broken(self, phase: str) -> None:
        if self.aborted is not None:
            raise CollectiveError(
                f"rank {self.rank}: cannot start phase '{phase}' on a broken group ({self.aborted}). Make a new group."
            )


class NcclExchange:
    """See `Exchange`."""

    def __init__(self, transport: NcclTransport, phase: str, recvs: Sequence[Parcel]):
        self.transport, self.phase = transport, phase
        self.receiving, self.sending = list(recvs), list[Parcel]()
        self.launched = False

    def send(self, peer: int, data: Tensor) -> None:
        if self.launched:
            raise CollectiveError(f"phase '{self.phase}': on NCCL every send must precede the first arrival")
        assert data.is_contiguous()
        self.sending.append(Parcel(peer, data))

    def arrivals(self) -> Iterator[Parcel]:
        self._launch()
        while self.receiving:
            yield self.receiving.pop(0)

    def _launch(self) -> None:
        if self.launched:
            return
        self.launched = True
        traffic = self.transport.traffic
        sends = [parcel for parcel in self.sending if parcel.data.nbytes]
        recvs = [parcel for parcel in self.receiving if parcel.data.nbytes]
        for parcel in sends:
            traffic.add(traffic.sent, self.phase, parcel.peer, parcel.data.nbytes)
        for parcel in recvs:
            traffic.add(traffic.received, self.phase, parcel.peer, parcel.data.nbytes)
        self.transport.run_group(self.phase, sends, recvs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.transport.abort()
            return
        self._launch()
