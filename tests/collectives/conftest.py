"""One launch of two ranks for all tests of FSDP, tensor and pipeline parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.ranks import run_ranks


@pytest.fixture(scope="session")
def two_ranks() -> list[dict[str, Any]]:
    """By rank: the results of every case of parallel_ranks.py."""
    ranks = Path(__file__).with_name("parallel_ranks.py")
    return run_ranks(2, f"{ranks}:run_all", {}, timeout_s=240)
