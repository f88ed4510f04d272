"""Rows of results, the guard around each part, the table and the JSON file."""

from __future__ import annotations

import json
import platform
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Row:
    """One result. Rates are bytes per second; `of_copy` is the share of a device copy of the same size."""

    part: str
    name: str
    status: Status
    size_mib: float | None = None
    microseconds: float | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None
    eager_times: float | None = None
    """How many times longer torch's own operations take for the same."""
    note: str = ""


class Skip(Exception):
    """Raised by a part that cannot run here; says why."""


@dataclass
class Report:
    """The results so far. `budget_s` is for everything; a part that would start after it is skipped."""

    budget_s: float
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def run(self, part: str, body: Callable[[], Iterable[Row]]) -> None:
        """Run one part; what it yields before it fails is kept."""
        if self.left_s <= 0:
            self.rows.append(Row(part, "all", "skipped", note=f"the {self.budget_s:g} s were used up"))
            return
        start = time.monotonic()
        print(f"-- {part}", flush=True)
        try:
            for row in body():
                self.rows.append(row)
                if row.status != "ok":
                    print(f"   {row.name}: {row.status} {row.note}", flush=True)
        except Skip as reason:
            self.rows.append(Row(part, "all", "skipped", note=str(reason)))
        except Exception as error:
            traceback.print_exc()
            self.rows.append(Row(part, "all", "failed", note=f"{type(error).__name__}: {error}"[:400]))
        self.seconds[part] = time.monotonic() - start

    @property
    def failed(self) -> bool:
        return any(row.status == "failed" for row in self.rows)

    def table(self) -> str:
        """All rows as text."""
        head = ("part", "what", "status", "MiB", "us", "GB/s", "of copy", "eager", "note")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head) - 1)]
        return "\n".join("  ".join([*map(str.ljust, line[:-1], widths), line[-1]]).rstrip() for line in cells)

    def write(self, folder: Path) -> Path:
        """`gpu-check.json` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "gpu-check.json"
        content = {
            "environment": environment(),
            "seconds": self.seconds,
            "rows": [{k: v for k, v in asdict(row).items() if v is not None} for row in self.rows],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None, pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    return (
        row.part,
        row.name,
        row.status,
        number(row.size_mib, "{:g}"),
        number(row.microseconds, "{:.1f}"),
        number(row.gb_per_s, "{:.0f}"),
        number(row.of_copy, "{:.0%}"),
        number(row.eager_times, "{:.1f}x"),
        row.note,
    )


def environment() -> dict[str, object]:
    """Versions and hardware: what a filed table must name."""
    packages = sorted(
        f"{found.metadata['Name']}=={found.version}"
        for found in metadata.distributions()
        if (found.metadata["Name"] or "").lower().startswith(("torch", "numpy", "numba", "cupy", "nvidia-"))
    )
    cards = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            cards.append(f"{card.name}, {card.total_memory >> 20} MiB, sm_{card.major}{card.minor}")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch_cuda": torch.version.cuda,
        "packages": packages,
        "cards": cards,
    }
