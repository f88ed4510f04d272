"""Lossless coding of sorted unique ids: the smallest of plain integers, gaps as varints, a bitmap, or "all of them".

One byte names the coding, then comes its body; an empty set is zero bytes. Gaps are id[0] and id[i] - id[i-1] - 1 in
little-endian base 128 (7 bits a byte, high bit = more follows). Decoding trusts nothing: wrong lengths, ids out of
order or out of range raise `WireFormatError`.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from collectives.errors import WireFormatError
from collectives.kernels.cuda import on_gpu
from collectives.kernels.host import Array, Scalar, host_array
from collectives.kernels.idsets import decode_bitmap, encode_bitmap

PLAIN, GAPS, BITMAP, ALL = range(4)

INT32_POSITIONS = 1 << 31
"""Id spaces from this size on need 8-byte ids."""


def index_dtype(num_positions: int) -> torch.dtype:
    """The integer type of plain ids on the wire: int32 below 2**31 positions, else int64."""
    return torch.int32 if num_positions < INT32_POSITIONS else torch.int64


@njit(nogil=True, cache=True)
def _gap_bytes(ids: Array) -> int:
    total, previous = 0, -1
    for i in range(ids.shape[0]):
        gap = ids[i] - previous - 1
        total += 1
        while gap >= 128:
            gap >>= 7
            total += 1
        previous = ids[i]
    return total


@njit(nogil=True, cache=True)
def _encode_gaps(ids: Array, out: Array) -> None:
    at, previous = 0, -1
    for i in range(ids.shape[0]):
        gap = ids[i] - previous - 1
        while gap >= 128:
            out[at] = 128 | (gap & 127)
            gap >>= 7
            at += 1
        out[at] = gap
        at += 1
        previous = ids[i]


@njit(nogil=True, cache=True)
def _decode_gaps(data: Array, num_positions: int, ids: Array) -> Scalar:
    at, previous = 0, -1
    for i in range(ids.shape[0]):
        gap, shift = 0, 0
        while True:
            if at >= data.shape[0] or shift > 56:
                return False
            byte: Scalar = np.int64(data[at])
            at += 1
            gap |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if gap >= num_positions - 1 - previous:
            return False
        previous += gap + 1
        ids[i] = previous
    return at == data.shape[0]


def _body_bytes(ids: Tensor, num_positions: int) -> dict[int, int]:
    sizes = {
        PLAIN: ids.numel() * index_dtype(num_positions).itemsize,
        BITMAP: (num_positions + 7) // 8,
    }
    if not on_gpu(ids):  # varints have no parallel form
        sizes[GAPS] = _gap_bytes(host_array(ids))
    if ids.numel() == num_positions:
        sizes[ALL] = 0
    return sizes


def coded_bytes(ids: Tensor, num_positions: int) -> int:
    """Length of `encode_ids(ids, num_positions)`, without encoding."""
    return 1 + min(_body_bytes(ids, num_positions).values()) if ids.numel() else 0


def encode_ids(ids: Tensor, num_positions: int) -> Tensor:
    """Code sorted unique ids (int64 [k] in [0, num_positions)) into as few bytes as possible: uint8 [coded_bytes]."""
    if not ids.numel():
        return torch.empty(0, dtype=torch.uint8, device=ids.device)
    sizes = _body_bytes(ids, num_positions)
    coding = min(sizes, key=sizes.__getitem__)
    coded = torch.empty(1 + sizes[coding], dtype=torch.uint8, device=ids.device)
    coded[0], body = coding, coded[1:]
    if coding == PLAIN:
        body.copy_(ids.to(index_dtype(num_positions)).view(torch.uint8))
    elif coding == GAPS:
        _encode_gaps(host_array(ids), host_array(body))
    elif coding == BITMAP:
        body.copy_(encode_bitmap(ids, num_positions))
    return coded


def decode_ids(coded: Tensor, num_ids: int, num_positions: int) -> Tensor:
    """The ids (int64 [num_ids], sorted, unique, in [0, num_positions)) of a message of `encode_ids`."""
    if num_ids == 0 and coded.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=coded.device)
    if not 0 < num_ids <= num_positions or coded.numel() == 0:
        raise WireFormatError(f"{coded.numel()} bytes cannot hold {num_ids} ids out of {num_positions} positions")
    coding, body = int(coded[0]), coded[1:]
    plain = index_dtype(num_positions)
    ids: Tensor | None = None
    if coding == PLAIN and body.numel() == num_ids * plain.itemsize:
        ids = body.clone().view(plain).to(torch.int64)
    elif coding == GAPS and body.numel() >= num_ids:
        gaps = torch.empty(num_ids, dtype=torch.int64)
        ids = gaps if _decode_gaps(host_array(body.cpu()), num_positions, host_array(gaps)) else None
        ids = None if ids is None else ids.to(coded.device)
    elif coding == BITMAP and body.numel() == (num_positions + 7) // 8:
        ids = decode_bitmap(body)
    elif coding == ALL and body.numel() == 0:
        ids = torch.arange(num_positions, dtype=torch.int64, device=coded.device)
    if ids is None or ids.numel() != num_ids or not is_sorted_set(ids, num_positions):
        raise WireFormatError(
            f"{coded.numel()} bytes of coding {coding} are not {num_ids} sorted ids in [0, {num_positions})"
        )
    return ids


def check_ids(ids: Tensor, num_positions: int) -> Tensor:
    """Received ids (any order) as int64, or WireFormatError where one lies outside [0, num_positions)."""
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_positions):
        raise WireFormatError(f"received ids span {int(ids.min())} to {int(ids.max())}, outside [0, {num_positions})")
    return ids.to(torch.int64)


def is_sorted_set(ids: Tensor, num_positions: int) -> bool:
    """Whether ids are strictly increasing and lie in [0, num_positions)."""
    if not ids.numel():
        return True
    return int(ids[0]) >= 0 and int(ids[-1]) < num_positions and bool((ids[1:] > ids[:-1]).all())
