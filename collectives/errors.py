"""The root of all zenray errors and the branch of this room.

Every message says what happened, with which numbers, and what to do. Errors cross process and actor borders: each class
rebuilds itself from its own fields (`__reduce__`), so a caller sees the fields and not only a text.
"""

from __future__ import annotations

from collections.abc import Sequence


class ZenrayError(Exception):
    """Root of every error that zenray raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[ZenrayError], args: tuple[object, ...], fields: dict[str, object]) -> ZenrayError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(ZenrayError):
    """A setting is unknown, misspelt, out of range or forbidden here."""


class GradientError(ZenrayError):
    """A gradient cannot be reduced as it is: its type, shape or ids are wrong. Nothing was sent."""


class WireFormatError(ZenrayError):
    """Received bytes do not describe what they claim; nothing was allocated from them."""


class CollectiveError(ZenrayError):
    """A collective failed. The transport it ran on is unusable afterwards; inputs are untouched, outputs are not."""


class CollectiveMismatch(CollectiveError):
    """Ranks disagree about the tensor, its layout or the order of calls. Raised on all ranks before data moves."""


class CollectiveTimeout(CollectiveError):
    """A peer did not answer before the deadline."""

    def __init__(self, *, rank: int, phase: str, missing: Sequence[int], expected_bytes: int, timeout_s: float):
        self.rank, self.phase, self.missing = rank, phase, tuple(missing)
        self.expected_bytes, self.timeout_s = expected_bytes, timeout_s
        super().__init__(
            f"rank {rank}: no answer from rank(s) {', '.join(map(str, self.missing))} in phase '{phase}' within "
            f"{timeout_s:g} s ({expected_bytes} bytes outstanding). A peer hangs or is slower than the "
            f"deadline: look at its log, or raise timeout_s if it is only slow."
        )


class PeerLost(CollectiveError):
    """A peer closed its connection: it died or left the group."""

    def __init__(self, *, rank: int, phase: str, peer: int, expected_bytes: int, cause: str):
        self.rank, self.phase, self.peer, self.expected_bytes, self.cause = rank, phase, peer, expected_bytes, cause
        super().__init__(
            f"rank {rank}: lost rank {peer} in phase '{phase}' with {expected_bytes} bytes outstanding ({cause}). "
            f"The group is unusable: rebuild it without that rank or restart from the last checkpoint."
        )
