"""Expert layers that balance themselves: hosts between steps, an exact split within, a backward inside its budget.

`ExpertBalancer` owns the experts of a model's `MoELayer`s on one transport: their optimizer shards, where each is hosted,
which pairs each rank computes and which take part in the backward. Inspired by LRMoE; the design is ours. A step is

    balancer.begin(step); loss.backward(); balancer.reduce_gradients(); balancer.step(lr)

What always holds: no pair is dropped unless the policy has a capacity; every rank takes part in every exchange; plans,
budgets and draws are functions of counts and (seed, step, micro-batch, layer, rank), so recomputation and resume repeat them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch

from collectives.codecs.hashing import derive_seed
from collectives.errors import ConfigError
from collectives.expert_state import ExpertState
from collectives.moe import CHUNK_PAIRS, MoELayer, Routes, ScoredPairs, Selection, Selector
from collectives.transport import Transport, all_gather_records
from placement.expert_plans import ExpertPlan, PlanBook, make_plan
from placement.experts import POLICIES
from placement.quotas import (
    SHARES,
    Float,
    Kept,
    PairMemory,
    PairTimes,
    Retention,
    budgets,
    by_source,
    floor_scores,
    neighbours,
    sampling_variances,
    select,
    top_q,
    walk_of,
)
from placement.split import Int, Ranks, SlotMap, exact_split, token_map

PLAN = "expert_plan"
Sampler = Literal["scored", "uniform", "top_q"]
"""How kept pairs are drawn: by score (of least variance), all alike, or the largest scores (biased; a control)."""


class PlanSource(Protocol):
    """Where plans come from when ranks do not make them on the spot; see `actors.expert_placement.PlanClient`."""

    def submit(self, step: int, counts: Int, newest: int) -> None:
        """Hand over int64 [layers, E] of `step`, and the newest version held. Never waits, never raises."""

    def poll(self, newest: int) -> list[ExpertPlan]:
        """Plans after version `newest` that have arrived. Never waits, never raises."""


@dataclass
class StepLoad:
    """What one step did, by layer; arrays are equal on all ranks."""

    pairs: Int
    """int64 [layers, N]: pairs computed on each rank."""
    kept: Int
    """int64 [layers, N]: pairs that each rank's backward keeps."""
    counts: Int
    """int64 [layers, E]."""
    dropped: int = 0
    variance: Float | None = None
    """Squared error that sampling adds to the w2 gradients at each of SHARES, as the optimizer sees it: that of each expert
    over the norm of its gradient, summed; on steps of a choice."""
    squared_norm: float = math.nan
    """The same of the square of the gradient that the full backward would have had."""
    num_nonfinite: int = 0
    """Scores of this rank that were NaN or infinite."""
    peak_bytes: int = 0
    """Planned peak of the fullest rank: weights, gradients, activations of all layers."""


@dataclass
class _Layer:
    """One expert layer as the balancer sees it."""

    layer: MoELayer
    state: ExpertState
    slots: SlotMap
    memory: PairMemory
    variance: Float
    """What sampling adds on this rank, float64 [SHARES, E]; counted on steps of a choice."""
    counted: bool = False
    """Whether this micro-batch is in the step's load: a forward that is recomputed must not count twice."""


class ExpertBalancer:
    """See the module. All ranks make it together, with equal arguments.

    layers: in the model's order, all with the same number of experts and slots. policy: a name of POLICIES. rho: share of
    pairs in the backward; "auto" finds the one with the least expected time to a loss, see `Retention`. times: what a pair
    costs, for that choice; equal on all ranks. num_steps: of the run, for the pace of "auto". ranks: None means equal ones,
    one a node. free_bytes: memory that the experts may use on each rank; limits the pairs in the backward and raises
    PlacementError where the forward exceeds it. source: where plans come from; None plans here, from the counts of the
    last step.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        transport: Transport,
        *,
        policy: str = "robust",
        rho: float | Literal["auto"] = "auto",
        times: PairTimes = PairTimes(),  # noqa: B008  (frozen)
        num_steps: int = 1000,
        sampler: Sampler = "scored",
        seed: int = 0,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        ranks: Ranks | None = None,
        free_bytes: int | None = None,
        source: PlanSource | None = None,
    ):
        if policy not in POLICIES:
            raise ConfigError(f"unknown policy '{policy}'; choose one of {', '.join(sorted(POLICIES))}")
        if rho != "auto" and not 0 < rho <= 1:
            raise ConfigError(f"rho = {rho}: the share of pairs in the backward lies in (0, 1], or is 'auto'")
        shapes = {(layer.num_experts, *layer.w1.shape) for layer in layers}
        if len(shapes) != 1:
            raise ConfigError(f"the layers of one balancer must be alike; (experts, slots, d, f): {sorted(shapes)}")
        num_slots, width, hidden = layers[0].w1.shape
        self.transport, self.rule, self.sampler, self.seed, self.source = (
            transport,
            POLICIES[policy],
            sampler,
            seed,
            source,
        )
        self.ranks = ranks or Ranks.equal(transport.size, num_slots)
        self.num_experts = layers[0].num_experts
        self.controlled, self.times = rho == "auto", times
        self.retention = Retention.for_run(num_steps) if rho == "auto" else Retention(num_steps, rho=rho)
        self.free_bytes = free_bytes
        self.step_index = self.micro_batch = 0
        self.evaluating = self.choosing = False
        even = np.ones((1, len(layers), self.num_experts), np.int64)
        first = make_plan(self.rule, even, self.ranks, None, 0, 0)
        self.book = PlanBook(first)
        self.load = self._new_load(len(layers))
        memory = PairMemory.of(
            free_bytes or 0, width, hidden, layers[0].w1.element_size(), CHUNK_PAIRS, keep_hidden=layers[0].keep_hidden
        )
        self.layers: list[_Layer] = []
        for index, layer in enumerate(layers):
            state = ExpertState([layer.w1, layer.w2], self.num_experts, transport, lr=lr, weight_decay=weight_decay)
            self.layers.append(
                _Layer(
                    layer,
                    state,
                    first.slots[index],
                    memory,
                    np.zeros((len(SHARES), self.num_experts)),
                )
            )
            layer.plan = self._planner(index)
            self._initialise(index)
            state.push_weights(first.slots[index])

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, micro_batch: int = 0) -> None:
        """Before each forward: names the draw. Counts and gradients of a step's micro-batches add up."""
        if micro_batch and self.rule.name == "llep":
            raise ConfigError(
                "llep moves experts within a micro-batch; gradients of several cannot add up in its slots"
            )
        self.step_index, self.micro_batch = step, micro_batch
        for item in self.layers:
            item.counted = False
        if micro_batch == 0:
            self.load = self._new_load(len(self.layers))
            self.choosing = self.controlled and self.retention.is_due
            for item in self.layers:
                item.variance = np.zeros_like(item.variance)

    def reduce_gradients(self, scale: float = 1.0) -> float:
        """After the last backward: sum the experts' gradients over instances, times `scale`; returns their squared norm.

        Equal on all ranks, each expert counted once.
        """
        for item in self.layers:
            item.state.reduce_gradients(item.slots, scale)
        if self.choosing:
            self._measure(scale)
        return float(sum(item.state.squared_norms().sum() for item in self.layers))

    def step(self, *, lr: float | None = None, clip: float = 1.0, spike: bool = False) -> None:
        """Update the experts, choose the next hosts, and send the weights there.

        clip: factor on the gradients (global-norm clipping). spike: the gradient norm jumped or was not finite.
        """
        for item in self.layers:
            item.state.lr = item.state.lr if lr is None else lr
            item.state.step(clip)
        if self.controlled:
            self.retention = self.retention.update(self.times, self.load.variance, self.load.squared_norm, spike=spike)
        self._choose_hosts()
        for index, item in enumerate(self.layers):
            item.slots = self.book.current.slots[index]
            if self.rule.name == "llep":
                for parameter in (item.layer.w1, item.layer.w2):
                    parameter.grad = None
            else:
                item.state.push_weights(item.slots)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within it no pair is dropped, whatever the policy, and nothing is counted."""
        load, self.evaluating = self.load, True
        try:
            if self.rule.name == "llep":
                for item in self.layers:
                    item.state.push_weights(item.slots)
            yield
        finally:
            self.load, self.evaluating = load, False

    def adopt(self, plan: ExpertPlan) -> None:
        """Use this placement from now on and send the weights there; a collective call, between steps."""
        self.book = PlanBook(plan, self.book.stale_limit)
        for item, slots in zip(self.layers, plan.slots, strict=True):
            item.slots = slots
            item.state.push_weights(slots)

    # --- planning -----------------------------------------------------------------------------------------------------

    def _choose_hosts(self) -> None:
        counts = self.load.counts
        if self.source is not None:
            if self.transport.rank == 0:
                self.source.submit(self.step_index, counts, self.book.newest)
            self.book.hear(self.source.poll(self.book.newest))
            table = all_gather_records(self.transport, PLAN, self.book.record())
            if not self.book.settle(table, self.step_index + 1):
                return
        previous = self.book.current
        plan = make_plan(self.rule, counts[None], self.ranks, previous.slots, previous.version, self.step_index + 1)
        self.book.take_local(plan.slots, self.step_index + 1)

    def _planner(self, index: int) -> Callable[[Int], Routes]:
        def plan(a: Int) -> Routes:
            item, w = self.layers[index], a.sum(0)
            if self.evaluating:
                return Routes(token_map(a, exact_split(item.slots, w, self.ranks), self.ranks), item.slots)
            split = self.rule.split(item.slots, w, self.ranks)
            if self.rule.name == "llep":
                item.slots = _slots_of(split.pairs, self.book.current.slots[index])
                item.state.push_weights(item.slots)
            # The same on all ranks, and wherever this forward is computed again; not the number of the micro-batch, which
            # is another one by the time of a backward that follows several forwards.
            key = (self.seed, self.step_index, index, zlib.crc32(a.tobytes()))
            drops = bool(split.dropped.any())
            if drops:
                a = _surviving(a, w - split.dropped)
            pairs = token_map(a, split.pairs, self.ranks)
            kept, select = self._count(index, w, pairs, key)
            return Routes(pairs, item.slots, kept, select, (*key, self.transport.rank) if drops else None)

        return plan

    def _count(self, index: int, w: Int, pairs: Int, key: tuple[int, ...]) -> tuple[Int, Selector] | tuple[None, None]:
        """What this micro-batch adds to the step's load; returns what of it counts in the backward, see `Routes`."""
        item, sent, rank = self.layers[index], pairs.sum(2), self.transport.rank
        x, home, hosted = sent.sum(0), sent.sum(1), (item.slots >= 0).sum(1)
        start = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key)))).integers(0, np.maximum(x, 1))
        kept = self._retained(x, self.retention.rho)
        by_home = by_source(kept, sent, start)
        if self.free_bytes is not None:
            memory, rows = replace(item.memory, free_bytes=self.free_bytes // len(self.layers)), np.maximum(x, home)
            limits = budgets(rows, hosted, np.ones(len(x)), float(rows.max(initial=0)), [memory] * len(x))
            kept = np.minimum(kept, limits)
            by_home = by_source(kept, sent, start)
            if (by_home.sum(1) > limits).any():  # rows of kept pairs fill the ranks of their tokens as well
                fits = float(((limits - len(x)) / np.maximum(by_home.sum(1), 1)).min())
                kept = np.minimum(x, np.maximum(1, np.floor(kept * max(0.0, fits)).astype(np.int64)))
                by_home = by_source(kept, sent, start)
        if not item.counted:
            item.counted = True
            self.load.counts[index] += w
            self.load.dropped += int(w.sum() - x.sum())
            self.load.pairs[index] += x
            self.load.kept[index] += kept
            self.rows[index], self.kept_rows[index] = np.maximum(x, home), np.maximum(kept, by_home.sum(1))
            self.load.peak_bytes = max(self.load.peak_bytes, self._peak_bytes(hosted))
        if (kept == x).all() and not self.choosing:
            return None, None
        share = sent[rank] / np.maximum(x, 1)
        chance = np.clip(kept * share, 0, 1)
        factor = np.divide(1, chance, out=np.ones(len(x)), where=chance > 0)
        expected = np.array([self._retained(x, of_all) * share for of_all in SHARES]) if self.choosing else None
        return by_home, self._selector(index, (*key, rank), factor, expected)

    def _retained(self, x: Int, rho: float) -> Int:
        """Pairs that each rank keeps: rho of all, shared out by speed. x: int64 [N], the pairs it computes."""
        if rho >= 1:
            return x
        speed = 1 / np.asarray(self.ranks.seconds_per_pair)
        quota = np.floor(rho * x.sum() * speed / speed.sum()).astype(np.int64)
        return np.asarray(np.minimum(x, np.maximum(1, quota)))

    def _peak_bytes(self, hosted: Int) -> int:
        """Of the fullest rank in one micro-batch: activations of all layers, the rest of the forward or the backward of one."""
        memory = self.layers[0].memory
        resident = len(self.layers) * memory.instance_bytes * hosted + memory.forward_bytes * self.rows.sum(0)
        passing = np.vectorize(memory.passing_bytes, otypes=[np.int64])(self.rows, self.kept_rows)
        return int((resident + passing.max(0)).max())

    def _selector(self, index: int, key: tuple[int, ...], factor: Float, expected: Float | None) -> Selector:
        """Of one forward. factor: float64 [N], 1 over the chance that any of this rank's pairs is kept there, which is below 1
        where less than one is its share. expected: float64 [SHARES, N], pairs of this rank kept at each share; on steps of a
        choice."""

        def select_pairs(pairs: ScoredPairs) -> Selection:
            if expected is not None and len(pairs.scores):
                self.layers[index].variance += self._variance(pairs, expected)
            scores, expert, place = pairs.scores.numpy(), pairs.expert.numpy(), pairs.place.numpy()
            found: list[Kept] = []
            ends = np.cumsum(pairs.count)
            for target, (start, stop, quota) in enumerate(zip(ends - pairs.count, ends, pairs.kept, strict=True)):
                run = slice(int(start), int(stop))
                if self.sampler == "top_q":
                    kept = top_q(scores[run], int(quota))
                else:
                    even = scores[run] if self.sampler == "scored" else np.ones(run.stop - run.start)
                    kept = select(even, expert[run], self.num_experts, int(quota), (*key, target), place[run])
                self.load.num_nonfinite += kept.num_nonfinite
                found.append(replace(kept, index=kept.index + start, weight=kept.weight * factor[target]))
            chosen, weight = np.concatenate([k.index for k in found]), np.concatenate([k.weight for k in found])
            return Selection(torch.from_numpy(chosen), torch.from_numpy(weight))

        return select_pairs

    def _variance(self, pairs: ScoredPairs, expected: Float) -> Float:
        """What sampling adds at each of SHARES: that of independent draws, times how unlike those are among which one is kept.

        At a share s one of 1/s pairs along the walk is kept; two of them are 1/(3s) apart on average. expected:
        float64 [SHARES, N].
        """
        expert, count = pairs.expert.numpy(), pairs.count
        run = np.repeat(np.arange(len(count)), count) * self.num_experts + expert
        scores, _ = floor_scores(pairs.scores.numpy(), run, len(count) * self.num_experts)
        walk = walk_of(run, pairs.place.numpy())
        unlike = {}
        for lag in {_lag(share) for share in SHARES}:
            first, second = neighbours(walk, lag)
            alike = pairs.alike(torch.from_numpy(first), torch.from_numpy(second)).numpy()
            unlike[lag] = float(np.average(1 - alike, weights=scores[first])) if len(first) else 1.0
        found, ends = np.zeros((len(SHARES), self.num_experts)), np.cumsum(count)
        for index, share in enumerate(SHARES):
            for start, stop, quota in zip(ends - count, ends, expected[index], strict=True):
                of_run = sampling_variances(scores[start:stop], float(quota), expert[start:stop], self.num_experts)
                found[index] += unlike[_lag(share)] * of_run
        return found

    def _measure(self, scale: float) -> None:
        """What the choice of a share needs, of the whole group, in units of unscaled gradients.

        Adam divides each gradient by its root mean square. So an expert counts with the norm of its gradient, and noise
        with its share of the square: for experts of few pairs that share is the largest.
        """
        first = self.layers[0].layer.w1[0].numel()  # scores are norms of w2's gradients, which follow w1's
        variance, norms = np.zeros(len(SHARES)), 0.0
        for item in self.layers:
            root = np.sqrt(item.state.squared_norms(first)) / scale
            table = item.state.totals(item.variance.reshape(-1)).reshape(item.variance.shape)
            variance += table @ np.divide(1, root, out=np.zeros_like(root), where=root > 0)
            norms += float(root.sum())
        self.load.variance = variance
        self.load.squared_norm = norms - float(np.interp(self.retention.rho, SHARES, variance))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _new_load(self, num_layers: int) -> StepLoad:
        size = self.transport.size
        by_rank = np.zeros((num_layers, size), np.int64)
        self.rows, self.kept_rows = by_rank.copy(), by_rank.copy()
        return StepLoad(by_rank, by_rank.copy(), np.zeros((num_layers, self.num_experts), np.int64))

    def _initialise(self, index: int) -> None:
        """W1 of scale 1/sqrt(d), W2 of 1/(2 sqrt(f)); the same for any number of ranks."""
        item = self.layers[index]
        _, width, hidden = item.layer.w1.shape
        for expert in range(self.num_experts):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, index, expert) & 0x7FFFFFFF)
            w1 = torch.randn(width * hidden, generator=generator) / math.sqrt(width)
            w2 = torch.randn(hidden * width, generator=generator) / (2 * math.sqrt(hidden))
            item.state.fill(expert, torch.cat([w1, w2]))


def _lag(share: float) -> int:
    return max(1, round(1 / (3 * share)))


def _surviving(a: Int, kept: Int) -> Int:
    """Pairs of each rank that stay when `kept` [E] of each expert's may: every rank loses in proportion."""
    total = np.maximum(a.sum(0), 1)
    upto = np.cumsum(a, axis=0) * kept // total
    return np.asarray(np.diff(upto, axis=0, prepend=0))


def _slots_of(pairs: Int, native: SlotMap) -> SlotMap:
    """Native experts first, then those whose pairs were spilled here."""
    slots = np.full((len(pairs), pairs.shape[1]), -1, np.int32)
    for rank, row in enumerate(native):
        home = row[row >= 0]
        guests = np.setdiff1d(np.flatnonzero(pairs[rank]), home)
        slots[rank, : len(home) + len(guests)] = [*home, *guests]
    return slots
