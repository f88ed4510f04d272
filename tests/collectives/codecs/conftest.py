"""Inputs that every codec must survive, and the codecs with their options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from collectives.codecs import CODECS, Codec, Dgc, ErrorBounded, Fp8Block, Int4Block, RandomK, SelectQuantise, TopK

VARIANTS: dict[str, Codec] = {
    **CODECS,
    "fp8b-e5m2": Fp8Block(form="e5m2"),
    "int4b-stochastic": Int4Block(stochastic=True),
    "int4b-hadamard": Int4Block(hadamard=True),
    "eb-absolute": ErrorBounded(bound=1e-3, relative_to="one"),
    "eb-range": ErrorBounded(bound=1e-3, relative_to="range"),
    "topk-exact": TopK(method="exact"),
    "topk-bitmap": TopK(method="exact", density=0.3),
    "topk-block": TopK(method="block"),
    "sq-sampled-int4": SelectQuantise(method="sampled", values="int4b"),
    "randomk-unbiased": RandomK(rescale=True, density=0.1),
    "dgc-warm": Dgc().at_epoch(0),
}

torch.set_num_threads(1)

SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1023, 1025, 20001)


def inputs(numel: int) -> dict[str, Tensor]:
    """Hard tensors of one size."""
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    wide = normal * torch.exp(4 * torch.randn(numel, generator=generator))
    cases = {
        "normal": normal,
        "wide": wide,
        "zero": torch.zeros(numel),
        "minus zero": torch.full((numel,), -0.0),
        "equal": torch.full((numel,), -3.25),
        "huge": normal.sign() * 3e38,
        "subnormal": wide * 1e-40,
        "tiny": normal * 2.0**-118,
        "sparse": torch.where(normal > 1.5, normal, 0.0),
    }
    for name, poison in (("nan", torch.nan), ("inf", torch.inf), ("minus inf", -torch.inf), ("outlier", 1e30)):
        cases[name] = normal.clone()
        cases[name][numel // 2 : numel // 2 + 1] = poison
    return cases


@pytest.fixture(params=VARIANTS, ids=str)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Each codec and option in turn."""
    return VARIANTS[request.param]


@pytest.fixture(params=[n for n, c in VARIANTS.items() if n != "lossless"], ids=str)
def lossy(request: pytest.FixtureRequest) -> Codec:
    """Each codec that takes part in reductions."""
    return VARIANTS[request.param]


@pytest.fixture(scope="session")
def sizes() -> tuple[int, ...]:
    return SIZES


@pytest.fixture(scope="session")
def hard_inputs() -> Callable[[int], dict[str, Tensor]]:
    return inputs
