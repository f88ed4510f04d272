"""Row, set, owner and selection kernels against NumPy on the host shim, in three thread orders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.kernels import cuda, gpu, rows, twins
from collectives.kernels.hashing import HashedOwners, RangeOwners
from collectives.kernels.idcoding import ALL, BITMAP, GAPS, PLAIN, coded_bytes, decode_ids, encode_ids
from collectives.kernels.idsets import decode_bitmap, encode_bitmap, partition_by_owner, union_ids

AsGpu = Callable[[int], AbstractContextManager[list[str]]]
ORDERS = (0, 1, 7)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (1, 3, 8, 31, 32, 36, 128, 130)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def matrix(num_rows: int, width: int, dtype: torch.dtype, touched: Tensor) -> Tensor:
    """Zeros of both signs, but for one value in each touched row: among them NaN, infinity and the smallest subnormal."""
    values = torch.zeros(num_rows, width)
    values[::3] = -0.0
    values = values.to(dtype)
    for number, row in enumerate(touched.tolist()):
        values[row, (5 * number) % width] = (torch.nan, torch.inf, -1.0, 2.0**-149 if dtype.itemsize == 4 else 1.0)[
            number % 4
        ]
    return values


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scan_finds_the_rows_with_any_value(
    dtype: torch.dtype, order: int, as_gpu: AsGpu, rng: np.random.Generator
) -> None:
    for width in WIDTHS:
        for num_rows in (1, 31, 32, 33, 1000):
            touched = torch.from_numpy(np.flatnonzero(rng.random(num_rows) < 0.2))
            values = matrix(num_rows, width, dtype, touched)
            for view in (values, torch.cat([values.view(-1)[:1], values.view(-1)])[1:].view(num_rows, width)):
                with as_gpu(order) as launched:
                    found = rows.nonzero_rows(view)
                assert launched == [f"nonzero_rows_{8 * dtype.itemsize}", "bitmap_count", "bitmap_list"]
                assert torch.equal(found, touched), (width, num_rows)
    with as_gpu(order):
        assert rows.nonzero_rows(torch.zeros(0, 4)).numel() == 0
        assert rows.nonzero_rows(torch.zeros(4, 0)).numel() == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_scatter_move_rows(dtype: torch.dtype, order: int, as_gpu: AsGpu, rng: np.random.Generator) -> None:
    for width in WIDTHS:
        source = torch.randn(300, width + 3).to(dtype)
        picked = torch.from_numpy(rng.permutation(300)[:201])
        for first in (0, 2):
            out, back = torch.full((201, width), 9.0, dtype=dtype), torch.full((300, width), 9.0, dtype=dtype)
            with as_gpu(order):
                rows.gather_rows(source, picked, out, first)
                rows.scatter_rows(back, picked, out)
            expected = source[picked, first : first + width]
            assert torch.equal(out, expected)
            assert torch.equal(back[picked], expected)
            assert int((back == 9).all(dim=1).sum()) == 99


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contributions_are_added_in_rank_order(
    dtype: torch.dtype, order: int, as_gpu: AsGpu, rng: np.random.Generator
) -> None:
    for width in WIDTHS:
        positions = [torch.from_numpy(rng.permutation(90)[:k]) for k in (90, 41, 0, 77)]
        values = [torch.randn(len(p), width + 2).to(dtype) for p in positions]
        total, fresh = torch.full((90, width), torch.nan), torch.ones(90, dtype=torch.uint8)
        with as_gpu(order):
            for where, one in zip(positions, values, strict=True):
                rows.scatter_add_rows(total, where, one, fresh, 1)
        expected = twins.sum_rows(
            90, [p.numpy() for p in positions], [v[:, 1 : width + 1].float().numpy() for v in values]
        )
        assert total.numpy().tobytes() == expected.tobytes()
        assert not fresh.any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_coalesce_adds_equal_ids_in_their_order(
    dtype: torch.dtype, order: int, as_gpu: AsGpu, rng: np.random.Generator
) -> None:
    for width in (1, 5, 64):
        ids = torch.from_numpy(rng.integers(0, 60, 500))
        values = torch.randn(500, width).to(dtype)
        expected_ids, expected = rows.coalesce(ids, values, 1000)
        with as_gpu(order):
            found, sums = rows.coalesce(ids, values, 1000)
            assert rows.coalesce(found, sums, 1000)[1] is sums
        assert torch.equal(found, expected_ids)
        assert sums.view(torch.uint8).numpy().tobytes() == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("order", ORDERS)
def test_sets_become_bitmaps_and_come_back(order: int, as_gpu: AsGpu, rng: np.random.Generator) -> None:
    for num_positions in (1, 7, 8, 31, 33, 4000, 140_001):
        ids = torch.from_numpy(np.flatnonzero(rng.random(num_positions) < 0.3))
        with as_gpu(order):
            bitmap = encode_bitmap(ids, num_positions)
            back = decode_bitmap(bitmap)
        assert bitmap.numpy().tobytes() == twins.bitmap(ids.numpy(), num_positions).tobytes()
        assert torch.equal(back, ids)


@pytest.mark.parametrize("num_positions", [300, 10**9])
@pytest.mark.parametrize("order", ORDERS)
def test_union_is_sorted_and_names_positions(
    num_positions: int, order: int, as_gpu: AsGpu, rng: np.random.Generator
) -> None:
    lists = [torch.from_numpy(rng.integers(0, num_positions, k)) for k in (100, 0, 37)]
    union, positions = twins.union_ids([ids.numpy() for ids in lists])
    with as_gpu(order):
        found, places = union_ids(lists, num_positions)
    assert found.tolist() == union.tolist()
    assert [place.tolist() for place in places] == [place.tolist() for place in positions]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_owners", [1, 2, 5, 33, 600])
def test_partition_is_stable(num_owners: int, order: int, as_gpu: AsGpu, rng: np.random.Generator) -> None:
    for num in (0, 1, 2047, 2049, 70_001):
        owners = rng.integers(0, num_owners, num).astype(np.int32)
        counts, expected = twins.partition_by_owner(owners, num_owners)
        with as_gpu(order):
            found, grouped = partition_by_owner(torch.from_numpy(owners), num_owners)
        assert found.tolist() == counts.tolist()
        assert grouped.tolist() == expected.tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_positions", [1, 2, 3, 1000, 1 << 20, (1 << 31) + 7, (1 << 40) + 1, (1 << 63) - 1])
def test_owners_are_those_of_the_cpu(num_positions: int, order: int, as_gpu: AsGpu, rng: np.random.Generator) -> None:
    ids = torch.from_numpy(rng.integers(0, num_positions, 700, dtype=np.uint64).astype(np.int64))
    for num_owners in (1, 3, 16):
        for owners in (HashedOwners(num_positions, num_owners, seed=4), RangeOwners(num_positions, num_owners)):
            expected = owners.split(ids)
            with as_gpu(order):
                owner_of, slots = owners.split(ids)
                back = [owners.join(owner, slots[owner_of == owner]) for owner in range(num_owners)]
            assert torch.equal(owner_of, expected[0])
            assert torch.equal(slots, expected[1])
            assert all(torch.equal(back[o], ids[owner_of == o]) for o in range(num_owners))


def test_coded_ids_avoid_varints_on_a_gpu_and_are_read_everywhere(as_gpu: AsGpu, rng: np.random.Generator) -> None:
    sets = {PLAIN: ([3, 700_000], 1 << 20), BITMAP: (range(0, 2000, 3), 2000), ALL: (range(50), 50)}
    for coding, (ids, num_positions) in sets.items():
        wanted = torch.tensor(list(ids))
        with as_gpu(0):
            coded = encode_ids(wanted, num_positions)
            assert coded.numel() == coded_bytes(wanted, num_positions)
            assert int(coded[0]) == coding
            assert torch.equal(decode_ids(coded, len(wanted), num_positions), wanted)
        assert torch.equal(decode_ids(coded, len(wanted), num_positions), wanted)
    wanted = torch.arange(0, 10_000, 50)
    coded = encode_ids(wanted, 10_000)
    assert int(coded[0]) == GAPS
    with as_gpu(0):
        assert torch.equal(decode_ids(coded, len(wanted), 10_000), wanted)
        assert encode_ids(wanted[:0], 10).numel() == 0


def test_nonfinite_values_are_noticed(as_gpu: AsGpu) -> None:
    with as_gpu(0):
        assert not rows.has_nonfinite(torch.ones(5, 5))
        assert rows.has_nonfinite(torch.tensor([[1.0, torch.nan]]))


def test_offsets_beyond_two_to_the_31_are_64_bit(kernels: Callable[..., object]) -> None:
    """A gather whose source row starts 3 * 2^31 bytes behind its base pointer, in memory that is never there in full."""
    stride = 3 << 30
    row = np.arange(64, dtype=np.float32)
    fake_base = np.uint64(row.ctypes.data - 2 * stride)
    out, index = np.zeros(64, np.float32), np.array([2], np.int64)
    args = (fake_base, np.int64(stride), index, np.int64(1), np.int64(256), out)
    kernels.get_function("gather_rows")((1,), (256,), args)  # type: ignore[attr-defined]
    assert out.tobytes() == row.tobytes()


def test_grids_are_bounded() -> None:
    assert cuda.blocks_for(0, 256) == 1
    assert cuda.blocks_for(257, 256) == 2
    assert cuda.blocks_for(1 << 40, 256) == cuda.MAX_BLOCKS
    assert gpu.PARTITION_TILE == 2048
