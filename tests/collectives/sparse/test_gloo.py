"""Every scheme on real processes over Gloo: the same bits and the same bytes as on threads."""

from pathlib import Path
from typing import Any

import pytest

from collectives.sparse.schemes import SCHEMES
from collectives.transport import run_local
from jobs.ranks import load_target, run_ranks

PROGRAM = str(Path(__file__).with_name("sparse_ranks.py"))
SIZES = (3, 4)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(max(SIZES), f"{PROGRAM}:on_groups", {"sizes": SIZES}, timeout_s=120)


@pytest.mark.parametrize("size", SIZES)
def test_gloo_equals_threads(size, seen) -> None:
    threads = run_local(size, lambda transport: load_target(f"{PROGRAM}:every_scheme")(transport, {}))
    processes = [outcomes[str(size)] for outcomes in seen[:size]]
    assert processes == threads
    for scheme in SCHEMES:
        assert len({outcomes[scheme][0] for outcomes in processes}) == 1, scheme
