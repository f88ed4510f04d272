"""What may be handed in as a sparse gradient, and what is refused by name."""

import pytest
import torch
from torch import nn

from collectives.errors import GradientError
from collectives.sparse.ids import normalise, to_coo, to_dense


def coo(ids, values, shape) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([ids]), torch.tensor(values), shape)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unsorted_ids_with_duplicates(dtype) -> None:
    rows = normalise(torch.tensor([5, 1, 5], dtype=dtype), torch.tensor([[1.0, 2], [3, 4], [5, 6]]), (8, 2))
    assert rows.ids.tolist() == [1, 5]
    assert rows.values.tolist() == [[3, 4], [6, 8]]
    assert rows.ids.dtype == torch.int64


@pytest.mark.parametrize("coalesced", [False, True])
def test_coo_gradient(coalesced) -> None:
    gradient = coo([4, 0, 4], [[1.0], [2.0], [3.0]], (6, 1))
    rows = normalise(None, gradient.coalesce() if coalesced else gradient, (6, 1))
    assert rows.ids.tolist() == [0, 4]
    assert rows.values.tolist() == [[2.0], [4.0]]


def test_a_real_embedding_gradient_with_more_dimensions() -> None:
    table = nn.Embedding(10, 6, sparse=True)
    table(torch.tensor([[1, 2], [2, 9]])).sum().backward()
    rows = normalise(None, table.weight.grad, (10, 6))
    assert rows.ids.tolist() == [1, 2, 9]
    assert rows.values[:, 0].tolist() == [1, 2, 1]
    assert torch.equal(to_coo(rows, (10, 6)).to_dense(), table.weight.grad.to_dense())
    cube = normalise(torch.tensor([1]), torch.ones(1, 2, 3), (4, 2, 3))
    assert (cube.num_rows, cube.width) == (4, 6)
    assert to_dense(cube, (4, 2, 3))[1].sum() == 6


def test_elements_of_a_matrix() -> None:
    gradient = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]]).to_sparse()
    rows = normalise(None, gradient, (2, 3))
    assert (rows.num_rows, rows.width, rows.ids.tolist()) == (6, 1, [1, 3, 5])
    assert torch.equal(to_coo(rows, (2, 3)).to_dense(), gradient.to_dense())


def test_user_08_csr_is_accepted_and_other_layouts_are_refused_by_name() -> None:
    matrix = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]])
    rows = normalise(None, matrix.to_sparse_csr(), (2, 3))
    assert rows.ids.tolist() == [1, 3, 5]
    assert rows.values.view(-1).tolist() == [1, 2, 3]
    with pytest.raises(GradientError, match=r"'emb.weight': layout torch.sparse_csc"):
        normalise(None, matrix.to_sparse_csc(), (2, 3), name="emb.weight")


def test_user_04_empty_has_the_width_of_the_table() -> None:
    for values in (torch.empty(0, 16), torch.empty(0), torch.empty(0, 0)):
        assert normalise(torch.empty(0, dtype=torch.int64), values, (9, 16)).values.shape == (0, 16)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 16), (9, 16))
    assert normalise(None, empty, (9, 16)).values.shape == (0, 16)


def test_user_05_missing_gradient_is_an_empty_contribution() -> None:
    rows = normalise(None, None, (9, 4, 2), dtype=torch.bfloat16)
    assert (rows.num_rows, rows.width, rows.ids.numel()) == (9, 8, 0)
    assert rows.values.dtype == torch.bfloat16
    elements = normalise(torch.empty((2, 0), dtype=torch.int64), None, (9, 4))
    assert (elements.num_rows, elements.width) == (36, 1)


def test_user_09_boundaries_of_int32_and_int64() -> None:
    shape = (5_000_000, 512)
    index = torch.tensor([[4_999_999, 4_194_304], [511, 0]])
    rows = normalise(index, torch.ones(2), shape)
    assert rows.ids.tolist() == [4_194_304 * 512, 5_000_000 * 512 - 1]
    assert rows.num_rows > 2**31
    with pytest.raises(GradientError, match="at most"):
        normalise(index, torch.ones(2), (2**40, 2**23))
    with pytest.raises(GradientError, match=r"span -1 to 7, outside \[0, 8\)"):
        normalise(torch.tensor([7, -1]), torch.ones(2, 1), (8, 1))


def test_user_10_duplicates_are_summed_in_float32_and_checked_afterwards() -> None:
    values = torch.tensor([[40000.0], [40000.0], [-40000.0]], dtype=torch.float16)
    rows = normalise(torch.tensor([3, 3, 3]), values, (8, 1))
    assert rows.values.tolist() == [[40000.0]]
    overflowing = normalise(torch.tensor([3, 3]), values[:2], (8, 1))
    assert overflowing.values.item() == float("inf")


def test_user_12_touched_rows_stay_whatever_their_values() -> None:
    values = torch.tensor([[1.0, -1.0], [0.0, 0.0], [2.0, 1.0], [-2.0, -1.0]])
    rows = normalise(torch.tensor([0, 2, 5, 5]), values, (8, 2))
    assert rows.ids.tolist() == [0, 2, 5]
    dense = torch.zeros(4, 2)
    dense[1] = torch.tensor([1.0, -1.0])
    assert normalise(None, dense, (4, 2)).ids.tolist() == [1]


def test_user_16_local_duplicates_are_merged_before_anything_is_sent() -> None:
    rows = normalise(torch.zeros(1000, dtype=torch.int64), torch.ones(1000, 4), (8, 4))
    assert rows.ids.tolist() == [0]
    assert rows.values.tolist() == [[1000.0] * 4]


def test_user_25_the_padding_row_is_dropped() -> None:
    rows = normalise(torch.tensor([2, 0, 2]), torch.ones(3, 4), (8, 4), padding_id=2)
    assert rows.ids.tolist() == [0]
    only_padding = normalise(torch.tensor([2, 2]), torch.ones(2, 4), (8, 4), padding_id=2)
    assert only_padding.values.shape == (0, 4)
    table = nn.Embedding(8, 4, sparse=True, padding_idx=2)
    table(torch.tensor([2, 2])).sum().backward()
    assert normalise(None, table.weight.grad, (8, 4), padding_id=2).ids.numel() == 0


def test_user_27_dense_gradient_with_touched_ids() -> None:
    dense = torch.zeros(6, 2)
    dense[3] = 1.0
    rows = normalise(None, dense, (6, 2), touched=torch.tensor([5, 3, 3]))
    assert rows.ids.tolist() == [3, 5]
    assert rows.values.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("indices", "values", "shape", "message"),
    [
        (torch.tensor([1.0]), torch.ones(1, 2), (4, 2), "indices are torch.float32"),
        (torch.tensor([1]), torch.ones(1, 2, dtype=torch.float64), (4, 2), "values are torch.float64"),
        (torch.tensor([1]), torch.ones(1, 3), (4, 2), r"need values of shape \(1, 2\), got \(1, 3\)"),
        (torch.tensor([1, 2]), torch.ones(1, 4), (4, 2), r"need values of shape \(2, 2\)"),
        (torch.tensor([4]), torch.ones(1, 2), (4, 2), r"outside \[0, 4\)"),
        (torch.tensor(1), torch.ones(1, 2), (4, 2), "fit neither rows"),
        (torch.tensor([1]), None, (4, 2), "1 indices but no values"),
        (torch.tensor([1]), [1.0, 2.0], (4, 2), "give a torch tensor"),
        (torch.tensor([1]), torch.ones(1, 2), (0, 2), "positive dimensions"),
        (None, torch.ones(3, 2), (4, 2), r"gradient has shape \(3, 2\)"),
    ],
)
def test_refusals_name_the_tensor_and_the_numbers(indices, values, shape, message) -> None:
    with pytest.raises(GradientError, match=f"'layer.weight': .*{message}"):
        normalise(indices, values, shape, name="layer.weight")
