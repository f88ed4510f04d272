"""Phase 1 of every sparse reduction: one round of fixed records, compared before any data moves.

Each rank sends what it believes the call to be. Every rank sees the same table, so every rank reaches the same verdict:
an `Agreement`, or `CollectiveMismatch` everywhere, with names and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import torch

from collectives.errors import CollectiveMismatch
from collectives.kernels.idcoding import coded_bytes, index_dtype
from collectives.kernels.rows import has_nonfinite
from collectives.sparse.ids import DTYPES
from collectives.sparse.rows import Op, SparseRows
from collectives.sparse.workspace import METADATA
from collectives.transport import Transport, all_gather, all_gather_records

PROTOCOL_VERSION = 1
MAX_NAME_BYTES = 256
OPS: tuple[Op, ...] = ("sum", "mean")


class Layout(IntEnum):
    """What a rank was given. A dense gradient has been scanned for touched rows before this phase."""

    SPARSE = 0
    DENSE = 1
    MISSING = 2
    INVALID = 3


MUST_AGREE = ("protocol version", "step", "tensor name", "dtype", "num_rows", "width", "op")
FIELDS = (*MUST_AGREE, "layout", "k", "id bytes", "found_inf")
"""One record, before the caller's extra values and the checksum."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """What all ranks agreed on before data moves; equal on all ranks, so it may drive decisions."""

    name: str
    step: int
    dtype: torch.dtype
    num_rows: int
    width: int
    op: Op
    layouts: tuple[Layout, ...]
    """Per rank. Ranks that disagree are reduced as sparse rows all the same."""
    k: np.ndarray
    """Touched rows of each rank, int64 [n]."""
    id_bytes: np.ndarray
    """Bytes of each rank's coded ids, int64 [n]."""
    found_inf: bool
    """Some rank holds an infinity or NaN after coalescing; gradient scalers skip such a step on all ranks."""
    extra: np.ndarray
    """What the callers added to their records, int64 [n, len(extra)]; not compared."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.k)

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Bytes of one plain id: 4, or 8 from 2**31 rows on."""
        return index_dtype(self.num_rows).itemsize

    @property
    def granularity(self) -> Literal["row", "element"]:
        """Whether an id names a row of several values or a single one."""
        return "row" if self.width > 1 else "element"

    @property
    def sizes(self) -> np.ndarray:
        """int64 [n, 2], rows and coded id bytes of each rank, as `Scheme.all_reduce` takes them."""
        return np.stack([self.k, self.id_bytes], axis=1)


def negotiate(
    rows: SparseRows | None,
    transport: Transport,
    *,
    name: str,
    op: Op,
    step: int = 0,
    layout: Layout = Layout.SPARSE,
    extra: Sequence[int] = (),
) -> Agreement:
    """Agree on one call: tensor, dtype, shape, op and order, and everybody's sizes. One round of 12 int64 and `extra`.

    rows: None announces an invalid gradient, so that the other ranks raise at once instead of waiting for this one.
    step: a number that all ranks must share, such as the optimizer step. extra: the same number of int64 on every rank,
    gathered along the way. Raises CollectiveMismatch on all ranks.
    """
    table = all_gather_records(transport, METADATA, _record(rows, name, op, step, layout, extra))
    damaged = [rank for rank, line in enumerate(table) if line[-1] != _checksum(line[:-1])]
    if damaged:
        raise CollectiveMismatch(f"'{name}': the metadata of rank(s) {damaged} arrived damaged; check the network")
    column = dict(zip(FIELDS, table.T, strict=False))
    invalid = np.flatnonzero(column["layout"] == Layout.INVALID).tolist()
    if invalid:
        raise CollectiveMismatch(
            f"rank(s) {', '.join(map(str, invalid))} could not offer a gradient for '{name}' in step {step}; "
            f"their own error says why. No data was sent."
        )
    if (table[:, : len(MUST_AGREE)] != table[0, : len(MUST_AGREE)]).any():
        differing = [field for field in MUST_AGREE if (column[field] != column[field][0]).any()]
        records = [dict(zip(FIELDS, line, strict=False)) for line in table.tolist()]
        raise CollectiveMismatch(_explain(differing, records, transport, name))
    assert rows is not None
    return Agreement(
        name=name,
        step=step,
        dtype=rows.values.dtype,
        num_rows=rows.num_rows,
        width=rows.width,
        op=op,
        layouts=tuple(Layout(layout) for layout in column["layout"].tolist()),
        k=column["k"].copy(),
        id_bytes=column["id bytes"].copy(),
        found_inf=bool(column["found_inf"].any()),
        extra=table[:, len(FIELDS) : -1],
    )


def _record(rows: SparseRows | None, name: str, op: Op, step: int, layout: Layout, extra: Sequence[int]) -> list[int]:
    body = [PROTOCOL_VERSION, step, _hash(name.encode()), 0, 0, 0, OPS.index(op), int(Layout.INVALID), 0, 0, 0]
    if rows is not None:
        body[3:6] = [DTYPES.index(rows.values.dtype), rows.num_rows, rows.width]
        body[7:] = [int(layout), rows.ids.numel(), coded_bytes(rows.ids, rows.num_rows), has_nonfinite(rows.values)]
    body += extra
    return [*body, _checksum(np.array(body, np.int64))]


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _checksum(fields: np.ndarray) -> int:
    return _hash(np.ascontiguousarray(fields).tobytes())


def _explain(differing: Sequence[str], records: Sequence[dict[str, int]], transport: Transport, name: str) -> str:
    """All ranks come here together (the table is the same), so a second round may fetch the names."""
    names = _gather_names(name, transport)
    lines = []
    for rank, record in enumerate(records):
        dtype = str(DTYPES[record["dtype"]]).removeprefix("torch.")
        lines.append(
            f"rank {rank}: '{names[rank]}' step {record['step']} [{record['num_rows']}, {record['width']}] {dtype} "
            f"{OPS[record['op']]} k={record['k']} protocol {record['protocol version']}"
        )
    return (
        f"ranks disagree about {', '.join(differing)}, no data was sent: {'; '.join(lines)}. "
        f"All ranks must reduce the same tensors in the same order."
    )


def _gather_names(name: str, transport: Transport) -> list[str]:
    padded = name.encode()[:MAX_NAME_BYTES].ljust(MAX_NAME_BYTES, b"\0")
    table = torch.zeros((transport.size, MAX_NAME_BYTES), dtype=torch.uint8, device=transport.device)
    table[transport.rank] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    all_gather(transport, METADATA, list(table))
    return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in table.cpu()]
