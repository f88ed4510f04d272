"""A hint to the processor: fetch this cache line now. It never faults and changes no value.

A block kernel makes two or three passes over a block that fits the first-level cache. While it computes, nothing asks
for the next block, because one block holds more instructions than the processor looks ahead; the hint fills that gap
and is worth a fifth of the time of `int8b` with error feedback.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """prefetch(flat_array, index): the line of element `index`, which may lie beyond the end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte_pointer)
        builder.call(hint, [address, *(ir.Constant(word, value) for value in (0, 3, 1))])  # read, keep, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
