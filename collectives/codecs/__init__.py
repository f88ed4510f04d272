"""Codecs: one file a family, one contract (`codec.py`), one registry.

What this room's codecs do not do: move bytes between ranks (`collectives.reduce`), remember errors between steps
(`collectives.feedback`), or decide which codec a tensor gets.
"""

from collectives.codecs.blockint import Int4Block, Int8Block
from collectives.codecs.bounded import ErrorBounded, ErrorBoundedSum
from collectives.codecs.cast import Bf16, Fp16
from collectives.codecs.codec import Codec

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Bf16(), Fp16(), Int8Block(), Int4Block(), ErrorBounded(), ErrorBoundedSum())
}
"""Every codec with its default settings, by name."""
