"""FSDP2 with codecs in its reduce-scatter and all-gather; ZeRO-1; the two-hop reduce-scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from collectives.codecs import CODECS
from collectives.fsdp import reduce_scatter_two_hop
from collectives.transport import LocalTransport, run_local


def test_losses_follow_the_exact_run(two_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["fsdp"] for rank in two_ranks):
        assert found["torch"]["losses"] == pytest.approx(found["exact"], rel=1e-4)
        assert found["int8_grad"]["losses"] == pytest.approx(found["exact"], rel=0.01)
        for name in ("int8_param", "int4_feedback", "zeropp"):
            assert found[name]["losses"] == pytest.approx(found["exact"], rel=0.05), name
        assert found["int8_grad"]["norms"][0] == pytest.approx(found["torch"]["norms"][0], rel=1e-3)
        assert found["exact"][-1] < 0.95 * found["exact"][0]


def test_all_ranks_hold_the_same_parameters_and_bytes_are_counted(two_ranks: list[dict[str, Any]]) -> None:
    for name in ("int8_grad", "int8_param", "int4_feedback", "zeropp"):
        assert two_ranks[0]["fsdp"][name]["digests"] == two_ranks[1]["fsdp"][name]["digests"]
    records = two_ranks[0]["fsdp"]["int8_grad"]["records"]
    assert records["fsdp_grad"][0] / records["fsdp_grad"][1] > 3
    assert records["fsdp_param"][1] <= records["fsdp_param"][0]
    assert (
        two_ranks[0]["fsdp"]["int8_param"]["records"]["fsdp_param"][0]
        > 3 * 0.9 * (two_ranks[0]["fsdp"]["int8_param"]["records"]["fsdp_param"][1])
    )
    assert two_ranks[0]["fsdp"]["int4_feedback"]["records"]["fsdp_grad"][2] > 0


def test_residuals_resume_bit_by_bit(two_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["fsdp_resume"] for rank in two_ranks):
        assert found["same"]
        assert found["modules"]


def test_without_fsdp_modules_the_error_says_what_to_call(two_ranks: list[dict[str, Any]]) -> None:
    assert "ConfigError: the model holds no FSDP2 module: call torch" in two_ranks[0]["fsdp"]["none"]


def test_optimizer_state_is_cut_over_the_ranks(two_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["zero_one"] for rank in two_ranks):
        assert found["plain"]["losses"] == pytest.approx(found["exact"], rel=1e-3)
        assert found["int8b"]["losses"] == pytest.approx(found["exact"], rel=0.03)
        assert found["int8b_changes"]["losses"] == pytest.approx(found["exact"], rel=0.01)
        for name in ("plain", "int8b", "int8b_changes"):
            assert found[name]["state_values"] <= found[name]["parameters"] + 8
            assert found[name]["digests"] == two_ranks[0]["zero_one"][name]["digests"]


def test_rounded_parameters_carry_their_changes_after_one_exact_collection(two_ranks: list[dict[str, Any]]) -> None:
    """The last optimizer collected thrice: all of it after the restore, then two changes in int8."""
    for found in (rank["zero_one"] for rank in two_ranks):
        assert found["plain"]["off_by"] == found["int8b"]["off_by"] == 0
        changes = found["int8b_changes"]
        assert 0 < changes["off_by"] < changes["once_off_by"] / 4
        assert changes["ratio"] == pytest.approx(3 / (1 + 2 * 8.125 / 32), rel=0.01)


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (6, 3), (8, 2), (4, 4), (4, 1)])
def test_two_hops_end_every_chunk_at_its_owner(size: int, per_node: int) -> None:
    numel = 40 * size

    def body(transport: LocalTransport) -> Tensor:
        x = torch.arange(numel, dtype=torch.float32) * (transport.rank + 1)
        out = torch.empty(40)
        codec = CODECS["fp16"]
        reduce_scatter_two_hop(x / numel, out, codec, codec, transport, per_node, residual=None, seed=1)
        return out

    factor = size * (size + 1) / 2
    for rank, out in enumerate(run_local(size, body)):
        exact = torch.arange(40 * rank, 40 * rank + 40) / numel * factor
        torch.testing.assert_close(out, exact, rtol=2e-3, atol=1e-3)
