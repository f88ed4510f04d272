"""What the driver makes of a training run: per-step records, and one variant held against another.

Pure bookkeeping on the reports of `zenray.engine.train_rank`; no Ray, no MLflow, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import pyarrow as pa

from collectives.planner import CallRecord

STEP_SCHEMA = pa.schema(
    [
        ("variant", pa.string()),
        ("step", pa.int64()),
        ("warmup", pa.bool_()),
        ("loss", pa.float64()),
        ("step_s", pa.float64()),
        ("elapsed_s", pa.float64()),
    ]
)
CALL_SCHEMA = pa.schema(
    [
        ("variant", pa.string()),
        ("tensor", pa.string()),
        ("call", pa.int64()),
        ("scheme", pa.string()),
        ("reason", pa.string()),
        ("predicted_bytes", pa.int64()),
        ("observed_bytes", pa.int64()),
        ("model_s", pa.float64()),
        ("predicted_s", pa.float64()),
        ("observed_s", pa.float64()),
        ("event", pa.string()),
    ]
)


@dataclass(frozen=True)
class Block:
    """One timed block of one variant, as rank 0 reported it."""

    variant: str
    first_step: int
    warmup: bool
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    block_s: float

    @property
    def steps_per_s(self) -> float:
        """Steps over wall seconds between the two barriers."""
        return len(self.losses) / self.block_s


@dataclass(frozen=True)
class Comparison:
    """`subject` against `baseline`, over the timed blocks. Ratios above 1 are in the subject's favour.

    speedup: steps per second, all timed blocks together; speedup_low, speedup_high, speedup_first, speedup_last: the
    extremes over neighbouring pairs of blocks, and the first (schemes are on trial) and last pair. bytes_ratio: payload
    bytes the busiest rank sends per step, NaN where one of the two does not count them. wire_ratio: the same as the
    network interface counts it, or None. loss_gap: the largest relative difference of the two loss curves at the same step.
    """

    subject: str
    baseline: str
    num_pairs: int
    speedup: float
    speedup_low: float
    speedup_high: float
    speedup_first: float
    speedup_last: float
    bytes_ratio: float
    wire_ratio: float | None
    loss_gap: float


@dataclass(frozen=True)
class TensorChoice:
    """How one tensor travelled: its last scheme, and medians over the calls that used it."""

    tensor: str
    scheme: str
    reason: str
    predicted_bytes: int
    observed_bytes: int
    predicted_ms: float
    observed_ms: float
    num_switches: int


class TrainingLog:
    """Collects reports, in any order between ranks, and answers with tables and ratios."""

    def __init__(self, variants: Sequence[str]):
        self.variants = tuple(variants)
        self.blocks: list[Block] = []
        self.events: list[str] = []
        self.probe: dict[str, float] = {}
        """The plain all-reduce before training: payload_bytes and seconds."""
        self._elapsed_s = dict.fromkeys(self.variants, 0.0)
        self._steps: dict[str, list[Any]] = {name: [] for name in STEP_SCHEMA.names}
        self._traffic: dict[tuple[str, int], dict[str, int]] = {}
        self._wire: dict[tuple[str, int], int] = {}
        self._num_timed: dict[tuple[str, int], int] = {}
        self._seen: set[tuple[str, int, str, int]] = set()

    def take(self, rank: int, report: Mapping[str, Any]) -> Block | None:
        """Note one report; returns the block if it was one. What is trained again after a recovery counts once."""
        if report["kind"] in ("traffic", "block"):
            key = (report["kind"], rank, report["variant"], report["first_step"])
            if key in self._seen:
                return None
            self._seen.add(key)
        match report["kind"]:
            case "event":
                self.events.append(str(report["text"]))
            case "probe":
                self.probe = {"payload_bytes": int(report["payload_bytes"]), "seconds": float(report["seconds"])}
            case "traffic":
                self._take_traffic(rank, report)
            case "block":
                return self._take_block(report)
        return None

    def _take_traffic(self, rank: int, report: Mapping[str, Any]) -> None:
        if report["warmup"]:
            return
        key = (str(report["variant"]), rank)
        phases = self._traffic.setdefault(key, {})
        for phase, num_bytes in report["sent_bytes"].items():
            phases[phase] = phases.get(phase, 0) + int(num_bytes)
        if report["wire_bytes"] is not None:
            self._wire[key] = self._wire.get(key, 0) + int(report["wire_bytes"])
        self._num_timed[key] = self._num_timed.get(key, 0) + int(report["num_steps"])

    def _take_block(self, report: Mapping[str, Any]) -> Block:
        block = Block(
            report["variant"],
            report["first_step"],
            report["warmup"],
            tuple(report["losses"]),
            tuple(report["step_s"]),
            report["block_s"],
        )
        self.blocks.append(block)
        for index, (loss, seconds) in enumerate(zip(block.losses, block.step_s, strict=True)):
            self._elapsed_s[block.variant] += block.block_s / len(block.losses)
            row = (block.variant, block.first_step + index, block.warmup, loss, seconds, self._elapsed_s[block.variant])
            for name, value in zip(self._steps, row, strict=True):
                self._steps[name].append(value)
        return block

    def timed(self, variant: str) -> list[Block]:
        """The blocks of `variant` that count, in order."""
        return [block for block in self.blocks if block.variant == variant and not block.warmup]

    def steps_per_s(self, variant: str) -> float:
        """Over all timed blocks together; NaN without any."""
        blocks = self.timed(variant)
        seconds = sum(block.block_s for block in blocks)
        return sum(len(block.losses) for block in blocks) / seconds if seconds else float("nan")

    def losses(self, variant: str) -> list[float]:
        """The loss at every step, by step."""
        rows = zip(self._steps["variant"], self._steps["step"], self._steps["loss"], strict=True)
        return [loss for name, _, loss in sorted(rows, key=lambda row: row[1]) if name == variant]

    def elapsed_s(self, variant: str) -> list[float]:
        """Training seconds of this variant at the end of each step."""
        return [s for name, s in zip(self._steps["variant"], self._steps["elapsed_s"], strict=True) if name == variant]

    def bytes_by_phase(self, variant: str) -> dict[str, float]:
        """Payload bytes per step that the busiest rank sent, by phase, over the timed blocks."""
        ranks = [key for key in self._traffic if key[0] == variant]
        if not ranks:
            return {}
        busiest = max(ranks, key=lambda key: sum(self._traffic[key].values()))
        return {phase: count / self._num_timed[busiest] for phase, count in self._traffic[busiest].items()}

    def wire_bytes(self, variant: str) -> float | None:
        """Bytes per step that the busiest interface sent, all protocols, or None where it cannot be told."""
        values = [count / self._num_timed[key] for key, count in self._wire.items() if key[0] == variant]
        return max(values, default=None)

    def compare(self, subject: str, baseline: str) -> Comparison:
        """See `Comparison`."""
        pairs = [a.steps_per_s / b.steps_per_s for a, b in zip(self.timed(subject), self.timed(baseline), strict=True)]
        ours, theirs = self.wire_bytes(subject), self.wire_bytes(baseline)
        sent, theirs_sent = (sum(self.bytes_by_phase(name).values()) for name in (subject, baseline))
        gaps = [
            abs(a - b) / max(abs(b), 1e-12) for a, b in zip(self.losses(subject), self.losses(baseline), strict=True)
        ]
        return Comparison(
            subject=subject,
            baseline=baseline,
            num_pairs=len(pairs),
            speedup=self.steps_per_s(subject) / self.steps_per_s(baseline),
            speedup_low=min(pairs),
            speedup_high=max(pairs),
            speedup_first=pairs[0],
            speedup_last=pairs[-1],
            bytes_ratio=theirs_sent / sent if sent and theirs_sent else float("nan"),
            wire_ratio=theirs / ours if ours and theirs else None,
            loss_gap=max(gaps),
        )

    def step_table(self) -> pa.Table:
        """One row per variant and step."""
        return pa.table(self._steps, schema=STEP_SCHEMA)


def call_table(records: Mapping[str, Sequence[CallRecord]]) -> pa.Table:
    """One row per reduction of a tensor, by variant."""
    rows = [{"variant": variant, **vars(record)} for variant, calls in records.items() for record in calls]
    return pa.Table.from_pylist(rows, schema=CALL_SCHEMA)


def choices(records: Sequence[CallRecord]) -> list[TensorChoice]:
    """The table of schemes, in the order in which the tensors first appeared."""
    result = []
    for tensor in dict.fromkeys(record.tensor for record in records):
        calls = [record for record in records if record.tensor == tensor]
        same = [record for record in calls if record.scheme == calls[-1].scheme]
        settled = same[len(same) // 4 :]  # the first calls pay for code generation and buffers
        result.append(
            TensorChoice(
                tensor=tensor,
                scheme=calls[-1].scheme,
                reason=calls[-1].reason,
                predicted_bytes=round(median(record.predicted_bytes for record in settled)),
                observed_bytes=round(median(record.observed_bytes for record in settled)),
                predicted_ms=1e3 * median(record.predicted_s for record in settled),
                observed_ms=1e3 * median(record.observed_s for record in settled),
                num_switches=sum(a.scheme != b.scheme for a, b in pairwise(calls)),
            )
        )
    return result
