"""The same kernels under the address and undefined-behaviour sanitizers, on small sizes: a memory checker for CUDA code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def runtime(name: str) -> str:
    try:
        found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=30).stdout
    except OSError:
        pytest.skip("g++ is not installed")
    if not Path(found.strip()).is_absolute():
        pytest.skip(f"g++ has no {name}")
    return found.strip()


def test_kernels_stay_inside_their_buffers() -> None:
    environment = {
        **os.environ,
        "ZENRAY_SHIM_SANITIZE": "1",
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "NUMBA_DISABLE_JIT": "1",
    }
    chosen = "misaligned or beyond or ((scan or sets or gather) and 7)"
    files = [str(HERE / name) for name in ("test_codec_kernels.py", "test_row_kernels.py")]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "ERROR: AddressSanitizer" not in result.stderr
