"""Sixteen values in a register: the vector words that numba lacks.

A loop with a literal trip count becomes vector operations only where the compiler does not unroll it first, and half-bytes
never do. So block kernels are written with `load`, `scaled`, `nearest`, `store` and the like, on any processor: the compiler
splits sixteen lanes into what it has. Two more words are about memory. `prefetch`: a block kernel makes two or three passes
over a block that fits the first-level cache, and while it computes, nothing asks for the next blocks. `stream`: a store into
a line that is not in the cache reads that line first, which for a decoder of 4 to 32 bits is the larger part of its traffic;
streaming stores do not.

numba keeps compiled kernels by the date of their own file: after a change here, touch the files that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from collectives.codecs.codec import ABS_MASK, Array

AHEAD = 8
"""Blocks of 256 between the one that is worked on and the one that is fetched: two pages, beyond its own guess."""
LINE = 16
"""fp32 values in a cache line."""
LANES = 16
STREAM_ALIGN_BYTES = 16
_BYTE, _WORD, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
_ELEMENTS = {types.float32: _FLOAT, types.int32: _WORD, types.int8: _BYTE, types.uint8: _BYTE}


class Lanes(types.Type):  # type: ignore[misc]
    """numba's type of sixteen values of one element type."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"Lanes({element})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, _vector(kind))


def _vector(kind: Lanes) -> ir.VectorType:
    return ir.VectorType(_ELEMENTS[kind.element], LANES)


_F32, _I32, _I8, _U8 = (Lanes(element) for element in _ELEMENTS)


def _same(builder: Any, value: Any) -> Any:
    """One scalar in all lanes."""
    first = builder.insert_element(ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, _WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES))


def _all(element: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to element `index` of a flat array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


# --- memory -----------------------------------------------------------------------------------------------------------


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """prefetch(flat_array, index): fetch the line of element `index` into the second-level cache. It may lie beyond the end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _WORD, _WORD, _WORD])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(_address(context, builder, array, *arguments), _BYTE.as_pointer())
        read, second_level, data = (_WORD(value) for value in (0, 2, 1))
        builder.call(hint, [address, read, second_level, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """load(flat_array, index): its elements index to index + 15."""
    kind = Lanes(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = builder.bitcast(_address(context, builder, array, *arguments), _vector(kind).as_pointer())
        return builder.load(source, align=kind.element.bitwidth // 8)

    return kind(array, types.intp), generate


@intrinsic
def store(typing_context: Any, array: Any, index: Any, lanes: Any) -> Any:
    """store(flat_array, index, lanes): into its elements index to index + 15."""
    return _store(array, lanes, lanes.element.bitwidth // 8, past=False)


@intrinsic
def stream(typing_context: Any, array: Any, index: Any, lanes: Any) -> Any:
    """stream(flat_array, index, lanes): `store` past the caches; where `can_stream`, at a multiple of 16 bytes."""
    return _store(array, lanes, STREAM_ALIGN_BYTES, past=True)


def _store(array: Any, lanes: Any, align: int, *, past: bool) -> Any:
    if array.dtype != lanes.element:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = _address(context, builder, array, *arguments[:2])
        done = builder.store(arguments[2], builder.bitcast(target, _vector(lanes).as_pointer()), align=align)
        if past:
            done.set_metadata("nontemporal", builder.module.add_metadata([_WORD(1)]))
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), generate


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _word(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic of one or two arguments of these types, from the function that emits it."""

    def define(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, *arguments)

        if len(kinds) == 1:

            def typed(typing_context: Any, first: Any) -> Any:
                return (result(*kinds), generate) if first == kinds[0] else None
        else:

            def typed(typing_context: Any, first: Any, second: Any) -> Any:  # type: ignore[misc]
                return (result(*kinds), generate) if first == kinds[0] else None

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return define


@_word(_F32, _F32, _F32)
def plus(builder: Any, first: Any, second: Any) -> Any:
    """first + second"""
    return builder.fadd(first, second)


@_word(_F32, _F32, _F32)
def minus(builder: Any, first: Any, second: Any) -> Any:
    """first - second"""
    return builder.fsub(first, second)


@_word(_F32, _F32, types.float32)
def scaled(builder: Any, lanes: Any, factor: Any) -> Any:
    """Each times one factor."""
    return builder.fmul(lanes, _same(builder, factor))


@_word(_I32, _F32)
def magnitude(builder: Any, lanes: Any) -> Any:
    """The fp32 bits without the sign, which order as the absolute values do."""
    return builder.and_(builder.bitcast(lanes, _vector(_I32)), _all(_WORD, int(ABS_MASK)))


@_word(_I32, _I32, _I32)
def larger(builder: Any, first: Any, second: Any) -> Any:
    """The larger of each pair."""
    return builder.select(builder.icmp_signed(">", first, second), first, second)


@_word(types.int32, _I32)
def largest(builder: Any, lanes: Any) -> Any:
    """The largest of all."""
    kind = ir.FunctionType(_WORD, [lanes.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.smax.v16i32"), [lanes])


@_word(_I32, _F32)
def nearest(builder: Any, lanes: Any) -> Any:
    """Rounded to nearest even; what is beyond int32 or no number gives anything."""
    kind = ir.FunctionType(lanes.type, [lanes.type])
    rint = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.v16f32")
    return builder.fptosi(builder.call(rint, [lanes]), _vector(_I32))


@_word(_F32, _I32)
def floats(builder: Any, lanes: Any) -> Any:
    """int32 -> fp32"""
    return builder.sitofp(lanes, _vector(_F32))


@_word(_I8, _I32)
def narrow(builder: Any, lanes: Any) -> Any:
    """int32 -> int8, the lowest byte"""
    return builder.trunc(lanes, _vector(_I8))


@_word(_I32, _I8)
def wide(builder: Any, lanes: Any) -> Any:
    """int8 -> int32"""
    return builder.sext(lanes, _vector(_I32))


@_word(_U8, _I32, _I32)
def pack4(builder: Any, low: Any, high: Any) -> Any:
    """Integers of -8 to 7, plus 8, as the low and the high halves of bytes."""
    halves = (builder.trunc(builder.add(lanes, _all(_WORD, 8)), _vector(_U8)) for lanes in (low, high))
    return builder.or_(next(halves), builder.shl(next(halves), _all(_BYTE, 4)))


@_word(_I32, _U8)
def low4(builder: Any, lanes: Any) -> Any:
    """The first argument of `pack4`."""
    return builder.sub(builder.zext(builder.and_(lanes, _all(_BYTE, 15)), _vector(_I32)), _all(_WORD, 8))


@_word(_I32, _U8)
def high4(builder: Any, lanes: Any) -> Any:
    """The second argument of `pack4`."""
    return builder.sub(builder.zext(builder.lshr(lanes, _all(_BYTE, 4)), _vector(_I32)), _all(_WORD, 8))


# --- whole arrays -----------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _copy_past(target, source):  # type: ignore[no-untyped-def]
    whole = source.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        stream(target, i, load(source, i))
    for i in range(whole, source.shape[0]):
        target[i] = source[i]


def can_stream(target: Array) -> bool:
    """Whether a contiguous array starts where streaming stores may."""
    return bool(target.ctypes.data % STREAM_ALIGN_BYTES == 0)


def copy_past_caches(target: Array, source: Array) -> None:
    """Copy `source` into `target`, flat and of four-byte elements of one dtype. See `can_stream`."""
    _copy_past(target.view(np.int32), source.view(np.int32))
