"""Every codec kernel against its NumPy twin, by bytes, on the host shim in three thread orders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.codecs import Bf16, Codec, ErrorBounded, Fp8Block, Int4Block, Int8Block, TopK
from collectives.codecs.codec import Flag, Residual, packet_flags
from collectives.codecs.hashing import mix64
from collectives.errors import ConfigError, WireFormatError

AsGpu = Callable[[int], AbstractContextManager[list[str]]]

CODECS: dict[str, Codec] = {
    "int8b": Int8Block(),
    "int4b": Int4Block(),
    "int4b-stochastic": Int4Block(stochastic=True),
    "int4b-hadamard": Int4Block(hadamard=True),
    "int4b-both": Int4Block(stochastic=True, hadamard=True),
    "fp8b-e4m3": Fp8Block(),
    "fp8b-e5m2": Fp8Block(form="e5m2"),
    "bf16": Bf16(),
    "eb": ErrorBounded(bound=0.05, relative_to="one"),
    "eb-fine": ErrorBounded(bound=1e-9, relative_to="one"),
    "eb-rms": ErrorBounded(),
    "topk-exact": TopK(method="exact"),
    "topk-sampled": TopK(density=0.02),
    "topk-bitmap": TopK(method="exact", density=0.3),
}
ORDERS = (0, 1, 7)
SIZES = (0, 1, 31, 33, 255, 256, 257, 2047, 2049, 8193, 30001)


def cases(numel: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(numel + 1)
    normal = torch.randn(numel, generator=generator)
    wide = normal * torch.exp(4 * torch.randn(numel, generator=generator))
    found = {
        "normal": normal,
        "zeros": torch.where(normal > 1, normal, -0.0),
        "subnormal": wide * 1e-40,
        "tiny": normal * 2.0**-118,
        "huge": normal.sign() * 3.3e38,
    }
    for name, poison in (("nan", torch.nan), ("inf", torch.inf)):
        found[name] = wide.clone()
        found[name][numel // 3 :: 2000] = poison
    return found


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.fixture(params=CODECS, ids=str)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]


@pytest.mark.parametrize("order", ORDERS)
def test_packets_and_decoded_values_are_those_of_numpy(codec: Codec, order: int, as_gpu: AsGpu) -> None:
    twin = codec.twin()
    for numel in SIZES:
        for name, x in cases(numel).items():
            if numel not in (257, 30001) and name != "normal":
                continue
            expected, out, added = twin.encode(x, seed=5), torch.full((numel,), 7.0), torch.ones(numel)
            with as_gpu(order) as launched:
                packet = codec.encode(x, seed=5)
                codec.decode(packet, out)
                codec.decode(packet, added, accumulate=True, scale=0.3)
            assert launched or not numel
            assert same(packet, expected), (numel, name)
            values, sums = torch.empty(numel), torch.ones(numel)
            twin.decode(expected, values)
            twin.decode(expected, sums, accumulate=True, scale=0.3)
            assert same(out, values), (numel, name)
            assert same(added, sums), (numel, name)


@pytest.mark.parametrize(("order", "numel"), [(0, 8201), (1, 9), (7, 8201)])
def test_error_feedback_and_sums_are_those_of_numpy(codec: Codec, order: int, numel: int, as_gpu: AsGpu) -> None:
    twin = codec.twin()
    found = cases(numel)
    for name in ("normal", "nan", "huge"):
        ours, theirs = torch.full((numel,), 0.25), torch.full((numel,), 0.25)
        expected = twin.encode(found[name], Residual.in_place(theirs), seed=3)
        with as_gpu(order):
            packet = codec.encode(found[name], Residual.in_place(ours), seed=3)
        assert same(packet, expected), name
        assert same(ours, theirs), name
    packets = [twin.encode(found[name], seed=2) for name in ("normal", "zeros", "subnormal", "nan")]
    for weights, scale in (([1.0, 2.0, 0.5, 0.0], 1 / 3), (None, 1.0)):
        out, expected_sum = torch.full((numel,), 9.0), torch.empty(numel)
        ours, theirs = torch.full((numel,), 0.5), torch.full((numel,), 0.5)
        expected_flags = twin.reduce(packets, expected_sum, weights, scale)
        expected = twin.reduce_encode(packets, numel, weights, scale, Residual.in_place(theirs), seed=9)
        with as_gpu(order) as launched:
            flags = codec.reduce(packets, out, weights, scale)
            packet = codec.reduce_encode(packets, numel, weights, scale, Residual.in_place(ours), seed=9)
        assert flags == expected_flags
        assert same(out, expected_sum)
        assert same(packet, expected)
        assert same(ours, theirs)
        if codec.fixed_size and codec.name != "topk":
            assert len(launched) == 2, "a sum of packets is one launch, with its new packet another"


def test_bf16_inputs_are_widened_exactly(codec: Codec, as_gpu: AsGpu) -> None:
    x = cases(30001)["nan"].to(torch.bfloat16)
    expected = codec.twin().encode(x.float(), seed=1)
    with as_gpu(0):
        assert same(codec.encode(x, seed=1), expected)


def test_misaligned_views_take_the_scalar_path(codec: Codec, as_gpu: AsGpu) -> None:
    memory = cases(30001)["normal"]
    for offset in (1, 2, 3):
        x, old = memory[offset:9001], memory[20000 : 20000 + 9001 - offset].clone()
        room = torch.zeros(9003)
        new, expected_new = room[offset : offset + x.numel()], torch.empty(x.numel())
        expected = codec.twin().encode(x.clone(), Residual(old, expected_new), seed=1)
        with as_gpu(1):
            packet = codec.encode(x, Residual(old, new), seed=1)
            out = torch.zeros(9003)[offset : offset + x.numel()]
            codec.decode(packet, out)
        assert same(packet, expected)
        assert same(new, expected_new)
        values = torch.empty(x.numel())
        codec.twin().decode(expected, values)
        assert same(out, values)


def test_nothing_is_written_beyond_a_packet(codec: Codec, as_gpu: AsGpu) -> None:
    for numel in (1, 255, 2049):
        bound = codec.wire_bytes(numel)
        room = torch.full((bound + 32,), 0xAB, dtype=torch.uint8)
        with as_gpu(7):
            packet = codec.encode(cases(numel)["normal"], out=room)
        assert packet.data_ptr() == room.data_ptr()
        assert bool((room[bound:] == 0xAB).all())


def test_a_damaged_packet_is_refused_and_the_output_left_alone(codec: Codec, as_gpu: AsGpu) -> None:
    x = cases(2049)["normal"]
    good = codec.twin().encode(x)
    damaged = []
    for place, value in ((0, 0), (3, 99), (8, 2)):
        packet = good.clone()
        packet[place] = value
        damaged.append(packet)
    damaged.append(good[:-16].clone())
    if codec.name == "eb":
        for place in (20 + 4, 32, 33):
            packet = good.clone()
            packet[place] = 77
            damaged.append(packet)
    if codec.name == "topk":
        packet = good.clone()
        packet[32:40] = 255
        damaged.append(packet)
    for number, packet in enumerate(damaged):
        out = torch.full((2049,), 3.0)
        with as_gpu(0), pytest.raises(WireFormatError):
            codec.decode(packet, out)
        assert bool((out == 3).all()), number


def test_flags_can_be_read_and_added(as_gpu: AsGpu) -> None:
    with as_gpu(0):
        packet = Int8Block().encode(cases(257)["nan"])
        assert packet_flags(packet) == Flag.NONFINITE


def test_what_the_kernels_cannot_take_is_refused(as_gpu: AsGpu) -> None:
    cuda = torch.device("cuda", 0)
    assert Int8Block().supports(torch.bfloat16, cuda)
    assert not Int8Block().supports(torch.float16, cuda)
    assert not TopK(method="block").supports(torch.float32, cuda)
    with as_gpu(0):
        for call in (
            lambda: Int8Block().encode(torch.zeros(4, 4).t()),
            lambda: Int8Block().encode(torch.zeros(4, dtype=torch.float64)),
            lambda: Int8Block().encode(torch.zeros(4), Residual.in_place(torch.zeros(3))),
            lambda: Int8Block().encode(torch.zeros(4), out=torch.zeros(4, dtype=torch.uint8)),
            lambda: Int8Block().decode(torch.zeros(48, dtype=torch.uint8), torch.zeros(4, dtype=torch.bfloat16)),
            lambda: TopK(method="block").encode(torch.zeros(4)),
        ):
            with pytest.raises(ConfigError):
                call()


def test_the_histogram_threshold_breaks_ties_by_index(as_gpu: AsGpu) -> None:
    x = torch.zeros(5000)
    x[::7] = -2.0
    codec = TopK(method="exact", density=0.01)
    out = torch.empty(5000)
    with as_gpu(7):
        codec.decode(codec.encode(x), out)
    assert np.flatnonzero(out.numpy()).tolist() == list(range(0, 350, 7))


def test_a_sample_that_misleads_for_ten_rounds_still_selects_at_most_k(as_gpu: AsGpu) -> None:
    """Ten ones where the sample looks, and everything else just above the last threshold."""
    codec = TopK(density=0.01)
    x = torch.full((50_000,), 0.11)
    x[mix64(3) % 50 :: 5000] = 1.0
    expected = codec.encode(x, seed=3)
    with as_gpu(0):
        packet = codec.encode(x, seed=3)
    assert same(packet, expected)
    assert int(expected[16:24].view(torch.int64)) == 500
