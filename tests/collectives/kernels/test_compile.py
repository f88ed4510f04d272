"""`kernels.cu` compiles to machine code for real cards, without one: no spilled registers, no stack."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collectives.errors import ConfigError
from collectives.kernels import cuda

ROOT = Path(__file__).resolve().parents[3]
MAX_REGISTERS = 80
"""Three blocks of 256 threads still fit the 65,536 registers of a multiprocessor."""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_kernel_compiles_without_spills_and_stack(arch: str, record_property: pytest.RecordProperty) -> None:
    nvrtc = pytest.importorskip(
        "cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed: the extra cuda13 brings it and NVRTC"
    )
    program = nvrtc.createProgram(cuda.SOURCE.read_text(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*cuda.OPTIONS, f"-arch={arch}", "--ptxas-options=-v"))
    finally:
        log = nvrtc.getProgramLog(program)
    assert nvrtc.getCUBIN(program)[:4] == b"\x7fELF", log
    assert "warning" not in log, log
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert len(names) == len(frames) == len(registers) > 50
    wasteful = [name for name, frame in zip(names, frames, strict=True) if frame != ("0", "0", "0")]
    assert not wasteful
    table = dict(sorted(zip(names, registers, strict=True)))
    record_property(f"registers {arch}", table)
    assert max(registers) <= MAX_REGISTERS, table


def test_importing_the_rooms_imports_no_cupy() -> None:
    code = (
        "import sys, zenray, collectives.codecs.gpu, collectives.kernels.gpu, collectives.sparse.all_reduce, "
        "collectives.ddp, collectives.reduce, collectives.nccl; "
        "found = [name for name in sys.modules if name.split('.')[0] in ('cupy', 'cupy_backends')]; assert not found, found"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], cwd=ROOT, check=True, timeout=120)


def test_cupy_is_named_in_one_kernel_file_and_one_transport_only() -> None:
    users = {path.name for path in (ROOT / "collectives").rglob("*.py") if "import cupy" in path.read_text()}
    assert users <= {"cuda.py", "nccl.py"}


def test_a_missing_cupy_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="cuda12 and cuda13"):
        cuda.warm_up(torch.device("cuda", 0))


def test_a_launch_sends_addresses_and_exact_scalars_on_torchs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for CuPy: the one piece of the launch path that the shim replaces."""
    launched: list[object] = []

    class Module:
        def __init__(self, code: str, options: tuple[str, ...]):
            assert (code, options) == (cuda.SOURCE.read_text(), ("--std=c++17", "--fmad=false"))

        def get_function(self, name: str) -> object:
            return lambda *args, **kwargs: launched.append((name, args, kwargs))

        def compile(self) -> None:
            launched.append("compiled")

    devices: list[int | None] = []
    fake = SimpleNamespace(
        RawModule=Module,
        cuda=SimpleNamespace(
            Device=lambda index: (devices.append(index), nullcontext())[1],
            Stream=SimpleNamespace(from_external=lambda stream: ("wrapped", stream)),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    for cached in (cuda._module, cuda._function):
        cached.cache_clear()
    x = torch.zeros(4)
    try:
        cuda.launch("int8b_decode", 3, 256, (x, np.int64(4), None), like=x, shared_bytes=8)
        cuda.warm_up(torch.device("cuda", 2))
    finally:
        for cached in (cuda._module, cuda._function):
            cached.cache_clear()
    name, (grid, block, args), options = launched[0]  # type: ignore[misc]
    assert (name, grid, block) == ("int8b_decode", (3,), (256,))
    assert args == (x.data_ptr(), np.int64(4), np.uint64(0))
    assert [type(arg) for arg in args] == [int, np.int64, np.uint64]
    assert options == {"shared_mem": 8, "stream": ("wrapped", "current of cpu")}
    assert launched[1:] == ["compiled"]
    assert devices == [None, 2]
