"""From whatever holds a sparse gradient to `SparseRows`, and back to a torch sparse tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from collectives.errors import GradientError
from collectives.kernels.idsets import union_ids
from collectives.kernels.rows import coalesce, gather_rows, nonzero_rows
from collectives.sparse.rows import SparseRows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Value types of a sparse gradient; 16-bit values are summed with 32-bit accumulators."""

MAX_NUMEL = 2**63 - 1


def normalise(
    indices: Tensor | None,
    values: Tensor | None,
    shape: Sequence[int],
    *,
    name: str = "tensor",
    touched: Tensor | None = None,
    padding_id: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> SparseRows:
    """Bring a gradient of a tensor of `shape` into the one form that the schemes take.

    Accepted, all with int32 or int64 ids in any order and with repetitions (equal ids are summed in float32):

    - indices [k] or [1, k] and values [k, *shape[1:]]: rows;
    - indices [len(shape), k] and values [k]: elements, as rows of width one of the flattened tensor;
    - indices None and values a torch COO tensor, coalesced or not, with its sparse dimensions first, or a CSR matrix;
    - indices None and values a dense tensor of `shape`: the rows `touched` (int ids [m]), or, where that is None, the
      rows with any value != 0, because a dense gradient does not say which rows were touched;
    - indices None and values None: no gradient, an empty contribution of `dtype`.

    padding_id: a row that is dropped, as `nn.Embedding(padding_idx=...)` means it. Raises GradientError naming `name`.
    """
    shape = _checked_shape(shape, name)
    if values is None:
        if indices is not None and indices.numel():
            raise GradientError(f"'{name}': {indices.numel()} indices but no values")
        by_element = indices is not None and indices.dim() == 2 and indices.shape[0] == len(shape) > 1
        num_rows, width = (prod(shape), 1) if by_element else (shape[0], prod(shape[1:]))
        return SparseRows(torch.empty(0, dtype=torch.int64), torch.empty((0, width), dtype=dtype), num_rows)
    if not isinstance(values, Tensor):
        raise GradientError(f"'{name}': values are a {type(values).__name__}; give a torch tensor")
    if values.dtype not in DTYPES:
        raise GradientError(f"'{name}': values are {values.dtype}; reducible are float32, float16 and bfloat16")
    if touched is not None and (indices is not None or values.layout != torch.strided):
        raise GradientError(f"'{name}': `touched` goes with a dense gradient only")
    values = values.detach()
    if indices is not None:
        return _from_parts(indices, values, shape, name, padding_id)
    if tuple(values.shape) != shape:
        raise GradientError(f"'{name}': gradient has shape {tuple(values.shape)}, the tensor {shape}")
    if values.layout == torch.sparse_coo:
        if values.dense_dim() and values.sparse_dim() > 1:
            raise GradientError(
                f"'{name}': {values.sparse_dim()} sparse and {values.dense_dim()} dense dimensions; "
                f"give rows (one sparse dimension) or elements (no dense dimension)"
            )
        return _from_parts(values._indices(), values._values(), shape, name, padding_id)
    if values.layout == torch.sparse_csr:
        if len(shape) != 2:
            raise GradientError(f"'{name}': a CSR gradient of {len(shape)} dimensions; give a matrix or COO")
        return _from_parts(
            values.to_sparse(layout=torch.sparse_coo)._indices(), values.values(), shape, name, padding_id
        )
    if values.layout == torch.strided:
        return _from_dense(values, touched, shape, name, padding_id)
    raise GradientError(f"'{name}': layout {values.layout} is not supported; give COO, CSR, (indices, values) or dense")


def _checked_shape(shape: Sequence[int], name: str) -> tuple[int, ...]:
    dims = tuple(int(dim) for dim in shape)
    if not dims or min(dims) < 1 or prod(dims) > MAX_NUMEL:
        raise GradientError(f"'{name}': shape {dims} must have positive dimensions and at most {MAX_NUMEL} elements")
    return dims


def _checked_ids(ids: Tensor, limit: int, what: str, name: str) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise GradientError(f"'{name}': {what} are {kind}; give an int32 or int64 tensor")
    if ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= limit:
            raise GradientError(f"'{name}': {what} span {low} to {high}, outside [0, {limit})")
    return ids.to(torch.int64)


def _from_parts(
    indices: Tensor, values: Tensor, shape: tuple[int, ...], name: str, padding_id: int | None
) -> SparseRows:
    if values.layout != torch.strided:
        raise GradientError(f"'{name}': values beside indices must be dense, not {values.layout}")
    count = indices.shape[-1] if indices.dim() else 0
    if indices.dim() == 2 and indices.shape[0] == len(shape) > 1:
        ids = torch.zeros(count, dtype=torch.int64, device=indices.device)
        for axis, dim in enumerate(shape):
            ids = ids * dim + _checked_ids(indices[axis], dim, f"indices of dimension {axis}", name)
        num_rows, row_shape = prod(shape), shape[:0]
        if padding_id is not None:
            raise GradientError(f"'{name}': padding_id {padding_id} names a row, but the indices name elements")
    elif indices.dim() == 1 or (indices.dim() == 2 and indices.shape[0] == 1):
        ids = _checked_ids(indices.reshape(-1), shape[0], "indices", name)
        num_rows, row_shape = shape[0], shape[1:]
    else:
        raise GradientError(
            f"'{name}': indices of shape {tuple(indices.shape)} fit neither rows ([k]) nor elements ([{len(shape)}, k])"
        )
    width = prod(row_shape)
    if count == 0 and values.numel() == 0:
        return SparseRows(ids, values.new_empty((0, width)), num_rows)
    if values.numel() != count * width or values.shape[0] != count:
        raise GradientError(
            f"'{name}': {count} indices need values of shape {(count, *row_shape)}, got {tuple(values.shape)}"
        )
    return _finish(ids, values.reshape(count, width), num_rows, padding_id)


def _from_dense(
    gradient: Tensor, touched: Tensor | None, shape: tuple[int, ...], name: str, padding_id: int | None
) -> SparseRows:
    matrix = gradient.reshape(shape[0], -1).contiguous()
    if touched is None:
        ids = nonzero_rows(matrix)
    else:
        ids = union_ids([_checked_ids(touched.reshape(-1), shape[0], "touched ids", name)], shape[0])[0]
    values = gather_rows(matrix, ids, matrix.new_empty((ids.numel(), matrix.shape[1])))
    return _finish(ids, values, shape[0], padding_id)


def _finish(ids: Tensor, values: Tensor, num_rows: int, padding_id: int | None) -> SparseRows:
    if padding_id is not None:
        kept = ids != padding_id
        if not bool(kept.all()):
            ids, values = ids[kept], values[kept]
    ids, values = coalesce(ids.contiguous(), values.contiguous(), num_rows)
    return SparseRows(ids, values, num_rows)


def to_coo(rows: SparseRows, shape: Sequence[int]) -> Tensor:
    """A coalesced torch COO tensor of `shape`: one sparse dimension for rows, all of them for elements."""
    shape = tuple(shape)
    if rows.num_rows == shape[0] and rows.width == prod(shape[1:]):
        indices, values = rows.ids[None], rows.values.view(-1, *shape[1:])
    else:
        coordinates = torch.unravel_index(rows.ids, shape)
        indices, values = torch.stack(coordinates), rows.values.view(-1)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def to_dense(rows: SparseRows, shape: Sequence[int]) -> Tensor:
    """A dense tensor of `shape` with zeros where no row was touched."""
    dense = rows.values.new_zeros((rows.num_rows, rows.width))
    dense[rows.ids] = rows.values
    return dense.view(*shape)
