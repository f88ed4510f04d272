"""Parameter shapes of known model families, and gradients that look like theirs.

Shapes follow the published architectures: BERT (Devlin et al., 2019), GPT-2 (Radford et al., 2019), GPT-3 (Brown et al.,
2020) and ResNet-50 (He et al., 2016). No weights are built, so the 175-billion-parameter model costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXEMPT_BYTES = 64 << 10
"""Smaller tensors, and all vectors (norms, biases), stay uncompressed."""


@dataclass(frozen=True)
class Parameter:
    """One trained tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def compressible(self) -> bool:
        """Whether a gradient of this shape is compressed by default."""
        return len(self.shape) > 1 and self.numel * 4 >= EXEMPT_BYTES


def transformer(*, layers: int, hidden: int, vocabulary: int, positions: int, pooler: bool) -> list[Parameter]:
    """Embeddings, then per layer attention and a feed-forward part four times as wide; output weights are tied.

    pooler: BERT's extras: token types, a norm behind the embeddings instead of a last one, and a pooler.
    """
    h = hidden
    found: list[tuple[str, tuple[int, ...]]] = [("embed.token", (vocabulary, h)), ("embed.position", (positions, h))]
    if pooler:
        found += [("embed.type", (2, h)), ("pooler.weight", (h, h)), ("pooler.bias", (h,))]
    found += [("norm.weight", (h,)), ("norm.bias", (h,))]
    for layer in range(layers):
        block = {
            "attn.qkv": (3 * h, h),
            "attn.out": (h, h),
            "mlp.up": (4 * h, h),
            "mlp.down": (h, 4 * h),
        }
        for name, shape in block.items():
            found += [(f"layer{layer}.{name}.weight", shape), (f"layer{layer}.{name}.bias", shape[:1])]
        for norm in ("norm1", "norm2"):
            found += [(f"layer{layer}.{norm}.weight", (h,)), (f"layer{layer}.{norm}.bias", (h,))]
    return [Parameter(name, shape) for name, shape in found]


def resnet50() -> list[Parameter]:
    """Convolutions [out, in, k, k], each with the two vectors of its batch norm, and the classifier."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def conv(name: str, out: int, into: int, kernel: int) -> None:
        found.extend([(f"{name}.weight", (out, into, kernel, kernel)), (f"{name}.bn.weight", (out,))])
        found.append((f"{name}.bn.bias", (out,)))

    conv("stem", 64, 3, 7)
    width = 64
    for stage, (blocks, inner) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            name = f"stage{stage}.block{block}"
            conv(f"{name}.conv1", inner, width, 1)
            conv(f"{name}.conv2", inner, inner, 3)
            conv(f"{name}.conv3", 4 * inner, inner, 1)
            if block == 0:
                conv(f"{name}.shortcut", 4 * inner, width, 1)
            width = 4 * inner
    found += [("classifier.weight", (1000, width)), ("classifier.bias", (1000,))]
    return [Parameter(name, shape) for name, shape in found]


def family(name: str) -> list[Parameter]:
    """The parameters of one of FAMILIES."""
    if name == "resnet50":
        return resnet50()
    layers, hidden, vocabulary, positions, pooler = _TRANSFORMERS[name]
    return transformer(layers=layers, hidden=hidden, vocabulary=vocabulary, positions=positions, pooler=pooler)


_TRANSFORMERS = {
    "bert-large": (24, 1024, 30522, 512, True),
    "gpt2-xl": (48, 1600, 50257, 1024, False),
    "gpt3-175b": (96, 12288, 50257, 2048, False),
}
FAMILIES = (*_TRANSFORMERS, "resnet50")


def gradient_like(rows: int, columns: int, seed: int) -> Tensor:
    """fp32 [rows, columns]: normal values with heavy tails, each row at its own log-normal scale, about 1e-3 in all."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= torch.randn(rows, columns, generator=generator).mul_(0.5).exp_()
    values *= torch.randn(rows, 1, generator=generator).exp_().mul_(1e-3)
    return values


def sample_gradient(parameters: list[Parameter], numel: int, seed: int) -> Tensor:
    """fp32 [numel]: slices of gradient-like matrices in the shapes of a family, in proportion to their size."""
    shapes: dict[tuple[int, ...], int] = {}
    for parameter in parameters:
        if parameter.compressible:
            shapes[parameter.shape] = shapes.get(parameter.shape, 0) + parameter.numel
    total, parts = sum(shapes.values()), []
    for number, (shape, weight) in enumerate(shapes.items()):
        columns = math.prod(shape[1:])
        rows = min(max(round(numel * weight / total / columns), 1), shape[0])
        parts.append(gradient_like(rows, columns, seed * 1000 + number).view(-1))
    flat = torch.cat(parts)
    repeats = -(-numel // flat.numel())
    return flat.repeat(repeats)[:numel].contiguous()
