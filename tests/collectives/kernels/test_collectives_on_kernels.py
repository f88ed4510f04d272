"""Whole collectives whose ranks use the CUDA kernels (on the host shim): the bytes of the CPU path, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor

from collectives.codecs import Codec, ErrorBounded, Fp8Block, Int4Block, Int8Block, TopK
from collectives.reduce import one_shot, two_shot
from collectives.sparse.ids import normalise
from collectives.sparse.rows import SparseRows
from collectives.sparse.schemes import SCHEMES
from collectives.transport import LocalTransport, run_local

AsGpu = Callable[[int], AbstractContextManager[list[str]]]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "codec", [Int8Block(), Int4Block(stochastic=True), Fp8Block(), ErrorBounded(), TopK(method="exact")], ids=str
)
def test_dense_reductions_are_those_of_the_cpu(codec: Codec, num_ranks: int, as_gpu: AsGpu) -> None:
    inputs = [torch.randn(5001, generator=torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]

    def reduce(transport: LocalTransport) -> list[Tensor]:
        results = [inputs[transport.rank].clone() for _ in range(2)]
        two_shot(results[0], codec, transport, op="mean", seed=3)
        one_shot(results[1], codec, transport, op="sum", seed=3)
        return results

    expected = run_local(num_ranks, reduce)
    with as_gpu(7) as launched:
        found = run_local(num_ranks, reduce)
    assert launched
    for rank in range(num_ranks):
        for ours, theirs in zip(found[rank], expected[rank], strict=True):
            assert ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "omnireduce"])
def test_sparse_schemes_are_those_of_the_cpu(name: str, as_gpu: AsGpu) -> None:
    generator = np.random.default_rng(5)
    counts, num_rows, width = (40, 0, 75), 501, 6
    parts = [
        (torch.from_numpy(generator.integers(0, num_rows, k)), torch.randn(k, width).to(torch.bfloat16)) for k in counts
    ]

    def reduce(transport: LocalTransport) -> SparseRows:
        ids, values = parts[transport.rank]
        rows = normalise(ids, values, (num_rows, width))
        return SCHEMES[name].all_reduce(rows, transport, "mean")

    expected = run_local(3, reduce)
    with as_gpu(1) as launched:
        found = run_local(3, reduce)
    assert launched
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.ids, theirs.ids)
        assert ours.values.view(torch.int16).equal(theirs.values.view(torch.int16))


def test_a_scheme_without_kernels_says_so(as_gpu: AsGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from collectives.errors import ConfigError
    from collectives.kernels.host import host_array

    with pytest.raises(ConfigError, match="move the tensor to the CPU"):
        host_array(torch.empty(3, device="meta"))
