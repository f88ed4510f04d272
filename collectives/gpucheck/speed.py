"""How fast the kernels are: each beside a device copy of the same size, and beside torch's own operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from collectives.codecs import Bf16, Codec, ErrorBounded, Fp8Block, Int4Block, Int8Block, TopK
from collectives.codecs.codec import Residual
from collectives.codecs.gpu import BlockSide
from collectives.gpucheck.report import Report, Row, Skip
from collectives.kernels import cuda, rows
from collectives.kernels.hashing import HashedOwners
from collectives.kernels.idsets import partition_by_owner

MIB = 1 << 20
SIZES_MIB = (1, 16, 256, 4096)
ROTATION_BYTES = 192 * MIB
"""Buffers are rotated over at least this much memory, so that no cache holds them."""
TARGET_S = 0.03
NUM_SOURCES = 8
ROW_WIDTH = 128

Call = Callable[[], object]


@dataclass(frozen=True)
class Bench:
    """One kernel at one size: what it does, the bytes it must move, and torch's way of doing the same."""

    name: str
    num_bytes: int
    run: Sequence[Call]
    """The same work on different buffers."""
    eager: Call | None = None


def seconds(calls: Sequence[Call], device: torch.device, target_s: float = TARGET_S) -> float:
    """Seconds of one call, on the device's clock where it has one: the best of three runs of many calls."""
    for call in calls[:3]:
        call()
    once = max(_elapsed(calls[:1], device), 1e-7)
    count = min(max(int(target_s / once), 3), 2000)
    many = [calls[i % len(calls)] for i in range(count)]
    return min(_elapsed(many, device) for _ in range(3)) / count


def _elapsed(calls: Sequence[Call], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record()  # type: ignore[no-untyped-call]
    for call in calls:
        call()
    end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3  # type: ignore[no-untyped-call]


def copy_rate(num_bytes: int, device: torch.device) -> float:
    """Bytes per second of a device copy of `num_bytes`, reads and writes counted."""
    pairs = [
        (torch.ones(num_bytes // 4, device=device), torch.empty(num_bytes // 4, device=device))
        for _ in range(_copies(2 * num_bytes))
    ]
    calls: list[Call] = [lambda x=x, y=y: y.copy_(x) for x, y in pairs]  # type: ignore[misc]
    return 2 * num_bytes / seconds(calls, device)


def _copies(num_bytes: int) -> int:
    return min(max(-(-ROTATION_BYTES // num_bytes), 1), 64)


def check_speed(device: torch.device, report: Report, sizes_mib: Sequence[int] = SIZES_MIB) -> Iterator[Row]:
    """The copy ceiling and every kernel, at sizes of fp32 input in MiB."""
    for size_mib in sizes_mib:
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 14 * size_mib * MIB:
            yield Row("speed", "all", "skipped", size_mib, note="not enough free memory")
            continue
        rate = copy_rate(size_mib * MIB, device)
        micros = 2 * size_mib * MIB / rate * 1e6
        yield Row("speed", "copy (the ceiling)", "ok", size_mib, micros, rate / 1e9, 1.0)
        for make in BENCHES:
            if report.left_s < 60:
                yield Row("speed", "rest", "skipped", size_mib, note="the time is needed for the other parts")
                return
            try:
                yield from (_measure(bench, size_mib, rate, device) for bench in make(size_mib * MIB // 4, device))
            except Exception as error:
                name = make.__name__.strip("_")
                yield Row("speed", name, "failed", size_mib, note=f"{type(error).__name__}: {error}"[:300])
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _measure(bench: Bench, size_mib: int, copy: float, device: torch.device) -> Row:
    took = seconds(bench.run, device)
    eager = seconds([bench.eager], device) / took if bench.eager else None
    rate = bench.num_bytes / took
    note = "below 70 % of copy" if size_mib == 256 and rate < 0.7 * copy else ""
    return Row("speed", bench.name, "ok", size_mib, took * 1e6, rate / 1e9, rate / copy, eager, note)


# --- the kernels ------------------------------------------------------------------------------------------------------


def _eager_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8b with torch's own operations, non-finite values left out."""
    blocks = x.view(-1, 256)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    return (blocks * (127 / amax)).round_().clamp_(-127, 127).to(torch.int8), amax / 127


def _encoders(numel: int, device: torch.device) -> Iterator[Bench]:
    copies = _copies(5 * numel)
    inputs = [torch.randn(numel, device=device) for _ in range(copies)]
    codecs: list[Codec] = [Int8Block(), Int4Block(), Fp8Block(), Bf16()]
    for codec in codecs:
        wire = codec.wire_bytes(numel)
        room = torch.empty(wire, dtype=torch.uint8, device=device)
        runs: list[Call] = [lambda x=x, codec=codec, room=room: codec.encode(x, out=room) for x in inputs]  # type: ignore[misc]
        eager = (lambda: _eager_int8(inputs[0])) if codec.name == "int8b" else None
        yield Bench(f"{codec.name} encode fp32", 4 * numel + wire, runs, eager)
    int8, wire = Int8Block(), Int8Block().wire_bytes(numel)
    room, error = torch.empty(wire, dtype=torch.uint8, device=device), torch.zeros(numel, device=device)
    residual = Residual.in_place(error)
    runs = [lambda x=x: int8.encode(x, residual, room) for x in inputs]  # type: ignore[misc]
    yield Bench("int8b encode fp32 + residual", 12 * numel + wire, runs)
    halves = [x.to(torch.bfloat16) for x in inputs]
    runs = [lambda x=x: int8.encode(x, out=room) for x in halves]  # type: ignore[misc]
    yield Bench("int8b encode bf16", 2 * numel + wire, runs)


def _decoders(numel: int, device: torch.device) -> Iterator[Bench]:
    """Launched without the check of the headers, which waits for the device."""
    codec = Int8Block()
    side, wire = BlockSide(codec), codec.wire_bytes(numel)
    packets = [codec.encode(torch.randn(numel, device=device)) for _ in range(NUM_SOURCES)]
    outputs = [torch.empty(numel, device=device) for _ in range(min(_copies(5 * numel), NUM_SOURCES))]
    n, grid, one = np.int64(numel), cuda.blocks_for(numel, 2048), np.float32(1)

    def decode(packet: Tensor, out: Tensor) -> None:
        cuda.launch("int8b_decode", grid, cuda.THREADS, (packet, n, out, np.uint32(0), one), like=out)

    runs: list[Call] = [lambda p=p, o=o: decode(p, o) for p, o in zip(packets, outputs, strict=False)]  # type: ignore[misc]
    payload = packets[0][16:][: numel // 256 * 256].view(torch.int8).view(-1, 256)
    scales = torch.ones(len(payload), 1, device=device)
    yield Bench("int8b decode fp32", wire + 4 * numel, runs, lambda: payload.float().mul_(scales))
    flags, table, kept = side._sources(packets, numel, None, device)
    count = np.int32(len(kept))
    runs = [
        lambda o=o: cuda.launch("int8b_reduce", grid, cuda.THREADS, (table, count, n, one, o), like=o)  # type: ignore[misc]
        for o in outputs
    ]

    def accumulate() -> None:
        outputs[0].zero_()
        for packet in packets:
            args = (packet, n, outputs[0], np.uint32(1), one)
            cuda.launch("int8b_decode", grid, cuda.THREADS, args, like=outputs[0])

    yield Bench(f"int8b sum of {NUM_SOURCES} (eager: {NUM_SOURCES} passes)", 8 * wire + 4 * numel, runs, accumulate)
    room = side._new_packet(numel, None, device)
    tail = (None, None, room, np.uint32(0), np.uint32(flags), np.uint32(0), np.uint32(0), np.uint32(0))
    runs = [lambda: cuda.launch("int8b_reduce_encode", grid, 256, (table, count, n, one, *tail), like=room)]
    yield Bench(f"int8b reduce-encode of {NUM_SOURCES}", 9 * wire, runs)


def _bounded(numel: int, device: torch.device) -> Iterator[Bench]:
    x, codec = torch.randn(numel, device=device), ErrorBounded(bound=0.05, relative_to="one")
    packet = codec.encode(x)
    room = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
    yield Bench("eb encode (two launches, one wait)", 8 * numel + packet.numel(), [lambda: codec.encode(x, out=room)])


def _selection(numel: int, device: torch.device) -> Iterator[Bench]:
    x, codec = torch.randn(numel, device=device), TopK(method="exact", density=0.01)
    k = codec._max_count(numel)
    runs: list[Call] = [lambda: codec.encode(x)]
    yield Bench("topk 1 % exact, whole packet", 8 * numel + 8 * k, runs, lambda: torch.topk(x.abs(), k))


def _rows(numel: int, device: torch.device) -> Iterator[Bench]:
    num_rows = numel // ROW_WIDTH
    matrix = torch.zeros(num_rows, ROW_WIDTH, device=device)
    matrix[::10] = 1
    scan: list[Call] = [lambda: rows.nonzero_rows(matrix)]
    yield Bench("nonzero rows (one wait)", 4 * numel, scan, lambda: (matrix != 0).any(dim=1).nonzero())
    ids = torch.randperm(num_rows, device=device)[: max(num_rows // 2, 1)].sort().values
    packed = torch.empty(len(ids), ROW_WIDTH, device=device)
    moved = 8 * packed.numel() + 8 * len(ids)
    gather: list[Call] = [lambda: rows.gather_rows(matrix, ids, packed)]
    yield Bench("gather half of the rows", moved, gather, lambda: torch.index_select(matrix, 0, ids, out=packed))
    fresh = torch.zeros(num_rows, dtype=torch.uint8, device=device)
    add: list[Call] = [lambda: rows.scatter_add_rows(matrix, ids, packed, fresh)]
    yield Bench(
        "scatter-add half of the rows", moved + 4 * packed.numel(), add, lambda: matrix.index_add_(0, ids, packed)
    )


def _owners(numel: int, device: torch.device) -> Iterator[Bench]:
    ids = torch.randperm(numel, device=device)
    owners = HashedOwners(20 * numel, 16, seed=1)
    owner_of, _ = owners.split(ids)
    split: list[Call] = [lambda: owners.split(ids)]
    yield Bench("owners and slots of ids", 20 * numel, split)
    group: list[Call] = [lambda: partition_by_owner(owner_of, 16)]
    yield Bench("partition to 16 owners", 16 * numel, group, lambda: torch.sort(owner_of, stable=True))


BENCHES = (_encoders, _decoders, _bounded, _selection, _rows, _owners)


def check_host_time(device: torch.device, num_launches: int = 2000) -> Iterator[Row]:
    """Microseconds of Python for one launch and for one call of a codec, on an input too small to matter."""
    if device.type != "cuda":
        raise Skip("the host's share of a launch exists on a card only")
    x, room = torch.ones(256, device=device), torch.empty(1024, dtype=torch.uint8, device=device)
    codec, bitmap = Int8Block(), torch.zeros(8, dtype=torch.int32, device=device)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    args = (ids, np.int64(1), bitmap)
    calls: dict[str, Call] = {
        "one launch": lambda: cuda.launch("bitmap_mark", 1, cuda.THREADS, args, like=ids),
        "int8b encode": lambda: codec.encode(x, out=room),
        "torch: x.add_(1)": lambda: x.add_(1),
    }
    for name, call in calls.items():
        call()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(num_launches):
            call()
        spent = time.perf_counter() - start
        torch.cuda.synchronize(device)
        yield Row("host time", name, "ok", microseconds=spent / num_launches * 1e6)


def check_registers(device: torch.device) -> Iterator[Row]:
    """What the driver says of the loaded kernels: registers and local memory, which must be none."""
    if device.type != "cuda":
        raise Skip("needs a loaded module")
    cuda.warm_up(device)
    for name in ("int8b_encode_f32", "int8b_reduce_encode", "int4b_encode_f32", "bounded_write_f32", "bitmap_list"):
        attributes = cuda.attributes(name, device)
        note = f"{attributes['num_regs']} registers, {attributes['local_size_bytes']} bytes of local memory"
        yield Row("registers", name, "failed" if attributes["local_size_bytes"] else "ok", note=note)
