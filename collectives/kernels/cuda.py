"""Compiles and launches `kernels.cu`: the only file that touches CuPy's compiler and launch interface.

torch owns memory and streams. Kernels get raw pointers and run on torch's current stream of the tensor's device; CuPy is
imported at the first launch and never before. A pointer keeps nothing alive: what a launch uses must live until the
stream has passed it, which torch's allocator guarantees for tensors that are used on one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.errors import ConfigError

SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17", "--fmad=false")
"""Contraction off: a fused multiply-add rounds once where NumPy rounds twice."""

THREADS = 256
"""Threads of every block; the kernels count on it."""
MAX_BLOCKS = 4096
"""Kernels loop over their tiles, so more blocks than fill any card gain nothing."""
WARPS = THREADS // 32

Argument = Tensor | np.generic | None
"""A tensor (its address), a scalar of exactly the parameter's width, or a null pointer."""

NULL = np.uint64(0)


def on_gpu(tensor: Tensor) -> bool:
    """Whether the kernels of `kernels.cu` work on this tensor: the one rule of dispatch."""
    return tensor.is_cuda


def installed() -> bool:
    """Whether CuPy is there, without importing it."""
    return find_spec("cupy") is not None


def blocks_for(num_items: int, items_per_block: int) -> int:
    """Blocks of a launch over `num_items`, at least one."""
    return min(max(-(-num_items // items_per_block), 1), MAX_BLOCKS)


def launch(name: str, grid: int, block: int, args: Sequence[Argument], *, like: Tensor, shared_bytes: int = 0) -> None:
    """Queue one kernel on torch's current stream of `like.device`; returns at once.

    grid: blocks. block: threads of a block. shared_bytes: dynamic shared memory of a block. Raises ConfigError where
    CuPy or its compiler is missing.
    """
    cupy = _cupy(like.device)
    with cupy.cuda.Device(like.device.index):
        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(like.device))
        values = tuple(_value(arg) for arg in args)
        _function(name, like.device.index)((grid,), (block,), values, shared_mem=shared_bytes, stream=stream)


def warm_up(device: torch.device) -> None:
    """Compile all kernels for `device` and load them: some seconds at first, from a cache on disk afterwards."""
    with _cupy(device).cuda.Device(device.index):
        _module().compile()


def attributes(name: str, device: torch.device) -> dict[str, int]:
    """What the driver knows of a loaded kernel: num_regs, local_size_bytes, ..."""
    with _cupy(device).cuda.Device(device.index):
        return dict(_function(name, device.index).attributes)


def _value(arg: Argument) -> int | np.generic:
    if isinstance(arg, Tensor):
        return arg.data_ptr()  # CuPy sends a Python int as eight bytes
    return NULL if arg is None else arg


@cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE.read_text(encoding="ascii"), options=OPTIONS)


@cache
def _function(name: str, device_index: int) -> Any:
    """The kernel as loaded on the current device, which the caller has set to `device_index`."""
    return _module().get_function(name)


def _cupy(device: torch.device) -> Any:
    try:
        import cupy
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        raise ConfigError(
            f"a tensor on {device} needs CuPy for its kernels ({error}). Install one of the extras cuda12 and cuda13 "
            f"(packages cupy-cuda12x, cupy-cuda13x), never both; this torch was built for CUDA {major}."
        ) from error
    return cupy
