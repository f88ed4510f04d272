"""The right values: hand-made packets, torch's own casts and sorts, matrices of known rank."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.codecs import (
    Bf16,
    Codec,
    Dgc,
    Fp8Block,
    Fp16,
    Int4Block,
    Int8Block,
    Lossless,
    LowRank,
    RandomK,
    SelectQuantise,
    Sign,
    TopK,
)
from collectives.codecs.cast import UnderflowGuard
from collectives.codecs.codec import Flag, Residual, packet_flags
from collectives.codecs.hashing import derive_seed, hash32, hash32_numpy, keys
from collectives.errors import CollectiveError, WireFormatError


def through(codec: Codec, x: Tensor, seed: int = 0) -> Tensor:
    out = torch.empty_like(x)
    codec.decode(codec.encode(x, seed=seed), out)
    return out


def relative_error(codec: Codec, x: Tensor) -> float:
    return float((through(codec, x) - x).norm() / x.norm())


def test_int8_by_hand() -> None:
    x = torch.zeros(256)
    x[:5] = torch.tensor([127.0, -63.5, 0.5, 1.5, -127.0])
    packet = Int8Block().encode(x)
    assert packet.numel() == 16 + 16 + 256
    assert packet[16:20].view(torch.float32).item() == 1.0
    assert packet[32:37].view(torch.int8).tolist() == [127, -64, 0, 2, -127], "ties go to even"
    assert packet[:4].numpy().tobytes() == b"zC\x01\x03"


def test_int4_by_hand() -> None:
    x = torch.zeros(32)
    x[0], x[16], x[1] = 7.0, -7.0, 2.0
    packet = Int4Block().encode(x)
    assert packet.numel() == 16 + 16 + 16
    assert packet[16:18].view(torch.bfloat16).item() == 1.0
    assert packet[32:35].tolist() == [15 | (1 << 4), 10 | (8 << 4), 8 | (8 << 4)]


def test_int8_error_is_half_a_step() -> None:
    x = torch.randn(256 * 50) * torch.exp(torch.randn(256 * 50))
    step = x.view(-1, 256).abs().amax(1, keepdim=True) / 127
    assert bool(((through(Int8Block(), x) - x).view(-1, 256).abs() <= step * 0.5001).all())


@pytest.mark.parametrize(
    ("codec", "low", "high"),
    [
        (Bf16(), 1.4e-3, 1.9e-3),
        (Fp16(), 1.8e-4, 2.4e-4),
        (Int8Block(), 6e-3, 8e-3),
        (Fp8Block(), 2.4e-2, 2.8e-2),
        (Fp8Block(form="e5m2"), 4.9e-2, 5.6e-2),
        (Int4Block(), 9e-2, 1.05e-1),
        (Int4Block(stochastic=True), 1.3e-1, 1.45e-1),
        (Sign(), 0.59, 0.61),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_errors_on_normal_values(codec: Codec, low: float, high: float) -> None:
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    assert low < relative_error(codec, x) < high


def test_rotation_spreads_an_outlier() -> None:
    x = torch.randn(32 * 500, generator=torch.Generator().manual_seed(0))
    x[::32] *= 30
    plain, rotated = through(Int4Block(), x), through(Int4Block(hadamard=True), x)
    small = torch.arange(len(x)) % 32 != 0
    assert float((rotated - x)[small].norm()) < 0.75 * float((plain - x)[small].norm())


def test_casts_equal_torch() -> None:
    x = torch.cat([torch.randn(5000) * torch.exp(10 * torch.randn(5000)), torch.tensor([0.0, -0.0, 1e-45, 3.4e38])])
    assert torch.equal(through(Bf16(), x), x.bfloat16().float())
    y = x.clamp(-65504, 65504)
    assert torch.equal(through(Fp16(), y), y.half().float())
    assert through(Bf16(), torch.tensor([torch.inf, -torch.inf])).tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize(
    ("form", "dtype", "top"), [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)]
)
def test_fp8_equals_torch_inside_a_block(form: str, dtype: torch.dtype, top: float) -> None:
    x = (torch.randn(2560) * torch.exp(3 * torch.randn(2560))).view(-1, 256)
    amax = x.abs().amax(1, keepdim=True)
    expected = (x * (top / amax)).clamp(-top, top).to(dtype).float() * (amax / top)
    assert torch.equal(through(Fp8Block(form=form), x.view(-1)), expected.view(-1))  # type: ignore[arg-type]


def test_all_fp8_codes_decode_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for form, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        codec = Fp8Block(form=form)  # type: ignore[arg-type]
        packet = codec.encode(torch.ones(256))
        packet[16:20].view(torch.float32)[0] = 1.0
        packet[32:288] = codes
        out, expected = torch.empty(256), codes.view(dtype).float()
        codec.decode(packet, out)
        valid = expected.isfinite()
        assert torch.equal(out[valid], expected[valid])


def test_fp16_guards_against_both_ends_of_its_range() -> None:
    x = torch.full((1000,), 2.0)
    x[3] = 65505.0
    packet = Fp16().encode(x)
    assert packet_flags(packet) == Flag.NONFINITE
    out = torch.empty(1000)
    Fp16().decode(packet, out)
    assert out[3].isnan()
    assert packet_flags(Fp16().encode(torch.full((1000,), 65504.0))) == Flag.NONE
    x = torch.ones(1000)
    x[:9] = 1e-9
    assert packet_flags(Fp16().encode(x)) == Flag.NONE
    x[:11] = 1e-9
    assert packet_flags(Fp16().encode(x)) == Flag.UNDERFLOW
    guard = UnderflowGuard(max_consecutive=3)
    assert [guard.observe(f) for f in (Flag.UNDERFLOW, Flag.UNDERFLOW, Flag.NONE, Flag.UNDERFLOW)] == [1, 1, 0, 1]
    guard.observe(Flag.UNDERFLOW)
    with pytest.raises(CollectiveError, match="raise the loss scale"):
        guard.observe(Flag.UNDERFLOW)


def test_exact_top_k_is_that_of_torch() -> None:
    x = torch.randn(10007)
    out = through(TopK(method="exact"), x)
    index = x.abs().topk(101).indices
    expected = torch.zeros(10007)
    expected[index] = x[index]
    assert torch.equal(out, expected)


def test_ties_go_to_the_lower_index() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, 2.0, -1.0])
    assert through(TopK(method="exact", density=0.6), x).tolist() == [1, -1, 0, 2, 0]
    assert through(TopK(method="block", density=0.6), x).tolist() == [1, -1, 1, 2, -1], "a short block sends all it has"
    x = torch.ones(2048)
    assert through(TopK(method="block", density=3 / 1024), x).nonzero().view(-1).tolist() == [0, 1, 2, 1024, 1025, 1026]


def test_the_sampled_threshold_takes_nearly_the_largest() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    sent = through(TopK(), x)
    assert 0.8 * 2000 <= int((sent != 0).sum()) <= 2000
    exact = float(through(TopK(method="exact"), x).norm())
    assert float(sent.norm()) > 0.85 * exact
    assert int((through(TopK(), torch.where(x > 3.5, x, 0.0)) != 0).sum()) == int((x > 3.5).sum()), "never a zero"


def test_indices_become_a_bitmap_where_that_is_smaller() -> None:
    x = torch.randn(10_000)
    assert TopK(method="exact", density=0.01).encode(x).numel() == 16 + 16 + 400 + 400
    assert TopK(method="exact", density=0.25).encode(x).numel() == 16 + 16 + 1264 + 10_000
    # 11 of each 1024, in 9 whole blocks and one of 784.
    assert TopK(method="block", density=0.01).encode(x).numel() == 16 + 16 + pad(2 * 110) + pad(4 * 110)


def test_select_and_quantise_costs_a_quarter_bit_per_value() -> None:
    x = torch.randn(1 << 17)
    packet = SelectQuantise().encode(x)
    assert packet.numel() * 8 / x.numel() < 0.28
    assert relative_error(SelectQuantise(), x) == pytest.approx(relative_error(TopK(method="block"), x), rel=1e-3)


def test_random_k_takes_one_of_each_stratum() -> None:
    x = torch.arange(1, 1001, dtype=torch.float32)
    sent = through(RandomK(density=0.1), x, seed=3).view(100, 10)
    assert bool(((sent != 0).sum(1) == 1).all())
    scaled = through(RandomK(density=0.1, rescale=True), x, seed=3).view(100, 10)
    assert torch.equal(scaled, sent * 10)
    assert not torch.equal(sent, through(RandomK(density=0.1), x, seed=4).view(100, 10))


def test_a_matrix_of_low_rank_comes_back() -> None:
    matrix = torch.randn(60, 3) @ torch.randn(3, 40)
    torch.testing.assert_close(through(LowRank(rank=3, columns=40), matrix), matrix, rtol=1e-3, atol=1e-3)
    assert LowRank(rank=3, columns=40).encode(matrix).numel() == 32 + pad(4 * 3 * 60) + pad(4 * 3 * 40)
    for scale in (1e30, 1e-30):
        torch.testing.assert_close(
            through(LowRank(rank=3, columns=40), matrix * scale) / scale, matrix, rtol=1e-3, atol=1e-3
        )


def pad(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def test_sign_by_hand() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, -6.0])
    packet = Sign().encode(x)
    assert packet[16:20].view(torch.float32).item() == 3.0
    assert packet[32].item() == 0b1010
    assert through(Sign(), x).tolist() == [3, -3, 3, -3]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]
)
def test_lossless_returns_every_bit(dtype: torch.dtype) -> None:
    for numel in (0, 1, 7, 5000):
        x = (torch.randn(numel) * 50).to(dtype)
        if dtype == torch.float32 and numel:
            x[0] = torch.nan
        packet = Lossless().encode(x)
        out = torch.empty_like(x)
        Lossless().decode(packet, out)
        assert out.view(torch.uint8).equal(x.view(torch.uint8))
        assert packet.numel() <= Lossless().wire_bytes(numel, dtype)
    assert Lossless().encode(torch.zeros(5000, dtype=dtype)).numel() < 100
    for other in (torch.uint8, torch.int16, torch.int32, torch.int64):  # narrower: the packet exceeds their bound
        if other.itemsize != dtype.itemsize:
            with pytest.raises(WireFormatError, match="-byte values"):
                Lossless().decode(packet, torch.empty(5000, dtype=other))


def test_momentum_correction_by_hand() -> None:
    codec = Dgc(density=0.25, method="exact", momentum=0.5)
    velocity, residual = Residual.in_place(torch.tensor([2.0, 0, 0, 0])), Residual.in_place(torch.zeros(4))
    u = codec.accelerate(torch.tensor([1.0, 4.0, 0.5, 0.0]), velocity, 1)
    assert u.tolist() == [2.0, 4.0, 0.5, 0.0]
    out = torch.empty(4)
    codec.decode(codec.encode(u, residual), out)
    codec.clear_sent(velocity, residual)
    assert out.tolist() == [0, 4, 0, 0]
    assert residual.value.tolist() == [2, 0, 0.5, 0]
    assert velocity.value.tolist() == [2, 0, 0.5, 0]
    assert Dgc(clip=1.0).accelerate(torch.tensor([3.0, 4.0]), Residual.in_place(torch.zeros(2)), 4).norm() == 0.5
    assert [Dgc().at_epoch(e).density for e in range(6)] == [0.25, 0.0625, 0.0156, 0.004, 0.001, 0.001]


def test_hashes_agree_and_spread() -> None:
    low, high = keys(derive_seed(1, 2, "layer.weight"))
    index = np.arange(5000, dtype=np.int64)
    ours = hash32_numpy(index, low, high)
    assert [hash32(np.int64(i), low, high) for i in (0, 1, 4999)] == ours[[0, 1, 4999]].tolist()
    assert len(np.unique(ours)) == 5000
    assert 0.48 < ours.mean() / 2**32 < 0.52
    assert derive_seed(1, 2) != derive_seed(2, 1) != derive_seed(1, "2")


def test_nothing_warns_on_hard_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.tensor([torch.nan, 3e38, -3e38, 1e-45] * 100)
        for codec in (Int8Block(), Int4Block(), Bf16(), Fp16(), Fp8Block()):
            for version in (codec, codec.twin()):
                version.reduce_encode([version.encode(x, Residual.in_place(x.clone()))] * 2, 400)
