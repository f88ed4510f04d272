"""The shim itself: it must run correct kernels right and make wrong ones fail, or the other tests here prove nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

KERNELS = """
extern "C" __global__ void block_sum(const float* x, long long n, float* out) {
    __shared__ float part[64];
    float sum = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 32; step; step /= 2) {
        if ((int)threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

extern "C" __global__ void racy_sum(const float* x, long long n, float* out) {
    __shared__ float part[64];
    float sum = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    part[threadIdx.x] = sum;
    for (int step = 32; step; step /= 2) {
        if ((int)threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

extern "C" __global__ void lanes(int* out) {
    int lane = threadIdx.x % 32;
    int* mine = out + 8 * threadIdx.x;
    mine[0] = __shfl_up_sync(~0u, lane, 3);
    mine[1] = __shfl_xor_sync(~0u, lane, 5);
    mine[2] = __shfl_sync(~0u, lane, 7, 8);
    mine[3] = (int)__ballot_sync(~0u, lane % 3 == 0);
    mine[4] = __reduce_max_sync(~0u, lane * 37 % 32);
    mine[5] = (int)__match_any_sync(~0u, lane / 8);
    mine[6] = __any_sync(~0u, lane == 9);
    mine[7] = (int)(__shfl_sync(~0u, (long long)lane << 40, 31) >> 40);
}
extern "C" __global__ void short_block(unsigned* out) {
    if (threadIdx.x >= 40) return;
    out[threadIdx.x] = __ballot_sync(~0u, 1);
    __syncthreads();
}

extern "C" __global__ void divergent_barrier(int* out) {
    if (threadIdx.x == 0) __ballot_sync(~0u, 1);
    else __syncthreads();
    out[0] = 1;
}
extern "C" __global__ void wrong_mask(int* out) { out[0] = (int)__ballot_sync(1u, 1); }
extern "C" __global__ void mixed_kinds(int* out) {
    if (threadIdx.x == 0) out[0] = __shfl_sync(~0u, 1, 0);
    else out[0] = __any_sync(~0u, 1);
}
"""

Build = Callable[..., Any]


@pytest.fixture(scope="module")
def module(build_shim: Build) -> Any:
    return build_shim(KERNELS)


def run_sums(module: Any, name: str, order: int) -> np.ndarray:
    x, out = np.arange(64, dtype=np.float32), np.full(3, -1, np.float32)
    module.get_function(name)((3,), (64,), (x, np.int64(64), out), order=order)
    return out


def test_a_correct_kernel_is_right_in_every_order(module: Any) -> None:
    for order in (0, 1, 2, 3):
        assert (run_sums(module, "block_sum", order) == 2016).all()


def test_a_missing_barrier_changes_the_result(module: Any) -> None:
    assert any((run_sums(module, "racy_sum", order) != 2016).any() for order in (0, 1, 2))


def test_warp_operations_mean_what_they_mean_on_a_device(module: Any) -> None:
    lanes = np.arange(32)
    for order in (0, 1, 5):
        out = np.zeros((64, 8), np.int32)
        module.get_function("lanes")((2,), (64,), (out,), order=order)
        assert (out[:32] == out[32:]).all()
        found = out[:32].T
        assert (found[0] == np.where(lanes < 3, lanes, lanes - 3)).all()
        assert (found[1] == lanes ^ 5).all()
        assert (found[2] == lanes // 8 * 8 + 7).all()
        assert (found[3].astype(np.uint32) == sum(1 << lane for lane in range(0, 32, 3))).all()
        assert (found[4] == 31).all()
        assert (found[5].astype(np.uint32) == np.uint32(0xFF) << (lanes // 8 * 8).astype(np.uint32)).all()
        assert (found[6] == 1).all()
        assert (found[7] == 31).all()


def test_threads_that_returned_are_not_waited_for(module: Any) -> None:
    out = np.zeros(64, np.uint32)
    module.get_function("short_block")((1,), (64,), (out,), order=1)
    assert (out[:32] == 0xFFFFFFFF).all()
    assert (out[32:40] == 0xFF).all()
    assert (out[40:] == 0).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "divergent_barrier",
            "deadlock: nothing moved (block 0, thread 31; 32 live threads, 31 of them at the barrier)",
        ),
        ("wrong_mask", "a mask that leaves it out"),
        ("mixed_kinds", "meet in different operations"),
    ],
)
def test_wrong_synchronisation_aborts_with_a_reason(name: str, message: str, module: Any) -> None:
    code = (
        "import ctypes, sys; lib = ctypes.PyDLL(sys.argv[1]); out = ctypes.c_uint64(0)\n"
        "at = ctypes.c_uint64(ctypes.addressof(out)); args = (ctypes.c_void_p * 1)(ctypes.addressof(at))\n"
        "dims = (ctypes.c_uint * 6)(1, 1, 1, 32, 1, 1)\n"
        f"lib.shim_run_{name}(dims, ctypes.c_size_t(0), ctypes.c_int(0), args)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(module.path)], capture_output=True, text=True, timeout=60)
    assert child.returncode < 0
    assert message in child.stderr


def test_arguments_of_the_wrong_width_are_refused(module: Any) -> None:
    function = module.get_function("block_sum")
    x = np.zeros(4, np.float32)
    with pytest.raises(TypeError, match="argument 1 has 4 bytes, the kernel takes 8"):
        function((1,), (64,), (x, np.int32(4), x))
    with pytest.raises(TypeError, match="argument 1 is a int"):
        function((1,), (64,), (x, 4, x))
    with pytest.raises(TypeError, match="takes 3 arguments, got 2"):
        function((1,), (64,), (x, np.int64(4)))
