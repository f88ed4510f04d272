"""Low rank: a matrix M (a x b) as P Q^T with r columns each (PowerSGD, Vogels et al., NeurIPS'19).

`LowRank` is the codec of one matrix. `PowerSGD` reduces many over all ranks: linear, so two native all-reduces of the
small factors do it, whatever the number of ranks; it keeps Q between steps, by parameter name.

The factors come from the QR decomposition, which turns a zero matrix into finite orthonormal columns: zero stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from collectives.codecs.codec import HEADER_BYTES, Array, Flag, Fp32Codec, Residual, pad16
from collectives.codecs.hashing import derive_seed, hash32_numpy, keys
from collectives.errors import ConfigError, WireFormatError
from collectives.transport import Transport

SIDE = HEADER_BYTES + 16


@dataclass(frozen=True, kw_only=True)
class LowRank(Fp32Codec):
    """One power iteration from a seeded start. Packet: header | rows, columns, rank as uint32, 0 | P fp32 | Q fp32.

    A flat tensor is cut into rows of `columns`, or made nearly square, padded with zeros. The same bytes on hosts with
    the same processor and torch. A value that is not finite makes the packet decode to NaN.
    """

    name: ClassVar[str] = "powersgd"
    codec_id: ClassVar[int] = 14
    min_numel: ClassVar[int] = 1024

    rank: int = 4
    columns: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or (self.columns is not None and self.columns < 1):
            raise ConfigError(f"{self.name}: rank and columns must be at least 1, not {self.rank} and {self.columns}")

    def ef_default(self, optimizer: str) -> bool:
        return True

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        rows, columns, rank = self._shape(numel)
        return SIDE + pad16(4 * rank * rows) + pad16(4 * rank * columns)

    def _shape(self, numel: int) -> tuple[int, int, int]:
        """(rows, columns, rank), with rows * columns >= numel."""
        if numel == 0:
            return 0, 0, 0
        columns = self.columns or max(math.isqrt(numel - 1) + 1, 1)
        rows = -(-numel // columns)
        return rows, columns, min(self.rank, rows, columns)

    def _factors(self, buffer: Array, numel: int) -> tuple[Array, Array]:
        """Views of P [a, r] and Q [b, r]."""
        rows, columns, rank = self._shape(numel)
        middle = SIDE + pad16(4 * rank * rows)
        p = buffer[SIDE:middle].view(np.float32)[: rows * rank].reshape(rows, rank)
        q = buffer[middle:].view(np.float32)[: columns * rank].reshape(columns, rank)
        return p, q

    def _matrix(self, x: Array) -> Tensor:
        rows, columns, _ = self._shape(x.size)
        if rows * columns == x.size:
            return torch.from_numpy(x).view(rows, columns)
        padded = torch.zeros(rows * columns)
        padded[: x.size] = torch.from_numpy(x)
        return padded.view(rows, columns)

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        used = self.wire_bytes(x.size)
        shape = self._shape(x.size)
        buffer[HEADER_BYTES:used] = 0
        buffer[HEADER_BYTES : HEADER_BYTES + 12].view(np.uint32)[:] = shape
        if x.size == 0:
            return 0, used
        matrix = self._matrix(x)
        p = orthonormal(matrix @ orthonormal(seeded_matrix(shape[1], shape[2], seed)))
        q = matrix.T @ p
        if not (bool(torch.isfinite(q).all()) and bool(torch.isfinite(p).all())):
            return int(Flag.NONFINITE), used
        target_p, target_q = self._factors(buffer[:used], x.size)
        target_p[:], target_q[:] = p.numpy(), q.numpy()
        return 0, used

    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        shape = tuple(buffer[HEADER_BYTES : HEADER_BYTES + 12].view(np.uint32).tolist())
        if shape != self._shape(out.size):
            raise WireFormatError(f"{self.name} packet of shape {shape}, expected {self._shape(out.size)}")
        if flags & Flag.NONFINITE:
            out[:] = np.nan
        elif out.size:
            p, q = (torch.from_numpy(factor) for factor in self._factors(buffer, out.size))
            product = (p @ q.T).view(-1)[: out.size]
            target = torch.from_numpy(out)
            if accumulate:
                target.add_(product, alpha=float(scale))
            else:
                torch.mul(product, float(scale), out=target)


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span those of fp32 [..., a, r], r <= a; NaN where the input is not finite."""
    if not bool(torch.isfinite(matrix).all()):
        return torch.full_like(matrix, torch.nan)
    # Scale first: the squares inside QR would overflow or vanish for very large or very small gradients.
    largest = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    columns: Tensor = torch.linalg.qr(matrix / torch.where(largest > 0, largest, 1.0))[0]
    return columns


def seeded_matrix(rows: int, columns: int, seed: int) -> Tensor:
    """fp32 [rows, columns] in [-1, 1), the same on all ranks."""
    bits = hash32_numpy(np.arange(rows * columns), *keys(seed)) >> np.uint32(8)
    values = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return torch.from_numpy(values).view(rows, columns)


def worth_it(shape: torch.Size, rank: int) -> bool:
    """Whether a parameter of this shape is sent as factors: at least two dimensions and 2 r (a + b) < a b."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return 2 * rank * (rows + columns) < rows * columns


@dataclass
class PowerSGD:
    """The state of PowerSGD on one rank: Q by parameter name. All ranks use the same seed and the same names."""

    rank: int = 4
    seed: int = 0
    factors: dict[str, Tensor] = field(default_factory=dict)
    """Q fp32 [b, r] of each parameter, the starting point of the next step."""

    def all_reduce(
        self,
        gradients: Mapping[str, Tensor],
        transport: Transport,
        *,
        op: Literal["sum", "mean"] = "mean",
        residuals: Mapping[str, Residual] | None = None,
    ) -> Flag:
        """Replace every gradient (fp32, contiguous) by its reduced approximation, small ones by their exact reduction.

        residuals: by name, fp32 of the gradient's size. Equal shapes are multiplied as one batch. Three native
        all-reduces: dense, P, Q. Where any rank's value is not finite the whole result is NaN, and residuals and
        factors stay as they were. Returns the same flags on every rank.
        """
        names = [name for name, g in gradients.items() if worth_it(g.shape, self.rank)]
        divisor = float(transport.size) if op == "mean" else 1.0
        finite = self._dense({n: g for n, g in gradients.items() if n not in names}, transport, divisor)
        batches = self._batches({name: gradients[name] for name in names}, residuals)
        products = [batch @ orthonormal(self._start(group, batch)) for group, batch in batches]
        _all_reduce_flat(transport, "powersgd-p", products)
        left = [orthonormal(product) for product in products]
        right = [batch.transpose(1, 2) @ p for (_, batch), p in zip(batches, left, strict=True)]
        _all_reduce_flat(transport, "powersgd-q", right)
        for (group, batch), p, q in zip(batches, left, right, strict=True):
            q /= divisor
            result = p @ q.transpose(1, 2)
            good = bool(torch.isfinite(result).all())
            finite &= good
            for i, name in enumerate(group):
                gradients[name].view(result[i].shape).copy_(result[i])
                if good:
                    self.factors[name] = q[i].clone()
                if residuals is not None:
                    residual, share = residuals[name], 1.0 if op == "mean" else 1.0 / transport.size
                    lost = torch.sub(batch[i], result[i], alpha=share).view(-1)
                    residual.update.view(-1).copy_(lost if good else residual.value.view(-1))
        return Flag.NONE if finite else Flag.NONFINITE

    def _dense(self, gradients: Mapping[str, Tensor], transport: Transport, divisor: float) -> bool:
        flat = [g.view(-1) for g in gradients.values()]
        _all_reduce_flat(transport, "powersgd-dense", flat)
        for g in flat:
            g /= divisor
        return all(bool(torch.isfinite(g).all()) for g in flat)

    def _batches(
        self, gradients: Mapping[str, Tensor], residuals: Mapping[str, Residual] | None
    ) -> list[tuple[list[str], Tensor]]:
        """Names and matrices [k, a, b] (with residual) of each distinct matrix shape."""
        groups: dict[tuple[int, int], list[str]] = {}
        for name, g in gradients.items():
            groups.setdefault((g.shape[0], g.numel() // g.shape[0]), []).append(name)
        batches = []
        for shape, group in groups.items():
            batch = torch.stack([gradients[name].view(shape) for name in group])
            if residuals is not None:
                for i, name in enumerate(group):
                    batch[i] += residuals[name].value.view(shape)
            batches.append((group, batch))
        return batches

    def _start(self, group: list[str], batch: Tensor) -> Tensor:
        """Q [k, b, r]: from the last step where there is one of this shape, otherwise seeded by name."""
        columns = batch.shape[2]
        for name in group:
            if name not in self.factors or self.factors[name].shape != (columns, self.rank):
                self.factors[name] = seeded_matrix(columns, self.rank, derive_seed(self.seed, name))
        return torch.stack([self.factors[name] for name in group])

    def state_dict(self) -> dict[str, Any]:
        """Rank, seed and factors."""
        return {"rank": self.rank, "seed": self.seed, "factors": {n: q.clone() for n, q in self.factors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; factors of another rank or shape are seeded anew when they are used."""
        self.seed = int(state["seed"])
        self.factors = {name: q.clone() for name, q in state["factors"].items()}


def _all_reduce_flat(transport: Transport, phase: str, tensors: list[Tensor]) -> None:
    """Sum a list of tensors over all ranks in place, as one message."""
    if not tensors or transport.size == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    transport.all_reduce(phase, flat)
    for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        t.copy_(part.view(t.shape))
