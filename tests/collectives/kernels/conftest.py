"""`kernels.cu` on the host: a module with the calling convention of `cupy.RawModule`, built by g++ with shim.h."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.kernels import cuda

SHIM = Path(__file__).with_name("shim.h")
FLAGS = (
    *("-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas"),
    *("-ffp-contract=off", "-fwrapv"),
    *("-U_FORTIFY_SOURCE", "-fcf-protection=none"),  # libc and CET object to jumps between stacks
)
SANITIZER_FLAGS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
SANITIZE = "ZENRAY_SHIM_SANITIZE"
CACHE = Path(tempfile.gettempdir()) / f"zenray-shim-{os.getuid()}"

torch.set_num_threads(1)


class ShimModule:
    """`kernels.cu` (or any CUDA source) as a shared library, cached by the hash of everything that goes into it."""

    def __init__(self, code: str, options: Sequence[str] = ()):
        preprocessed = _gxx(["-E", "-P", "-x", "c++", "-"], code)
        self.names = re.findall(r'extern\s+"C"\s+__global__[^(]*(?:\([^)]*\))?\s+(\w+)\s*\(', preprocessed)
        exports = "\n".join(f"SHIM_EXPORT({name})" for name in self.names)
        flags = [*FLAGS, *options]
        key = hashlib.sha256("\0".join([code, SHIM.read_text(), *flags]).encode()).hexdigest()[:24]
        self.path = path = CACHE / f"{key}.so"
        if not path.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            unfinished = CACHE / f"{key}.{os.getpid()}.tmp"
            command = [*flags, "-include", str(SHIM), "-x", "c++", "-", "-o", str(unfinished)]
            _gxx(command, f'#line 1 "kernels.cu"\n{code}\n{exports}\n')
            unfinished.replace(path)
        self.library = ctypes.PyDLL(str(path))  # keeps the GIL: the shim's state is global

    def get_function(self, name: str) -> ShimFunction:
        return ShimFunction(self.library, name)


class ShimFunction:
    """One kernel. Arguments are contiguous NumPy arrays or NumPy scalars of exactly the parameter's width."""

    def __init__(self, library: ctypes.PyDLL, name: str):
        self.name, self.run = name, getattr(library, f"shim_run_{name}")
        sizes = (ctypes.c_size_t * 64)()
        self.sizes = list(sizes[: getattr(library, f"shim_sizes_{name}")(sizes)])

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int = 0, order: int = 0
    ) -> None:
        if len(args) != len(self.sizes):
            raise TypeError(f"{self.name} takes {len(self.sizes)} arguments, got {len(args)}")
        values = [self._value(number, arg) for number, arg in enumerate(args)]
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        dims = (ctypes.c_uint * 6)(*[*grid, 1, 1, 1][:3], *[*block, 1, 1, 1][:3])
        self.run(dims, ctypes.c_size_t(shared_mem), ctypes.c_int(order), addresses)

    def _value(self, number: int, arg: Any) -> np.ndarray:
        if isinstance(arg, np.ndarray):
            assert arg.flags.c_contiguous
            arg = np.uint64(arg.ctypes.data)
        if not isinstance(arg, np.generic):
            raise TypeError(f"{self.name}: argument {number} is a {type(arg).__name__}; give a NumPy scalar")
        if arg.dtype.itemsize != self.sizes[number]:
            raise TypeError(
                f"{self.name}: argument {number} has {arg.dtype.itemsize} bytes, the kernel takes {self.sizes[number]}"
            )
        return np.array([arg])


def _gxx(arguments: Sequence[str], code: str) -> str:
    result = subprocess.run(["g++", *arguments], input=code, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "warning" not in result.stderr, result.stderr[:4000]
    return result.stdout


@pytest.fixture(scope="session")
def build_shim() -> Callable[..., ShimModule]:
    """ShimModule(code, options), or a skip where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels cannot be built for the host")
    return ShimModule


@pytest.fixture(scope="session")
def kernels(build_shim: Callable[..., ShimModule]) -> ShimModule:
    """All kernels of the project on the host."""
    options = SANITIZER_FLAGS if os.environ.get(SANITIZE) else ()
    return build_shim(cuda.SOURCE.read_text(), options)


def _pointer(arg: cuda.Argument) -> np.generic:
    if isinstance(arg, Tensor):
        return np.uint64(arg.data_ptr())
    return np.uint64(0) if arg is None else arg


@pytest.fixture(scope="session")
def as_gpu(kernels: ShimModule) -> Callable[[int], AbstractContextManager[list[str]]]:
    """`with as_gpu(order) as launched`: CPU tensors count as CUDA tensors, and launches go to the shim in this order.

    `launched` names the kernels. New tensors hold rubbish, and no launch has fewer than three blocks unless it has
    fewer tiles: the grid is cut to three, so that blocks loop over tiles.
    """

    @contextmanager
    def redirect(order: int) -> Iterator[list[str]]:
        launched: list[str] = []

        def launch(
            name: str,
            grid: int,
            block: int,
            args: Sequence[cuda.Argument],
            *,
            like: Tensor,
            shared_bytes: int = 0,
        ) -> None:
            launched.append(name)
            values = [_pointer(arg) for arg in args]
            kernels.get_function(name)((min(grid, 3),), (block,), values, shared_mem=shared_bytes, order=order)

        with pytest.MonkeyPatch.context() as patch:
            for module in _users_of("launch"):
                patch.setattr(module, "launch", launch)
            for module in _users_of("on_gpu"):
                patch.setattr(module, "on_gpu", lambda tensor: True)
            patch.setattr(torch, "empty", _rubbish)
            yield launched

    return redirect


_empty = torch.empty


def _rubbish(*args: Any, **kwargs: Any) -> Tensor:
    tensor = _empty(*args, **kwargs)
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(0xA5)
    return tensor


def _users_of(name: str) -> list[Any]:
    from collectives.codecs import codec, gpu
    from collectives.kernels import gpu as row_gpu
    from collectives.kernels import hashing, idcoding, idsets, rows

    modules = (codec, gpu, row_gpu, hashing, idcoding, idsets, rows)
    return [module for module in modules if hasattr(module, name)]
