"""How the recoveries of a run enter its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from actors.protection import Recovery
from placement.recovery import Stage
from zenray.recorder import RunRecord


def record_recoveries(record: RunRecord, recoveries: Sequence[Recovery], events: Sequence[str]) -> None:
    """Seconds of each stage at step = number of the recovery, one table of all, and the group's events as tags."""
    for number, recovery in enumerate(recoveries, 1):
        seconds = {stage: s for stage, s in recovery.seconds.items() if stage != Stage.TRAINING}
        values = {f"recovery/{stage}_s": s for stage, s in seconds.items()}
        record.metrics(values | {"recovery/total_s": sum(seconds.values())}, number)
    record.metrics({"recoveries": len(recoveries)})
    record.tags({f"recovery.event.{number}": event for number, event in enumerate(events)})
    if recoveries:
        record.document("recoveries.json", [asdict(recovery) for recovery in recoveries])
