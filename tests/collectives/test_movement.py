"""Compressed data movement: one quantisation, the same bytes everywhere, odd lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collectives.codecs import Codec, ErrorBounded, Int8Block, Lossless
from collectives.movement import all_gather, all_to_all, broadcast, point_to_point
from collectives.transport import LocalTransport, run_local

BOUND = 0.02
CODECS = {"eb": ErrorBounded(bound=BOUND, relative_to="one"), "int8b": Int8Block(), "lossless": Lossless()}
LIMIT = {"eb": BOUND, "int8b": 0.02, "lossless": 0.0}


def part(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).clamp(-5, 5)


@pytest.fixture(params=CODECS)
def named(request: pytest.FixtureRequest) -> tuple[Codec, float]:
    return CODECS[request.param], LIMIT[request.param]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_gather_quantises_once(named: tuple[Codec, float], size: int) -> None:
    codec, limit = named
    lengths = [100 * r for r in range(size)]

    def body(t: LocalTransport) -> Tensor:
        outputs = [part(r, n) if r == t.rank else torch.empty(n) for r, n in enumerate(lengths)]
        all_gather(outputs, codec, t)
        return torch.cat(outputs)

    results = run_local(size, body, 20)
    assert all(r.equal(results[0]) for r in results)
    expected = torch.cat([part(r, n) for r, n in enumerate(lengths)])
    assert not expected.numel() or float((results[0] - expected).abs().max()) <= limit


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_broadcast_gives_the_source_the_decoded_values_too(named: tuple[Codec, float], size: int) -> None:
    codec, limit = named
    for numel in (0, 1, 777):

        def body(t: LocalTransport, numel: int = numel) -> Tensor:
            x = part(7, numel) if t.rank == size - 1 else torch.zeros(numel)
            broadcast(x, codec, t, root=size - 1)
            return x

        results = run_local(size, body, 20)
        assert all(r.equal(results[0]) for r in results)
        assert not numel or float((results[0] - part(7, numel)).abs().max()) <= limit


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_to_all_moves_uneven_parts(named: tuple[Codec, float], size: int) -> None:
    codec, limit = named

    def length(source: int, target: int) -> int:
        return 0 if source == target + 1 else 50 * source + 7 * target

    def body(t: LocalTransport) -> float:
        inputs = [part(t.rank, length(t.rank, r)) for r in range(size)]
        outputs = [torch.empty(length(r, t.rank)) for r in range(size)]
        all_to_all(outputs, inputs, codec, t)
        return max([0.0, *(float((o - part(r, len(o))).abs().max()) for r, o in enumerate(outputs) if len(o))])

    assert max(run_local(size, body, 20)) <= limit


def test_pipeline_stages_pass_activations_on(named: tuple[Codec, float]) -> None:
    codec, limit = named

    def body(t: LocalTransport) -> Tensor:
        out = torch.empty(300)
        sends = {t.rank + 1: part(t.rank, 300)} if t.rank + 1 < t.size else {}
        recvs = {t.rank - 1: out} if t.rank else {}
        point_to_point(sends, recvs, codec, t)
        return out

    results = run_local(3, body, 20)
    for rank in (1, 2):
        assert float((results[rank] - part(rank - 1, 300)).abs().max()) <= limit


def test_lossless_moves_any_type_bit_by_bit() -> None:
    def body(t: LocalTransport) -> bool:
        mine = [torch.arange(500, dtype=torch.int64), torch.randn(333).bfloat16()][t.rank % 2 :]
        outputs = [
            torch.arange(500, dtype=torch.int64) if t.rank == r else torch.empty(500, dtype=torch.int64) for r in (0, 1)
        ]
        all_gather(outputs, Lossless(), t)
        return all(o.equal(torch.arange(500)) for o in outputs) and bool(mine)

    assert all(run_local(2, body, 20))
