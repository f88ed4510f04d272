"""One line for a training loop: wrap the model, attach the synchroniser; and ask it afterwards what it did.

Works inside a Ray Train loop, where Ray has set up `torch.distributed`, and in any other program that has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives.channel import RoleRecord
from collectives.ddp import attach, hook_of
from collectives.dense import SegmentReport
from collectives.errors import ConfigError
from collectives.policy import Role, SyncPolicy
from collectives.sparse import all_reduce
from collectives.sparse.ids import to_coo
from collectives.sparse.rows import Op
from collectives.torch_transport import TorchTransport
from collectives.transport import Transport

Policy = SyncPolicy | str | Mapping[str, str]


def prepare_model(
    model: nn.Module, policy: Policy = "auto", *, timeout_s: float = 300.0, **ddp_options: object
) -> DistributedDataParallel:
    """Let zenray synchronise the gradients of `model`; a collective call. Returns the DDP model to train.

    policy: "auto" (per tensor, by measurement), "off" (plain DDP), a scheme's name for all sparse gradients, a preset
    (naive, mz, z, zeropp), a codec's name for all dense gradients, a mapping of roles or parameter-name patterns to
    those, or a `SyncPolicy`. timeout_s: longest wait for a peer within one reduction.
    ddp_options go to `DistributedDataParallel` where the model is not wrapped yet; on NCCL it is moved to this
    process's current card first. "auto" may take codecs that round dense gradients where that pays, with error feedback;
    {"dp_grad": "off"} keeps them exact. Raises ConfigError without a process group, or for an unknown policy.
    """
    wanted = SyncPolicy.of(policy)
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised: call prepare_model inside a Ray Train loop, or after "
            "torch.distributed.init_process_group (one process is a group of one)"
        )
    if not isinstance(model, DistributedDataParallel):
        if "nccl" in dist.get_backend() and torch.cuda.is_available():
            model = model.to(torch.device("cuda", torch.cuda.current_device()))
        model = DistributedDataParallel(model, **ddp_options)  # type: ignore[arg-type]
    elif ddp_options:
        raise ConfigError(f"the model is wrapped already, so {', '.join(ddp_options)} would have no effect")
    wanted.check_patterns([name.removeprefix("module.") for name, _ in model.named_parameters()])
    if wanted.touches_gradients:
        attach(model, wanted, timeout_s=timeout_s)
    return model


# --- what it did ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorReport:
    """One parameter: how its gradient travels, why, and what the last reduction took (0 where nothing was measured)."""

    tensor: str
    scheme: str
    reason: str
    predicted_bytes: int
    observed_bytes: int
    predicted_s: float
    observed_s: float


@dataclass(frozen=True)
class Explanation:
    """One row a parameter, one record a role; `str()` of it is the table."""

    rows: tuple[TensorReport, ...]
    roles: tuple[RoleRecord, ...] = ()

    def __str__(self) -> str:
        header = ("tensor", "scheme", "bytes (predicted)", "ms (predicted)", "why")
        lines = [header, *(_cells(row) for row in self.rows)] if self.rows else []
        widths = [max((len(line[column]) for line in lines), default=0) for column in range(len(header))]
        table = ["  ".join(c.ljust(width) for c, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*table, *(_role_line(role) for role in self.roles if role.observed_ms)])


def _role_line(role: RoleRecord) -> str:
    is_gradient = role.role == Role.DP_GRAD
    said = [
        f"{role.raw_bytes:,.0f} raw, {role.wire_bytes:,.0f} wire bytes a {'step' if is_gradient else 'call'} "
        f"({role.ratio:.2f}x)",
        f"{role.observed_ms:.3g} ms ({role.predicted_ms:.3g} predicted, {role.codec_ms:.3g} of it the codec)",
        f"{role.exposed_share:.0%} of the plain step exposed" if is_gradient else "",
        f"relative error {role.relative_error:.2g}",
        f"residual {role.residual_ratio:.2g} x gradient" if is_gradient else "",
        f"{role.nonfinite_calls} calls not finite" if role.nonfinite_calls else "",
        f"{role.fallbacks} fallbacks",
        f"plan {role.plan_hash}" if is_gradient else "",
    ]
    return f"{role.role}: {', '.join(filter(None, said))}"


def _cells(row: TensorReport) -> tuple[str, ...]:
    if not row.predicted_s:
        return (row.tensor, row.scheme, "-", "-", row.reason)
    num_bytes = f"{row.observed_bytes:,} ({row.predicted_bytes:,})"
    return (row.tensor, row.scheme, num_bytes, f"{row.observed_s * 1e3:.3g} ({row.predicted_s * 1e3:.3g})", row.reason)


@runtime_checkable
class Recorded(Protocol):
    """What keeps records of other roles: of FSDP2, tensor and pipeline parallelism, experts, outer steps."""

    def records(self) -> list[RoleRecord]:
        """One a role."""


def explain(*parts: nn.Module | Recorded) -> Explanation:
    """How each parameter of a prepared model is synchronised, and what each role of other parts came to on this rank.

    parts: models from `prepare_model`, and whatever has records. Call it after at least one backward pass, not during
    one. Raises ConfigError for a model that no DDP wraps and that has no records.
    """
    told = [_explain_model(p) if isinstance(p, DistributedDataParallel) else _explain_roles(p) for p in parts]
    return Explanation(tuple(r for t in told for r in t.rows), tuple(r for t in told for r in t.roles))


def _explain_roles(part: nn.Module | Recorded) -> Explanation:
    if not isinstance(part, Recorded):
        raise ConfigError(f"{type(part).__name__} is not prepared: train what prepare_model returns, and explain that")
    return Explanation((), tuple(part.records()))


def _explain_model(model: DistributedDataParallel) -> Explanation:
    hook = hook_of(model)
    if hook is None:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        return Explanation(
            tuple(TensorReport(n, "plain DDP", "no synchroniser attached", 0, 0, 0.0, 0.0) for n in names)
        )
    last = {record.tensor: record for record in hook.records()}
    segments = {name: segment for segment in hook.segments() for name in segment.names}
    rows = []
    for name, parameter in hook.parameters.items():
        if (record := last.get(name)) is not None and (record.scheme != "dense" or name not in segments):
            figures = (record.predicted_bytes, record.observed_bytes, record.predicted_s, record.observed_s)
            rows.append(TensorReport(name, record.scheme, record.reason, *figures))
        elif (segment := segments.get(name)) is not None:
            rows.append(_share_of(segment, name, parameter.numel() / segment.numel))
        else:
            rows.append(TensorReport(name, "dense", "dense gradient, part of its bucket", 0, 0, 0.0, 0.0))
    return Explanation(tuple(rows), (hook.role_record(),))


def _share_of(segment: SegmentReport, name: str, share: float) -> TensorReport:
    """A parameter's part, by its elements, of the stretch it travels in."""
    scheme, why = (
        ("dense", f"off, because {segment.reason}") if segment.choice == "off" else (segment.choice, segment.reason)
    )
    return TensorReport(
        name,
        scheme,
        why,
        round(share * segment.predicted_bytes),
        round(share * segment.observed_bytes),
        share * segment.predicted_s,
        share * segment.observed_s,
    )


# --- single reductions ------------------------------------------------------------------------------------------------

_transports: WeakKeyDictionary[dist.ProcessGroup, Transport] = WeakKeyDictionary()


def sparse_all_reduce(
    indices: Tensor | None,
    values: Tensor | None,
    shape: Sequence[int],
    op: Op = "mean",
    *,
    scheme: str = "auto",
    timeout_s: float = 300.0,
) -> Tensor:
    """Reduce a sparse tensor over the default process group; returns a coalesced COO tensor, equal on all ranks.

    indices [k] and values [k, *shape[1:]] are rows; indices [len(shape), k] and values [k] are elements; indices None
    and values a COO, CSR or dense tensor work as well. timeout_s counts from the first call on. Errors: see
    `collectives.sparse.all_reduce.sparse_all_reduce`.
    """
    transport = _default_transport(timeout_s)
    reduced = all_reduce.sparse_all_reduce(indices, values, shape, op, transport=transport, scheme=scheme)
    return to_coo(reduced.rows, shape)


def _default_transport(timeout_s: float) -> Transport:
    """A transport of our own beside the default group, so that our messages never meet other users' of that group."""
    world = dist.group.WORLD
    if world is None:
        raise ConfigError("torch.distributed is not initialised: call init_process_group first")
    if world not in _transports:
        on_cpu = "gloo" in dist.get_backend_config(world)
        group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo") if on_cpu else world
        _transports[world] = TorchTransport(group, timeout_s=timeout_s)
    return _transports[world]
