"""The branch of errors that placing things can raise."""

from __future__ import annotations

from collectives.errors import ZenrayError


class PlacementError(ZenrayError):
    """What was asked for does not fit: the message names the need, the best that there is, and the nearest change."""
