"""Reductions with a codec inside: bounds, identical replicas, odd worlds, exact bytes, weights, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.codecs import (
    CODECS,
    Bf16,
    Codec,
    ErrorBounded,
    ErrorBoundedSum,
    Fp16,
    Int4Block,
    Int8Block,
    RandomK,
    TopK,
)
from collectives.codecs.codec import Flag, Residual
from collectives.errors import CollectiveTimeout, ConfigError, ZenrayError
from collectives.packets import Workspace
from collectives.reduce import (
    Chunks,
    homomorphic,
    native,
    one_shot,
    owner_span,
    recursive_doubling,
    reduce_scatter,
    two_hop,
    two_shot,
)
from collectives.transport import LocalTransport, run_local
from jobs.ranks import RankProcesses, load_target

WORLDS = (1, 2, 3, 5, 8)
Reduce = Callable[[Tensor, LocalTransport], Flag]


def inputs(size: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * size + numel)
    return [torch.randn(numel, generator=generator) for _ in range(size)]


def run(xs: list[Tensor], reduce: Reduce, timeout_s: float = 20.0) -> tuple[Tensor, Flag, list[LocalTransport]]:
    """The common result, flags and transports; asserts that all ranks got the same bytes and flags."""

    def body(transport: LocalTransport) -> tuple[Tensor, Flag, LocalTransport]:
        x = xs[transport.rank].clone()
        return x, reduce(x, transport), transport

    results = run_local(len(xs), body, timeout_s)
    first, flags, _ = results[0]
    assert all(x.view(-1).view(torch.uint8).equal(first.view(-1).view(torch.uint8)) for x, _, _ in results)
    assert all(f == flags for _, f, _ in results)
    return first, flags, [t for _, _, t in results]


def patterns(codec: Codec, size: int) -> dict[str, Reduce]:
    """The patterns that make sense for a codec and a number of ranks."""
    found: dict[str, Reduce] = {
        "two_shot": lambda x, t: two_shot(x, codec, t, seed=3),
        "one_shot": lambda x, t: one_shot(x, codec, t, seed=3),
    }
    if size & (size - 1) == 0:
        found["doubling"] = lambda x, t: recursive_doubling(x, codec, t, seed=3)
    if size % 2 == 0:
        found["two_hop"] = lambda x, t: two_hop(x, codec, codec, t, ranks_per_node=2, seed=3)
    if isinstance(codec, ErrorBoundedSum):
        found["homomorphic"] = lambda x, t: homomorphic(x, codec, t)
    if codec.linear:
        found["native"] = lambda x, t: native(x, codec, t, seed=3)
    return found


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", [n for n in CODECS if n != "lossless"])
def test_replicas_are_identical_whatever_the_codec(name: str, size: int) -> None:
    codec = CODECS[name]
    for numel in (0, 1, size - 1, 37, 1000):
        for pattern, reduce in patterns(codec, size).items():
            run(inputs(size, numel), reduce)
            if numel:
                poisoned = inputs(size, numel)
                poisoned[-1][-1] = torch.nan
                result, flags, _ = run(poisoned, reduce)
                assert not bool(result[-1].isfinite()), pattern
                assert Flag.NONFINITE in flags, pattern


@pytest.mark.parametrize("size", WORLDS)
def test_sums_of_error_bounded_packets_stay_within_the_documented_bounds(size: int) -> None:
    bound, xs = 0.02, inputs(size, 5000)
    exact = sum(x.double() for x in xs)
    codec, summing = ErrorBounded(bound=bound, relative_to="one"), ErrorBoundedSum(bound=bound, relative_to="one")
    limits = {
        "one_shot": size * bound,
        "two_shot": (size + 1) * bound,
        "doubling": 2 * (size - 1) * bound,
        "two_hop": (size + 4) * bound,
        "homomorphic": size * bound,
    }
    for name, reduce in patterns(summing, size).items():
        result = run(xs, reduce)[0]
        assert float((result.double() - exact).abs().max()) <= limits[name] * (1 + 1e-5) + 1e-6 * size, name
    result = run(xs, lambda x, t: two_shot(x, codec, t, op="mean"))[0]
    assert float((result.double() - exact / size).abs().max()) <= 2 * bound + 1e-6
    split = ErrorBounded.for_result(0.05, size, "sum")
    assert float((run(xs, lambda x, t: two_shot(x, split, t))[0].double() - exact).abs().max()) <= 0.05 + 1e-5


def test_errors_are_those_of_one_and_of_two_encodes() -> None:
    """Relative errors of a sum of noise: flat in the number of ranks for two-shot, about 1.4 times one-shot."""
    for size in (2, 8):
        xs = inputs(size, 1 << 14)
        exact = sum(x.double() for x in xs)
        for codec, once in ((Int8Block(), 0.7e-2), (Int4Block(), 9.7e-2), (Bf16(), 1.66e-3)):
            errors = {
                name: float((run(xs, reduce)[0] - exact).norm() / exact.norm())
                for name, reduce in patterns(codec, size).items()
            }
            assert errors["one_shot"] == pytest.approx(once, rel=0.06)
            assert errors["two_shot"] == pytest.approx(2**0.5 * once, rel=0.06)
            assert errors["doubling"] < once * (1.06 if size == 2 else 1.9)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_on_the_wire_are_exact(size: int) -> None:
    numel, codec = 10_000, Int8Block()
    _, _, transports = run(inputs(size, numel), lambda x, t: two_shot(x, codec, t))
    cuts = Chunks.of(numel, size, 256)
    chunk_bytes = [codec.wire_bytes(cuts.whole(r).stop - cuts.whole(r).start) for r in range(size)]
    for rank, transport in enumerate(transports):
        others = sum(b for r, b in enumerate(chunk_bytes) if r != rank)
        assert transport.traffic.sent_bytes("reduce") == others
        assert transport.traffic.sent_bytes("gather") == (size - 1) * chunk_bytes[rank]
    _, _, transports = run(inputs(size, numel), lambda x, t: one_shot(x, codec, t))
    assert all(t.traffic.sent_bytes() == (size - 1) * codec.wire_bytes(numel) for t in transports)


def test_large_tensors_travel_in_parts() -> None:
    numel = 3 * (1 << 20) + 77
    xs = inputs(3, numel)
    cuts = Chunks.of(numel, 3, 256)
    assert cuts.num_parts == 4
    assert sum(cuts.span(p, r).stop - cuts.span(p, r).start for p in range(4) for r in range(3)) == numel
    result, flags, _ = run(xs, lambda x, t: two_shot(x, Int8Block(), t, op="mean"))
    exact = sum(x.double() for x in xs) / 3
    assert float((result - exact).norm() / exact.norm()) < 1.1e-2
    assert flags == Flag.NONE


def test_other_shapes_and_types_go_through_fp32() -> None:
    xs = [x.view(10, 20).bfloat16() for x in inputs(3, 200)]
    result = run(xs, lambda x, t: two_shot(x, Bf16(), t, op="mean"))[0]
    assert result.shape == (10, 20)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), sum(x.float() for x in xs) / 3, rtol=2e-2, atol=1e-2)


def test_weights_leave_out_ranks_and_divide_by_their_total() -> None:
    xs, weights = inputs(3, 600), [1.0, 0.0, 3.0]
    xs[1].fill_(torch.nan)
    expected = (xs[0] + 3 * xs[2]) / 4
    for reduce in (two_shot, one_shot):
        result = run(xs, lambda x, t, f=reduce: f(x, Bf16(), t, op="mean", weights=weights))[0]  # type: ignore[misc]
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    zero = run(xs, lambda x, t: two_shot(x, Bf16(), t, op="mean", weights=[0, 0, 0]))[0]
    assert not zero.any()
    halves = run(xs, lambda x, t: homomorphic(x, ErrorBoundedSum(), t, op="mean", weights=[1, 0, 1]))[0]
    assert float((halves - (xs[0] + xs[2]) / 2).abs().max()) < 0.15
    single = run(xs[:1], lambda x, t: two_shot(x, Bf16(), t, op="sum", weights=[2.0]))[0]
    assert single.equal(2 * xs[0])
    for bad in ([1.0], [1, 1, -1], [1, 1, float("nan")]):
        with pytest.raises(ConfigError, match="finite numbers"):
            run(xs, lambda x, t, w=bad: two_shot(x, Bf16(), t, weights=w))  # type: ignore[misc]


def test_residuals_of_worker_and_owner_together_hold_the_whole_error() -> None:
    size, numel, codec = 3, 2000, Int4Block()
    xs = inputs(size, numel)

    def body(t: LocalTransport) -> tuple[Tensor, Tensor, Tensor]:
        x, span = xs[t.rank].clone(), owner_span(numel, size, t.rank, codec)
        worker, owner = torch.zeros(numel), torch.zeros(span.stop - span.start)
        two_shot(x, codec, t, residual=Residual.in_place(worker), owner_residual=Residual.in_place(owner))
        return x, worker, owner

    results = run_local(size, body, 20)
    lost = sum(worker for _, worker, _ in results) + torch.cat([owner for _, _, owner in results])
    torch.testing.assert_close(results[0][0] + lost, sum(xs), rtol=1e-4, atol=1e-4)


def test_error_feedback_makes_the_average_result_right() -> None:
    xs, steps = inputs(2, 512), 200

    def body(t: LocalTransport) -> Tensor:
        residual, total, space = Residual.in_place(torch.zeros(512)), torch.zeros(512), Workspace()
        for step in range(steps):
            x = xs[t.rank].clone()
            one_shot(x, TopK(density=0.05), t, op="mean", residual=residual, seed=step, workspace=space)
            total += x
        return total / steps

    average = run_local(2, body, 20)[0]
    expected = (xs[0] + xs[1]) / 2
    assert float((average - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("size", WORLDS)
def test_reduce_scatter_gives_each_rank_its_exact_share(size: int) -> None:
    xs = inputs(size, 6 * size)

    def body(t: LocalTransport) -> Tensor:
        out, x = torch.empty(6), xs[t.rank].clone()
        reduce_scatter(x, out, Int8Block(), t, op="mean")
        assert x.equal(xs[t.rank]), "the input must stay"
        return out

    result = torch.cat(run_local(size, body, 20))
    torch.testing.assert_close(result, sum(xs) / size, rtol=0, atol=0.02)


def test_reduce_scatter_refuses_an_output_of_another_size() -> None:
    with pytest.raises(ConfigError, match="owns 6 of 18"):
        run_local(3, lambda t: reduce_scatter(torch.ones(18), torch.empty(5), Int8Block(), t), 20)


def test_homomorphic_sums_do_not_depend_on_the_order_of_ranks() -> None:
    xs = inputs(5, 3000)
    codec = ErrorBoundedSum(bound=0.05)
    first = run(xs, lambda x, t: homomorphic(x, codec, t))[0]
    assert first.equal(run(xs[::-1], lambda x, t: homomorphic(x, codec, t))[0])
    with pytest.raises(ConfigError, match="weights must be 0 or 1"):
        run(xs, lambda x, t: homomorphic(x, codec, t, weights=[0.5] * 5))


def test_native_sums_run_in_the_wire_type() -> None:
    xs = inputs(4, 3000)
    expected = sum(xs) / 4
    for codec, tolerance in ((Bf16(), 1e-2), (Fp16(), 2e-3)):
        result = run(xs, lambda x, t, c=codec: native(x, c, t, op="mean"))[0]  # type: ignore[misc]
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    large = [torch.full((10,), 40_000.0)] * 4
    assert run(large, lambda x, t: native(x, Fp16(), t, op="mean"))[0].equal(large[0]), "divide before the cast"
    sent = run(xs, lambda x, t: native(x, RandomK(density=0.1), t, op="mean", seed=5))[0]
    chosen = sent != 0
    assert int(chosen.sum()) == 300
    torch.testing.assert_close(sent[chosen], expected[chosen])
    with pytest.raises(ConfigError, match="not linear"):
        run(xs, lambda x, t: native(x, Int8Block(), t))


def test_nodes_exchange_only_shards() -> None:
    xs = inputs(4, 4096)
    result, _, transports = run(xs, lambda x, t: two_hop(x, Bf16(), Int8Block(), t, ranks_per_node=2, op="mean"))
    exact = sum(x.double() for x in xs) / 4
    assert float((result - exact).norm() / exact.norm()) < 1.2e-2
    between = sum(int(v[2:].sum()) for v in transports[0].traffic.sent.values())
    assert between == 2 * Int8Block().wire_bytes(1024)


def test_impossible_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="whole number of nodes"):
        run(inputs(3, 10), lambda x, t: two_hop(x, Bf16(), Bf16(), t, ranks_per_node=2))
    with pytest.raises(ConfigError, match="power of two"):
        run(inputs(3, 10), lambda x, t: recursive_doubling(x, Bf16(), t))


def test_a_workspace_is_reused() -> None:
    def body(t: LocalTransport) -> tuple[int, int]:
        space = Workspace()
        sizes = []
        for _ in range(2):
            two_shot(torch.ones(5000), Int8Block(), t, workspace=space)
            sizes.append(space.num_bytes)
        return sizes[0], sizes[1]

    assert all(0 < first == second for first, second in run_local(2, body, 20))


def test_a_silent_peer_ends_in_an_error_on_the_others() -> None:
    gone = threading.Event()

    def body(t: LocalTransport) -> None:
        if t.rank == 1:
            gone.wait(20)
            return
        try:
            two_shot(torch.ones(100), Int8Block(), t)
        finally:
            gone.set()

    with pytest.raises(CollectiveTimeout, match="rank 0"):
        run_local(2, body, 0.3)


def test_ranks_that_disagree_about_sizes_get_an_error() -> None:
    for codec in (Int8Block(), ErrorBounded()):
        with pytest.raises(ZenrayError):
            run_local(2, lambda t, c=codec: two_shot(torch.ones(100 + 900 * t.rank), c, t), 2.0)  # type: ignore[misc]


def test_a_rank_that_raises_stops_its_peers() -> None:
    def body(t: LocalTransport) -> None:
        if t.rank == 1:
            two_shot(torch.ones(100).double().view(10, 10).T, Int8Block(), t)
        else:
            two_shot(torch.ones(100), Int8Block(), t)

    with pytest.raises(ConfigError, match="contiguous"):
        run_local(2, body, 5)


def test_chunks_cover_everything_once() -> None:
    for numel in (0, 1, 255, 256, 257, 100_000, 3_000_000):
        for size in (1, 2, 3, 5, 8, 32):
            cuts = Chunks.of(numel, size, 256)
            spans = [cuts.span(p, r) for r in range(size) for p in range(cuts.num_parts)]
            covered = np.concatenate([np.arange(s.start, s.stop) for s in spans]) if numel < 1000 else None
            assert covered is None or covered.tolist() == list(range(numel))
            assert sum(s.stop - s.start for s in spans) == numel
            assert all(s.start % 256 == 0 or s.start == numel for s in spans)


def test_gloo_gives_the_bytes_of_threads_and_a_killed_rank_ends_the_others() -> None:
    programs = str(Path(__file__).with_name("reduce_programs.py"))
    workout = load_target(f"{programs}:workout")
    threads = run_local(4, lambda transport: workout(transport, {}))
    with RankProcesses(4, f"{programs}:workout_then_death", {}, timeout_s=120) as ranks:
        processes = ranks.wait([0, 1, 2])
    for seen, expected in zip(processes, threads, strict=False):
        assert seen.pop("error") in ("PeerLost", "CollectiveError")
        assert seen.pop("seconds") < 20
        assert seen == expected
    common = [{k: v for k, v in t.items() if k not in ("bytes", "reduce_scatter")} for t in threads]
    assert all(c == common[0] for c in common)
