"""What a reduction with a codec inside costs: bytes in closed form, seconds from the measured link and codec speeds.

Codec speeds are measured once per machine and version, kept on disk, and agreed over the ranks (the slowest counts), so
that every rank predicts the same numbers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numba
import numpy as np
import torch

from collectives.codecs import CODECS, Codec, ErrorBoundedSum, Lossless, LowRank, RandomK, TopK
from collectives.codecs.codec import HEADER_BYTES, Residual
from collectives.cost import Link
from collectives.reduce import MAX_PARTS, Chunks
from collectives.transport import Transport, all_gather_records

logger = logging.getLogger(__name__)

PROBE_VALUES = 1 << 18
PROBE_REPEATS = 3
TABLE_VERSION = 1


# --- speeds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds per fp32 value on one core, and bits per value on Gaussian values."""

    encode: float
    feedback: float
    """Encode with a residual."""
    reduce: float
    """Decode one packet and add it."""
    decode: float
    bits: float


def codec_speeds(names: Sequence[str], transport: Transport) -> dict[str, CodecSpeed]:
    """The speeds of these codecs; a collective call. Measures only what this machine has not measured before."""
    path = _table_path(transport.device)
    table = _read_table(path)
    missing = [name for name in names if name not in table]
    if missing:
        table |= {name: measure_codec(CODECS[name], transport.device) for name in missing}
        _write_table(path, table)
    mine = np.array([astuple(table[name]) for name in names], np.float64).reshape(-1)
    bits = all_gather_records(transport, "metadata", mine.view(np.int64).tolist())
    agreed = bits.view(np.float64).max(axis=0).reshape(len(names), -1)
    return {name: CodecSpeed(*map(float, row)) for name, row in zip(names, agreed, strict=True)}


def measure_codec(codec: Codec, device: torch.device) -> CodecSpeed:
    """Time one codec on one device. The best repetition counts.

    On the CPU by the clock of this thread, which stops while others use the core.
    """
    x = torch.randn(PROBE_VALUES, generator=torch.Generator().manual_seed(0)).to(device)
    codec = codec.for_tensor(x)
    out, residual = torch.zeros_like(x), Residual.in_place(torch.zeros_like(x))
    packet = codec.encode(x)
    room = torch.empty(codec.wire_bytes(x.numel()), dtype=torch.uint8, device=device)

    def seconds(body: Callable[[], object]) -> float:
        times = []
        for _ in range(PROBE_REPEATS + 1):
            start = time.thread_time() if device.type == "cpu" else time.perf_counter()
            body()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.thread_time() if device.type == "cpu" else time.perf_counter()) - start)
        return max(min(times[1:]), 1e-9) / PROBE_VALUES

    plain = seconds(lambda: codec.encode(x, out=room))
    return CodecSpeed(
        encode=plain,
        feedback=plain if isinstance(codec, Lossless) else seconds(lambda: codec.encode(x, residual, room)),
        reduce=seconds(lambda: codec.decode(packet, out, accumulate=True)),
        decode=seconds(lambda: codec.decode(packet, out)),
        bits=packet.numel() * 8 / x.numel(),
    )


def _table_path(device: torch.device) -> Path:
    name = platform.node() if device.type == "cpu" else torch.cuda.get_device_name(device).replace(" ", "_")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zenray"
    build = f"{platform.machine()}-{os.cpu_count()}-torch{torch.__version__}-numba{numba.__version__}"
    return folder / f"codecs-{TABLE_VERSION}-{name}-{build}.json"


def _read_table(path: Path) -> dict[str, CodecSpeed]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {name: CodecSpeed(*map(float, row)) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_table(path: Path, table: Mapping[str, CodecSpeed]) -> None:
    """Replace the file in one step, so that ranks which write at once leave one of their tables, whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({name: astuple(speed) for name, speed in table.items()}, file)
        Path(file.name).replace(path)
    except OSError as error:
        logger.info("codec speeds are not kept on disk: %s", error)


# --- candidates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseLoad:
    """One stretch of a gradient. feedback: codecs that carry a residual here. budget_bytes: for residuals and buffers.

    density: see `SyncPolicy`.
    """

    numel: int
    itemsize: int
    size: int
    feedback: frozenset[str] = frozenset()
    ranks_per_node: int = 1
    budget_bytes: int | None = None
    density: float | None = None

    @property
    def raw_bytes(self) -> int:
        """What each rank of the plain all-reduce sends."""
        return round(2 * (self.size - 1) / self.size * self.numel * self.itemsize)


@dataclass(frozen=True)
class Candidate:
    """One way to reduce a stretch. wire_bytes: what a rank sends. codec_s: its own part of model_s, not overlapped."""

    codec: str
    pattern: str
    wire_bytes: int
    model_s: float
    codec_s: float = 0.0
    memory_bytes: int = 0

    @property
    def key(self) -> str:
        """Its name in plans and records."""
        return f"{self.codec}/{self.pattern}" if self.pattern != "native" or self.codec != "off" else "off"


def plain(load: DenseLoad, link: Link) -> Candidate:
    """The backend's own all-reduce in the tensor's type."""
    seconds = link.all_reduce_s + load.raw_bytes / link.all_reduce_bytes_per_s
    return Candidate("off", "native", load.raw_bytes, seconds)


def configured(name: str, density: float | None) -> Codec:
    """The codec of that name; `density` is for those that keep a share of the elements."""
    codec = CODECS[name]
    if density is not None and isinstance(codec, TopK | RandomK):
        return replace(codec, density=density)
    return codec


def patterns_of(codec: Codec, load: DenseLoad) -> tuple[str, ...]:
    """The reductions that make sense for a codec."""
    if isinstance(codec, LowRank):
        return ("powersgd",)
    if isinstance(codec, RandomK):
        return ("one_shot",) if codec.name in load.feedback else ("native",)
    if isinstance(codec, TopK):
        return ("one_shot",)
    if isinstance(codec, ErrorBoundedSum):
        return ("homomorphic",)
    has_levels = 1 < load.ranks_per_node < load.size and codec.fixed_size
    return ("two_shot", "one_shot", *(("two_hop",) if has_levels else ()))


def candidates(
    names: Sequence[str], load: DenseLoad, link: Link, speeds: Mapping[str, CodecSpeed]
) -> tuple[Candidate, ...]:
    """All reductions with these codecs that fit the memory budget."""
    found = [predict(name, how, load, link, speeds[name]) for name in names for how in patterns_of(CODECS[name], load)]
    return tuple(c for c in found if load.budget_bytes is None or c.memory_bytes <= load.budget_bytes)


def predict(name: str, pattern: str, load: DenseLoad, link: Link, speed: CodecSpeed) -> Candidate:
    """Bytes and seconds of one reduction. In two-shot the parts of a chunk overlap codec and wire; others add them."""
    codec, n, numel = configured(name, load.density), load.size, load.numel
    with_feedback = name in load.feedback
    encode = speed.feedback if with_feedback else speed.encode
    whole = _packet_bytes(codec, numel, speed)
    residual_bytes = 8 * numel if with_feedback else 0
    if pattern == "two_shot":
        cuts = Chunks.of(numel, n, codec.align)
        sent = 2 * (n - 1) / n * _chunked_bytes(codec, cuts, n, speed)
        codec_s = numel * (encode + speed.reduce + speed.decode) + cuts.chunk * speed.encode
        wire_s, parts = sent / link.bytes_per_s, min(cuts.num_parts, MAX_PARTS) if codec.fixed_size else 1
        rounds = 2 if codec.fixed_size else 4
        seconds = rounds * link.round_s + max(wire_s, codec_s) + min(wire_s, codec_s) / parts
        return Candidate(name, pattern, round(sent), seconds, codec_s, residual_bytes + 3 * round(whole))
    if pattern == "one_shot":
        sent = (n - 1) * whole
        codec_s = numel * (encode + n * speed.reduce)
        seconds = (1 if codec.fixed_size else 2) * link.round_s + sent / link.bytes_per_s + codec_s
        return Candidate(name, pattern, round(sent), seconds, codec_s, residual_bytes + n * round(whole))
    if pattern == "homomorphic":
        sent = 2 * (n - 1) / n * whole
        codec_s = numel * (encode + 2 * speed.reduce + speed.decode)
        seconds = 5 * link.round_s + sent / link.bytes_per_s + codec_s
        return Candidate(name, pattern, round(sent), seconds, codec_s, residual_bytes + 3 * round(whole))
    if pattern == "two_hop":
        return _two_hop(name, load, link, speed, encode, residual_bytes)
    if pattern == "powersgd":
        return _powersgd(name, load, link, speed, residual_bytes)
    sent = 2 * (n - 1) / n * (whole - HEADER_BYTES)
    codec_s = numel * (encode + speed.decode)
    seconds = link.all_reduce_s + sent / link.all_reduce_bytes_per_s + codec_s
    return Candidate(name, pattern, round(sent), seconds, codec_s, residual_bytes + round(whole))


def _two_hop(
    name: str, load: DenseLoad, link: Link, speed: CodecSpeed, encode: float, residual_bytes: int
) -> Candidate:
    """Only the hop between nodes is charged to the link; inside a node bytes move at the speed of memory."""
    local, numel = load.ranks_per_node, load.numel
    nodes = load.size // local
    whole = _packet_bytes(CODECS[name], numel, speed)
    between, inside = 2 * (nodes - 1) / nodes * whole / local, 2 * (local - 1) / local * whole
    codec_s = numel * (encode + speed.reduce + speed.decode) + numel / local * (2 * speed.encode + 2 * speed.decode)
    seconds = 4 * link.round_s + between / link.bytes_per_s + 2 * inside / link.copy_bytes_per_s + codec_s
    return Candidate(name, "two_hop", round(between + inside), seconds, codec_s, residual_bytes + 4 * round(whole))


def _powersgd(name: str, load: DenseLoad, link: Link, speed: CodecSpeed, residual_bytes: int) -> Candidate:
    """Three dependent all-reduces of factors; two products over the matrix and one to decode."""
    sent = 2 * (load.size - 1) / load.size * _packet_bytes(CODECS[name], load.numel, speed)
    codec_s = load.numel * (speed.feedback + speed.decode)
    seconds = 3 * link.all_reduce_s + sent / link.all_reduce_bytes_per_s + codec_s
    return Candidate(name, "powersgd", round(sent), seconds, codec_s, residual_bytes + 4 * load.numel)


def _packet_bytes(codec: Codec, numel: int, speed: CodecSpeed) -> float:
    if codec.fixed_size:
        return codec.wire_bytes(numel)
    measured_at = CODECS[codec.name]
    denser = codec.density / measured_at.density if isinstance(codec, TopK) and isinstance(measured_at, TopK) else 1.0
    return min(codec.wire_bytes(numel), denser * speed.bits / 8 * numel + 64)


def _chunked_bytes(codec: Codec, cuts: Chunks, size: int, speed: CodecSpeed) -> float:
    """All packets of a tensor that is cut into chunks and parts."""
    if not codec.fixed_size:
        return _packet_bytes(codec, cuts.numel, speed)
    spans = [cuts.span(part, owner) for part in range(cuts.num_parts) for owner in range(size)]
    lengths: dict[int, int] = {}
    for span in spans:
        lengths[span.stop - span.start] = lengths.get(span.stop - span.start, 0) + 1
    return math.fsum(codec.wire_bytes(length) * count for length, count in lengths.items() if length)
