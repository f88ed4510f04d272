"""What each rank of `jobs.moe` runs: one trainer per policy and seed, a block of steps of one, then of the next."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import torch

from actors.expert_placement import PlanClient, client, start
from actors.worker import WorkerContext
from collectives.channel import Channel
from collectives.expert_state import GRADIENTS, WEIGHTS
from collectives.moe import COMBINE, DISPATCH, MoELayer, Routes, channels_for
from collectives.policy import SyncPolicy
from collectives.transport import LocalGroup, Transport, all_gather_records
from jobs.workloads.moe_lm import ExpertMlp, MoeLm, MoeLmConfig
from placement.experts import num_moves
from placement.quotas import SHARES, PairTimes
from placement.split import Ranks, SlotMap
from zenray.engine import Workload, check_equal_facts, cosine, interface_tx_bytes, probe_all_reduce
from zenray.moe import ExpertBalancer, PlanSource, Sampler

DENSE = "dense_gradients"
EXPERT_PHASES = (DISPATCH, COMBINE, GRADIENTS, WEIGHTS)
WARMUP_STEPS = 20
CLIP_NORM = 1.0
SPIKE = 4.0
"""A gradient norm this many times the running mean makes the control keep every pair again."""


@dataclass(frozen=True)
class MoeVariant:
    """One way to place experts and to run their backward."""

    name: str
    policy: str
    rho: float | Literal["auto"] = 1.0
    sampler: Sampler = "scored"
    planner: Literal["local", "actor"] = "local"
    """Who makes the plans: every rank from the last counts, or the planning actor."""


@dataclass(frozen=True)
class MoePlan:
    """What every rank trains."""

    variants: tuple[MoeVariant, ...]
    seeds: tuple[int, ...]
    slots: int
    steps: int
    batch: int
    lr: float
    block_steps: int
    evaluate_every: int
    codecs: SyncPolicy

    def blocks(self) -> Iterator[range]:
        """Steps 0 .. steps - 1, cut every `block_steps` and wherever an evaluation is due."""
        cuts = sorted({*range(0, self.steps, self.block_steps), *range(0, self.steps, self.evaluate_every), self.steps})
        yield from (range(a, b) for a, b in pairwise(cuts))


class MoeTrainer:
    """One variant with one seed on one rank."""

    def __init__(
        self,
        variant: MoeVariant,
        workload: MoeLm,
        plan: MoePlan,
        transport: Transport,
        *,
        channels: tuple[Channel, Channel] | None = None,
        source: PlanSource | None = None,
        nodes: tuple[int, ...] | None = None,
        times: PairTimes = PairTimes(),  # noqa: B008  (frozen)
    ):
        self.variant, self.workload, self.plan, self.transport = variant, workload, plan, transport
        config = workload.config
        # spilled experts need slots of their own: least-loaded parallelism has no limit on them
        slots = config.experts if variant.policy == "llep" else plan.slots

        def make_layer() -> MoELayer:
            return MoELayer(
                config.width,
                config.hidden,
                config.experts,
                slots,
                config.top_k,
                transport=transport,
                plan=_no_plan,
                channels=channels,
            )

        self.model = workload.model(make_layer)
        self.mlps = [module for module in self.model.modules() if isinstance(module, ExpertMlp)]
        self.balancer = ExpertBalancer(
            [mlp.layer for mlp in self.mlps],
            transport,
            policy=variant.policy,
            rho=variant.rho,
            times=times,
            num_steps=plan.steps,
            sampler=variant.sampler,
            seed=workload.seed,
            lr=plan.lr,
            source=source,
            ranks=Ranks.equal(transport.size, slots)
            if nodes is None
            else replace(Ranks.equal(transport.size, slots), nodes=nodes),
        )
        experts = {id(p) for mlp in self.mlps for p in (mlp.layer.w1, mlp.layer.w2)}
        self.dense = [p for p in self.model.parameters() if id(p) not in experts]
        self.optimizer = torch.optim.AdamW(self.dense, lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.mean_norm = 0.0

    def block(self, steps: range) -> dict[str, Any]:
        """Train these steps; returns their records, by step: equal on all ranks but for seconds and bytes."""
        records = [self.step(step) for step in steps]
        return {
            "kind": "moe",
            "policy": self.variant.name,
            "seed": self.workload.seed,
            "first_step": steps.start,
            "steps": {key: [record[key] for record in records] for key in records[0]},
        }

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step."""
        transport, balancer = self.transport, self.balancer
        sent = {phase: transport.traffic.sent_bytes(phase) for phase in EXPERT_PHASES}
        ids, targets = self.workload.batch(step, transport.rank, transport.size)
        balancer.begin(step)
        share = len(ids) * transport.size / self.plan.batch
        loss = self.model(ids, targets)
        balance = torch.stack([mlp.balance_loss() for mlp in self.mlps]).sum()
        (share * (loss + self.workload.config.balance * balance)).backward()  # type: ignore[no-untyped-call]
        squared = self._reduce_dense() + balancer.reduce_gradients(1 / transport.size)
        norm = math.sqrt(squared)
        clip = min(1.0, CLIP_NORM / norm) if norm > 0 else 1.0
        lr = self.plan.lr * cosine(step, self.plan.steps)
        self._update_dense(clip, lr)
        spike = not math.isfinite(norm) or (step > WARMUP_STEPS and norm > SPIKE * self.mean_norm)
        self.mean_norm = norm if step == 0 else 0.9 * self.mean_norm + 0.1 * norm
        rho, before = balancer.retention.rho, balancer.book.current.slots
        balancer.step(lr=lr, clip=clip, spike=spike)
        load, loads = balancer.load, [mlp.layer.load for mlp in self.mlps]
        return {
            "loss": float(loss.detach()),
            "norm": norm,
            "rho": rho,
            "pairs": load.pairs.tolist(),
            "kept": load.kept.tolist(),
            "counts": load.counts.tolist(),
            "dropped": load.dropped,
            "extra_steps": balancer.retention.extra_steps,
            "peak_bytes": load.peak_bytes,
            "moves": sum(
                num_moves(new, old, balancer.num_experts)
                for new, old in zip(balancer.book.current.slots, before, strict=True)
            ),
            "together": replicas_together(balancer.book.current.slots, balancer.ranks.nodes),
            "plan_version": balancer.book.current.version,
            "plan_age": step - balancer.book.current.valid_from + 1,
            "moe_s": sum(item.forward_s + item.backward_s for item in loads),
            "sent_bytes": {phase: transport.traffic.sent_bytes(phase) - sent[phase] for phase in EXPERT_PHASES},
        }

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on held-out text in nats per byte, equal on all ranks; no pair is dropped."""
        ids, targets = self.workload.held_out
        rank, size = self.transport.rank, self.transport.size
        mine = ids[rank::size], targets[rank::size]
        with self.balancer.evaluation():
            loss = float(self.model(*mine)) * len(mine[0])
        return self.balancer.layers[0].state.total(loss) / len(ids)

    def _reduce_dense(self) -> float:
        """Mean of the dense gradients over ranks, in place; returns their squared norm."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.dense]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        self.transport.all_reduce(DENSE, flat, "mean")
        parts = torch.split(flat, [p.numel() for p in self.dense])
        for parameter, part in zip(self.dense, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return float(flat.double().square().sum())

    def _update_dense(self, clip: float, lr: float) -> None:
        for parameter in self.dense:
            assert parameter.grad is not None
            parameter.grad.mul_(clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def replicas_together(slots: SlotMap, nodes: Sequence[int]) -> int:
    """Instances beside another one of the same expert on the same node, over all layers. slots: int32 [layers, N, s]."""
    count = 0
    for layer in slots:
        for node in set(nodes):
            used = layer[np.asarray(nodes) == node]
            used = used[used >= 0]
            count += len(used) - len(np.unique(used))
    return count


def _no_plan(counts: object) -> Routes:
    raise AssertionError("the balancer sets the plan of every layer")


def time_layer(
    width: int,
    hidden: int,
    experts: int,
    top_k: int,
    tokens: int,
    shares: Sequence[float],
    *,
    keep_hidden: bool = True,
    rounds: int = 15,
) -> list[tuple[float, float]]:
    """Seconds of one layer's forward and backward on one core, for each share of the pairs in the backward.

    The fastest of the rounds, in which the shares take turns; counted is the time of this thread alone, so others who use
    the core meanwhile disturb little.
    """
    transport = LocalGroup(1).transports()[0]
    cases = []
    for share in shares:
        layer = MoELayer(
            width, hidden, experts, experts, top_k, transport=transport, plan=_no_plan, keep_hidden=keep_hidden
        )
        cases.append((layer, ExpertBalancer([layer], transport, policy="static", rho=share)))
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    best = [(math.inf, math.inf)] * len(cases)
    for number in range(rounds):
        for index, (layer, balancer) in enumerate(cases):
            balancer.begin(number)
            inputs = x.clone().requires_grad_()
            started = time.thread_time()
            y, _ = layer(inputs)
            computed = time.thread_time()
            y.backward(x)
            forward_s, backward_s = computed - started, time.thread_time() - computed
            best[index] = min(best[index][0], forward_s), min(best[index][1], backward_s)
    return best


def measure_times(width: int, hidden: int, experts: int, top_k: int, tokens: int) -> PairTimes:
    """Seconds of a pair on this machine for a rank with `tokens` tokens; selection is all that sampling adds to the layer
    beyond its share of the full backward: norms, scores, the draw, gathers, smaller products, and whatever of the backward
    does not shrink. The most that it adds at any of a few shares, so that no share is charged too little.
    """
    shares = (1.0, 0.75, 0.5, SHARES[0])
    (forward_s, backward_s), *sampled = time_layer(width, hidden, experts, top_k, tokens, shares)
    extra_s = [f + b - forward_s - share * backward_s for share, (f, b) in zip(shares[1:], sampled, strict=True)]
    pairs = tokens * top_k
    return PairTimes(forward_s / pairs, backward_s / pairs, max(0.0, *extra_s) / pairs)


def train_moe(plan: MoePlan, config: MoeLmConfig, context: WorkerContext) -> dict[str, Any]:
    """Train all variants with all seeds on this rank. Reports: one "facts" record, then one "moe" record a block.

    Returns the bytes that this rank sent to each other rank, what its network device counted (None on loopback), and the
    figures of moe_dispatch and moe_combine over all variants, empty without codecs. Each rank keeps to one core, as it would
    to one device: ranks that move to whichever core is idle show no imbalance.
    """
    with one_core(context.rank):
        return _train(plan, config, context)


def _train(plan: MoePlan, config: MoeLmConfig, context: WorkerContext) -> dict[str, Any]:
    transport = context.transport
    channels = channels_for(plan.codecs, transport) if plan.codecs.scheme != "off" else None
    check_equal_facts(cast(Workload, MoeLm(config, plan.batch, plan.seeds[0], plan.steps)), context)
    nodes = all_gather_records(transport, "metadata", [context.node_rank])[:, 0].tolist()
    facts = {"kind": "facts", "probe": probe_all_reduce(), "nodes": nodes}
    tokens = max(1, plan.batch * config.context // transport.size)
    picoseconds = [0, 0, 0]
    if transport.rank == 0:  # alone: the others wait for its figures
        found = measure_times(config.width, config.hidden, min(plan.slots, config.experts), config.top_k, tokens)
        picoseconds = [round(seconds * 1e12) for seconds in (found.forward_s, found.backward_s, found.selection_s)]
    measured = all_gather_records(transport, "metadata", picoseconds)[0]
    times = PairTimes(*(float(value) / 1e12 for value in measured))
    if transport.rank == 0:
        context.report(facts | {"times": asdict(times)})
    before, wire = transport.traffic.sent_bytes(), interface_tx_bytes()
    for seed in plan.seeds:
        workload = MoeLm(config, plan.batch, seed, plan.steps)
        trainers = [
            MoeTrainer(
                v,
                workload,
                plan,
                transport,
                channels=channels,
                source=source_of(v, seed, plan, context),
                nodes=tuple(nodes),
                times=times,
            )
            for v in plan.variants
        ]
        for steps in plan.blocks():
            for trainer in trainers:
                record = trainer.block(steps)
                record["evaluations"] = {}
                if steps.stop % plan.evaluate_every == 0 or steps.stop == plan.steps:
                    record["evaluations"] = {str(steps.stop): trainer.evaluate()}
                if transport.rank:
                    record["steps"] = {key: record["steps"][key] for key in ("moe_s", "sent_bytes")}
                context.report(record)
    sent = sum(transport.traffic.sent.values(), np.zeros(transport.size, np.int64))
    after = interface_tx_bytes()
    return {
        "sent_bytes": {"to": sent.tolist(), "all": transport.traffic.sent_bytes() - before},
        "wire_bytes": None if wire is None or after is None else after - wire,
        "roles": [asdict(channel.record()) for channel in channels or ()],
    }


def source_of(variant: MoeVariant, seed: int, plan: MoePlan, context: WorkerContext) -> PlanSource | None:
    """The planning actor of one run of a variant, started by rank 0, or None."""
    if variant.planner == "local":
        return None
    run_id = f"{context.run_id}-{variant.name}-{seed}"
    own = start(run_id, variant.policy, Ranks.equal(context.size, plan.slots)) if context.rank == 0 else None
    all_gather_records(context.transport, "metadata", [0])

    def say(text: str) -> None:
        context.report({"kind": "event", "text": text})

    return PlanClient(own, say) if own is not None else client(run_id, say)


@contextmanager
def one_core(rank: int) -> Iterator[None]:
    """Pin this thread to one of its cores, ranks in turn, for as long as the block lasts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[rank % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
