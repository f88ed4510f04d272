"""What holds for every codec: one format in NumPy and numba, bounded packets, declared properties, clean refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives.codecs import CODECS, Bf16, Codec, Int8Block, TopK
from collectives.codecs.block import STREAM_BYTES, BlockCodec
from collectives.codecs.codec import HEADER_BYTES, Flag, Residual, packet_flags, read_header
from collectives.errors import ConfigError, WireFormatError

Inputs = Callable[[int], dict[str, Tensor]]


def same(a: Tensor, b: Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


def decoded(codec: Codec, packet: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), 7.0)
    codec.decode(packet, out)
    return out


def test_numpy_and_numba_write_and_read_the_same_bytes(
    lossy: Codec, sizes: tuple[int, ...], hard_inputs: Inputs
) -> None:
    twin = lossy.twin()
    for numel in sizes:
        for name, x in hard_inputs(numel).items():
            packet = lossy.encode(x, seed=5)
            assert same(packet, twin.encode(x, seed=5)), (numel, name)
            ours, theirs = torch.ones(numel), torch.ones(numel)
            lossy.decode(packet, ours)
            twin.decode(packet, theirs)
            assert same(ours, theirs), (numel, name)
            lossy.decode(packet, ours, accumulate=True, scale=0.3)
            twin.decode(packet, theirs, accumulate=True, scale=0.3)
            assert same(ours, theirs), (numel, name)


def test_error_feedback_and_sums_are_the_same_in_numpy_and_numba(lossy: Codec, hard_inputs: Inputs) -> None:
    twin = lossy.twin()
    for numel in (0, 1, 257, 70001):
        cases = hard_inputs(numel)
        for name in ("normal", "wide", "nan", "zero"):
            x = cases[name]
            ours, theirs = torch.full((numel,), 0.25), torch.full((numel,), 0.25)
            packet = lossy.encode(x, Residual.in_place(ours), seed=3)
            assert same(packet, twin.encode(x, Residual.in_place(theirs), seed=3)), (numel, name)
            assert same(ours, theirs), (numel, name)
        packets = [lossy.encode(cases[name], seed=2) for name in ("normal", "wide", "zero")]
        args = (packets, numel, [1.0, 2.0, 0.0], 1 / 3)
        assert same(lossy.reduce_encode(*args, seed=9), twin.reduce_encode(*args, seed=9)), numel


def test_packets_stay_within_their_announced_size(codec: Codec, sizes: tuple[int, ...], hard_inputs: Inputs) -> None:
    for numel in sizes:
        for name, x in hard_inputs(numel).items():
            room = torch.full((codec.wire_bytes(numel) + 32,), 0xAB, dtype=torch.uint8)
            packet = codec.encode(x, out=room)
            assert packet.numel() % 16 == 0
            assert packet.numel() <= codec.wire_bytes(numel), (numel, name)
            assert not codec.fixed_size or packet.numel() == codec.wire_bytes(numel)
            assert bool((room[codec.wire_bytes(numel) :] == 0xAB).all()), "wrote beyond the packet"
            assert same(packet, codec.encode(x)), "bytes depend on the buffer"
            assert read_header(packet.numpy())[2] == numel


def test_values_that_are_not_finite_reach_the_receiver(codec: Codec, hard_inputs: Inputs) -> None:
    for name in ("nan", "inf", "minus inf"):
        x = hard_inputs(1025)[name]
        packet = codec.encode(x)
        assert not bool(decoded(codec, packet, 1025)[512].isfinite()), name
        if codec.name != "lossless":
            assert Flag.NONFINITE in packet_flags(packet)
            old = torch.full((1025,), 0.5)
            codec.encode(x, residual := Residual(old, torch.empty(1025)))
            assert residual.update[512] == 0.5, "the residual of a block that is not finite must stay"
            assert bool(residual.update.isfinite().all())
    assert packet_flags(codec.encode(hard_inputs(1025)["normal"])) == Flag.NONE


def test_zero_decodes_to_zero_with_zero_residual(codec: Codec) -> None:
    if codec.name == "lossless":
        pytest.skip("leaves no residual")
    residual = Residual.in_place(torch.zeros(700))
    packet = codec.encode(torch.zeros(700), residual)
    assert not decoded(codec, packet, 700).any()
    assert not residual.update.any()


def test_error_feedback_keeps_what_the_packet_lost(lossy: Codec) -> None:
    x, old = torch.randn(3001), torch.randn(3001)
    residual = Residual(old.clone(), torch.empty(3001))
    packet = lossy.encode(x, residual, seed=1)
    assert same(residual.value, old)
    torch.testing.assert_close(decoded(lossy, packet, 3001) + residual.update, x + old, rtol=1e-5, atol=1e-5)


def test_error_feedback_delivers_everything_in_the_end(lossy: Codec) -> None:
    """The mean of what was sent approaches the constant input, for every codec that asks for feedback."""
    if lossy.unbiased or lossy.name not in ("topk", "sq", "powersgd", "randomk", "sign"):
        pytest.skip("needs none, or more steps")
    x, steps = torch.randn(512), 400
    residual, sent = Residual.in_place(torch.zeros(512)), torch.zeros(512)
    for step in range(steps):
        lossy.decode(lossy.encode(x, residual, seed=step), sent, accumulate=True)
    assert float((sent / steps - x).norm() / x.norm()) < 0.35
    torch.testing.assert_close(sent + residual.value, x * steps, rtol=1e-3, atol=1e-2)


def test_reduce_is_decode_and_add_in_rank_order(lossy: Codec) -> None:
    tensors = [torch.randn(3001) for _ in range(3)]
    packets = [lossy.encode(x, seed=4) for x in tensors]
    expected = torch.zeros(3001)
    for packet, weight in zip(packets, (1.0, 0.5, 2.0), strict=True):
        expected += decoded(lossy, packet, 3001) * weight
    expected *= 0.25
    out = torch.empty(3001)
    lossy.reduce(packets, out, [1.0, 0.5, 2.0], 0.25)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert same(lossy.reduce_encode(packets, 3001, [1.0, 0.5, 2.0], 0.25, seed=8), lossy.encode(out, seed=8))


def test_a_packet_of_weight_zero_is_not_looked_at() -> None:
    codec, x = Int8Block(), torch.randn(600)
    garbage = torch.full((codec.wire_bytes(600),), 255, dtype=torch.uint8)
    out = torch.empty(600)
    codec.reduce([codec.encode(x), garbage], out, [1.0, 0.0])
    assert same(out, decoded(codec, codec.encode(x), 600))


def test_sums_keep_the_flags_of_their_sources() -> None:
    codec = CODECS["fp16"]
    small = torch.full((600,), 1e-9)
    packet = codec.reduce_encode([codec.encode(small), codec.encode(torch.ones(600))], 600)
    assert packet_flags(packet) == Flag.UNDERFLOW


def test_linear_packets_may_be_added_on_the_wire(codec: Codec) -> None:
    a, b = torch.randn(1000), torch.randn(1000)
    first, second = codec.encode(a, seed=6), codec.encode(b, seed=6)
    if not codec.linear:
        with pytest.raises(ConfigError, match="cannot be added"):
            codec.summand(first)
        return
    expected = decoded(codec, first, 1000) + decoded(codec, second, 1000)
    codec.summand(first).add_(codec.summand(second))
    torch.testing.assert_close(decoded(codec, first, 1000), expected, rtol=1e-2, atol=1e-2)


def test_unbiased_codecs_are_right_on_average(lossy: Codec) -> None:
    if not lossy.unbiased:
        pytest.skip("not declared")
    x, draws, total = torch.randn(512), 2000, torch.zeros(512)
    for seed in range(draws):
        lossy.decode(lossy.encode(x, seed=seed), total, accumulate=True)
    assert float((total / draws - x).norm() / x.norm()) < 0.1


def test_seeds_change_random_codecs_only(lossy: Codec) -> None:
    x = torch.randn(5000)
    assert same(lossy.encode(x, seed=1), lossy.encode(x, seed=1))
    draws = lossy.unbiased or lossy.name in ("randomk", "powersgd") or getattr(lossy, "method", "") == "sampled"
    assert same(lossy.encode(x, seed=1), lossy.encode(x, seed=2)) or draws


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_corrupted_packets_raise_or_decode_but_never_anything_else(data: st.DataObject, codec: Codec) -> None:
    numel = data.draw(st.sampled_from((0, 1, 40, 300, 1500)))
    packet = codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(1))).clone()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, packet.numel() - 1))
        packet[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, packet.numel()))
    packet = packet[: data.draw(st.sampled_from((packet.numel(), cut)))]
    out = torch.full((numel,), 7.0)
    try:
        codec.decode(packet, out)
    except WireFormatError:
        assert bool((out == 7).all()), "a refused packet must leave the output as it was"


def test_the_header_is_checked_field_by_field() -> None:
    codec = Bf16()
    for place, value, message in (
        (0, 0x00, "no packet"),
        (2, 9, "format version 9"),
        (3, 3, "written by codec 3"),
        (8, 41, "claims 41 elements, expected 40"),
        (15, 255, "claims"),
    ):
        packet = codec.encode(torch.ones(40))
        packet[place] = value
        with pytest.raises(WireFormatError, match=message):
            decoded(codec, packet, 40)
    with pytest.raises(WireFormatError, match="no room"):
        decoded(codec, packet[: HEADER_BYTES - 1], 40)
    with pytest.raises(WireFormatError, match="exactly 96"):
        decoded(codec, torch.cat([codec.encode(torch.ones(40)), torch.zeros(16, dtype=torch.uint8)]), 40)


def test_wrong_buffers_are_refused_with_what_to_do() -> None:
    codec, x = Int8Block(), torch.ones(40)
    with pytest.raises(ConfigError, match="at least 80 bytes"):
        codec.encode(x, out=torch.empty(64, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="not aligned"):
        codec.encode(x, out=torch.empty(200, dtype=torch.uint8)[1:])
    with pytest.raises(ConfigError, match="float64"):
        codec.encode(x.double())
    with pytest.raises(ConfigError, match="strides"):
        codec.encode(torch.ones(4, 10).T)
    with pytest.raises(ConfigError, match="residual has 3"):
        codec.encode(x, Residual.in_place(torch.zeros(3)))
    with pytest.raises(ConfigError, match="density"):
        TopK(density=0.0)


def test_packets_may_lie_anywhere_in_memory(codec: Codec) -> None:
    packet = codec.encode(torch.randn(300))
    shifted = torch.empty(packet.numel() + 3, dtype=torch.uint8)[3:].copy_(packet)
    assert same(decoded(codec, packet, 300), decoded(codec, shifted, 300))


@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if isinstance(codec, BlockCodec)])
def test_results_beyond_the_caches_are_the_same(name: str, first: int) -> None:
    """Large results are written past the caches where they start at a multiple of 16 bytes, and end in a short block."""
    numel = STREAM_BYTES // 4 + 333
    packet = CODECS[name].encode(torch.randn(numel, generator=torch.Generator().manual_seed(1)))
    room = torch.empty(numel + 4)
    ours = room[first : first + numel]
    CODECS[name].decode(packet, ours)
    assert same(ours, decoded(CODECS[name].twin(), packet, numel))


def test_the_registry_names_each_codec_once() -> None:
    assert all(codec.name == name for name, codec in CODECS.items())
    assert len({codec.codec_id for codec in CODECS.values()}) == len(CODECS) == 14


def test_defaults_of_error_feedback_follow_codec_and_optimizer() -> None:
    on = {name for name, codec in CODECS.items() if codec.ef_default("adamw")}
    assert on == {"sq", "topk", "dgc", "powersgd"}
    assert {name for name, codec in CODECS.items() if codec.ef_default("sgd")} == on | {"randomk"}


def test_warm_up_compiles_without_a_trace(codec: Codec) -> None:
    if codec.name != "lossless":
        codec.warm_up()
