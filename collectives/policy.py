"""What may be done with which tensor: the user's say, before any measurement.

Every exchanged tensor has a role. `ROLES` says which codecs a role takes by itself, inside and between nodes, and which
only where the user asks; anything else is refused with ConfigError. "off" is always allowed, and inside the allowed set
the planner decides by measurement, unless `fixed` says to take the named codec as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase

import torch

from collectives.cost import COSTS
from collectives.errors import ConfigError


class Role(StrEnum):
    """What a tensor is to the training: how its error spreads depends on it."""

    DP_GRAD = "dp_grad"
    FSDP_GRAD = "fsdp_grad"
    FSDP_PARAM = "fsdp_param"
    TP_ACT = "tp_act"
    TP_GRAD = "tp_grad"
    PP_ACT = "pp_act"
    PP_GRAD = "pp_grad"
    MOE_DISPATCH = "moe_dispatch"
    MOE_COMBINE = "moe_combine"
    OPT_STATE = "opt_state"
    OUTER_DELTA = "outer_delta"


@dataclass(frozen=True)
class RoleRule:
    """Codecs by the place of the link. feedback: whether what a codec lost may be added to the role's next tensor."""

    inside: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    on_request: tuple[str, ...] = ()
    feedback: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        """Everything that is not forbidden."""
        return tuple(dict.fromkeys((*self.inside, *self.between, *self.on_request)))


ROLES: Mapping[Role, RoleRule] = {
    Role.DP_GRAD: RoleRule(
        inside=("bf16",),
        between=("bf16", "int8b"),
        on_request=("fp16", "fp8b", "int4b", "eb", "eb_sum", "sq", "topk", "randomk", "powersgd", "sign"),
        feedback=True,
    ),
    Role.FSDP_GRAD: RoleRule(("bf16",), ("bf16", "int8b"), ("int4b", "eb"), feedback=True),
    Role.FSDP_PARAM: RoleRule((), ("lossless",), ("int8b", "fp8b")),
    Role.TP_ACT: RoleRule((), (), ("fp8b", "int8b", "bf16")),
    Role.TP_GRAD: RoleRule((), (), ("fp8b", "int8b", "bf16")),
    Role.PP_ACT: RoleRule((), ("bf16", "lossless"), ("int8b", "eb")),
    Role.PP_GRAD: RoleRule((), ("bf16", "lossless"), ("int8b", "eb")),
    Role.MOE_DISPATCH: RoleRule((), ("bf16",), ("fp8b",)),
    Role.MOE_COMBINE: RoleRule((), ("bf16",), ()),
    Role.OPT_STATE: RoleRule((), ("lossless",), ()),
    Role.OUTER_DELTA: RoleRule(("int8b",), ("int8b",), ("int4b", "eb", "topk", "sq"), feedback=True),
}

DENSE_FIRST = ("topk", "sq", "randomk", "powersgd", "sign")
"""These need gradients that have settled: plain reduction for the first `SyncPolicy.dense_steps`."""

MIN_COMPRESSED_BYTES = 64 << 10
ROUTERS = ("*router*", "*.gate.weight")

Codecs = tuple[tuple[str, tuple[str, ...]], ...]
"""(role, codecs) pairs."""


def _naive() -> Codecs:
    """One codec wherever the role does not forbid it, otherwise the role's own."""
    own = {role: rule.between for role, rule in ROLES.items()}
    return tuple((role, ("int8b",) if "int8b" in ROLES[role].allowed else own[role][:1]) for role in ROLES)


def _mild() -> dict[Role, tuple[str, ...]]:
    mild: dict[Role, tuple[str, ...]] = {role: ("bf16",) for role in ROLES if "bf16" in ROLES[role].allowed}
    return mild | {Role.OPT_STATE: ("lossless",)}


LOSSLESS: Codecs = tuple((role, ("lossless",)) for role in ROLES if "lossless" in ROLES[role].allowed)

PRESETS: Mapping[str, Codecs] = {
    "naive": _naive(),
    "mz": (("dp_grad", ("int8b",)), *LOSSLESS),
    "z": tuple((_mild() | {Role.DP_GRAD: ("int8b",), Role.OUTER_DELTA: ("int8b",)}).items()),
    "zeropp": (("fsdp_param", ("int8b",)), ("fsdp_grad", ("int4b",)), ("dp_grad", ("int4b",))),
}
"""Fixed codecs per role. naive, mz, z repeat in kind the schemes of Xu et al., CCGrid'24; zeropp is that of ZeRO++
(Wang et al., ICLR'24): int8 parameters, int4 gradients in two hops where nodes hold several ranks."""


@dataclass(frozen=True)
class SyncPolicy:
    """How tensors are exchanged.

    scheme: for sparse gradients: "auto" lets the planner choose per tensor, "off" leaves the model with plain DDP, a
    scheme's name fixes it. by_name: (pattern, what) pairs for single parameters, first match wins; patterns are shell
    patterns on the parameter's full name. What: "off" (plain reduction), "auto", a scheme (on a dense gradient it sends
    the non-zero rows), a codec (also for parameters that are otherwise exempt, and for the values of sparse rows where
    it pays), or "column+codec" to fix both. codecs: (role, codecs) pairs; a role that is not named takes the defaults of
    `ROLES` while `scheme` is "auto", and nothing otherwise. fixed: take the first codec of a role without asking
    whether it pays. error_feedback: None takes each codec's default for `optimizer`. dense_steps: first steps without
    `DENSE_FIRST` codecs; also at least the learning rate's warm-up and 2 % of all steps. budget_bytes: limit of
    residuals and buffers per rank; None: none. density: share of the elements that topk, sq and randomk keep; None takes
    their own, 0.01. check_replicas_every: backward passes between two comparisons of all
    parameters over all ranks; 0 never compares. Raises ConfigError for what is unknown or forbidden.
    """

    scheme: str = "auto"
    by_name: tuple[tuple[str, str], ...] = ()
    codecs: Codecs = ()
    fixed: bool = False
    optimizer: str = "adam"
    error_feedback: bool | None = None
    dense_steps: int = 100
    budget_bytes: int | None = None
    density: float | None = None
    check_replicas_every: int = 1000

    def __post_init__(self) -> None:
        known = ("auto", "off", *COSTS)
        if self.scheme not in known:
            near = get_close_matches(self.scheme, (*known, *PRESETS, *ROLES[Role.DP_GRAD].allowed), n=1)
            hint = f"did you mean '{near[0]}'? C" if near else "c"
            raise ConfigError(
                f"unknown policy '{self.scheme}'; {hint}hoose one of {', '.join((*known, *PRESETS))}, a codec for dp_grad "
                f"({', '.join(ROLES[Role.DP_GRAD].allowed)}), or a mapping"
            )
        for pattern, what in self.by_name:
            self._check_name(pattern, what, known)
        for role, codecs in self.codecs:
            _check_codecs(role, codecs)
        if self.density is not None and not 0 < self.density <= 1:
            raise ConfigError(f"density = {self.density}; it is a share of the elements, above 0 and at most 1")
        if self.check_replicas_every < 0 or self.dense_steps < 0:
            raise ConfigError(
                f"check_replicas_every = {self.check_replicas_every}, dense_steps = {self.dense_steps}; both count "
                f"backward passes and may not be negative"
            )

    @staticmethod
    def _check_name(pattern: str, what: str, known: tuple[str, ...]) -> None:
        scheme, _, codec = what.rpartition("+")
        if scheme or what in ROLES[Role.DP_GRAD].allowed:
            _check_codecs("dp_grad", (codec,))
        if scheme not in ("", "column") or not (scheme or what in (*known, *ROLES[Role.DP_GRAD].allowed)):
            raise ConfigError(
                f"unknown policy '{what}' for '{pattern}'; choose one of {', '.join(known)}, a codec "
                f"({', '.join(ROLES[Role.DP_GRAD].allowed)}), or column+codec"
            )

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a pattern that matches no parameter of `names`: a mistyped name or role."""
        for pattern, _ in self.by_name:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = get_close_matches(pattern, [*names, *Role], n=1, cutoff=0.5)
                raise ConfigError(
                    f"policy: '{pattern}' is no role and matches no parameter"
                    + (f"; did you mean '{near[0]}'?" if near else f" of {', '.join(names[:8])} ...")
                )

    @classmethod
    def of(cls, policy: SyncPolicy | str | Mapping[str, str]) -> SyncPolicy:
        """From what users write: "auto", "off", a scheme, a preset, a codec, or a mapping.

        A codec's name fixes it for dp_grad. In a mapping a role's name as the key gives that role's codecs, by comma,
        for the planner to choose from; any other key is a name pattern.
        """
        if isinstance(policy, SyncPolicy):
            return policy
        if isinstance(policy, str):
            if policy in PRESETS:
                return cls(codecs=PRESETS[policy], fixed=True)
            if policy in ROLES[Role.DP_GRAD].allowed:
                return cls(codecs=(("dp_grad", (policy,)),), fixed=True)
            return cls(policy)
        roles = {key: tuple(v.strip() for v in value.split(",")) for key, value in policy.items() if key in set(Role)}
        patterns = tuple((key, value) for key, value in policy.items() if key not in roles)
        return cls(by_name=patterns, codecs=tuple((role, codecs) for role, codecs in roles.items()))

    def scheme_for(self, name: str, *, is_dense: bool) -> str | None:
        """The scheme fixed for this parameter, or None where the planner chooses. "dense" stands for "off"."""
        general = "auto" if is_dense else self.scheme
        wanted = self._named(name) or general
        if wanted in ROLES[Role.DP_GRAD].allowed:
            return "dense" if is_dense else None
        return {"auto": None, "off": "dense"}.get(wanted, wanted)

    def value_codec(self, name: str) -> str | None:
        """The codec with which the values of this parameter's sparse rows may travel, where the user named one."""
        wanted = self._named(name) or ""
        return wanted.rpartition("+")[2] if wanted.rpartition("+")[2] in ("bf16", "int8b", "int4b") else None

    def codecs_for(self, role: Role, *, between_nodes: bool) -> tuple[str, ...]:
        """Codecs that the planner may give to tensors of this role, besides "off"."""
        named = dict(self.codecs).get(role)
        if named is not None:
            return tuple(codec for codec in named if codec != "off")
        if self.scheme != "auto" or self.fixed:
            return ()
        return ROLES[role].between if between_nodes else ROLES[role].inside

    def codecs_of_gradient(
        self, name: str, shape: torch.Size, dtype: torch.dtype, *, between_nodes: bool
    ) -> tuple[str, ...]:
        """Codecs for one dense gradient: none for exempt ones, which are small, of one dimension, or routers.

        A parameter named in `by_name` with a codec takes that one, whatever its size.
        """
        if dtype not in (torch.float32, torch.bfloat16, torch.float16) or not shape.numel():
            return ()
        named = self._named(name)
        if named is not None and named != "auto":
            return (named,) if named in ROLES[Role.DP_GRAD].allowed else ()
        small = len(shape) < 2 or shape.numel() * dtype.itemsize < MIN_COMPRESSED_BYTES
        if small or any(fnmatchcase(name, pattern) for pattern in ROUTERS):
            return ()
        codecs = self.codecs_for(Role.DP_GRAD, between_nodes=between_nodes)
        return tuple(c for c in codecs if dtype == torch.float32 or c not in ("bf16", "fp16"))

    @property
    def touches_gradients(self) -> bool:
        """Whether DDP's gradients are to be looked at at all."""
        return self.scheme != "off" or bool(self.by_name) or bool(self.codecs)

    def _named(self, name: str) -> str | None:
        return next((what for pattern, what in self.by_name if fnmatchcase(name, pattern)), None)


def _check_codecs(role: str, codecs: tuple[str, ...]) -> None:
    if role not in set(Role):
        raise ConfigError(f"unknown role '{role}'; roles are {', '.join(Role)}")
    allowed = ("off", *ROLES[Role(role)].allowed)
    for codec in codecs:
        if codec not in allowed:
            raise ConfigError(f"role {role} does not take codec '{codec}'; it takes {', '.join(allowed)}")
