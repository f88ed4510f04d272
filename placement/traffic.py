"""When to send checkpoint copies: chunks in the idle spans of the network, and what that costs if they do not fit.

After GEMINI (Wang et al., SOSP'23), section 5: the first iterations show the idle spans t_1 .. t_n of a step; a share mu
of each may be used; f(s) = alpha + s / B is the time of s bytes; a buffer in parts lets one part arrive while the one
before moves to host memory. The last span takes whatever is left: what exceeds it lengthens the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collectives.errors import ConfigError

MU = 0.8
"""Share of an idle span that is used: spans vary from step to step."""


@dataclass(frozen=True)
class Link:
    """f(s) = alpha_s + s / bytes_per_s: the time that s bytes to one peer take."""

    alpha_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """f(num_bytes)."""
        return self.alpha_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class TrafficPlan:
    """spans[i] = (copy, bytes) of each chunk to send in idle span i. exposed_s: by how much the step gets longer."""

    spans: tuple[tuple[tuple[int, int], ...], ...]
    exposed_s: float

    @property
    def sent_bytes(self) -> int:
        """All chunks together."""
        return sum(num_bytes for span in self.spans for _, num_bytes in span)


def plan_traffic(
    spans_s: Sequence[float], shard_bytes: int, num_remote: int, chunk_bytes: int, link: Link, mu: float = MU
) -> TrafficPlan:
    """Distribute `num_remote` copies of `shard_bytes` over the idle spans of one step.

    spans_s: idle seconds of the network in order, at least one. chunk_bytes: one part of the buffer. Whole chunks as
    long as they fit, then one smaller chunk in the rest of the span; the last span is not cut off.
    """
    if not spans_s or min(spans_s) < 0 or not 0 < mu < 1 or chunk_bytes < 1:
        raise ConfigError(
            f"need idle spans >= 0, 0 < mu < 1 and chunks >= 1: {spans_s}, mu = {mu}, {chunk_bytes} bytes"
        )
    left = [shard_bytes] * num_remote
    planned: list[tuple[tuple[int, int], ...]] = []
    used_s = 0.0
    copy = 0
    for index, span_s in enumerate(spans_s):
        is_last = index == len(spans_s) - 1
        budget_s, used_s = mu * span_s, 0.0
        chunks: list[tuple[int, int]] = []
        while copy < num_remote:
            if left[copy] == 0:
                copy += 1
                continue
            size = min(chunk_bytes, left[copy])
            if not is_last and used_s + link.seconds(size) > budget_s:
                size = min(size, int((budget_s - used_s - link.alpha_s) * link.bytes_per_s))
                if size <= 0:
                    break
            chunks.append((copy, size))
            used_s += link.seconds(size)
            left[copy] -= size
        planned.append(tuple(chunks))
    return TrafficPlan(tuple(planned), max(0.0, used_s - mu * spans_s[-1]))
