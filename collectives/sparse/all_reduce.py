"""`sparse_all_reduce`: normalise, agree, choose, reduce. The one call that hooks, engines and users share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.errors import CollectiveError, ConfigError, GradientError
from collectives.sparse.agreement import OPS, Agreement, Layout, negotiate
from collectives.sparse.ids import normalise
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.sparse.workspace import Workspace
from collectives.transport import Transport

Chooser = Callable[[Agreement], str]
"""From what all ranks agreed on to a scheme name; must depend on nothing that may differ between ranks."""


@dataclass
class Stats:
    """What one call cost this rank."""

    scheme: str
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """By phase; "metadata" and "touched" are no payload."""
    received_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time: "negotiate", "reduce" (all of the scheme), and inside that its local work: "pack", "union", "sum",
    "assemble"."""


@dataclass(frozen=True)
class Reduced:
    """The reduced tensor, what the ranks agreed on, and what it cost."""

    rows: SparseRows
    agreement: Agreement
    stats: Stats


def default_choice(agreement: Agreement) -> str:
    """The scheme without a cost model: AGsparse for two ranks, column split for rows, ZEN for elements.

    Rows with fewer columns than ranks are hashed, because a column split would leave ranks idle.
    Elements so dense that even full overlap would not pay go dense (ZEN beats the ring iff
    (v + i) d / v + D + 1 / (8 v) < 2, and the union's density D is at least that of any rank).
    """
    if agreement.size <= 2:
        return "agsparse"
    if agreement.granularity == "row":
        return "column" if agreement.width >= agreement.size else "hashed_rows"
    density, value = float(agreement.k.max()) / agreement.num_rows, agreement.itemsize
    dense_pays = (value + agreement.index_bytes) * density / value + density + 1 / (8 * value) >= 2
    return "dense" if dense_pays else "zen"


def sparse_all_reduce(
    indices: Tensor | None,
    values: Tensor | None,
    shape: Sequence[int],
    op: Op = "sum",
    *,
    transport: Transport,
    scheme: str = "auto",
    name: str = "tensor",
    step: int = 0,
    touched: Tensor | None = None,
    padding_id: int | None = None,
    dtype: torch.dtype = torch.float32,
    choose: Chooser = default_choice,
) -> Reduced:
    """Reduce a sparse gradient over all ranks; lossless up to the order of summation, the same bytes on every rank.

    indices, values, shape, touched, padding_id, dtype: see `normalise`. op: "sum", or "mean" (divided once, by the
    number of ranks). scheme: a name of `SCHEMES`, or "auto" to ask `choose`. name, step: identify the call; all ranks
    must make the same calls in the same order.

    Raises GradientError for an input that cannot be reduced (the other ranks get CollectiveMismatch), CollectiveMismatch
    where the ranks disagree (on all of them, before data moves), and CollectiveTimeout or PeerLost when a peer fails
    later; the transport is unusable after the last two.
    """
    if op not in OPS or scheme not in ("auto", *SCHEMES):
        raise ConfigError(f"'{name}': op '{op}', scheme '{scheme}'; ops are {OPS}, schemes auto, {', '.join(SCHEMES)}")
    try:
        rows = normalise(indices, values, shape, name=name, touched=touched, padding_id=padding_id, dtype=dtype)
    except GradientError:
        with suppress(CollectiveError):
            negotiate(None, transport, name=name, op=op, step=step)
        raise
    layout = _layout(indices, values)
    return reduce_rows(rows, op, transport=transport, scheme=scheme, name=name, step=step, layout=layout, choose=choose)


def reduce_rows(
    rows: SparseRows,
    op: Op = "sum",
    *,
    transport: Transport,
    scheme: str = "auto",
    name: str = "tensor",
    step: int = 0,
    layout: Layout = Layout.SPARSE,
    choose: Chooser = default_choice,
) -> Reduced:
    """`sparse_all_reduce` for rows that are normalised already. The result never shares memory with the input."""
    work, traffic = Workspace.of(transport), transport.traffic
    work.seconds.clear()
    before = _by_phase(traffic.sent), _by_phase(traffic.received)
    try:
        with work.timed("negotiate"):
            agreement = negotiate(rows, transport, name=name, op=op, step=step, layout=layout)
        chosen = choose(agreement) if scheme == "auto" else scheme
        with work.timed("reduce"):
            reduced = SCHEMES[chosen].all_reduce(rows, transport, op, agreement.sizes)
    except CollectiveError as error:
        error.add_note(f"in sparse_all_reduce of '{name}', step {step}, rank {transport.rank} of {transport.size}")
        raise
    sent = _difference(_by_phase(traffic.sent), before[0])
    received = _difference(_by_phase(traffic.received), before[1])
    return Reduced(reduced, agreement, Stats(chosen, sent, received, dict(work.seconds)))


def _layout(indices: Tensor | None, values: Tensor | None) -> Layout:
    if values is None:
        return Layout.MISSING
    return Layout.DENSE if indices is None and values.layout == torch.strided else Layout.SPARSE


def _by_phase(table: dict[str, np.ndarray]) -> dict[str, int]:
    return {phase: int(row.sum()) for phase, row in table.items()}


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {phase: total - before.get(phase, 0) for phase, total in after.items() if total != before.get(phase, 0)}


class ReduceQueue:
    """Sparse reductions in the background, in the order of submission; their futures may be awaited in any order.

    One thread drives the transport, so nothing else may use it until `close`. After a failed reduction the transport
    is broken, and the reductions behind it fail as well.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zenray-sparse")

    def submit(
        self, indices: Tensor | None, values: Tensor | None, shape: Sequence[int], op: Op = "sum", **options: Any
    ) -> Future[Reduced]:
        """Queue `sparse_all_reduce` with these arguments; all ranks must submit the same tensors in the same order."""
        return self._thread.submit(sparse_all_reduce, indices, values, shape, op, transport=self._transport, **options)

    def close(self) -> None:
        """Wait for what was submitted and end the thread. Waits no longer than the transport's deadlines."""
        self._thread.shutdown(wait=True)
