"""GPU types: what a card offers, and the memory that libraries take on it before any tensor.

Peak rates and bandwidths are the vendors' data sheets (dense, without sparsity). Context and NCCL bytes are starting
values of the right order: a node measures its own at start and replaces them (`dataclasses.replace`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from collectives.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class GpuType:
    """One kind of card and the node around it. Sizes in bytes, rates in FLOP/s and bytes/s."""

    name: str
    memory_bytes: int
    """What NVML reports as total."""
    memory_rate: float
    flops: float
    """Dense bf16 matrix products; fp16 where the card has no bf16."""
    link_rate: float
    """One direction, between cards of a node."""
    network_rate: float
    """One direction, per card, between nodes."""
    gpus_per_node: int
    price: float = 1.0
    """Weight of an hour of this card, relative; used to compare plans across types."""
    context_bytes: int = 500 * MIB
    nccl_bytes: int = 300 * MIB
    """Of one communicator's worth of channels and buffers."""
    blas_workspace_bytes: int = 8 * MIB + 128 * 1024
    """cuBLAS workspace that torch keeps per stream and thread."""
    layer_library_workspace_bytes: int = 4 * MIB
    """Workspace of the transformer kernel library."""
    attention_slack_bytes: int = 0
    """Extra bytes a layer that the default fused attention keeps, whatever the shape."""


def _gpu(
    name: str, gib: int, tb_s: float, tflops: float, link_gb_s: float, net_gbit_s: float, price: float, node: int = 8
) -> GpuType:
    return GpuType(
        name=name,
        memory_bytes=gib * GIB,
        memory_rate=tb_s * 1e12,
        flops=tflops * 1e12,
        link_rate=link_gb_s * 1e9,
        network_rate=net_gbit_s * 1e9 / 8,
        gpus_per_node=node,
        price=price,
    )


def _with_large_workspace(gpu: GpuType) -> GpuType:
    return replace(gpu, layer_library_workspace_bytes=32 * MIB)


def _with_attention_slack(gpu: GpuType) -> GpuType:
    return replace(gpu, attention_slack_bytes=2 * MIB)


def _hopper(gpu: GpuType) -> GpuType:
    return replace(_with_large_workspace(gpu), blas_workspace_bytes=32 * MIB)


def _blackwell(gpu: GpuType) -> GpuType:
    return _with_attention_slack(_with_large_workspace(gpu))


CATALOGUE: dict[str, GpuType] = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 15, 0.30, 65, 8, 25, 0.1, node=4),
        _gpu("RTX2080Ti", 11, 0.62, 108, 8, 25, 0.15),
        _gpu("V100-32", 32, 0.90, 125, 150, 100, 0.35),
        _gpu("A10", 23, 0.60, 125, 16, 25, 0.3, node=1),
        _gpu("L40S", 45, 0.86, 362, 32, 100, 0.5),
        _with_attention_slack(_gpu("A100-40", 40, 1.56, 312, 300, 200, 0.8)),
        _with_attention_slack(_gpu("A100-80", 80, 2.04, 312, 300, 200, 1.0)),
        _hopper(_gpu("H100", 80, 3.35, 989, 450, 400, 2.0)),
        _hopper(_gpu("H200", 141, 4.80, 989, 450, 400, 2.4)),
        _blackwell(_gpu("B200", 180, 8.00, 2250, 900, 400, 4.0)),
        _blackwell(_gpu("GB200", 184, 8.00, 2500, 900, 400, 4.4, node=4)),
    )
}
ALIASES = {"A100": "A100-80", "V100": "V100-32", "H800": "H100", "A800": "A100-80"}


def gpu_type(name: str) -> GpuType:
    """The card of this name or alias. Raises ConfigError naming the known ones."""
    gpu = CATALOGUE.get(ALIASES.get(name, name))
    if gpu is None:
        known = ", ".join([*CATALOGUE, *ALIASES])
        raise ConfigError(f"GPU type '{name}' is not in the catalogue; known: {known}. Give a GpuType instead.")
    return gpu
