"""Training on ranks that differ: the numbers of a run on equal ones, whatever the split."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.job_run import Assignment
from jobs.ranks import run_ranks
from placement.catalogue import GIB
from zenray.job_config import JobConfig, request_of
from zenray.queue_program import train_rank

RANKS = Path(__file__).with_name("mixed_ranks.py")


def test_case_19_a_batch_split_by_speed_and_split_anew_trains_as_one_rank_does(tmp_path: Path) -> None:
    job = JobConfig.model_validate(
        {"model": {"layers": 2, "hidden": 64, "heads": 2}, "batch": 8, "seq": 32, "steps": 4, "checkpoint_every": 2}
    )
    config = {
        "request": request_of(job),
        "speeds": [1, 2, 5],
        "micro_batches": [1, 2, 3],
        "folder": str(tmp_path / "mixed"),
    }
    results = run_ranks(3, f"{RANKS}:train", config, timeout_s=120)
    free = Assignment(
        data=1, micro_batch=8, recompute="none", upper_bytes=GIB, capacity_bytes=GIB, fake=True, folder=str(tmp_path)
    )
    context: Any = SimpleNamespace(
        run_id="one", epoch=1, rank=0, size=1, device=torch.device("cpu"), report=lambda metrics: None
    )
    torch.set_num_threads(1)
    one = train_rank(request_of(job), free, context)["losses"]
    for result in results:
        assert result["losses"] == pytest.approx(one, rel=1e-5)
    assert results[0]["splits"][0].startswith("step 2: batch split (")
    assert "(2, 2, 4)" not in results[0]["splits"][0], "it began by predicted speeds, (2, 2, 4)"
