"""The training engine: what each rank of a `WorkerGroup` runs, and nothing about the driver.

Several variants of one workload (stock DDP, zenray) train in the same processes, a block of steps of one, then a block
of the other, so that a noisy machine disturbs them alike. What always holds: both start from the same weights and see
the same batches; a batch is a pure function of (seed, rank, step); timed blocks begin and end with a barrier.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from actors.keeper import Keeper
from actors.state import DataPosition, ModelState, OptimizerState, RandomState, State, StateProvider, digest_of
from actors.worker import WorkerContext
from collectives.ddp import hook_of
from collectives.errors import CollectiveMismatch, ConfigError
from collectives.planner import CallRecord
from collectives.policy import SyncPolicy
from collectives.replicas import check_replicas, digest
from collectives.transport import all_gather_records
from zenray.engine_state import Copies, DiskCheckpoints, HookState
from zenray.environment import NodeLoad
from zenray.step_metrics import StepMetrics
from zenray.train import prepare_model

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adamw": partial(torch.optim.AdamW, fused=True),
}
"""Under the first two a row that was not touched does not change, so sparse and dense gradients train alike."""
WARMUP_SHARE, LAST_LR_SHARE = 1 / 6, 0.1


def cosine(step: int, steps: int) -> float:
    """Share of the peak learning rate: up in a straight line over the first sixth, then down a cosine to a tenth."""
    if step < (rising := max(1, round(WARMUP_SHARE * steps))):
        return (step + 1) / rising
    z = (step - rising) / max(1, steps - rising)
    return LAST_LR_SHARE + (1 - LAST_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * z))


SCHEDULES: Mapping[str, Callable[[int, int], float]] = {"constant": lambda step, steps: 1.0, "cosine": cosine}
"""Share of the learning rate at a step of a run of so many steps."""


PROBE_BYTES = 16 << 20
ALONE_STEPS = 9
"""Steps without communication that show what of a step is computation."""


class Workload(Protocol):
    """A model and its data. Sent to every rank by pickling; equal on all of them. `seed` sets weights and batches."""

    seed: int

    def facts(self) -> Mapping[str, object]:
        """What results depend on beyond the configuration; must be equal on all ranks."""

    def model(self, sparse: bool) -> nn.Module:
        """A module whose call with a batch returns the loss; the same initial weights for every call and rank."""

    def batch(self, step: int, rank: int) -> tuple[Tensor, ...]:
        """The arguments of the model: a pure function."""

    def evaluate(self, model: nn.Module) -> float:
        """Loss on held-out data."""


@dataclass(frozen=True)
class Variant:
    """One way to train. policy None is stock DDP, nothing of ours; sparse is the layout of the embedding gradients.

    hook: a compression hook of torch's for stock DDP, a name of `HOOKS`. seed_offset: added to the workload's seed.
    bucket_mib: size of DDP's gradient buckets; None: torch's default.
    """

    name: str
    sparse: bool
    policy: SyncPolicy | None
    hook: str | None = None
    seed_offset: int = 0
    bucket_mib: float | None = None


@dataclass(frozen=True)
class CheckpointPlan:
    """Where to write checkpoints and how often. every_steps 0: never. resume: go on from the last complete one."""

    folder: Path
    every_steps: int
    keep: int
    resume: bool


@dataclass(frozen=True)
class TrainPlan:
    """One training run. Steps count per variant; the first `warmup_steps` are trained but not timed."""

    variants: tuple[Variant, ...]
    steps: int
    warmup_steps: int
    block_steps: int
    optimizer: str
    lr: float
    config_sha256: str
    checkpoint: CheckpointPlan | None = None
    schedule: str = "constant"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"unknown optimizer '{self.optimizer}'; choose one of {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"unknown schedule '{self.schedule}'; choose one of {', '.join(SCHEDULES)}")
        unknown = [v.hook for v in self.variants if v.hook is not None and v.hook not in HOOKS]
        if unknown:
            raise ConfigError(f"unknown hook '{unknown[0]}'; choose one of {', '.join(HOOKS)}")
        if not 0 <= self.warmup_steps < self.steps or self.block_steps < 1:
            raise ConfigError(
                f"steps = {self.steps}, warmup_steps = {self.warmup_steps}, block_steps = {self.block_steps}: at least "
                f"one step must remain after the warm-up, and a block holds at least one"
            )

    def lr_at(self, step: int) -> float:
        """A function of the step alone, so nothing of it needs to be saved."""
        return self.lr * SCHEDULES[self.schedule](step, self.steps)

    def blocks(self, done_steps: int) -> list[range]:
        """The steps that remain, cut into blocks; the warm-up is the first."""
        cuts = [0, *range(self.warmup_steps, self.steps, self.block_steps), self.steps]
        blocks = [range(max(a, done_steps), b) for a, b in pairwise(cuts)]
        return [block for block in blocks if len(block)]


def _bf16_all_reduce(group, bucket):  # type: ignore[no-untyped-def]
    """What torch's bf16 hook does on NCCL. That one refuses Gloo by its name, though Gloo reduces bf16.

    Not annotated: DDP compares a hook's annotations with the types themselves.
    """
    compressed = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(compressed, async_op=True).get_future()
    buffer = bucket.buffer()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _powersgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: Mapping[str, Callable[[DistributedDataParallel], None]] = {
    "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda model: model.register_comm_hook(None, _bf16_all_reduce),
    "powersgd": _powersgd,
}
"""torch's communication hooks for dense gradients, as rivals."""


@dataclass
class Trainer:
    """One variant on one rank."""

    variant: Variant
    workload: Workload
    plan: TrainPlan
    context: WorkerContext
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    position: DataPosition
    metrics: StepMetrics
    losses: list[Tensor] = field(default_factory=list)
    """Of the steps of the present block that are done."""
    seconds: list[float] = field(default_factory=list)
    was_interrupted: bool = False
    """Whether the present block was begun in an earlier epoch; its speed does not count then."""

    @classmethod
    def create(cls, variant: Variant, workload: Workload, plan: TrainPlan, context: WorkerContext) -> Trainer:
        """Build the model and let stock DDP or zenray synchronise it; a collective call."""
        if variant.seed_offset:
            workload = copy(workload)
            workload.seed += variant.seed_offset
        module = workload.model(variant.sparse).to(context.device)
        if variant.policy is None:
            # torch's PowerSGD chains three all-reduces by callbacks, whose order over several buckets differs between
            # ranks on Gloo and ends the process; with one bucket it runs.
            bucket_mib = 1024 if variant.hook == "powersgd" else variant.bucket_mib
            ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_mib)
            if variant.hook is not None:
                HOOKS[variant.hook](ddp)
        else:
            ddp = prepare_model(module, variant.policy, bucket_cap_mb=variant.bucket_mib)
        optimizer = OPTIMIZERS[plan.optimizer](module.parameters(), lr=plan.lr)
        metrics = StepMetrics(f"{context.run_id}/{variant.name}", context.rank, ddp)
        position = DataPosition(name=f"{variant.name}.data")
        return cls(variant, workload, plan, context, ddp, optimizer, position, metrics)

    def replicated(self) -> list[StateProvider]:
        """What is the same bytes on every rank."""
        name, module = self.variant.name, self.ddp.module
        return [
            ModelState(module, f"{name}.model"),
            OptimizerState(self.optimizer, module, f"{name}.optimizer"),
        ]

    def own(self) -> list[StateProvider]:
        """What else this rank needs to go on bit-identically, between two blocks."""
        hook = hook_of(self.ddp)
        return [self.position, *([] if hook is None else [HookState(hook, f"{self.variant.name}.synchroniser")])]

    @property
    def name(self) -> str:
        """As a state provider: of the block under way."""
        return f"{self.variant.name}.block"

    def state_dict(self) -> State:
        """Loss and seconds of the steps of this block that are done."""
        losses = torch.stack(self.losses).double() if self.losses else torch.zeros(0, dtype=torch.float64)
        return {"losses": losses, "seconds": list(self.seconds)}

    def load_state_dict(self, state: State) -> None:
        """Go on in the middle of a block."""
        self.losses, self.seconds = list(state["losses"].to(self.context.device)), list(state["seconds"])
        self.was_interrupted = bool(self.losses)

    def load_all(self, states: Sequence[State]) -> None:
        """In a group of another size the mean loss of the old ranks stands for each new one."""
        losses = torch.stack([state["losses"] for state in states]).mean(0)
        self.load_state_dict({"losses": losses, "seconds": states[0]["seconds"]})

    def step(self, copies: Copies) -> None:
        """One step: batch, loss, gradients, update. The loss is this rank's own."""
        started = time.perf_counter()
        batch = self.workload.batch(self.position.consumed, self.context.rank)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.ddp(*(item.to(self.context.device) for item in batch))
        with copies.busy():
            loss.backward()
        copies.gate()
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr_at(self.position.consumed)
        self.optimizer.step()
        self.position.consumed += 1
        self.losses.append(loss.detach().double())
        self.seconds.append(time.perf_counter() - started)

    def block(self, steps: range, copies: Copies) -> dict[str, Any]:
        """Train what is left of `steps`; returns the block's record: losses averaged over ranks, seconds of the slowest
        rank."""
        phases, wire = self._sent_by_phase(), interface_tx_bytes()
        dist.barrier()
        started = time.perf_counter()
        for step in steps[len(self.losses) :]:
            self.step(copies)
            if step + 1 < steps.stop:
                copies.after_update()
        dist.barrier()
        block_s = time.perf_counter() - started
        wire_now, hook = interface_tx_bytes(), hook_of(self.ddp)
        sent = {k: n - phases.get(k, 0) for k, n in self._sent_by_phase().items()}
        total = float(sum(sent.values()))
        means = torch.tensor([*torch.stack(self.losses).tolist(), total], dtype=torch.float64) / self.context.size
        seconds = torch.tensor([*self.seconds, block_s, total], dtype=torch.float64)
        dist.all_reduce(means)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        *losses, mean_bytes = means.tolist()
        *step_s, slowest_s, most_bytes = seconds.tolist()
        self.metrics.block(self.seconds, losses[-1], sent, most_bytes / mean_bytes if mean_bytes else None)
        self.losses, self.seconds = [], []
        was_interrupted, self.was_interrupted = self.was_interrupted, False
        return {
            "kind": "block",
            "was_interrupted": was_interrupted,
            "variant": self.variant.name,
            "first_step": steps.start,
            "losses": losses,
            "step_s": step_s,
            "block_s": slowest_s,
            "sent_bytes": sent,
            "wire_bytes": None if wire is None or wire_now is None else wire_now - wire,
            "codec_s": 0.0 if hook is None else 1e-3 * hook.role_record().codec_ms,
        }

    def _sent_by_phase(self) -> dict[str, int]:
        """Payload bytes this rank has sent so far. Stock DDP does not count: a ring sends 2(n-1)/n of its buffers.

        Empty where nobody counts: torch's sparse all-reduce, and PowerSGD, whose factors' ranks vary by bucket.
        """
        hook, size = hook_of(self.ddp), self.context.size
        if hook is not None:
            traffic = hook.transport.traffic
            return {phase: traffic.sent_bytes(phase) for phase in list(traffic.sent)}
        if self.variant.sparse or self.variant.hook == "powersgd":
            return {}
        gradient_bytes = sum(p.numel() * p.element_size() for p in self.ddp.module.parameters() if p.requires_grad)
        share = {"fp16": 2, "bf16": 2}.get(self.variant.hook or "", 1)
        return {"dense all-reduce": 2 * (size - 1) * gradient_bytes // size // share * self.position.consumed}

    def finish(self) -> dict[str, Any]:
        """Prove that all replicas are equal, evaluate, hand over what the planner recorded; a collective call."""
        module = self.ddp.module
        parameters = dict(module.named_parameters())
        check_replicas(parameters, self.context.transport)
        hook = hook_of(self.ddp)
        records: list[CallRecord] = hook.records() if hook is not None else []
        dense: dict[str, Any] = {}
        if hook is not None:
            dense = {
                "role": asdict(hook.role_record()),
                "segments": [asdict(row) for row in hook.segments()],
                "events": hook.events(),
            }
        found = {
            "held_out_loss": self.workload.evaluate(module) if self.context.rank == 0 else None,
            "parameters_sha256": digest_of({name: digest(p) for name, p in parameters.items()}),
            "num_parameters": sum(p.numel() for p in parameters.values()),
            "records": records,
            "dense": dense,
        }
        if self.variant.policy is None and self.variant.hook is None:
            found["compute_s"] = self.compute_seconds()
        return found

    def compute_seconds(self) -> float:
        """Of a step without communication, of the slowest rank, a median; a collective call. The model is a replica no more."""
        idle = Copies(None, each_update=False)
        for _ in range(ALONE_STEPS):
            dist.barrier()
            with self.ddp.no_sync():
                self.step(idle)
        seconds = torch.tensor(self.seconds[-ALONE_STEPS:], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.losses, self.seconds = [], []
        return float(seconds.median())


def interface_tx_bytes() -> int | None:
    """Bytes that left this node's interface, or None where ranks share it (loopback)."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name == "lo":
        return None
    try:
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except OSError:
        return None


def train_rank(
    plan: TrainPlan, workload: Workload, context: WorkerContext, keeper: Keeper | None = None
) -> dict[str, Any]:
    """Train all variants on this rank; returns, by variant, what `Trainer.finish` gives.

    With a keeper (under a `RecoverableGroup`) the state is kept in peers' memory: after each update where one variant is
    trained; in a comparison after each round of blocks, outside of what is timed.

    Reports: one "probe" record, and one "block" record a block and variant, from rank 0; one "traffic" record a block and
    variant from every rank; "event" records. Raises what the collectives raise; then the group is unusable.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # else each Adagrad warns
    check_equal_facts(workload, context)
    if keeper is None or keeper.assignment.attempt == 0:
        probe = probe_all_reduce()
        if context.rank == 0:
            context.report({"kind": "probe"} | probe)
    trainers = [Trainer.create(variant, workload, plan, context) for variant in plan.variants]
    try:
        train_all(plan, trainers, context, keeper)
        return {trainer.variant.name: trainer.finish() for trainer in trainers}
    finally:
        for trainer in trainers:
            if (hook := hook_of(trainer.ddp)) is not None:
                hook.close()


def train_all(plan: TrainPlan, trainers: list[Trainer], context: WorkerContext, keeper: Keeper | None) -> None:
    """Block by block, from wherever a checkpoint or a copy lets this rank go on."""
    replicated = [p for trainer in trainers for p in trainer.replicated()]
    own = [*(p for trainer in trainers for p in trainer.own()), RandomState({})]
    checkpoints = DiskCheckpoints(plan, [*replicated, *own], context)
    if keeper is None or not keeper.assignment.old_shards:
        checkpoints.resume()
    copies = Copies(keeper, each_update=len(trainers) == 1)
    copies.restore([*own, *trainers], replicated)
    rounds = plan.blocks(min(trainer.position.consumed - len(trainer.losses) for trainer in trainers))
    first_number, load = len(plan.blocks(0)) - len(rounds), NodeLoad()
    for number, steps in enumerate(rounds, first_number):
        order = trainers if number % 2 == 0 else trainers[::-1]
        for trainer in order:
            record = trainer.block(steps, copies)
            record["warmup"] = steps.start < plan.warmup_steps or record.pop("was_interrupted")
            traffic = {key: record[key] for key in ("variant", "first_step", "sent_bytes", "wire_bytes", "warmup")}
            context.report(traffic | {"kind": "traffic", "num_steps": len(steps)})
            if context.local_rank == 0:
                context.report({"kind": "node", "step": steps.stop, "figures": load.figures()})
            if context.rank == 0:
                context.report(record)
        copies.after_round()
        checkpoints.save_if_due(steps)
    copies.finish()


def probe_all_reduce() -> dict[str, float]:
    """Median time of a plain dense all-reduce: what the network itself can do, in the run it vouches for."""
    buffer = torch.ones(PROBE_BYTES // 4)
    if dist.get_backend() == "nccl":
        buffer = buffer.cuda()
    seconds = []
    for _ in range(4):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(buffer)
        float(buffer[0])  # on a GPU this waits for the result
        seconds.append(time.perf_counter() - started)
    return {"payload_bytes": buffer.nbytes, "seconds": median(seconds[1:])}


def check_equal_facts(workload: Workload, context: WorkerContext) -> None:
    """Compare the workload's facts over all ranks: other Python sources on one host would be another data set."""
    facts = dict(workload.facts())
    table = all_gather_records(context.transport, "metadata", [int(digest_of(facts)[:15], 16)])[:, 0]
    odd = [rank for rank, value in enumerate(table.tolist()) if value != table[0]]
    if odd:
        raise CollectiveMismatch(
            f"rank {context.rank}: the data of rank(s) {odd} differ from those of rank 0. Here: {facts}. Use the same "
            f"Python and the same files on every node."
        )
