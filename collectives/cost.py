"""What a reduction costs: bytes per scheme in closed form, the lower bound, and seconds on a measured link.

Pure formulas over `Load` (what all ranks know once the metadata round is done) and `Link` (measured once, then equal
on all ranks), so that every rank predicts the same numbers. Byte formulas follow the schemes' own phases; metadata
(sizes, counts) is not part of them. Times follow the alpha-beta model: rounds cost latency, the rank that sends or
receives most sets the transfer time, and touched memory costs packing time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np
import torch

from collectives.sparse.zen import block_unit
from collectives.transport import Parcel, Transport, all_gather_records, others

# --- the link ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One group's network and memory, as agreed by all its ranks (the slowest rank's view).

    round_s: every rank swaps a few bytes with all others. pair_s: with one other. all_reduce_s: the backend's own
    all-reduce of a few bytes. bytes_per_s: per rank and direction, all ranks busy both ways. all_reduce_bytes_per_s:
    the same for the backend's all-reduce, counting 2(n-1)/n of the buffer. pack_bytes_per_s: gathering and
    scatter-adding rows. copy_bytes_per_s: contiguous copy.
    """

    size: int
    round_s: float
    pair_s: float
    all_reduce_s: float
    bytes_per_s: float
    all_reduce_bytes_per_s: float
    pack_bytes_per_s: float
    copy_bytes_per_s: float


PROBE_REPEATS = 5
PROBE_TARGET_S = 0.02
"""A transfer this long is dominated by bandwidth; the probe grows its buffer until one takes that long."""
PROBE_BYTES = 2 << 20, 16 << 20
"""First and last amount that each rank sends to all others together."""


def probe_link(transport: Transport) -> Link:
    """Measure the link and the memory once; a collective call. All ranks return equal values.

    Takes about 0.3 s on a fast link and 2 s at 100 Mbit/s. The best of a few repetitions counts, because neighbours on
    the machine only ever slow it down.
    """
    n = transport.size
    pack, copy = _memory_rates(transport.device)
    if n == 1:
        return Link(1, 0.0, 0.0, 0.0, math.inf, math.inf, pack, copy)
    everyone = others(transport)
    round_s = _slowest(transport, lambda: _swap(transport, everyone, everyone, 8))
    pair_s = round_s if n == 2 else _slowest(transport, lambda: _swap(transport, everyone[:1], everyone[-1:], 8))
    tiny = torch.zeros(2, device=transport.device)
    all_reduce_s = _slowest(transport, lambda: transport.all_reduce("probe", tiny))

    num_bytes, last = PROBE_BYTES
    part = partial(_swap, transport, everyone, everyone)
    while (elapsed_s := _slowest(transport, partial(part, num_bytes // (n - 1)))) < PROBE_TARGET_S and num_bytes < last:
        num_bytes *= 2
    data = torch.zeros(num_bytes // 4, device=transport.device)
    dense_s = _slowest(transport, lambda: transport.all_reduce("probe", data))
    rate, dense_rate = _rate(num_bytes, elapsed_s, round_s), _rate(2 * (n - 1) / n * data.nbytes, dense_s, all_reduce_s)
    return _agree(transport, Link(n, round_s, pair_s, all_reduce_s, rate, dense_rate, pack, copy))


def _rate(num_bytes: float, elapsed_s: float, latency_s: float) -> float:
    """Bytes per second without the latency, of which a disturbed measurement may claim at most half the time."""
    return num_bytes / max(elapsed_s - latency_s, elapsed_s / 2)


def _agree(transport: Transport, mine: Link) -> Link:
    """The slowest rank's view, sent as the bits of float64, so that all ranks hold equal bytes."""
    values = np.array(astuple(mine)[1:], np.float64)
    table = all_gather_records(transport, "metadata", values.view(np.int64).tolist()).view(np.float64)
    times, rates = table[:, :3].max(axis=0), table[:, 3:].min(axis=0)
    return Link(mine.size, *(float(x) for x in times), *(float(x) for x in rates))


def _swap(transport: Transport, to: list[int], source: list[int], num_bytes: int) -> None:
    data = torch.zeros(num_bytes, dtype=torch.uint8, device=transport.device)
    recvs = [Parcel(peer, torch.empty_like(data)) for peer in source]
    with transport.exchange("probe", recvs) as exchange:
        for peer in to:
            exchange.send(peer, data)


def _slowest(transport: Transport, body: Callable[[], None]) -> float:
    """Seconds of the best repetition (after one warm-up), the slowest rank's of each: equal on all ranks."""
    best_ns = np.iinfo(np.int64).max
    for repetition in range(PROBE_REPEATS + 1):
        start_ns = time.perf_counter_ns()
        body()
        elapsed_ns = time.perf_counter_ns() - start_ns
        slowest_ns = int(all_gather_records(transport, "metadata", [elapsed_ns]).max())
        best_ns = min(best_ns, slowest_ns) if repetition else best_ns
    return max(best_ns, 1) / 1e9


def _memory_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second of a gather plus scatter-add of 1 KiB rows, and of a copy (4 MiB each, best of the repeats)."""
    table = torch.ones(8192, 256, device=device)
    ids = torch.arange(0, 8192, 2, device=device)
    out, packed = torch.zeros_like(table), torch.zeros(len(ids), 256, device=device)

    def pack() -> None:
        torch.index_select(table, 0, ids, out=packed)
        out.index_add_(0, ids, packed)

    def best(body: Callable[[], object]) -> float:
        times = []
        for _ in range(PROBE_REPEATS + 1):
            start_ns = time.perf_counter_ns()
            body()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter_ns() - start_ns)
        return max(min(times), 1) / 1e9

    return table.nbytes / 2 / best(pack), table.nbytes / best(lambda: out.copy_(table))


# --- the load and the bound -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """One tensor to reduce: touched rows of each rank, the (predicted or known) union, and the shape of a row.

    k: int64 [n], touched rows by rank. union: distinct rows over all ranks. width: values a row. itemsize: bytes a
    value. id_bytes: int64 [n], each rank's ids in their shortest coding. is_dense: the gradients are dense buffers
    (rows found by scanning): reducing them densely packs nothing.
    """

    k: np.ndarray
    union: float
    num_rows: int
    width: int
    itemsize: float
    id_bytes: np.ndarray
    is_dense: bool = False

    @property
    def size(self) -> int:
        return len(self.k)

    @property
    def row_bytes(self) -> float:
        return self.width * self.itemsize

    @property
    def index_bytes(self) -> int:
        return 4 if self.num_rows < 2**31 else 8

    @property
    def total(self) -> int:
        return int(self.k.sum())

    @property
    def dense_bytes(self) -> float:
        return self.num_rows * self.row_bytes

    def union_of(self, num_ranks: float) -> float:
        """Distinct rows over `num_ranks` ranks, interpolated as a power law between one rank's mean and the union."""
        mean = self.total / self.size
        if self.size == 1 or mean == 0 or self.union <= mean:
            return mean
        return mean * math.pow(num_ranks, math.log(self.union / mean) / math.log(self.size))


def lower_bound_bytes(load: Load) -> float:
    """Least bytes of values per rank, on average, that any lossless reduction moves: (k + (n-2)/n K) rows.

    Without in-network reduction or multicast, and with one partial sum per position and message.
    """
    n = load.size
    return (load.total / n + (n - 2) / n * load.union) * load.row_bytes if n > 1 else 0.0


def dense_wins_on_elements(load: Load) -> bool:
    """True where balanced parallelism cannot beat the dense ring on bytes: (v+i)/v d + D + 1/(8v) >= 2 (width 1)."""
    v, i, n = load.itemsize, load.index_bytes, load.size
    density, union_density = load.total / n / load.num_rows, load.union / load.num_rows
    return (v + i) / v * density + union_density + 1 / (8 * v) >= 2


# --- the schemes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one scheme does with one load.

    sent_bytes, received_bytes: float64 [n], payload by rank. rounds: exchanges of all with all; pair_rounds: exchanges
    with one other rank. packed_bytes, copied_bytes: memory moved row by row, and contiguously, by the busiest rank.
    native: the backend's own all-reduce carries the payload.
    """

    sent_bytes: np.ndarray
    received_bytes: np.ndarray
    rounds: int = 0
    pair_rounds: int = 0
    packed_bytes: float = 0.0
    copied_bytes: float = 0.0
    native: bool = False

    @property
    def bottleneck_bytes(self) -> float:
        """What the busiest rank sends or receives, whichever is more."""
        return float(max(self.sent_bytes.max(), self.received_bytes.max()))


def _agsparse(load: Load) -> Cost:
    """All-gather of ids and values; every rank merges all of it."""
    entry = load.row_bytes + load.index_bytes
    others_k = load.total - load.k
    packed = (load.total + load.union) * load.row_bytes
    return Cost((load.size - 1.0) * load.k * entry, others_k * float(entry), rounds=1, packed_bytes=packed)


def _column(load: Load) -> Cost:
    """Coded ids to everybody, values by columns to their owner, the reduced columns to everybody."""
    n, total = load.size, load.total
    cuts = np.arange(n + 1) * load.width // n
    owned = np.diff(cuts) * float(load.itemsize)
    sent = (n - 1.0) * load.id_bytes + load.k * (load.row_bytes - owned) + (n - 1) * load.union * owned
    received = load.id_bytes.sum() - load.id_bytes + (total - load.k) * owned + load.union * (load.row_bytes - owned)
    packed = float(load.k.max()) * load.row_bytes + total * owned.max() + load.union * load.row_bytes
    return Cost(sent, received, rounds=2, packed_bytes=packed)


def _push_pull(load: Load, unit: int, *, bitmap: bool) -> Cost:
    """Balanced parallelism: units of `unit` values with ids to their owner; sums back with a bitmap or with plain ids."""
    n, per_row = load.size, load.width // unit
    index_bytes = 4 if load.num_rows * per_row < 2**31 else 8
    entry, owned = load.row_bytes + per_row * index_bytes, load.union * per_row
    fullest = 1 + expected_peak(n) * math.sqrt((n - 1) / max(owned, 1.0))
    named = load.num_rows * per_row / 8 if bitmap else owned * index_bytes
    pulled = load.union * load.row_bytes
    sent = (n - 1) / n * (load.k * entry + (pulled * fullest + named if bitmap else (pulled + named) * fullest))
    received = (load.total - load.k) / n * entry * fullest + (n - 1) / n * (pulled + named)
    packed = (float(load.k.max()) + load.total / n + 2 * load.union) * load.row_bytes
    return Cost(sent, received, rounds=4 if bitmap else 5, packed_bytes=packed)


def expected_peak(num_parts: int) -> float:
    """Expected maximum of `num_parts` standard normal variables (Blom's approximation): the fullest hashed part."""
    return NormalDist().inv_cdf((num_parts - 0.375) / (num_parts + 0.25)) if num_parts > 1 else 0.0


def _sparcml(load: Load) -> Cost:
    """Recursive doubling, dense once that is shorter; surplus ranks fold into a partner first and get the result last.

    Renggli et al., SC'19, SSAR_Recursive_double: at each stage a rank swaps the merge of all ranks it has met.
    """
    n, entry = load.size, load.row_bytes + load.index_bytes
    stages = n.bit_length() - 1
    core = 1 << stages
    surplus = n - core

    def message(num_ranks: int) -> float:
        rows = load.union_of(num_ranks)
        return rows * entry if rows * entry < load.dense_bytes else load.dense_bytes + load.num_rows / 8

    sent, received = np.zeros(n), np.zeros(n)
    folded, result = load.k[core:] * float(entry), message(n)
    sent[core:], received[:surplus] = folded, folded
    merged = np.where(np.arange(core) < surplus, 2, 1)
    for stage in range(stages):
        partner = np.arange(core) ^ (1 << stage)
        offered = np.array([message(int(m)) for m in merged])
        sent[:core] += offered
        received[:core] += offered[partner]
        merged = merged + merged[partner]
    sent[:surplus] += result
    received[core:] += result
    pair_rounds = 2 * (stages + (2 if surplus else 0))
    packed = 2 * float(received.max()) + load.union * load.row_bytes
    return Cost(sent, received, pair_rounds=pair_rounds, packed_bytes=packed)


def _dense(load: Load) -> Cost:
    """All-reduce of the whole tensor. A sparse gradient is spread out first and gathered afterwards.

    Its touched ids travel as bitmaps, reduced like the values; 16-bit ones go by exchange, summed in 32 bits.
    """
    n = load.size
    if load.is_dense:
        ring = np.full(n, 2 * (n - 1) / n * load.dense_bytes)
        return Cost(ring, ring, native=True)
    ring = np.full(n, 2 * (n - 1) / n * (load.dense_bytes + load.num_rows / 8))
    native = load.itemsize == 4
    packed = (float(load.k.max()) + load.union) * load.row_bytes
    return Cost(
        ring, ring, rounds=2 if native else 4, packed_bytes=packed, copied_bytes=float(load.dense_bytes), native=native
    )


COSTS: dict[str, Callable[[Load], Cost]] = {
    "column": _column,
    "zen": lambda load: _push_pull(load, 1, bitmap=True),
    "zen_rows": lambda load: _push_pull(load, load.width, bitmap=True),
    "hashed_rows": lambda load: _push_pull(load, load.width, bitmap=False),
    "hashed_blocks": lambda load: _push_pull(load, block_unit(load.width), bitmap=False),
    "agsparse": _agsparse,
    "sparcml": _sparcml,
    "dense": _dense,
}
"""Byte formulas by scheme name: what can be predicted from counts alone, without knowing how the ids are skewed."""


@dataclass(frozen=True)
class Prediction:
    """payload_bytes: what the busiest rank sends or receives, whichever is more. seconds: on the given link."""

    scheme: str
    payload_bytes: int
    seconds: float


VALUE_BYTES = {"bf16": 2.0, "int8b": 1 + 4 / 256, "int4b": 0.5 + 2 / 32}
"""Bytes per value on the wire in "scheme+codec"."""


def predict(scheme: str, load: Load, link: Link) -> Prediction:
    """Bytes and seconds of one scheme, or of "scheme+codec". Raises KeyError for a scheme without a formula."""
    base, _, codec = scheme.partition("+")
    cost = COSTS[base](load)
    if codec:
        # Values shrink, ids do not; encoding and decoding touch the values as often as packing does.
        light = COSTS[base](replace(load, itemsize=VALUE_BYTES[codec]))
        cost = replace(
            cost,
            sent_bytes=light.sent_bytes,
            received_bytes=light.received_bytes,
            packed_bytes=2 * cost.packed_bytes,
        )
    payload = cost.bottleneck_bytes
    seconds = cost.rounds * link.round_s + cost.pair_rounds * link.pair_s + cost.packed_bytes / link.pack_bytes_per_s
    if cost.native:
        seconds += link.all_reduce_s + payload / link.all_reduce_bytes_per_s
    else:
        seconds += payload / link.bytes_per_s
    scanned_bytes = load.dense_bytes if load.is_dense and not cost.native else 0
    seconds += (cost.copied_bytes + scanned_bytes) / link.copy_bytes_per_s
    return Prediction(scheme, round(payload), float(seconds))
