"""Codecs: one file a family, one contract (`codec.py`), one registry.

What this room's codecs do not do: move bytes between ranks (`collectives.reduce`), remember errors between steps
(`collectives.feedback`), or decide which codec a tensor gets.
"""

from collectives.codecs.blockint import Int4Block, Int8Block
from collectives.codecs.bounded import ErrorBounded, ErrorBoundedSum
from collectives.codecs.cast import Bf16, Fp16
from collectives.codecs.codec import Codec
from collectives.codecs.fp8 import Fp8Block
from collectives.codecs.lossless import Lossless
from collectives.codecs.lowrank import LowRank
from collectives.codecs.randomk import RandomK
from collectives.codecs.sign import Sign
from collectives.codecs.topk import Dgc, SelectQuantise, TopK

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Bf16(),
        Fp16(),
        Fp8Block(),
        Int8Block(),
        Int4Block(),
        ErrorBounded(),
        ErrorBoundedSum(),
        SelectQuantise(),
        Sign(),
        TopK(),
        RandomK(),
        Dgc(),
        LowRank(),
        Lossless(),
    )
}
"""Every codec with its default settings, by name."""

__all__ = [
    "CODECS",
    "Bf16",
    "Codec",
    "Dgc",
    "ErrorBounded",
    "ErrorBoundedSum",
    "Fp8Block",
    "Fp16",
    "Int4Block",
    "Int8Block",
    "Lossless",
    "LowRank",
    "RandomK",
    "SelectQuantise",
    "Sign",
    "TopK",
]
