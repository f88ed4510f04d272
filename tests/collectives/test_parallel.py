"""Tensor and pipeline parallelism through torch's own layers, the outer loop, and all of it at once on eight ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.ranks import run_ranks

RANKS = Path(__file__).with_name("parallel_ranks.py")


def test_tensor_parallel_sums_are_exact_without_and_close_with_fp8(two_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["tensor_parallel"] for rank in two_ranks):
        assert found["plain"]["loss"] == pytest.approx(found["exact"], rel=1e-5)
        assert found["plain"]["up"] < 1e-4
        assert found["plain"]["embed"] < 1e-4
        assert found["fp8b"]["loss"] == pytest.approx(found["exact"], rel=0.05)
        assert 1e-4 < found["fp8b"]["up"] < 0.3
        assert 1e-4 < found["fp8b"]["embed"] < 0.3
        for role in ("tp_act", "tp_grad"):
            raw, wire = found["fp8b"]["records"][role]
            assert raw / wire > 3.5
    assert len({rank["tensor_parallel"]["fp8b"]["embed_digest"] for rank in two_ranks}) == 1


def test_pipeline_messages_are_packets_and_gradients_stay_close(two_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(result["pipeline"] for result in two_ranks):
        assert found["plain"]["error"] < 1e-4
        assert 1e-5 < found["int8b"]["error"] < 0.1
        raw, wire = found["int8b"]["records"]["pp_act" if rank == 0 else "pp_grad"]
        assert raw / wire > 3.5
        assert "ConfigError: pp_act: packets of eb need a fixed size" in found["unsized"]
    last = two_ranks[1]["pipeline"]
    assert last["plain"]["losses"] == pytest.approx(last["exact"], rel=1e-5)
    assert last["int8b"]["losses"] == pytest.approx(last["exact"], rel=0.01)


def test_what_a_codec_owes_when_it_is_taken_back_reaches_the_next_update(two_ranks: list[dict[str, Any]]) -> None:
    for found in (rank["taken_back"] for rank in two_ranks):
        assert found["fsdp_grad"] < 1e-5
        assert found["outer_delta"] < 1e-5


def test_outer_steps_leave_equal_replicas_and_learn_with_quantised_deltas(two_ranks: list[dict[str, Any]]) -> None:
    exact = two_ranks[0]["outer_loop"]["off"]["losses"]
    assert exact[-1] < 0.9 * exact[0]
    for codec, least in (("int8b", 3.5), ("int4b", 6.0)):
        found = [rank["outer_loop"][codec] for rank in two_ranks]
        assert found[0]["digests"] == found[1]["digests"]
        assert found[0]["losses"] == pytest.approx(exact, rel=0.1, abs=0.02)
        assert found[0]["ratio"] > least


POLICY = {"dp_grad": "int8b", "tp_act": "fp8b", "tp_grad": "fp8b", "pp_act": "int8b", "pp_grad": "int8b"}


def check_three_dimensions(steps: int, policy: dict[str, str] | str, tolerance: float) -> None:
    ranks = run_ranks(8, f"{RANKS}:three_dimensions", {"steps": steps, "policy": policy}, timeout_s=240)
    exact = ranks[0]["exact"]
    losses = [rank["losses"] for rank in ranks if rank["losses"]]
    assert len(losses) == 4
    mean = [sum(values) / 4 for values in zip(*losses, strict=True)]
    assert mean == pytest.approx(exact, rel=tolerance)
    by_place = {tuple(rank["place"]): rank["digests"] for rank in ranks}
    for (stage, replica, shard), digests in by_place.items():
        assert digests == by_place[stage, 1 - replica, shard], "replicas of one shard differ"
    if isinstance(policy, dict):
        assert all(rank["ratios"][role] > 3.5 for rank in ranks for role in ("tp_act", "tp_grad"))
        assert all(rank["ratios"]["dp_grad"] > 1.2 for rank in ranks)


def test_tensor_pipeline_and_data_parallelism_together() -> None:
    check_three_dimensions(3, POLICY, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["off", "naive", "z", "mz"])
def test_presets_in_three_dimensions(policy: str) -> None:
    check_three_dimensions(12, policy, 1e-3 if policy == "off" else 0.1)
