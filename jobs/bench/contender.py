"""One entry of the `net` benchmark's table, and how its result is judged before its time counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collectives.errors import CollectiveMismatch
from collectives.sparse.rows import SparseRows

Result = Tensor | SparseRows


@dataclass(frozen=True)
class Contender:
    """`call` is timed and returns its result; `reset` puts the inputs back before each call."""

    name: str
    call: Callable[[], Result]
    reset: Callable[[], object] = lambda: None
    reference: Callable[[], Tensor] | None = None
    """The right result in dense form, known after the warm-up round; None: nothing to compare with."""
    max_relative_error: float | None = None
    """Allowed relative 2-norm of the error; None: equal up to the order of summation."""
    replicated: bool = True
    """All ranks must end up with the same bytes."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Known beforehand and reported beside the measurement."""

    def check(self, result: Result) -> tuple[str, float | None]:
        """Compare with the reference; returns a digest of the result's bytes and the relative error, if lossy."""
        parts, error = [result.ids, result.values] if isinstance(result, SparseRows) else [result], None
        if self.reference is not None:
            error = self._judge(dense_of(result), self.reference())
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest(), error

    def _judge(self, found: Tensor, expected: Tensor) -> float | None:
        if self.max_relative_error is None:
            if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
                raise CollectiveMismatch(f"{self.name} differs from the reference: its times would mean nothing")
            return None
        error = float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
        if not error <= self.max_relative_error:
            raise CollectiveMismatch(
                f"{self.name}: relative error {error:.3g}, at most {self.max_relative_error} expected: its times would "
                f"mean nothing"
            )
        return error


def dense_of(result: Result) -> Tensor:
    """The result as a full tensor."""
    if isinstance(result, Tensor):
        return result
    dense = torch.zeros(result.num_rows, result.width, dtype=result.values.dtype)
    dense[result.ids] = result.values
    return dense
