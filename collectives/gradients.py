"""The mean of one bucket of gradients over all ranks: sparse tensors, row-sparse slices, and the dense rest.

Knows nothing of DDP: a bucket is a sparse tensor with a name, or a flat buffer with named places in it. What always
holds: every rank takes the same path for the same tensor, because paths depend only on agreed data; a tensor without
touched rows on this rank still takes part; results are the same bytes on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.cost import Load
from collectives.dense import DenseReducer
from collectives.errors import CollectiveError, GradientError
from collectives.kernels.rows import nonzero_rows
from collectives.planner import Planner, load_of
from collectives.policy import SyncPolicy
from collectives.segments import Place
from collectives.sparse.agreement import Agreement, Layout, negotiate
from collectives.sparse.ids import DTYPES, normalise, to_coo
from collectives.sparse.quantised import QUANTISED
from collectives.sparse.rows import SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.sparse.workspace import METADATA
from collectives.topology import Topology
from collectives.transport import Traffic, Transport

MIN_SCAN_BYTES = 64 << 10
"""Dense gradients below this size are never searched for zero rows: latency would eat the gain."""
SCAN_SAMPLE = 64


class GradientReducer:
    """Reduces buckets over one transport, by the policy and the planner. Not thread-safe: buckets come in order."""

    def __init__(self, transport: Transport, planner: Planner, policy: SyncPolicy, topology: Topology | None = None):
        self.transport, self.planner = transport, planner
        self.dense = DenseReducer(transport, planner.link, policy, topology)
        self.step = 0
        """A number that all ranks must share; it goes into every metadata record."""

    @property
    def policy(self) -> SyncPolicy:
        """What may be done; all ranks set it alike, between two steps."""
        return self.dense.policy

    @policy.setter
    def policy(self, policy: SyncPolicy) -> None:
        self.dense.use(policy)

    def reduce_flat(self, buffer: Tensor, places: Sequence[Place]) -> None:
        """Average a flat buffer in place: the touched rows of parameters that have few, the rest as dense segments."""
        self.dense.open_step(self.step)
        remaining, declined = [], {}
        for place in places:
            if self._is_scanned(place, buffer):
                load = self._reduce_touched_rows(place, buffer)
                if load is None:
                    continue
                declined[place.name] = load
            remaining.append(place)
        self._reduce_dense(buffer, remaining, declined)

    def reduce_sparse(self, name: str, gradient: Tensor) -> Tensor:
        """The mean of a sparse COO gradient, coalesced. Raises GradientError for one that cannot be reduced.

        Equal ids are summed before and after; an id stays even where its sum is zero.
        """
        self.dense.open_step(self.step)
        if gradient.numel() == 0:
            return gradient.coalesce()
        try:
            rows = normalise(None, gradient, gradient.shape, name=name)
        except GradientError:
            with suppress(CollectiveError):
                self._negotiate(name, None, Layout.INVALID)
            raise
        agreement = self._negotiate(name, rows, Layout.SPARSE)
        load = load_of(agreement)
        codec = self.policy.value_codec(name) if rows.values.dtype == torch.float32 and rows.values.is_cpu else None
        choice = self.planner.choose(name, load, self._override(name, rows, is_dense=False), codec)
        return to_coo(self._reduce_rows(choice.scheme, rows, agreement, load), gradient.shape)

    def _reduce_touched_rows(self, place: Place, buffer: Tensor) -> Load | None:
        """Reduce a dense gradient by its touched rows, in place; or return its load and leave it to the dense path."""
        matrix = buffer[place.start : place.stop].view(place.shape)
        ids = touched_rows(matrix)
        values = matrix if len(ids) == len(matrix) else matrix.index_select(0, ids)
        rows = SparseRows(ids, values, len(matrix))
        agreement = self._negotiate(place.name, rows, Layout.DENSE)
        load = load_of(agreement, is_dense=True)
        choice = self.planner.choose(place.name, load, self._override(place.name, rows, is_dense=True))
        if choice.scheme == "dense":
            return load
        reduced = self._reduce_rows(choice.scheme, rows, agreement, load)
        matrix[reduced.ids] = reduced.values
        return None

    def _negotiate(self, name: str, rows: SparseRows | None, layout: Layout) -> Agreement:
        agreement = negotiate(
            rows,
            self.transport,
            name=name,
            op="mean",
            step=self.step,
            layout=layout,
            extra=self.planner.record(name),
        )
        self.planner.settle(name, agreement.extra)
        self.dense.was_skipped |= agreement.found_inf
        return agreement

    def _override(self, name: str, rows: SparseRows, *, is_dense: bool) -> str | None:
        """The scheme that the policy fixes. Quantised columns take fp32 rows with a column for every rank."""
        wanted = self.policy.scheme_for(name, is_dense=is_dense)
        fits = rows.values.dtype == torch.float32 and rows.values.is_cpu and rows.width >= self.transport.size > 1
        return wanted.partition("+")[0] if wanted is not None and not fits else wanted

    def _reduce_rows(self, scheme: str, rows: SparseRows, agreement: Agreement, load: Load) -> SparseRows:
        with self._measured() as spent:
            if scheme in QUANTISED:
                reduced = QUANTISED[scheme].all_reduce(
                    rows, self.transport, "mean", agreement.sizes, self.dense.rows, agreement.name
                )
            else:
                reduced = SCHEMES[scheme].all_reduce(rows, self.transport, "mean", agreement.sizes)
        self.planner.observe(agreement.name, load, len(reduced.ids), spent.payload_bytes, spent.seconds)
        return reduced

    def _reduce_dense(self, buffer: Tensor, places: Sequence[Place], declined: Mapping[str, Load]) -> None:
        """Average the rest in place. Each declined tensor is charged its share of the bytes and of the time."""
        num_bytes = sum(place.shape.numel() for place in places) * buffer.element_size()
        with self._measured() as spent:
            self.dense.reduce(buffer, places, self.step)
        for name, load in declined.items():
            share = load.dense_bytes / num_bytes
            self.planner.observe(name, load, None, round(share * spent.payload_bytes), share * spent.seconds)

    @contextmanager
    def _measured(self) -> Iterator[_Spent]:
        spent, traffic = _Spent(), self.transport.traffic
        sent, received = payload_bytes(traffic)
        start_s = time.perf_counter()
        yield spent
        spent.seconds = time.perf_counter() - start_s
        sent_after, received_after = payload_bytes(traffic)
        spent.payload_bytes = max(sent_after - sent, received_after - received)

    def _is_scanned(self, place: Place, buffer: Tensor) -> bool:
        """Whether to look for zero rows in this gradient now; depends on nothing that may differ between ranks."""
        if len(place.shape) != 2 or not place.is_contiguous or not place.shape.numel():
            return False
        if buffer.dtype not in DTYPES or not buffer.is_cpu:
            return False
        scheme = self.policy.scheme_for(place.name, is_dense=True)
        if scheme is not None or self.policy.scheme != "auto":
            return scheme not in (None, "dense")
        is_large = place.shape.numel() * buffer.element_size() >= MIN_SCAN_BYTES
        return is_large and self.planner.scan_due(place.name)


@dataclass
class _Spent:
    payload_bytes: int = 0
    seconds: float = 0.0


def payload_bytes(traffic: Traffic) -> tuple[int, int]:
    """Bytes this rank sent and received so far, without metadata."""
    sent = traffic.sent_bytes() - traffic.sent_bytes(METADATA)
    return sent, traffic.received_bytes() - traffic.received_bytes(METADATA)


def touched_rows(matrix: Tensor) -> Tensor:
    """Sorted ids (int64) of the rows with any value != 0, or of all rows where most of a sample are: a cheap way out.

    Naming a row that is all zero costs bytes but changes no sum.
    """
    num_rows = matrix.shape[0]
    sample = matrix[:: max(1, num_rows // SCAN_SAMPLE)].contiguous()
    if 2 * nonzero_rows(sample).numel() > sample.shape[0]:
        return torch.arange(num_rows)
    return nonzero_rows(matrix)
