"""Kernels against their NumPy definitions, over shapes, special values and hypothesis' choice of sets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import WireFormatError
from collectives.kernels import idsets, rows, twins
from collectives.kernels.idcoding import ALL, BITMAP, GAPS, PLAIN, check_ids, coded_bytes, decode_ids, encode_ids
from collectives.sparse.omnireduce import BLOCK_WIDTH, blocks_of_rows, num_blocks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ids_in = st.integers(1, 5000).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=60)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (7, 5), (64, 33), (130, 64)])
def test_row_scan_finds_every_value_that_is_not_zero(dtype, shape) -> None:
    matrix = torch.zeros(shape, dtype=dtype)
    if matrix.numel():
        matrix.view(-1)[::11] = 1e-7 if dtype == torch.float16 else 1e-40
        matrix[shape[0] // 2, -1] = float("nan")
        matrix[-1] = -0.0
    expected = twins.nonzero_rows(matrix.float().numpy())
    assert rows.nonzero_rows(matrix).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter_move_bits(dtype) -> None:
    source = torch.randn(50, 12).to(dtype)
    order = torch.tensor([3, 3, 49, 0])
    assert torch.equal(rows.gather_rows(source, order, torch.empty(4, 12, dtype=dtype)), source[order])
    assert torch.equal(rows.gather_rows(source, order, torch.empty(4, 5, dtype=dtype), 7), source[order, 7:])
    out = torch.zeros(50, 12, dtype=dtype)
    rows.scatter_rows(out, order[1:], source[order[1:]])
    assert torch.equal(out[order[1:]], source[order[1:]])
    assert int((out != 0).any(1).sum()) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_add_equals_its_definition(dtype) -> None:
    rng = np.random.default_rng(0)
    positions = [np.sort(rng.choice(20, size, replace=False)) for size in (20, 0, 7, 13)]
    values = [torch.from_numpy(rng.standard_normal((len(p), 9), dtype=np.float32)).to(dtype) for p in positions]
    total, fresh = torch.full((20, 4), float("nan")), torch.ones(20, dtype=torch.uint8)
    for where, part in zip(positions, values, strict=True):
        rows.scatter_add_rows(total, torch.from_numpy(where), part, fresh, first_column=3)
    expected = twins.sum_rows(20, positions, [part[:, 3:7].float().numpy() for part in values])
    assert total.numpy().tobytes() == expected.tobytes()
    assert not fresh.any()


@given(ids_in)
def test_coalesce_sorts_and_sums(case) -> None:
    num_rows, ids = case
    values = torch.arange(len(ids) * 2, dtype=torch.float32).view(-1, 2)
    unique, summed = rows.coalesce(torch.tensor(ids, dtype=torch.int64), values, num_rows)
    assert unique.tolist() == sorted(set(ids))
    expected = [[sum(values[i, c].item() for i, x in enumerate(ids) if x == u) for c in (0, 1)] for u in unique]
    assert summed.tolist() == expected


def test_coalesce_returns_sorted_unique_input_itself() -> None:
    ids, values = torch.tensor([1, 5]), torch.ones(2, 3)
    assert rows.coalesce(ids, values, 9)[1] is values


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_is_found(dtype) -> None:
    values = torch.full((4, 33), torch.finfo(dtype).max, dtype=dtype)
    assert not rows.has_nonfinite(values)
    for bad in (float("inf"), -float("inf"), float("nan")):
        values[3, 32] = bad
        assert rows.has_nonfinite(values)
    assert not rows.has_nonfinite(values[:0])


@given(
    st.integers(1, 300).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.lists(st.integers(0, n - 1), max_size=20), min_size=1, max_size=4))
    )
)
def test_union_by_bitmap_equals_its_definition(case) -> None:
    num_positions, lists = case
    arrays = [np.array(ids, np.int64) for ids in lists]
    union, positions = twins.union_ids(arrays)
    for space in (num_positions, 2**40):
        found, where = idsets.union_ids([torch.from_numpy(ids) for ids in arrays], space)
        assert found.tolist() == union.tolist()
        assert [one.tolist() for one in where] == [one.tolist() for one in positions]


@given(ids_in)
def test_bitmaps_round_trip(case) -> None:
    num_positions, ids = case
    ids = np.unique(np.array(ids, np.int64))
    bitmap = idsets.encode_bitmap(torch.from_numpy(ids), num_positions)
    assert bitmap.numpy().tobytes() == twins.bitmap(ids, num_positions).tobytes()
    assert idsets.decode_bitmap(bitmap).tolist() == ids.tolist()


@given(st.lists(st.integers(0, 6), max_size=50))
def test_partition_is_stable(owners) -> None:
    array = np.array(owners, np.int32)
    counts, order = idsets.partition_by_owner(torch.from_numpy(array), 7)
    expected_counts, expected_order = twins.partition_by_owner(array, 7)
    assert counts.tolist() == expected_counts.tolist()
    assert order.tolist() == expected_order.tolist()


@given(ids_in)
def test_id_coding_round_trips_in_as_many_bytes_as_said(case) -> None:
    num_positions, ids = case
    ids = torch.from_numpy(np.unique(np.array(ids, np.int64)))
    for space in (num_positions, 2**31 - 1, 2**31, 2**62):
        coded = encode_ids(ids, space)
        assert coded.numel() == coded_bytes(ids, space)
        assert coded.numel() <= 1 + ids.numel() * (4 if space < 2**31 else 8)
        assert decode_ids(coded, ids.numel(), space).tolist() == ids.tolist()


def test_each_coding_is_chosen_where_it_is_smallest() -> None:
    cases = [
        (torch.tensor([10**9, 2 * 10**9]), 2**31 - 1, PLAIN, 8),
        (torch.tensor([0, 1, 300]), 10**6, GAPS, 4),
        (torch.arange(0, 800, 2), 800, BITMAP, 100),
        (torch.arange(800), 800, ALL, 0),
    ]
    for ids, space, coding, body in cases:
        coded = encode_ids(ids, space)
        assert (int(coded[0]), coded.numel()) == (coding, 1 + body)
    assert encode_ids(torch.empty(0, dtype=torch.int64), 5).numel() == 0


@given(ids_in)
def test_gaps_equal_their_definition(case) -> None:
    ids = np.unique(np.array(case[1], np.int64))
    coded = encode_ids(torch.from_numpy(ids), 2**30)
    if len(ids) and coded[0] == GAPS:
        assert bytes(coded[1:].tolist()) == twins.gaps(ids)


@settings(max_examples=300)
@given(st.binary(max_size=12), st.integers(0, 5), st.integers(1, 40))
def test_damaged_ids_are_refused_or_valid(data, num_ids, num_positions) -> None:
    coded = torch.tensor(list(data), dtype=torch.uint8)
    try:
        ids = decode_ids(coded, num_ids, num_positions).tolist()
    except WireFormatError:
        return
    assert ids == sorted(set(ids))
    assert len(ids) == num_ids
    assert all(0 <= x < num_positions for x in ids)


def test_received_ids_out_of_range_are_refused() -> None:
    assert check_ids(torch.tensor([3, 0], dtype=torch.int32), 4).tolist() == [3, 0]
    for bad in ([4], [-1]):
        with pytest.raises(WireFormatError, match=r"outside \[0, 4\)"):
            check_ids(torch.tensor(bad), 4)


@pytest.mark.parametrize("width", [1, 54, 256, 300, 512, 1000])
def test_rows_to_blocks_and_back(width) -> None:
    ids, num_rows = torch.tensor([0, 3, 4, 19]), 20
    values = torch.randn(4, width)
    blocks, first = blocks_of_rows(ids, num_rows, width)
    dense = torch.zeros(num_blocks(num_rows, width) * BLOCK_WIDTH)
    dense[: num_rows * width].view(num_rows, width)[ids] = values
    expected = dense.view(-1, BLOCK_WIDTH)
    assert blocks.tolist() == torch.unique(torch.where(expected != 0)[0]).tolist()
    packed = torch.zeros(len(blocks), BLOCK_WIDTH)
    rows.copy_rows_to_blocks(values, ids, first, packed)
    assert torch.equal(packed, expected[blocks])
    back = torch.empty_like(values)
    rows.copy_blocks_to_rows(packed, ids, first, back)
    assert torch.equal(back, values)
