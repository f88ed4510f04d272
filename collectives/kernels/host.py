"""Where a CPU kernel meets a tensor: zero-copy NumPy views of torch memory.

CPU kernels take and return torch tensors and reach their bytes only through these views, so a tensor on a device that has
no kernel of its own fails here, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.errors import ConfigError

Array = np.ndarray[Any, Any]
Scalar = Any
"""A NumPy or Python number inside a compiled kernel, where numba and not mypy knows its type."""

_BIT_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_array(tensor: Tensor) -> Array:
    """The tensor's memory as a NumPy array of the same shape and dtype (no bfloat16: see `bit_array`)."""
    return _on_host(tensor).numpy()  # type: ignore[no-any-return]


def bit_array(tensor: Tensor) -> Array:
    """The tensor's memory as signed integers of the same item size: for kernels that move or test bits."""
    return _on_host(tensor).view(_BIT_DTYPES[tensor.element_size()]).numpy()  # type: ignore[no-any-return]


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cpu:
        raise ConfigError(f"no kernel for {tensor.dtype} tensors on {tensor.device} here; move the tensor to the CPU")
    return tensor.detach()
