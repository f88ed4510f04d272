"""The orthogonal 32-point Hadamard rotation, one block a row; it is its own inverse.

Fast form: five stages; stage h replaces (a, b), h apart, by (a+b, a-b); then all times fp32(1/sqrt(32)).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, np.dtype[Any]]

NORM = np.float32(1 / np.sqrt(32))


def rotate32_numpy(x: Array, out: Array) -> None:
    """out [k, 32] = H32/sqrt(32) applied to each row of x [k, 32]; x and out are different arrays."""
    out[:] = x
    for h in (1, 2, 4, 8, 16):
        pairs = out.reshape(len(x), 16 // h, 2, h)
        a, b = pairs[:, :, 0, :].copy(), pairs[:, :, 1, :].copy()
        pairs[:, :, 0, :], pairs[:, :, 1, :] = a + b, a - b
    out *= NORM


@njit(nogil=True, cache=True)
def rotate32(x, out):  # type: ignore[no-untyped-def]
    """Compiled `rotate32_numpy`."""
    for r in range(x.shape[0]):
        row, target = x[r], out[r]
        for i in range(32):
            target[i] = row[i]
        for stage in range(5):
            h = 1 << stage
            for base in range(0, 32, 2 * h):
                for i in range(base, base + h):
                    a, b = target[i], target[i + h]
                    target[i] = a + b
                    target[i + h] = a - b
        for i in range(32):
            target[i] *= NORM
