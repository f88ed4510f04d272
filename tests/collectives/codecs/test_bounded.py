"""The error-bounded codec keeps its promise for every value, and its packets add."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives.codecs import ErrorBounded, ErrorBoundedSum
from collectives.codecs.bounded import SIDE, bin_width
from collectives.errors import ConfigError, WireFormatError


def absolute(bound: float) -> ErrorBounded:
    return ErrorBounded(bound=bound, relative_to="one")


def test_ten_thousand_random_tensors_keep_the_bound() -> None:
    generator = np.random.default_rng(0)
    out = torch.empty(45)
    for case in range(10_000):
        exponents = (
            generator.uniform(-44, 38, 45) if case % 2 else generator.uniform(-44, 38) + generator.normal(0, 1, 45)
        )
        with np.errstate(over="ignore"):
            x = (generator.standard_normal(45) * 10.0**exponents).astype(np.float32)
        x[~np.isfinite(x)] = np.float32(3e38)
        bound = float(
            10.0 ** generator.uniform(-46, 38) if case % 3 else np.abs(x).max() * 10 ** generator.uniform(-6, 0)
        )
        codec = absolute(bound)
        codec.decode(codec.encode(torch.from_numpy(x)), out)
        worst = np.abs(x.astype(np.float64) - out.numpy().astype(np.float64)).max()
        assert worst <= bound, (case, bound, worst)


def test_the_layout_by_hand() -> None:
    """bound 0.5 makes the width 1 - 2^-12: 3 becomes q = 3 (two bits), -1 becomes q = -1."""
    x = torch.zeros(64)
    x[0], x[5] = 3.0, -1.0
    packet = absolute(0.5).encode(x)
    assert packet[16:20].view(torch.float32).item() == 1 - 2.0**-12
    assert packet[24:32].view(torch.int64).item() == 12
    assert packet[SIDE : SIDE + 2].tolist() == [2, 0], "the second block is all zero and costs one byte"
    assert packet[48:60].view(torch.int32).tolist() == [1 << 5, (1 << 0) | (1 << 5), 1 << 0]
    assert packet.numel() == 64


def test_values_that_cannot_be_kept_within_the_bound_are_sent_as_they_are() -> None:
    x = torch.randn(96)
    x[40] = torch.inf
    x[41] = torch.nan
    out = torch.empty(96)
    absolute(0.1).decode(absolute(0.1).encode(x), out)
    assert out[32:64].view(torch.int32).equal(x[32:64].view(torch.int32))
    assert bool(((out - x)[:32].abs() <= 0.1).all())
    exact = absolute(0.0)
    exact.decode(exact.encode(x), out)
    assert out.view(torch.int32).equal(x.view(torch.int32))


def test_relative_bounds_follow_the_tensor() -> None:
    x = torch.randn(10_000) * 5
    assert ErrorBounded(bound=0.1).for_tensor(x).bound == pytest.approx(0.1 * float(x.square().mean().sqrt()), rel=1e-5)
    codec = ErrorBounded(bound=1e-3, relative_to="range").for_tensor(x)
    assert codec.bound == pytest.approx(1e-3 * float(x.max() - x.min()), rel=1e-5)
    x[0], x[1] = torch.nan, torch.inf
    assert ErrorBounded(bound=0.1).for_tensor(x).bound == pytest.approx(0.5, rel=0.05)
    assert 0 < ErrorBounded(bound=0.1).for_tensor(torch.full((10,), 3e38)).bound < torch.inf
    assert ErrorBounded().for_tensor(torch.empty(0)).bound == 0


def test_half_an_rms_zeroes_most_values() -> None:
    x = (torch.randn(1024, 64) * torch.exp(torch.randn(1024, 1))).view(-1)
    packet = ErrorBounded(bound=0.5).encode(x)
    assert packet.numel() * 8 / x.numel() < 3
    out = torch.empty_like(x)
    ErrorBounded(bound=0.5).decode(packet, out)
    assert 0.5 < float((out == 0).float().mean()) < 0.9


def test_packets_add_without_being_decoded() -> None:
    codec = ErrorBoundedSum(bound=0.01, relative_to="one")
    tensors = [torch.randn(1000) for _ in range(5)]
    packets = [codec.encode(x) for x in tensors]
    total, out = codec.add(packets, 1000), torch.empty(1000)
    codec.decode(total, out)
    assert float((out.double() - sum(x.double() for x in tensors)).abs().max()) <= 5 * 0.01
    assert codec.add(packets[::-1], 1000).equal(total), "integer sums do not depend on the order"
    assert total.equal(codec.twin().add(packets, 1000))  # type: ignore[attr-defined]


def test_a_block_that_is_raw_anywhere_becomes_raw_in_the_sum() -> None:
    codec = ErrorBoundedSum(bound=0.01, relative_to="one")
    a, b = torch.ones(64), torch.ones(64)
    a[40] = torch.nan
    out = torch.empty(64)
    codec.decode(codec.add([codec.encode(a), codec.encode(b)], 64), out)
    assert out[40].isnan()
    assert bool(((out - 2)[:32].abs() <= 0.02).all())
    assert int(out.isnan().sum()) == 1
    huge = torch.full((32,), 0.0199 * 2**29)
    out = torch.empty(32)
    codec.decode(codec.add([codec.encode(huge)] * 4, 32), out)
    torch.testing.assert_close(out, huge * 4, rtol=1e-6, atol=0.1)


def test_different_widths_do_not_add() -> None:
    fine, coarse = (ErrorBoundedSum(bound=b, relative_to="one") for b in (0.01, 0.02))
    x = torch.randn(100)
    with pytest.raises(WireFormatError, match="bin widths"):
        fine.add([fine.encode(x), coarse.encode(x)], 100)


def test_a_result_bound_is_split_over_both_encodes() -> None:
    assert ErrorBounded.for_result(0.1, 4, "mean").bound == pytest.approx(0.05)
    assert ErrorBounded.for_result(0.1, 4, "sum").bound == pytest.approx(0.02)


def test_widths_stay_representable() -> None:
    assert float(bin_width(0.5)) <= 1 - 2.0**-12
    assert bin_width(1e-45) == 0
    assert np.isfinite(bin_width(1e300))
    with pytest.raises(ConfigError, match="finite number"):
        absolute(-1.0)
