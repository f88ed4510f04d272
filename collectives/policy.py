"""What the synchroniser may do with which tensor: the user's say, before any measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from collectives.cost import COSTS
from collectives.errors import ConfigError


@dataclass(frozen=True)
class SyncPolicy:
    """How gradients are reduced.

    scheme: for sparse gradients: "auto" lets the planner choose per tensor, "off" leaves the model with plain DDP, a
    scheme's name fixes it. by_name: (pattern, scheme) pairs for single parameters, first match wins; patterns are shell
    patterns on the parameter's full name; "off" there means the plain dense reduction. A named scheme on a dense
    gradient sends its non-zero rows. check_replicas_every: backward passes between two comparisons of all parameters
    over all ranks; 0 never compares. Raises ConfigError for an unknown scheme.
    """

    scheme: str = "auto"
    by_name: tuple[tuple[str, str], ...] = ()
    check_replicas_every: int = 1000

    def __post_init__(self) -> None:
        known = ("auto", "off", *COSTS)
        for scheme in (self.scheme, *(scheme for _, scheme in self.by_name)):
            if scheme not in known:
                raise ConfigError(f"unknown policy '{scheme}'; choose one of {', '.join(known)}")
        if self.check_replicas_every < 0:
            raise ConfigError(
                f"check_replicas_every = {self.check_replicas_every}; it counts backward passes, 0 = never"
            )

    @classmethod
    def of(cls, policy: SyncPolicy | str | Mapping[str, str]) -> SyncPolicy:
        """From what users write: a scheme's name, "auto", "off", or a mapping of name patterns to those."""
        if isinstance(policy, SyncPolicy):
            return policy
        if isinstance(policy, str):
            return cls(policy)
        return cls(by_name=tuple(policy.items()))

    def scheme_for(self, name: str, *, is_dense: bool) -> str | None:
        """The scheme fixed for this parameter, or None where the planner chooses. "dense" stands for "off"."""
        general = "auto" if is_dense else self.scheme
        wanted = next((scheme for pattern, scheme in self.by_name if fnmatchcase(name, pattern)), general)
        return {"auto": None, "off": "dense"}.get(wanted, wanted)
