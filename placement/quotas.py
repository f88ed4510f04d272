"""How much backward work each rank keeps, which pairs, and with which weights, so that the gradient stays unbiased.

Inspired by LRMoE's backward recalibration; the design is ours. Every routed pair is computed forward; backward, rank n
keeps exactly K_n of its pairs, drawn with probabilities that minimise the variance of the expert gradients for that K_n,
each kept pair weighted by 1/pi. Deterministic selection of the largest scores is biased and breaks training: `top_q` exists
only as the negative control.

Shapes: n pairs on one rank; scores float64 [n] (norm of the output gradient times norm of the hidden activation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from collectives.errors import ConfigError
from placement.errors import PlacementError
from placement.split import Int

Float = NDArray[np.float64]
SCORE_FLOOR = 1e-3
"""Smallest score of a pair, as a share of its expert's mean: bounds the weights at 1000 times the typical one."""
_ONE = 1 << 40
MAX_STRIDES = 4
"""By how many factors the share may shrink at once: one for every halving that the variance is below its limit."""


@dataclass(frozen=True)
class Kept:
    """The pairs of one rank that take part in the backward pass."""

    index: Int
    """int64 [K], ascending."""
    weight: Float
    """float64 [K] = 1/pi: what the gradient of a kept pair is multiplied with."""
    variance: float
    """Unbiased estimate of the squared error that sampling adds, in units of score squared."""
    num_nonfinite: int
    """Scores that were NaN or infinite; those pairs count as the largest of the rank."""


def floor_scores(scores: Float, expert: Int, num_experts: int) -> tuple[Float, int]:
    """Make every score positive and finite; returns them with the number of non-finite ones.

    A zero score gets SCORE_FLOOR of its expert's mean, so every probability is positive; all zero means uniform.
    """
    scores = np.asarray(scores, np.float64)
    bad = ~np.isfinite(scores)
    if bad.any():
        good = scores[~bad]
        scores = np.where(bad, good.max() if len(good) and good.max() > 0 else 1.0, scores)
    if not scores.any():
        return np.ones_like(scores), int(bad.sum())
    total = np.bincount(expert, weights=scores, minlength=num_experts)
    count = np.bincount(expert, minlength=num_experts)
    mean = total / np.maximum(count, 1)
    mean[mean == 0] = scores.mean()
    return np.maximum(scores, SCORE_FLOOR * mean[expert]), int(bad.sum())


def inclusion(scores: Float, quota: int) -> Float:
    """pi = min(1, tau * score) with sum(pi) = quota: the unbiased design of smallest variance. Scores must be > 0."""
    if quota >= len(scores):
        return np.ones(len(scores))
    if quota <= 0:
        return np.zeros(len(scores))
    falling = np.sort(scores)[::-1]
    tail = np.cumsum(falling[::-1])[::-1]
    certain = np.arange(len(scores))
    first = int(np.argmax((quota - certain) * falling <= tail))  # pairs before it are kept for certain
    pi: Float = np.minimum(1.0, (quota - first) / tail[first] * scores)
    return pi


def systematic(pi: Float, order: Int, start: float) -> NDArray[np.bool_]:
    """Draw exactly round(sum(pi)) pairs by systematic sampling along `order`, start in [0, 1).

    Along any run of `order` the number drawn is the floor or the ceiling of the run's sum of pi. Computed in fixed point:
    floating sums that miss an integer by one bit would lose or double a pair.
    """
    quota = round(float(pi.sum()))
    units = np.minimum(np.rint(pi * _ONE), _ONE).astype(np.int64)
    missing = quota * _ONE - int(units.sum())
    fractional = (units > 0) & (units < _ONE)
    room = np.where(fractional, _ONE - units if missing > 0 else units, 0)
    before = np.cumsum(room) - room
    units += np.sign(missing) * np.clip(abs(missing) - before, 0, room)
    ticks = (np.concatenate(([0], np.cumsum(units[order]))) - round(start * _ONE)) // _ONE
    keep = np.zeros(len(pi), bool)
    keep[order] = np.diff(ticks) > 0
    return keep


def select(scores: Float, expert: Int, num_experts: int, quota: int, key: Sequence[int]) -> Kept:
    """Keep exactly min(quota, n) pairs of one rank.

    key: what names this draw (seed, step, micro-batch, layer, rank); the same key draws the same pairs, so
    recomputation and resume agree. Each expert's count is the floor or ceiling of its share of the probabilities.
    """
    scores, num_nonfinite = floor_scores(scores, expert, num_experts)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))
    pi = inclusion(scores, min(quota, len(scores)))
    shuffled = rng.permutation(len(scores))
    order = shuffled[np.argsort(expert[shuffled], kind="stable")]
    index = np.flatnonzero(systematic(pi, order, float(rng.random())))
    kept = pi[index]
    variance = float((scores[index] ** 2 * (1 - kept) / kept**2).sum())
    return Kept(index, 1 / kept, variance, num_nonfinite)


def thin(kept: Kept, limit: int, key: Sequence[int]) -> Kept:
    """Cap a selection made for a stale quota: drop uniformly to `limit` and scale the weights up. Still unbiased."""
    if len(kept.index) <= limit:
        return kept
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*key, len(kept.index)])))
    stay = np.sort(rng.choice(len(kept.index), limit, replace=False))
    return replace(kept, index=kept.index[stay], weight=kept.weight[stay] * (len(kept.index) / limit))


def top_q(scores: Float, quota: int) -> Kept:
    """The negative control: the `quota` largest scores, weight 1. Biased on purpose."""
    index = np.sort(np.argsort(-np.asarray(scores), kind="stable")[:quota])
    return Kept(index, np.ones(len(index)), 0.0, 0)


def sampling_variance(scores: Float, quota: int) -> float:
    """V(q) = sum of c^2 (1/pi - 1): what keeping `quota` pairs costs; convex and falling in q. Scores must be > 0."""
    if quota >= len(scores):
        return 0.0
    if quota <= 0:
        return float("inf")
    pi = inclusion(scores, quota)
    return float((scores**2 * (1 / pi - 1)).sum())


# --- budgets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairMemory:
    """Bytes of one expert layer on one rank, by what they belong to."""

    free_bytes: int
    """What is left after dense model and optimizer shards."""
    instance_bytes: int
    """Weights and gradient of one hosted expert."""
    forward_bytes: int
    """Held from forward to backward for every routed pair."""
    gradient_bytes: int
    """Of every routed pair's output gradient, alive in the backward; its input gradient takes as much at the end."""
    retained_bytes: int
    """Extra for every pair that takes part in the backward."""
    chunk_bytes: int = 0
    """Alive inside one product, before the input gradients: the hidden rows of one chunk and their gradient."""

    @classmethod
    def of(
        cls, free_bytes: int, width: int, hidden: int, itemsize: int, chunk_pairs: int = 0, *, keep_hidden: bool = True
    ) -> PairMemory:
        """Counts for an expert of `hidden` x `width` as `collectives.moe` computes it, `chunk_pairs` at once.

        Held: x, p (unless recomputed), the norm. Of retained pairs: gathers of x, delta and p, and the input gradient.
        """
        kept_hidden = hidden if keep_hidden else 0
        return cls(
            free_bytes=free_bytes,
            instance_bytes=4 * width * hidden * itemsize,
            forward_bytes=(width + kept_hidden) * itemsize + 4,
            gradient_bytes=width * itemsize,
            retained_bytes=(3 * width + kept_hidden) * itemsize,
            chunk_bytes=(2 if keep_hidden else 3) * hidden * itemsize * chunk_pairs,
        )

    def peak_bytes(self, num_hosted: int, num_pairs: int, num_kept: int) -> int:
        """Bytes in use at the worst moment."""
        resident = self.instance_bytes * num_hosted + self.forward_bytes * num_pairs
        return resident + self.backward_bytes(num_pairs, num_kept)

    def backward_bytes(self, num_pairs: int, num_kept: int) -> int:
        """The part that lives in the backward only."""
        gradients = self.gradient_bytes * num_pairs
        return gradients + self.retained_bytes * num_kept + max(self.chunk_bytes, gradients)

    def max_kept(self, num_hosted: int, num_pairs: int) -> int:
        """How many pairs may take part in the backward; negative where not even the forward fits."""
        return (self.free_bytes - self.peak_bytes(num_hosted, num_pairs, 0)) // self.retained_bytes


def budgets(pairs: Int, hosted: Int, seconds_per_pair: Float, target_s: float, memory: Sequence[PairMemory]) -> Int:
    """K_n = min(x_n, target / seconds per pair, what memory allows), at least 1 where a rank has pairs.

    pairs, hosted: int64 [N]. Raises PlacementError naming rank and bytes where the forward alone exceeds the memory.
    """
    by_time = np.floor(target_s / seconds_per_pair * (1 + 1e-12)).astype(np.int64)
    by_memory = np.array([m.max_kept(int(h), int(x)) for m, h, x in zip(memory, hosted, pairs, strict=True)])
    for rank in map(int, np.flatnonzero((by_memory < 1) & (pairs > 0))):
        need = memory[rank].peak_bytes(int(hosted[rank]), int(pairs[rank]), 1)
        raise PlacementError(
            f"rank {rank}: {pairs[rank]} pairs and {hosted[rank]} experts need {need} bytes for one retained pair, "
            f"{memory[rank].free_bytes} are free: lower the rank's share of pairs or use a smaller micro-batch"
        )
    quota: Int = np.minimum(pairs, np.maximum(1, np.minimum(by_time, by_memory)))
    return quota


def common_target(
    scores: Sequence[Float], seconds_per_pair: Float, limits: Int, max_variance: float
) -> tuple[float, Int]:
    """The smallest backward time for which the summed variance stays within `max_variance`; returns it and K [N].

    scores: the positive scores of each rank's pairs. limits: int64 [N], the largest K_n that memory allows. Where even
    the limits leave more variance, all of them are used.
    """
    sizes = np.array([len(s) for s in scores])
    limits = np.minimum(limits, sizes)
    sorted_scores = [np.sort(s)[::-1] for s in scores]

    def kept(target_s: float) -> Int:
        by_time = np.floor(target_s / seconds_per_pair * (1 + 1e-12)).astype(np.int64)
        quota: Int = np.minimum(limits, np.maximum(np.minimum(sizes, 1), by_time))
        return quota

    def variance(quota: Int) -> float:
        return sum(sampling_variance(s, int(q)) for s, q in zip(sorted_scores, quota, strict=True) if len(s))

    low, high = 0.0, float((limits * seconds_per_pair).max(initial=0.0))
    if variance(kept(high)) > max_variance:
        return high, kept(high)
    smallest = float(seconds_per_pair.min()) if len(seconds_per_pair) else 1.0
    while high - low > smallest / 2:
        middle = (low + high) / 2
        if variance(kept(middle)) <= max_variance:
            high = middle
        else:
            low = middle
    return high, kept(high)


@dataclass(frozen=True)
class Retention:
    """The controlled share of pairs that take part in the backward: state in, state out, once per step.

    Keeps the variance that sampling adds within `kappa` of the variance that mini-batches have anyway (VCAS,
    arXiv 2402.17227, uses the same criterion with 0.1). That ratio is also about the share of steps that it costs, and
    falls with rho like 1/rho - 1; the time (forward + rho backward) (1 + ratio) is then least near a ratio of a quarter
    where the backward takes twice the forward.
    """

    num_steps: int
    """Steps of the whole run; the first 2 % keep everything."""
    rho: float = 1.0
    step: int = 0
    kappa: float = 0.25
    every: int = 20
    shrink: float = 0.98
    grow: float = 0.95
    lowest: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.rho <= 1 or self.kappa <= 0 or self.every < 1:
            raise ConfigError(f"retention needs 0 < lowest <= rho <= 1, kappa > 0 and every >= 1: {self}")

    @classmethod
    def for_run(cls, num_steps: int) -> Retention:
        """Short runs must move faster, or the share never leaves 1."""
        return cls(num_steps, every=5, shrink=0.95) if num_steps < 1000 else cls(num_steps)

    def update(self, sampling: float, batch: float, *, spike: bool = False) -> Retention:
        """sampling, batch: this step's variances in the same units. spike: the gradient norm jumped or was not finite."""
        following = replace(self, step=self.step + 1)
        if spike or following.step <= 0.02 * self.num_steps:
            return replace(following, rho=1.0)
        if following.step % self.every or not np.isfinite(sampling) or not np.isfinite(batch):
            return following
        if sampling <= self.kappa * batch:
            # far below the limit one stride is too timid: a short run would be over before the share has settled
            room = np.log2(self.kappa * batch / sampling) if sampling > 0 else np.inf
            strides = int(np.clip(room, 1, MAX_STRIDES))
            return replace(following, rho=max(self.lowest, self.rho * self.shrink**strides))
        return replace(following, rho=min(1.0, self.rho / self.grow))
