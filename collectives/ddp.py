"""Where DistributedDataParallel hands us its gradients: one communication hook for sparse, row-sparse and dense ones.

On Gloo the hook owns a group and one thread, which runs the collectives of all buckets in bucket order while backward
goes on; on NCCL, and on Gloo for parameters on a card, it runs them on DDP's own group in the calling thread. What
always holds: state is keyed by parameter name (DDP rebuilds its buckets after the first backward), a parameter without
a gradient still takes part, and an error ends the backward pass of every rank with an exception that names the
parameter.

What this does not do: buffers, and parameters that DDP was told to ignore, stay as they are.
"""

# Annotations are not postponed here: DDP compares the hook's with the types themselves.

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from collectives.channel import RoleRecord
from collectives.cost import probe_link
from collectives.dense import SegmentReport
from collectives.errors import CollectiveError, CollectiveMismatch, ConfigError, ZenrayError
from collectives.feedback import reshard
from collectives.gradients import GradientReducer
from collectives.kernels import cuda
from collectives.planner import CallRecord, Planner
from collectives.policy import SyncPolicy
from collectives.replicas import check_replicas
from collectives.segments import Place
from collectives.sparse import schemes
from collectives.staging import StagedTransport
from collectives.topology import probe_topology
from collectives.torch_transport import TorchTransport
from collectives.transport import Transport

MAX_NAMED = 4


@dataclass
class _Bucket:
    """One bucket on its way. `done` is set when `future` has its result or the hook has failed."""

    names: tuple[str, ...]
    places: tuple[Place, ...]
    """Empty for a sparse gradient, which has a bucket of its own."""
    buffer: Tensor
    is_last: bool
    future: Future[Tensor]
    done: threading.Event = field(default_factory=threading.Event)


def sync_hook(state: "SyncHook", bucket: GradBucket) -> Future[Tensor]:
    """The function that DDP calls for every ready bucket."""
    return state.start(bucket)


def attach(
    model: DistributedDataParallel, policy: SyncPolicy | str | Mapping[str, str] = "auto", *, timeout_s: float = 300.0
) -> "SyncHook":
    """Let zenray synchronise the gradients of `model`; a collective call, before the first backward pass.

    timeout_s bounds every wait for a peer. Raises ConfigError if a hook is attached already.
    """
    if hook_of(model) is not None:
        raise ConfigError("this model has a synchroniser already; set hook_of(model).policy to change what it does")
    device = next(p.device for p in model.parameters())
    own_group = _gloo_group_like(model.process_group, timeout_s) if device.type == "cpu" else None
    transport: Transport = TorchTransport(own_group or model.process_group, timeout_s=timeout_s)
    if device.type == "cuda" and transport.device.type == "cpu":
        transport = StagedTransport(transport, device)
    if device.type == "cpu":
        schemes.warm_up()  # some seconds at first, for which step 0 would stall; so below
    elif device.type == "cuda" and cuda.installed():
        cuda.warm_up(device)
    if transport.device.type != device.type:
        raise ConfigError(f"parameters live on {device}, but the process group serves {transport.device}")
    hook = SyncHook(model, SyncPolicy.of(policy), transport, own_group)
    model.register_comm_hook(hook, sync_hook)
    _attached[model] = hook
    return hook


def _gloo_group_like(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """A new group of the same ranks. Only they take part in making it, also where they are not the whole world."""
    ranks, timeout = dist.get_process_group_ranks(group), timedelta(seconds=timeout_s)
    is_world = len(ranks) == dist.get_world_size()
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, backend="gloo", use_local_synchronization=not is_world
    )
    return made


def hook_of(model: nn.Module) -> "SyncHook | None":
    """The hook attached to this DDP model, if any."""
    return _attached.get(model)


_attached: weakref.WeakKeyDictionary[nn.Module, "SyncHook"] = weakref.WeakKeyDictionary()


class SyncHook:
    """State and engine of the communication hook of one DDP model. Made by `attach`; a context manager.

    Gradients come back as the mean over ranks, the same bytes on every rank. After an error the group is unusable:
    every later backward pass raises, and training goes on from a checkpoint in a new group.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        policy: SyncPolicy,
        transport: Transport,
        own_group: dist.ProcessGroup | None,
    ):
        self.transport = transport
        ignored = set(model.parameters_to_ignore)
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored
        }
        self.planner = Planner(probe_link(transport))
        self._reducer = GradientReducer(transport, self.planner, policy, probe_topology(transport))
        self.num_backwards = 0
        self.exposed_s = 0.0
        """Seconds that all backward passes so far waited for communication after their last gradient."""
        self._waited_s = 0.0
        self._ended_at: float | None = None
        self._loss_scale = 1.0
        self.error: BaseException | None = None
        self._names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        self._seen: set[str] = set()
        self._checked_at = 0
        handles = _define_missing_gradients(model, self.parameters)
        handles.append(model.register_forward_pre_hook(lambda _, __: self._require_health()))
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if own_group is not None:
            # The thread knows the queue only, so that a hook nobody closes can still be collected.
            self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="zenray-sync", daemon=True)
            self._thread.start()
        self._stop = weakref.finalize(self, _stop, self._jobs, self._thread, transport, own_group, handles)

    # --- called by autograd ---

    def start(self, bucket: GradBucket) -> Future[Tensor]:
        """Queue one bucket; its collectives run in order behind those of earlier buckets."""
        self._require_health()
        self._require_open()
        self._check_replicas_if_due()
        buffer = bucket.buffer()
        names = tuple(self._names[p] for p in bucket.parameters())
        places = tuple(
            Place(name, int(view.storage_offset() - buffer.storage_offset()), view.shape, view.is_contiguous())
            for name, view in zip(names, bucket.gradients(), strict=not buffer.is_sparse)
        )
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        work = _Bucket(names, places, buffer, bucket.is_last(), future)
        Variable._execution_engine.queue_callback(lambda: self._finish(work))
        self._submit(lambda: self._run(work))
        return work.future

    def _require_health(self) -> None:
        """Raise after a failure: DDP has not finished its backward pass and would stop with an internal error."""
        if self.error is not None and torch.is_grad_enabled():
            raise CollectiveError(
                f"rank {self.transport.rank}: the gradient synchroniser failed earlier: {self.error}. Rebuild the "
                f"group and the model from the last checkpoint."
            )

    def _require_open(self) -> None:
        if not self._stop.alive:
            raise CollectiveError(f"rank {self.transport.rank}: the gradient synchroniser was closed; attach a new one")

    def _submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            job()
        else:
            self._jobs.put(job)

    def _finish(self, work: _Bucket) -> None:
        """Runs at the end of backward, before DDP collects the futures: the place where errors can be raised.

        An exception inside a future would reach DDP as a value of the wrong type.
        """
        started = time.perf_counter()
        work.done.wait()  # ends: by the transport's deadlines
        self._waited_s += time.perf_counter() - started
        if self.error is not None:
            raise self.error
        self._seen.update(work.names)
        missing = sorted(self.parameters.keys() - self._seen)
        if not missing:
            self._seen.clear()
            self.num_backwards += 1
            self._note_step()
        elif work.is_last:
            raise CollectiveMismatch(
                f"{len(self._seen)} of {len(self.parameters)} parameters were synchronised; missing: {_listing(missing)}"
            )

    def _note_step(self) -> None:
        """Backward has computed all gradients by now, so whatever it waited is communication that nothing hid."""
        now = time.perf_counter()
        self.exposed_s += self._waited_s
        if self._ended_at is not None:
            self._reducer.dense.planner.note_step(self._waited_s, now - self._ended_at)
        self._ended_at, self._waited_s = now, 0.0

    # --- called by the communication thread ---

    def _run(self, work: _Bucket) -> None:
        result = work.buffer
        if self.error is None:
            try:
                result = self._reduce(work)
            except BaseException as error:
                self._fail(error, f"gradient of {_listing(work.names)}")
        try:
            work.future.set_result(result)
        finally:
            work.done.set()

    def _reduce(self, work: _Bucket) -> Tensor:
        self._reducer.step = self.num_backwards
        if work.buffer.is_sparse:
            return self._reducer.reduce_sparse(work.names[0], work.buffer)
        self._reducer.reduce_flat(work.buffer, work.places)
        return work.buffer

    def _fail(self, error: BaseException, what: str) -> None:
        if isinstance(error, ZenrayError):
            error.args = (f"{what}: {error}",)
            self.error = error
        else:
            self.error = CollectiveError(f"rank {self.transport.rank}: {what}: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        self.transport.abort()

    def _check_replicas_if_due(self) -> None:
        every = self.policy.check_replicas_every
        if every and self.num_backwards % every == 0 and self._checked_at < self.num_backwards:
            self._checked_at = self.num_backwards
            self._submit(self._check_replicas)

    def _check_replicas(self) -> None:
        if self.error is None:
            try:
                check_replicas(self.parameters, self.transport)
            except BaseException as error:
                self._fail(error, f"after {self.num_backwards} steps")

    # --- for the user ---

    @property
    def policy(self) -> SyncPolicy:
        """What the hook may do. Set it on all ranks alike, between two steps."""
        return self._reducer.policy

    @policy.setter
    def policy(self, policy: SyncPolicy | str | Mapping[str, str]) -> None:
        self._reducer.policy = SyncPolicy.of(policy)

    def records(self) -> list[CallRecord]:
        """Predicted and observed bytes and seconds of every reduction of a sparse tensor; not during backward."""
        return self.planner.records()

    def role_record(self) -> RoleRecord:
        """Bytes, times, errors and memory of the dense gradients (dp_grad) on this rank; not during backward."""
        return self._reducer.dense.record()

    def segments(self) -> list[SegmentReport]:
        """What reduces which stretch of dense gradients, and why; not during backward."""
        return self._reducer.dense.report()

    def events(self) -> list[str]:
        """Codecs that were taken back or replaced, with the reason; equal on all ranks."""
        return list(self._reducer.dense.planner.events)

    def take_back(self) -> None:
        """The step whose backward pass has just ended will not be applied: its residuals stay what they were before.

        Steps with a gradient that is not finite are taken back by themselves. Call it on all ranks alike.
        """
        self._reducer.dense.was_skipped = True

    @property
    def loss_scale(self) -> float:
        """The factor of the loss. Residuals are in its units: set it, on all ranks, whenever the scaler changes it."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"loss_scale = {scale}; it must be positive and finite")
        self._reducer.dense.close_step()
        self._reducer.dense.feedback.rescale(scale / self._loss_scale)
        for table in self._reducer.dense.rows.tables.values():
            table *= scale / self._loss_scale
        self._loss_scale = scale

    def check_replicas(self) -> None:
        """Compare all parameters over all ranks now; a collective call, not during backward. See `check_replicas`."""
        if self.error is not None:
            raise self.error
        self._require_open()
        done = threading.Event()
        self._submit(self._check_replicas)
        self._submit(done.set)
        done.wait()  # ends: by the transport's deadlines
        if self.error is not None:
            raise self.error

    def state_dict(self) -> dict[str, Any]:
        """By parameter name, free of buckets and groups; picklable; not during backward.

        "planner" and "plan" are equal on all ranks, the residuals and factors are this rank's own tensors.
        """
        dense = self._reducer.dense.state_dict()
        return {"planner": self.planner.state_dict(), "loss_scale": self._loss_scale, **dense}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, each rank from its own; in a group of another size, all from `reshard_states`."""
        self.planner.load_state_dict(state["planner"])
        self._loss_scale = float(state.get("loss_scale", 1.0))
        self._reducer.dense.load_state_dict(state)

    def close(self) -> None:
        """End the thread and its group; waits no longer than a collective may take. Later backward passes raise."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reshard_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One hook state for every rank of a group of another size, from the states of all old ranks, in their order."""
    tables = {
        name: torch.stack([state["rows"][name] for state in states]).mean(0)
        for name in states[0].get("rows", {})
        if all(name in state["rows"] for state in states)
    }
    return {**states[0], "feedback": reshard([state["feedback"] for state in states]), "rows": tables}


def _define_missing_gradients(
    model: DistributedDataParallel, parameters: Mapping[str, nn.Parameter]
) -> list[RemovableHandle]:
    """Give sparse parameters that a backward pass does not reach an empty gradient, before DDP looks for one.

    DDP stops at an unused parameter whose gradient should be sparse, because it cannot invent one. Tensor hooks run
    before DDP's own, so the first parameter that is reached defines them all.
    """
    if not (model.find_unused_parameters or model.static_graph):
        return []
    modules = [m for m in model.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    trained = set(parameters.values())
    sparse = [m.weight for m in modules if m.weight in trained]

    def define(_: Tensor) -> None:
        for weight in sparse:
            if weight.grad is None:
                weight.grad = torch.sparse_coo_tensor(
                    torch.empty((1, 0), dtype=torch.int64, device=weight.device),
                    weight.new_empty((0, *weight.shape[1:])),
                    weight.shape,
                    check_invariants=False,
                )

    if not sparse:
        return []
    return [p.register_hook(define) for p in parameters.values()]  # type: ignore[no-untyped-call]


def _run_jobs(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:  # ends: `_stop` puts None
        job()
        del job


def _stop(
    jobs: "queue.SimpleQueue[Callable[[], None] | None]",
    thread: threading.Thread | None,
    transport: Transport,
    own_group: dist.ProcessGroup | None,
    handles: Sequence[RemovableHandle],
) -> None:
    for handle in handles:
        handle.remove()
    if thread is None:
        return
    jobs.put(None)
    thread.join(transport.timeout_s)
    if thread.is_alive():
        transport.abort()
        return
    if own_group is not None and dist.is_initialized() and transport.size == dist.get_world_size():
        # A group of some ranks is named by them and keeps that name until the process ends: torch would meet its
        # stale addresses under it. A group that a failure has torn down, or the user destroyed, is gone already.
        with suppress(ValueError, RuntimeError):
            dist.destroy_process_group(own_group)


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
