"""What must be equal on all ranks after a step, and the norm that counts every gradient value once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from collectives.errors import CollectiveMismatch
from collectives.transport import Transport, all_gather_records, as_bytes

MAX_NAMED = 5


def digest(tensor: Tensor) -> int:
    """56 bits of BLAKE2b over dtype, shape and bytes; equal tensors of any layout in memory have equal digests."""
    data = tensor.detach().cpu().contiguous()
    state = hashlib.blake2b(f"{data.dtype}{tuple(data.shape)}".encode(), digest_size=7)
    if data.numel():
        state.update(as_bytes(data).numpy().data)
    return int.from_bytes(state.digest(), "big")


def check_replicas(parameters: Mapping[str, Tensor], transport: Transport) -> None:
    """Compare all parameters over all ranks; a collective call, 8 bytes a parameter.

    Raises CollectiveMismatch on every rank, naming the parameters that differ and the ranks that hold the odd bytes.
    """
    names = sorted(parameters)
    table = all_gather_records(transport, "metadata", [digest(parameters[name]) for name in names])
    differing = []
    for column, name in enumerate(names):
        values, counts = np.unique(table[:, column], return_counts=True)
        if len(values) > 1:
            odd = np.flatnonzero(table[:, column] != values[counts.argmax()]).tolist()
            differing.append(f"'{name}' (rank {', '.join(map(str, odd))})")
    if differing:
        more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        raise CollectiveMismatch(
            f"replicas differ in {len(differing)} of {len(names)} parameters: {', '.join(differing[:MAX_NAMED])}{more}. "
            f"Some rank changed them outside the synchronised step; restart from the last checkpoint."
        )


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for dense and sparse gradients; call it after backward, on all ranks.

    Sparse gradients are coalesced in place first, so that a row which occurs twice counts once, as the sum it is.
    Returns the norm before clipping (float32 scalar, equal on all ranks). A norm that is not finite is returned and
    used as torch does: the caller or the loss scaler skips the step.
    """
    values = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    values = [value for value in values if value.numel()]
    if not values:
        return torch.tensor(0.0)
    norms = torch.stack(
        [torch.linalg.vector_norm(v, norm_type, dtype=_norm_dtype(v)).to(values[0].device) for v in values]
    )
    total = norms.max() if math.isinf(norm_type) else torch.linalg.vector_norm(norms, norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale.to(value.device, value.dtype))
    return total


def _norm_dtype(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32
