"""One line for a training loop: wrap the model, attach the synchroniser; and ask it afterwards what it did.

Works inside a Ray Train loop, where Ray has set up `torch.distributed`, and in any other program that has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives.ddp import attach, hook_of
from collectives.errors import ConfigError
from collectives.policy import SyncPolicy
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

    policy: "auto" (per tensor, by measurement), "off" (plain DDP), a scheme's name for all sparse gradients, a mapping
    of parameter-name patterns to those, or a `SyncPolicy`. timeout_s: longest wait for a peer within one reduction.
    ddp_options go to `DistributedDataParallel` where the model is not wrapped yet; on NCCL it is moved to this
    process's current card first. Raises ConfigError without a process group, or for an unknown policy.
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
    if wanted.scheme != "off" or wanted.by_name:
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
    """One row a parameter; `str()` of it is the table."""

    rows: tuple[TensorReport, ...]

    def __str__(self) -> str:
        header = ("tensor", "scheme", "bytes (predicted)", "ms (predicted)", "why")
        lines = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def _cells(row: TensorReport) -> tuple[str, ...]:
    if not row.predicted_s:
        return (row.tensor, row.scheme, "-", "-", row.reason)
    num_bytes = f"{row.observed_bytes:,} ({row.predicted_bytes:,})"
    return (row.tensor, row.scheme, num_bytes, f"{row.observed_s * 1e3:.3g} ({row.predicted_s * 1e3:.3g})", row.reason)


def explain(model: nn.Module) -> Explanation:
    """How each parameter of a prepared model is synchronised; after at least one backward pass, not during one."""
    hook = hook_of(model)
    if hook is None:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        return Explanation(
            tuple(TensorReport(n, "plain DDP", "no synchroniser attached", 0, 0, 0.0, 0.0) for n in names)
        )
    last = {record.tensor: record for record in hook.records()}
    rows = []
    for name in hook.parameters:
        record = last.get(name)
        if record is None:
            rows.append(TensorReport(name, "dense", "dense gradient, part of its bucket", 0, 0, 0.0, 0.0))
        else:
            rows.append(
                TensorReport(
                    name,
                    record.scheme,
                    record.reason,
                    record.predicted_bytes,
                    record.observed_bytes,
                    record.predicted_s,
                    record.observed_s,
                )
            )
    return Explanation(tuple(rows))


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
