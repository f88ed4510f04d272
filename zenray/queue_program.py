"""What the queue runs: a job file becomes a profile for the scheduler and a training loop for every rank.

What always holds: the samples of a step, and their weights, are the same under every plan. Each rank takes a slice of
the global batch in micro-batches, and a gradient is the mean over all samples, so a job that is re-planned or restarted
goes on with the numbers it would have had, up to the order of additions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from actors.job_run import Assignment, JobNeeds
from actors.monitor import CudaCard, FakeCard, MemoryMonitor, told_apart
from actors.state import CheckpointFolder, ModelState, OptimizerState, Stamp, State, StateProvider, digest_of
from actors.worker import RankFunction, WorkerContext
from collectives.errors import ConfigError
from placement.catalogue import MIB
from placement.data_plans import PINNABLE, ModuleProfile
from placement.mixed import drifted, split_by_speed
from placement.peaks import Peak
from placement.shapes import Layout, ModelShape, Recompute, stage_parameters
from placement.speed import flops_per_token
from placement.traced import Device, predict_module
from placement.watch import Alarm, Limits
from zenray.job_config import WORKLOADS, JobConfig, job_of
from zenray.step_metrics import StepMetrics
from zenray.train import prepare_model

MOST_MICRO_BATCH = 64
KEPT_LOSSES = 64
"""Losses that a result lists, evenly spaced."""


class QueueWorkload(Protocol):
    """A model and its data, for any plan. What it is made from is the job file."""

    shape: ModelShape

    def model(self, recompute: Recompute) -> nn.Module:
        """A module whose call with a batch returns the mean loss of its samples; the same weights on every call."""

    def samples(self, step: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Samples start .. stop - 1 of the global batch of `step`: a pure function."""

    def example(self, micro_batch: int) -> tuple[Tensor, ...]:
        """A batch of the right shapes."""


def workload_of(job: JobConfig) -> QueueWorkload:
    """The workload that the job file names. Raises ConfigError if it is not in the allow-list, or refuses the file."""
    if job.workload not in WORKLOADS:
        raise ConfigError(f"job '{job.name}': unknown workload '{job.workload}'; known: {', '.join(WORKLOADS)}")
    module, _, function = WORKLOADS[job.workload].partition(":")
    made: QueueWorkload = getattr(importlib.import_module(module), function)(job)
    return made


class QueueProgram:
    """See `actors.job_run.JobProgram`."""

    def check(self, request: Mapping[str, Any]) -> JobNeeds:
        """Raises ConfigError if no training can be made of the request."""
        job = job_of(request)
        workload_of(job)
        if unknown := set(job.pin) - set(PINNABLE):
            raise ConfigError(f"job '{job.name}': cannot pin {', '.join(sorted(unknown))}, only {', '.join(PINNABLE)}")
        return JobNeeds(
            global_batch=job.batch,
            steps=job.steps,
            max_gpus=job.max_gpus,
            recompute=tuple(job.recompute),
            pinned=job.pin,
            gpu_types=tuple(job.gpu_types),
            resources={"CPU": 1.0, "memory": float(job.host_memory_mib * MIB)},
            timeout_s=job.timeout_s,
            deadline_s=job.deadline_s,
            boost_s=job.boost_s,
            mixed=job.mixed,
        )

    def profile_key(self, request: Mapping[str, Any]) -> str:
        """All that a trace depends on."""
        return digest_of({name: request[name] for name in _TRACED})[:16]

    def class_key(self, request: Mapping[str, Any]) -> str:
        """The same, and what narrows the choice of plans."""
        return digest_of({name: request[name] for name in (*_TRACED, *_NARROWING)})[:16]

    def floor_bytes(self, request: Mapping[str, Any]) -> int:
        """Weights, gradients and both moments of Adam, 4 bytes each."""
        shape = workload_of(job_of(request)).shape
        return 16 * int(stage_parameters(shape, Layout.of(micro_batch=1), first=False).total[0])

    def profile(self, request: Mapping[str, Any]) -> ModuleProfile:
        """Trace the module at the smallest and the largest micro-batch, with and without recomputation.

        Its weights are never made, so a host smaller than the model can do it.
        """
        job = job_of(request)
        workload = workload_of(job)
        most = min(job.batch, MOST_MICRO_BATCH)
        device: Device = "cuda" if torch.cuda.is_available() else "cpu"
        smallest: dict[Recompute, Peak] = {}
        largest: dict[Recompute, Peak] = {}
        reserved = 1.0
        for level in sorted(set(job.recompute) & {"none", "full"}, reverse=True):
            for batch, peaks in ((1, smallest), (most, largest)):
                traced = predict_module(_outline(workload, level), workload.example(batch), device=device)
                peaks[level] = traced.forward_backward
                if device == "cuda":
                    reserved = max(reserved, traced.reserved / traced.allocated)
        trained = [p.numel() * p.element_size() for p in _outline(workload, "none").parameters() if p.requires_grad]
        return ModuleProfile(
            family=job.workload,
            variant=self.profile_key(request),
            smallest=smallest,
            largest=largest,
            most=most,
            step=traced.step,
            gradient_bytes=float(sum(trained)),
            largest_gradient_bytes=float(max(trained)),
            reserved_over_allocated=reserved,
            flops_per_sample=flops_per_token(workload.shape) * job.seq,
            tokens_per_sample=job.seq,
        )

    def rank_function(self, request: Mapping[str, Any], assignment: Assignment) -> RankFunction:
        """The training loop of one rank."""
        return partial(train_rank, dict(request), assignment)


def _outline(workload: QueueWorkload, recompute: Recompute) -> nn.Module:
    """The module without values, of which a trace takes only shapes."""
    with torch.device("meta"):
        return workload.model(recompute)


def train_rank(request: Mapping[str, Any], assignment: Assignment, context: WorkerContext) -> dict[str, Any]:
    """Train from the last checkpoint until the end, or until the card will be full before the next checkpoint.

    Reports, from rank 0, one "progress" record a step and one "checkpoint" record a checkpoint; from any rank an "alarm"
    record. Raises CardOutOfMemory, HostOutOfMemory, or what the collectives raise.
    """
    job = job_of(request)
    if assignment.shares:
        share = assignment.shares[context.node_id]
        assignment = replace(
            assignment,
            micro_batch=share.micro_batch,
            upper_bytes=share.upper_bytes,
            capacity_bytes=share.capacity_bytes,
        )
    limits = Limits(upper_bytes=assignment.upper_bytes, capacity_bytes=assignment.capacity_bytes)
    where: list[Any] = [0, "start"]
    with told_apart(context.rank, limits, where), card_of(assignment, context) as card:
        loop = _Loop(job, assignment, context)
        monitor = MemoryMonitor(card, limits, loop.done_steps)
        started = perf_counter()
        alarm, needed_bytes = loop.run(monitor, where)
        return {
            "ended": "alarm" if loop.stopped else "done",
            "alarm": alarm,
            "needed_bytes": max(needed_bytes, monitor.peak_bytes),
            "step": loop.done_steps,
            "losses": loop.losses[:: max(1, len(loop.losses) // KEPT_LOSSES)],
            "last_loss": loop.losses[-1] if loop.losses else None,
            "peak_bytes": monitor.peak_bytes,
            "peaks": monitor.peaks,
            "sampling_share": monitor.sampling_s / max(perf_counter() - started, 1e-9),
        }


@contextlib.contextmanager
def card_of(assignment: Assignment, context: WorkerContext) -> Iterator[FakeCard | CudaCard]:
    """The rank's card; a pretended one counts and enforces while the block runs."""
    if assignment.fake:
        with FakeCard(assignment.capacity_bytes) as fake:
            yield fake
    else:
        yield CudaCard(context.device)


class _Loop:
    """Model, optimizer, position and checkpoints of one rank."""

    def __init__(self, job: JobConfig, assignment: Assignment, context: WorkerContext):
        self.job, self.assignment, self.context = job, assignment, context
        self.workload = workload_of(job)
        self.module = self.workload.model(assignment.recompute).to(context.device)
        self.model = self.module
        if context.size > 1:
            self.model = prepare_model(self.module, job.policy, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=job.lr)
        self.metrics = StepMetrics(context.run_id, context.rank, self.model)
        self.losses: list[float] = []
        self.stopped = False
        self.samples = (job.batch // context.size,) * context.size
        self.forward: list[float] = [0.0, 0.0]
        """Samples and seconds of forward passes since the last split: a rank's speed, without waiting for others."""
        if assignment.shares:
            speeds = self._gather(assignment.shares[context.node_id].speed)
            self.samples = split_by_speed(speeds, job.batch)
        self.digest = digest_of({k: v for k, v in job.model_dump(mode="json").items() if k in _NUMERIC})
        # The state is the same on every rank, so rank 0 writes it, whatever the number of ranks is next time.
        self.folder = CheckpointFolder(Path(assignment.folder), 0, 1)
        self.providers: list[StateProvider] = [
            ModelState(self.module),
            OptimizerState(self.optimizer, self.module),
            _Losses(self.losses),
        ]
        self.done_steps = self.folder.latest() or 0
        if self.done_steps:
            self.folder.load(self.done_steps, self.providers, self.digest)

    def run(self, monitor: MemoryMonitor, where: list[Any]) -> tuple[str, int]:
        """Train; returns this rank's own alarm, '' without one, and the bytes that its trend leads to."""
        job, alarm, needed_bytes, noted = self.job, "", 0, False
        while self.done_steps < job.steps and not self.stopped:
            step = self.done_steps
            where[:], started = [step, "training"], perf_counter()
            loss = self._step(step)
            due = min(job.steps, (step // job.checkpoint_every + 1) * job.checkpoint_every)
            verdict = monitor.step_end(step, due)
            if verdict.alarm is Alarm.CROSSING and step + 1 < job.steps:
                needed_bytes = verdict.projected_bytes
                alarm = (
                    f"rank {self.context.rank}, step {step}: {verdict.peak_bytes} bytes, growing by "
                    f"{verdict.slope_bytes:.0f} a step, pass {monitor.limits.capacity_bytes} at step {verdict.crossing_step}"
                )
            elif verdict.alarm is Alarm.ABOVE_UPPER and not noted:
                noted = True
                self._say("alarm", text=f"{verdict.peak_bytes} bytes, {monitor.limits.upper_bytes} predicted at most")
            where[1] = "synchronisation"
            mean, alarms = self._agree(loss, bool(alarm))
            self.losses.append(mean)
            self.metrics.block([perf_counter() - started], mean)
            self.done_steps = step + 1
            self.stopped = alarms > 0
            if self.context.rank == 0:
                self._say("progress", step=self.done_steps, loss=mean, peak_bytes=monitor.peak_bytes)
            where[1] = "checkpoint"
            if self.stopped or self.done_steps == due:
                self._save()
                if self.assignment.shares:
                    self._split_anew()
        if alarm:
            self._say("alarm", text=alarm, peak_bytes=monitor.peak_bytes)
        return alarm, needed_bytes

    def _step(self, step: int) -> float:
        """Forward and backward of this rank's slice in micro-batches, then the update; returns its share of the loss."""
        job, b, size, rank = self.job, self.assignment.micro_batch, self.context.size, self.context.rank
        first, share = sum(self.samples[:rank]), self.samples[rank]
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(first, first + share, b):
            stop = min(start + b, first + share)
            batch = [item.to(self.context.device) for item in self.workload.samples(step, start, stop)]
            last = stop == first + share
            with contextlib.nullcontext() if last or self.model is self.module else self.model.no_sync():  # type: ignore[operator]
                began = perf_counter()
                loss = self.model(*batch) * ((stop - start) * size / job.batch)  # DDP averages over ranks
                total += float(loss.detach()) / size
                self.forward[0] += stop - start
                self.forward[1] += perf_counter() - began
                loss.backward()
        self.optimizer.step()
        return total

    def _gather(self, value: float) -> list[float]:
        """This number of every rank, by rank."""
        row = torch.zeros(self.context.size, dtype=torch.float64)
        row[self.context.rank] = value
        if self.context.size > 1:
            self.context.transport.all_reduce("speeds", row)
        return list(row.tolist())

    def _split_anew(self) -> None:
        """Split the batch by measured speeds, if they are far from those it was split by. All ranks decide alike."""
        speeds = self._gather(self.forward[0] / max(self.forward[1], 1e-9))
        self.forward = [0.0, 0.0]
        if drifted(self.samples, speeds):
            self.samples = split_by_speed(speeds, self.job.batch)
            if self.context.rank == 0:
                self._say("split", text=f"step {self.done_steps}: batch split {self.samples} by measured speed")

    def _agree(self, loss: float, alarm: bool) -> tuple[float, int]:
        """(mean loss of the global batch, ranks with an alarm): all ranks stop at the same step, or none."""
        shared = torch.tensor([loss, float(alarm)], dtype=torch.float64)
        if self.context.size > 1:
            self.context.transport.all_reduce("agreement", shared)
        return float(shared[0]), int(shared[1])

    def _save(self) -> None:
        context = self.context
        if context.rank == 0:
            stamp = Stamp(context.run_id, self.done_steps, context.epoch, 0, 1, self.digest)
            self.folder.save(stamp, self.providers)
            self._say("checkpoint", step=self.done_steps)

    def _say(self, kind: str, **values: Any) -> None:
        self.context.report({"kind": kind, **values})


class _Losses:
    """The losses so far, as part of the state."""

    name = "losses"

    def __init__(self, losses: list[float]):
        self.losses = losses

    def state_dict(self) -> State:
        """One JSON list."""
        return {"losses": json.loads(json.dumps(self.losses))}

    def load_state_dict(self, state: State) -> None:
        """Replace what is there."""
        self.losses[:] = state["losses"]


_TRACED = ("workload", "model", "batch", "seq", "retain", "recompute")
_NARROWING = ("max_gpus", "gpu_types", "pin")
_NUMERIC = ("model", "workload", "batch", "seq", "lr", "seed")
"""Keys of the job file that the numbers of the training depend on."""
