"""The branch of errors that placing things can raise."""

from __future__ import annotations

from collections.abc import Mapping

from collectives.errors import ZenrayError


class PlacementError(ZenrayError):
    """What was asked for does not fit: the message names the need, the best that there is, and the nearest change."""


class GangDoesNotFit(PlacementError):
    """A gang of bundles has no place, now or ever: which bundle, what it needs, and the node that comes closest.

    `reason` is "never" (more than the cluster has, even when idle) or "busy" (others hold it; `free` is what is left).
    """

    def __init__(
        self, *, bundle: int, need: Mapping[str, float], best_node: str, has: Mapping[str, float], reason: str, why: str
    ):
        self.bundle, self.need, self.best_node, self.has = bundle, dict(need), best_node, dict(has)
        self.reason, self.why = reason, why
        advice = "ask for less, or add a node" if reason == "never" else "wait, end another job, or raise timeout_s"
        super().__init__(
            f"bundle {bundle} needs {_amounts(need)} and does not fit ({why}). Best node: {best_node or 'none'} with "
            f"{_amounts(has)} {'in all' if reason == 'never' else 'free'}. To go on, {advice}."
        )


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items())) or "nothing"
