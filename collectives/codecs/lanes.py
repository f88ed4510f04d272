"""Three instructions that numba has no word for; without them block kernels wait for memory, or are no vectors.

`prefetch`: a block kernel makes two or three passes over a block that fits the first-level cache, and while it computes,
nothing asks for the next blocks. `stream`: a store into a line that is not in the cache reads that line first, which for
a decoder of 8 to 32 bits is the larger part of its traffic; streaming stores do not (decoding 64 MiB of `int8b`: 1.2 of
the speed of a copy without, 1.7 with them). `top32`: the largest of 32 int32 as vector operations, which a loop with a
literal trip count becomes only where the compiler does not unroll it first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from collectives.codecs.codec import Array

AHEAD = 8
"""Blocks of 256 between the one that is worked on and the one that is fetched: two pages, beyond its own guess."""
LINE = 16
"""fp32 values in a cache line."""
LINE_BYTES = 64
STREAM_ALIGN_BYTES = 16
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to element `index` of a flat array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """prefetch(flat_array, index): fetch the line of element `index` into the second-level cache. It may lie beyond the end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _WORD, _WORD, _WORD])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(_address(context, builder, array, *arguments), _BYTE.as_pointer())
        read, second_level, data = (ir.Constant(_WORD, value) for value in (0, 2, 1))
        builder.call(hint, [address, read, second_level, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def _stream_line(typing_context: Any, target: Any, source: Any, index: Any) -> Any:
    """_stream_line(target, source, index): 64 bytes from flat uint8 `source` to `target`, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_BYTE, LINE_BYTES).as_pointer()
        to, origin = (
            builder.bitcast(_address(context, builder, kind, array, arguments[2]), vector)
            for kind, array in ((target, arguments[0]), (source, arguments[1]))
        )
        store = builder.store(builder.load(origin, align=STREAM_ALIGN_BYTES), to, align=STREAM_ALIGN_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_WORD, 1)]))
        return context.get_dummy_value()

    return types.void(target, source, types.intp), generate


@intrinsic
def top32(typing_context: Any, array: Any, index: Any, mask: Any) -> Any:
    """top32(flat_int32, index, mask): the maximum of the 32 elements from `index` on, each after `& mask`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_WORD, 16)
        start = builder.bitcast(_address(context, builder, array, *arguments[:2]), vector.as_pointer())
        lanes = ir.Constant(vector, ir.Undefined)
        for lane in range(16):
            lanes = builder.insert_element(lanes, arguments[2], ir.Constant(_WORD, lane))
        low, high = (
            builder.and_(builder.load(builder.gep(start, [ir.Constant(_WORD, half)]), align=4), lanes)
            for half in (0, 1)
        )
        most = builder.select(builder.icmp_signed(">", low, high), low, high)
        kind = ir.FunctionType(_WORD, [vector])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.smax.v16i32")
        return builder.call(reduce, [most])

    return types.int32(array, types.intp, types.int32), generate


@njit(nogil=True, cache=True)
def _stream(target, source):  # type: ignore[no-untyped-def]
    lines = source.shape[0] // LINE_BYTES
    for line in range(lines):
        _stream_line(target, source, line * LINE_BYTES)
    for i in range(lines * LINE_BYTES, source.shape[0]):
        target[i] = source[i]


def can_stream(target: Array) -> bool:
    """Whether a contiguous array starts where streaming stores may."""
    return bool(target.ctypes.data % STREAM_ALIGN_BYTES == 0)


def stream(target: Array, source: Array) -> None:
    """Copy `source` into `target`, flat and of one dtype, past the caches. See `can_stream`."""
    _stream(target.view(np.uint8), source.view(np.uint8))
