"""TorchTransport on Gloo: the same results and byte counts as LocalTransport, and an end in time for every failure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from collectives.errors import CollectiveError
from collectives.torch_transport import NUM_EXCHANGE_TAGS, TorchTransport, parcel_tag
from collectives.transport import MAX_PARCELS, run_local
from jobs.links import ShapedBed, unavailable_reason
from jobs.ranks import RankProcesses, load_target, run_ranks

PROGRAMS = str(Path(__file__).with_name("rank_programs.py"))
SIZES = (1, 2, 3, 5, 8)


STAGES = (
    ("metadata", 7, "killed"),
    ("ring", 6, "killed"),
    ("data", 5, "killed"),
    ("data", 4, "raises"),
    ("chain", 4, "aborts"),
    ("data", 4, "disagrees"),
    ("ring", 4, "stopped"),
    ("chain", 3, "stopped"),
)
"""Phase of the survivors, number of ranks, and what becomes of the last of them."""
DEADLINE_S = 1.0
LIMIT_S = 5.0
"""Far below the deadline of 60 s of the stages that must not wait for it; a quiet machine takes some 0.05 s."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what each rank saw: workoutN/RANK.json and stageN/RANK.json. Ranks 0 and 1 survive all stages."""
    folder = tmp_path_factory.mktemp("seen")
    config = {"sizes": SIZES, "stages": STAGES, "deadline_s": DEADLINE_S, "folder": str(folder)}
    with RankProcesses(max(SIZES), f"{PROGRAMS}:workouts_and_failures", config, timeout_s=200) as ranks:
        ranks.wait([0, 1])
    return folder


def read(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(num_ranks)]


@pytest.mark.parametrize("size", SIZES)
def test_results_and_byte_counts_are_those_of_threads(size: int, seen: Path) -> None:
    """Groups are the last ranks of the world; every dtype, uneven and zero sizes, open exchanges, the wrap of tags."""
    workout = load_target(f"{PROGRAMS}:workout")
    threads = run_local(size, lambda transport: workout(transport, {}))
    assert read(seen / f"workout{size}", size) == threads
    if size > 1:
        assert threads[0]["sent"]["records"] == [0] + [24] * (size - 1)
        assert threads[0]["sent"]["dense"] == 2 * (size - 1) * 6 * 4


def test_ranks_without_a_group_are_told_what_to_do() -> None:
    assert not dist.is_initialized()
    with pytest.raises(CollectiveError, match="init_process_group"):
        TorchTransport()


def test_tags_differ_by_exchange_ordinal_and_size_and_stay_below_the_reserved_ones() -> None:
    tags = {
        parcel_tag(exchange, ordinal, num_bytes)
        for exchange in (0, 1, NUM_EXCHANGE_TAGS - 1)
        for ordinal in (0, 1, MAX_PARCELS - 1)
        for num_bytes in (1, 2, 4092)
    }
    assert len(tags) == 27
    assert min(tags) >= 0
    assert max(tags) < 0x7FF00000
    assert parcel_tag(NUM_EXCHANGE_TAGS + 1, 3, 5) == parcel_tag(1, 3, 5)


@pytest.mark.parametrize("stage", range(len(STAGES)), ids=[f"{fate}-{phase}" for phase, _, fate in STAGES])
def test_every_survivor_leaves_in_time_and_names_the_cause(stage: int, seen: Path) -> None:
    phase, size, fate = STAGES[stage]
    victim = size - 1
    for note in read(seen / f"stage{stage}", victim):
        assert "broken group" in note["later"], "a failed transport refuses later calls"
        assert f"phase '{phase}'" in note["text"], note
        assert "bytes outstanding" in note["text"]
        if fate in ("killed", "raises", "aborts"):
            assert note["error"] == "PeerLost", note
            assert note["fields"]["peer"] == victim, note
            assert ("error of its own" in note["text"]) == (fate != "killed")
            assert note["fields"]["expected_bytes"] > 0
            assert note["after_failure_s"] < LIMIT_S
        elif fate == "stopped":
            assert note["error"] == "CollectiveTimeout", note
            assert note["fields"]["missing"] == [victim], note
            assert note["fields"]["expected_bytes"] > 0
            assert DEADLINE_S <= note["waited_s"] < DEADLINE_S + LIMIT_S
        else:
            assert note["error"] == "CollectiveMismatch", note
            assert "disagree about sizes" in note["text"]
            assert note["waited_s"] < DEADLINE_S + LIMIT_S


# --- the wire ---


@pytest.mark.network
@pytest.mark.skipif(unavailable_reason() is not None, reason=f"no shaped links: {unavailable_reason()}")
def test_counted_bytes_are_those_of_the_interface() -> None:
    with ShapedBed(2, None) as bed:
        results = run_ranks(2, f"{PROGRAMS}:wire_bytes", {}, bed=bed, timeout_s=60)
    for result in results:
        for counted, on_wire in result.values():
            assert counted in (8 << 20, 16 << 20)
            assert on_wire == pytest.approx(counted, rel=0.01)
