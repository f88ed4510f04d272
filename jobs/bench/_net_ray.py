"""The driver of `net engine=ray`, inside the first namespace: the same measurement in the workers of a `WorkerGroup`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from actors.group import WorkerGroup
from actors.worker import WorkerContext
from collectives.torch_transport import TorchTransport
from jobs.bench._net_ranks import measure
from jobs.cluster import connect


def main(path: Path) -> None:
    """Read the specification from `path`, measure, and leave the figures of all ranks there instead."""
    spec = json.loads(path.read_text(encoding="utf-8"))

    def rank(context: WorkerContext) -> dict[str, Any]:
        assert isinstance(context.transport, TorchTransport)
        return measure(context.transport, spec)

    limits = {"start_timeout_s": 120.0, "collective_timeout_s": spec["timeout_s"]}
    with connect(num_nodes=spec["ranks"]), WorkerGroup(spec["ranks"], strategy="STRICT_SPREAD", **limits) as group:
        path.write_text(json.dumps(group.run(rank, timeout_s=spec["timeout_s"])), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
