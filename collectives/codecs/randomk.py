"""A random share of the elements, drawn alike on all ranks from a common seed: linear, and no indices on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from collectives.codecs.codec import HEADER_BYTES, Array, Flag, Fp32Codec, pad16
from collectives.codecs.hashing import M64, hash32_numpy, keys
from collectives.codecs.selection import finite
from collectives.errors import ConfigError

SIDE = HEADER_BYTES + 16


@dataclass(frozen=True, kw_only=True)
class RandomK(Fp32Codec):
    """One element of each of k equal strata. Packet: header | seed uint64, 8 zero bytes | values fp32.

    A value that is not finite anywhere makes all sent values NaN, and a NaN value makes the packet decode to NaN, so
    the news survives a native sum.
    """

    name: ClassVar[str] = "randomk"
    codec_id: ClassVar[int] = 11
    linear: ClassVar[bool] = True
    shared_seed: ClassVar[bool] = True
    min_numel: ClassVar[int] = 128

    density: float = 0.01
    rescale: bool = False
    """Multiply by 1/density: unbiased, with variance 1/density. Leave it off with error feedback."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"{self.name}: density must be in (0, 1], not {self.density}")

    @property
    def unbiased(self) -> bool:
        return self.rescale

    def ef_default(self, optimizer: str) -> bool:
        return "sgd" in optimizer.lower() and not self.rescale

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return SIDE + pad16(4 * self._count(numel))

    def summand(self, packet: Tensor) -> Tensor:
        return packet[SIDE:].view(torch.float32)

    def _count(self, numel: int) -> int:
        return min(math.ceil(self.density * numel), numel)

    def _index(self, numel: int, seed: int) -> tuple[Array, Array]:
        """(indices int64 [k], sizes of their strata int64 [k])."""
        count = self._count(numel)
        stratum = np.arange(count + 1, dtype=np.int64) * numel // max(count, 1)
        size = np.diff(stratum)
        draw = hash32_numpy(np.arange(count), *keys(seed)).astype(np.int64)
        return stratum[:-1] + (draw * size >> 32), size

    def _encode(self, x: Array, buffer: Array, seed: int) -> tuple[int, int]:
        used = self.wire_bytes(x.size)
        buffer[HEADER_BYTES:used] = 0
        buffer[HEADER_BYTES : HEADER_BYTES + 8].view(np.uint64)[0] = seed & M64
        index, size = self._index(x.size, seed)
        values = buffer[SIDE:used].view(np.float32)[: index.size]
        if not finite(x.view(np.int32)):
            values[:] = np.nan
            return int(Flag.NONFINITE), used
        values[:] = x[index]
        if self.rescale:
            values *= size.astype(np.float32)
        return 0, used

    def _decode(self, buffer: Array, flags: int, out: Array, accumulate: bool, scale: np.float32) -> None:
        index, _ = self._index(out.size, int(buffer[HEADER_BYTES : HEADER_BYTES + 8].view(np.uint64)[0]))
        values = buffer[SIDE:].view(np.float32)[: index.size]
        if np.isnan(values).any():
            out[:] = np.nan
            return
        if not accumulate:
            out[:] = 0
        out[index] += values * scale

    def _encode_feedback(self, x: Array, old: Array, new: Array, buffer: Array, seed: int) -> tuple[int, int]:
        total = x + old
        flags, used = self._encode(total, buffer, seed)
        if flags & Flag.NONFINITE:
            new[:] = old
            return flags, used
        index, _ = self._index(x.size, seed)
        new[:] = total
        new[index] -= buffer[SIDE:used].view(np.float32)[: index.size]
        return flags, used
