"""`compress`: speed, size and error of every codec, and what it would mean for known model families.

Speed: one core, 64 MiB of gradient-like fp32, a copy of the same bytes in every round, GB/s = input bytes / time, by
the clock of the one thread, which stops while others use the core; ratios to that copy come first. Families: bytes per
rank and step, counted for the true shapes through the code that cuts and sizes packets; errors of the mean over
simulated ranks (threads of this process), on slices of the same shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from collectives.codecs import CODECS, Codec, Dgc, Lossless, LowRank, RandomK, TopK
from collectives.codecs.codec import Residual
from collectives.codecs.randomk import SIDE
from collectives.errors import ConfigError
from collectives.reduce import Chunks, native, one_shot, two_shot
from collectives.transport import LocalTransport, run_local
from jobs.job import Run
from jobs.workloads.shapes import FAMILIES, Parameter, family, gradient_like, sample_gradient
from zenray.config import Section

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FILES = ()
COLUMNS = 1024
EXACT = 1e-5
COLUMNS_SHOWN = {
    "encode_vs_memcpy": "enc /",
    "decode_vs_memcpy": "dec /",
    "ef_vs_memcpy": "ef /",
    "encode_gbps": "enc GB/s",
    "decode_gbps": "dec GB/s",
    "ef_gbps": "ef GB/s",
    "memcpy_gbps": "memcpy",
    "bits_per_value": "bits",
    "rel_l2": "error",
}


class Config(Section):
    """What is measured."""

    mib: int = 64
    """MiB of fp32 that are encoded and decoded."""
    rounds: int = 9
    """Rounds of copy, encode, decode and error feedback, in turn; the best of each counts."""
    ranks: list[int] = Field(default=[2, 8, 32])
    """Simulated ranks, 2 to 32, for the errors; bytes are given for the largest."""
    sample: int = 1 << 17
    """Values per rank for the errors."""
    families: list[str] = Field(default=list(FAMILIES))
    """Model families of jobs/workloads/shapes.py; empty: speed alone."""
    seed: int = 0
    """Seed of the generated gradients."""


def run(config: Config, run: Run) -> dict[str, Any]:
    """Measure, count, draw; see the module."""
    unknown = sorted(set(config.families) - set(FAMILIES))
    if unknown or config.mib < 1 or config.rounds < 1 or not all(2 <= r <= 32 for r in config.ranks):
        raise ConfigError(
            f"families are {', '.join(FAMILIES)} (unknown: {', '.join(unknown) or 'none'}); mib and rounds at least 1, "
            f"ranks 2 to 32; got mib={config.mib} rounds={config.rounds} ranks={config.ranks}"
        )
    torch.set_num_threads(1)
    speeds = measure_codecs(config, run)
    rows = [(name, *(figures[key] for key in COLUMNS_SHOWN)) for name, figures in speeds.items()]
    heads = ("codec", *COLUMNS_SHOWN.values())
    run.table(f"codecs, {config.mib} MiB on one core, best of {config.rounds} rounds; / = over memcpy", heads, rows)
    run.baseline["memcpy_gbps"] = float(np.median([figures["memcpy_gbps"] for figures in speeds.values()]))
    draw(speeds, run)
    families = {name: measure_family(name, config, speeds, run) for name in config.families}
    return {"codecs": speeds, "families": families}


def variants() -> dict[str, Codec]:
    """All codecs as they are used here; low rank gets the row length of the data."""
    return {**CODECS, "powersgd": LowRank(columns=COLUMNS)}


# --- speed ------------------------------------------------------------------------------------------------------------


def measure_codecs(config: Config, run: Run) -> dict[str, dict[str, Any]]:
    """Per codec: GB/s, ratios to memcpy, bits per value and relative error."""
    rows = (config.mib << 20) // (4 * COLUMNS)
    x = gradient_like(rows, COLUMNS, config.seed).view(-1)
    copy, out, residual = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    room = torch.zeros(max(codec.wire_bytes(x.numel()) for codec in variants().values()), dtype=torch.uint8)
    figures = {}
    for name, codec in variants().items():
        run.say(f"measuring {name}")
        figures[name] = measure(codec.for_tensor(x), x, copy, out, residual, room, config.rounds)
    return figures


def measure(
    codec: Codec, x: Tensor, copy: Tensor, out: Tensor, residual: Tensor, room: Tensor, rounds: int
) -> dict[str, Any]:
    """One codec against a copy: all steps once per round, so that a slow moment of the machine hits each alike."""
    packet = codec.encode(x, out=room)
    codec.decode(packet, out)
    error = float(torch.linalg.vector_norm(out - x) / torch.linalg.vector_norm(x))
    steps: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copy.numpy(), x.numpy()),
        "encode": lambda: codec.encode(x, out=room),
        "decode": lambda: codec.decode(packet, out),
    }
    if not isinstance(codec, Lossless):
        steps["ef"] = _feedback_step(codec, x, residual.zero_(), copy, room)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.thread_time()
            step()
            seconds[name].append(time.thread_time() - start)
    best = {name: min(times[1:]) for name, times in seconds.items()}
    found: dict[str, Any] = {f"{name}_vs_memcpy": None for name in ("encode", "decode", "ef")} | {"ef_gbps": None}
    for name, duration in best.items():
        found[f"{name}_gbps"] = x.nbytes / duration / 1e9
        found[f"{name}_spread"] = float(np.median(seconds[name][1:])) / duration
        if name != "memcpy":
            found[f"{name}_vs_memcpy"] = best["memcpy"] / duration
    return found | {"bits_per_value": packet.numel() * 8 / x.numel(), "rel_l2": error}


def _feedback_step(codec: Codec, x: Tensor, residual: Tensor, velocity: Tensor, room: Tensor) -> Callable[[], object]:
    """One step with the residual in place; for DGC with its momentum (the copy's target holds the velocity)."""
    kept = Residual.in_place(residual)
    if not isinstance(codec, Dgc):
        return lambda: codec.encode(x, kept, room)

    def step() -> None:
        moving = Residual.in_place(velocity)
        codec.encode(codec.accelerate(x, moving, 1), kept, room)
        codec.clear_sent(moving, kept)

    return step


def draw(speeds: dict[str, dict[str, Any]], run: Run) -> None:
    """Bits per value against relative error, speed as colour."""
    figure, axes = plt.subplots(figsize=(8.5, 5.5), layout="constrained")
    labels: dict[tuple[float, float], list[str]] = {}
    for name, f in speeds.items():
        # An exact codec has no place on a logarithmic axis: it gets the lowest one, and says so.
        label = name if f["rel_l2"] > EXACT else f"{name} (exact)"
        labels.setdefault((f["bits_per_value"], max(f["rel_l2"], EXACT)), []).append(label)
    bits, errors = [f["bits_per_value"] for f in speeds.values()], [max(f["rel_l2"], EXACT) for f in speeds.values()]
    ratios = [f["encode_vs_memcpy"] for f in speeds.values()]
    scatter = axes.scatter(bits, errors, c=ratios, s=90, cmap="viridis", norm="log", edgecolors="black", zorder=3)
    for position, (point, names) in enumerate(sorted(labels.items())):
        shift = (0, 9 if position % 2 == 0 else -17)
        axes.annotate(", ".join(names), point, shift, textcoords="offset points", ha="center", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="bits per value (fp32: 32)", ylabel="relative error (2-norm)")
    axes.set_title("Codecs on gradient-like values: size, error, speed")
    axes.grid(which="major", alpha=0.3)
    axes.margins(0.12, 0.12)
    figure.colorbar(scatter, label="encode speed / memcpy, one core")
    figure.savefig(run.out / "codecs.png", dpi=130)
    plt.close(figure)


# --- model families ---------------------------------------------------------------------------------------------------


def pattern(codec: Codec) -> str:
    """How gradients are reduced with this codec."""
    if isinstance(codec, RandomK):
        return "native"
    return "one_shot" if isinstance(codec, TopK | LowRank) else "two_shot"


def measure_family(name: str, config: Config, speeds: dict[str, dict[str, Any]], run: Run) -> dict[str, Any]:
    """Bytes per rank for the true shapes, error of the mean on slices of them."""
    parameters, size = family(name), max(config.ranks)
    numel = sum(p.numel for p in parameters)
    dense = sum(ring_bytes(p.numel * 4, size) for p in parameters)
    run.say(f"{name}: {numel:,} parameters, {size} simulated ranks")
    samples = [sample_gradient(parameters, config.sample, config.seed + 1 + rank) for rank in range(size)]
    codecs: dict[str, Any] = {}
    for codec_name, codec in CODECS.items():
        if isinstance(codec, Lossless):
            continue
        errors = {str(n): simulated_error(codec, samples[:n]) for n in sorted(set(config.ranks))}
        sent = sum(sent_bytes(codec, p, size, speeds[codec_name]["bits_per_value"]) for p in parameters)
        codecs[codec_name] = {
            "pattern": pattern(codec),
            "gib_per_rank": sent / 2**30,
            "fp32_over_codec": dense / sent,
            "rel_l2_of_mean": errors,
        }
    rows = [
        (c, f["pattern"], f["gib_per_rank"], f["fp32_over_codec"], *f["rel_l2_of_mean"].values())
        for c, f in codecs.items()
    ]
    columns = ("codec", "pattern", "GiB per rank", "fp32 / codec", *(f"error, {n} ranks" for n in errors))
    run.table(
        f"{name}: {numel / 1e6:,.1f} M parameters; bytes for {size} ranks, fp32 {dense / 2**30:.3g} GiB", columns, rows
    )
    return {"num_parameters": numel, "ranks": size, "fp32_gib_per_rank": dense / 2**30, "codecs": codecs}


def ring_bytes(num_bytes: float, size: int) -> float:
    """What each rank of a ring all-reduce sends."""
    return 2 * (size - 1) / size * num_bytes


def sent_bytes(codec: Codec, parameter: Parameter, size: int, bits_per_value: float) -> float:
    """Bytes that one rank sends for one gradient, the mean over ranks; small and 1-D ones stay fp32.

    Exact for packets of fixed size; otherwise from the bits per value measured above.
    """
    numel = parameter.numel
    if not parameter.compressible:
        return ring_bytes(numel * 4, size)
    if isinstance(codec, LowRank):
        columns = numel // parameter.shape[0]
        return ring_bytes(codec.rank * (parameter.shape[0] + columns) * 4, size)
    how = pattern(codec)
    if how == "native":
        return ring_bytes(codec.wire_bytes(numel) - SIDE, size)
    if how == "one_shot":
        return (size - 1) * codec.wire_bytes(numel)
    if not codec.fixed_size:
        return ring_bytes(numel * bits_per_value / 8, size)
    cuts = Chunks.of(numel, size, codec.align)
    spans = [cuts.span(part, owner) for part in range(cuts.num_parts) for owner in range(size)]
    return ring_bytes(sum(codec.wire_bytes(s.stop - s.start) for s in spans if s.stop > s.start), size)


def simulated_error(codec: Codec, inputs: Sequence[Tensor]) -> float:
    """Relative error of the mean of `inputs`, reduced by one thread per rank without error feedback."""

    def body(transport: LocalTransport) -> Tensor:
        x = inputs[transport.rank].clone()
        if pattern(codec) == "native":
            native(x, codec, transport, op="mean")
        else:
            (one_shot if pattern(codec) == "one_shot" else two_shot)(x, codec, transport, op="mean")
        return x if transport.rank == 0 else x[:0]

    result = run_local(len(inputs), body, timeout_s=300.0)[0]
    exact = torch.zeros(result.numel(), dtype=torch.float64)
    for x in inputs:
        exact += x
    exact /= len(inputs)
    return float(torch.linalg.vector_norm(result - exact) / torch.linalg.vector_norm(exact))
