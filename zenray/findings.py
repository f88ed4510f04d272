"""What a check found: the common form of `zenray doctor` and of the checks before a submission."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """Of one thing that was looked at. WARN: works, but will cost speed or surprise; BROKEN: does not work."""

    OK = "ok"
    WARN = "warn"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was seen, and where it is not OK, what to do."""

    about: str
    health: Health
    seen: str
    fix: str = ""

    def __str__(self) -> str:
        advice = f"\n       -> {self.fix}" if self.fix and self.health is not Health.OK else ""
        return f"{self.health:>6} {self.about}: {self.seen}{advice}"


def ok(about: str, seen: str) -> Finding:
    """All is well."""
    return Finding(about, Health.OK, seen)


def warn(about: str, seen: str, fix: str) -> Finding:
    """Works, with a price."""
    return Finding(about, Health.WARN, seen, fix)


def broken(about: str, seen: str, fix: str) -> Finding:
    """Does not work."""
    return Finding(about, Health.BROKEN, seen, fix)


def is_broken(findings: Iterable[Finding]) -> bool:
    """Whether any of them is BROKEN."""
    return any(finding.health is Health.BROKEN for finding in findings)
