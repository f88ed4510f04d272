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
from numba import njit
from numpy.typing import NDArray

from collectives.errors import ConfigError
from placement.errors import PlacementError
from placement.split import Int

Float = NDArray[np.float64]
SCORE_FLOOR = 1e-3
"""Smallest score of a pair, as a share of its expert's mean: bounds the weights at 1000 times the typical one."""
_CERTAIN = 1e9
"""A score so many times the largest is kept in any quota of at least one."""
_ONE_BITS = 40
_ONE = 1 << _ONE_BITS
"""Probability 1 in fixed point."""
SHARES = tuple(percent / 100 for percent in range(10, 101, 5))
"""Shares of the pairs in the backward among which `Retention` chooses, rising to 1."""


@dataclass(frozen=True)
class Kept:
    """The pairs of one rank that take part in the backward pass."""

    index: Int
    """int64 [K], ascending."""
    weight: Float
    """float64 [K] = 1/pi: what the gradient of a kept pair is multiplied with."""
    num_nonfinite: int
    """Scores that were NaN or infinite; those pairs are kept before all others, so that the gradient shows them."""


def floor_scores(scores: Float, expert: Int, num_experts: int) -> tuple[Float, int]:
    """Make every score positive and finite; returns them with the number of non-finite ones.

    A zero score gets SCORE_FLOOR of its expert's mean, so every probability is positive; all zero means uniform.
    """
    floored, num_nonfinite = _floor_scores(np.asarray(scores, np.float64), expert, num_experts)
    return floored, int(num_nonfinite)


@njit(nogil=True, cache=True)
def _floor_scores(scores, expert, num_experts):  # type: ignore[no-untyped-def]
    largest, num_finite, whole = 0.0, 0, 0.0
    total = np.zeros(num_experts)
    count = np.zeros(num_experts, np.int64)
    for i in range(len(scores)):
        if np.isfinite(scores[i]):
            largest = max(largest, scores[i])
            total[expert[i]] += scores[i]
            count[expert[i]] += 1
            whole += scores[i]
            num_finite += 1
    floored = np.ones(len(scores))
    for i in range(len(scores)):
        e = expert[i]
        if not np.isfinite(scores[i]):
            floored[i] = _CERTAIN * max(largest, 1.0)
        elif whole > 0:
            mean = total[e] / count[e] if total[e] > 0 else whole / num_finite
            floored[i] = max(scores[i], SCORE_FLOOR * mean)
    return floored, len(scores) - num_finite


def inclusion(scores: Float, quota: float) -> Float:
    """pi = min(1, tau * score) with sum(pi) = quota: the unbiased design of smallest variance. Scores must be > 0."""
    if quota >= len(scores):
        return np.ones(len(scores))
    if quota <= 0:
        return np.zeros(len(scores))
    return np.asarray(_inclusion(np.asarray(scores, np.float64), quota))


@njit(nogil=True, cache=True)
def _inclusion(scores, quota):  # type: ignore[no-untyped-def]
    """Without sorting: pairs above `limit` are certain, which lowers the limit for the others, until none joins them."""
    num_certain, tail = 0, scores.sum()
    while True:
        limit = tail / (quota - num_certain)
        count, rest = 0, 0.0
        for score in scores:
            if score > limit:
                count += 1
            else:
                rest += score
        if count <= num_certain or count >= quota:
            break
        num_certain, tail = count, rest
    return np.minimum(1.0, scores / limit)


def systematic(pi: Float, order: Int, start: float) -> NDArray[np.bool_]:
    """Draw exactly round(sum(pi)) pairs by systematic sampling along `order`, start in [0, 1).

    Along any run of `order` the number drawn is the floor or the ceiling of the run's sum of pi. Computed in fixed point:
    floating sums that miss an integer by one bit would lose or double a pair.
    """
    return np.asarray(_systematic(pi, order, round(start * _ONE), round(float(pi.sum()))))


@njit(nogil=True, cache=True)
def _systematic(pi, order, start, quota):  # type: ignore[no-untyped-def]
    units = np.empty(len(pi), np.int64)
    missing = quota * _ONE
    for i, probability in enumerate(pi):
        units[i] = np.int64(np.rint(probability * _ONE))
        missing -= units[i]
    for i in range(len(pi)):  # what rounding left over goes to the first pairs that are neither certain nor excluded
        if missing == 0:
            break
        if 0 < units[i] < _ONE:
            change = min(missing, _ONE - units[i]) if missing > 0 else max(missing, -units[i])
            units[i] += change
            missing -= change
    keep = np.zeros(len(pi), np.bool_)
    position = -start
    for i in order:
        before = position >> _ONE_BITS
        position += units[i]
        keep[i] = position >> _ONE_BITS > before
    return keep


def select(
    scores: Float, expert: Int, num_experts: int, quota: int, key: Sequence[int], place: Int | None = None
) -> Kept:
    """Keep exactly min(quota, n) pairs of one rank.

    key: what names this draw (seed, step, micro-batch, layer, rank); the same key draws the same pairs, so
    recomputation and resume agree. place: int64 [n] in [0, 2**16), near for pairs that contribute alike. Each expert's
    count, and that of any run of places within it, is the floor or ceiling of its share of the probabilities, so that
    the kept pairs stand for all directions: on average they miss less than independent draws would.
    """
    scores, num_nonfinite = floor_scores(scores, expert, num_experts)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))
    pi = inclusion(scores, min(quota, len(scores)))
    ties = rng.integers(0, 1 << 32, len(scores))
    order = np.argsort((walk_of(expert, place) << 32) | ties)
    index = np.flatnonzero(systematic(pi, order, float(rng.random())))
    return Kept(index, 1 / pi[index], num_nonfinite)


def by_source(kept: Int, pairs: Int, start: Int) -> Int:
    """Whose pairs the kept ones of each rank are: int64 [N, N] by (source, computing rank), each the floor or the ceiling of
    its share in proportion to `pairs` (int64, alike), drawn by systematic sampling so that its mean is that share.

    kept: int64 [N], at most what each rank computes. start: int64 [N], the draw, from 0 to below what each rank computes.
    """
    computed = np.maximum(pairs.sum(0), 1)
    upto = (np.cumsum(kept * pairs, axis=0) + start) // computed
    return np.asarray(np.diff(upto, axis=0, prepend=0))


def walk_of(expert: Int, place: Int | None) -> Int:
    """Expert by expert, and by place within each: int64 [n]."""
    return np.asarray(expert, np.int64) << 16 | (0 if place is None else place)


def neighbours(walk: Int, lag: int, limit: int = 512) -> tuple[Int, Int]:
    """At most `limit` pairs of indices that are `lag` apart along the walk and of one expert."""
    order = np.argsort(walk)
    first, second = order[:-lag], order[lag:]
    same = np.flatnonzero(walk[first] >> 16 == walk[second] >> 16)
    same = same[:: max(1, len(same) // limit)]
    return first[same], second[same]


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
    return Kept(index, np.ones(len(index)), 0)


def sampling_variances(scores: Float, quota: float, expert: Int, num_experts: int) -> Float:
    """V(q) = sum of c^2 (1/pi - 1) over the pairs of each expert, float64 [E]: what keeping `quota` pairs costs if they are
    drawn independently of what they contribute. Each falls in q. Scores must be > 0.
    """
    if quota >= len(scores):
        return np.zeros(num_experts)
    with np.errstate(divide="ignore"):
        lost = scores**2 * (1 / inclusion(scores, quota) - 1)
    return np.asarray(np.bincount(expert, lost, num_experts), np.float64)


def sampling_variance(scores: Float, quota: int) -> float:
    """`sampling_variances` of all pairs together; convex in the quota."""
    return float(sampling_variances(scores, quota, np.zeros(len(scores), np.int64), 1)[0])


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
    retained_bytes: int
    """Extra for every pair that takes part in the backward: its output gradient and its input gradient."""
    output_bytes: int = 0
    """Of every routed pair's output, while it travels in the forward."""
    chunk_bytes: int = 0
    """Alive inside one product: a chunk's rows, its hidden rows and their gradients."""

    @classmethod
    def of(
        cls, free_bytes: int, width: int, hidden: int, itemsize: int, chunk_pairs: int = 0, *, keep_hidden: bool = True
    ) -> PairMemory:
        """Counts for an expert of `hidden` x `width` as `collectives.moe` computes it, `chunk_pairs` at once.

        Held: x, p (unless recomputed), y, the gate, the norm.
        """
        return cls(
            free_bytes=free_bytes,
            instance_bytes=4 * width * hidden * itemsize,
            forward_bytes=(2 * width + hidden * keep_hidden + 1) * itemsize + 4,
            retained_bytes=2 * width * itemsize,
            output_bytes=width * itemsize,
            chunk_bytes=3 * (hidden + width) * itemsize * chunk_pairs,
        )

    def peak_bytes(self, num_hosted: int, num_pairs: int, num_kept: int) -> int:
        """Bytes in use at the worst moment."""
        return self.resident_bytes(num_hosted, num_pairs) + self.passing_bytes(num_pairs, num_kept)

    def resident_bytes(self, num_hosted: int, num_pairs: int) -> int:
        """Between forward and backward."""
        return self.instance_bytes * num_hosted + self.forward_bytes * num_pairs

    def passing_bytes(self, num_pairs: int, num_kept: int) -> int:
        """What lives at the end of the forward only, or in the backward only."""
        return max(self.output_bytes * num_pairs, self.retained_bytes * num_kept + self.chunk_bytes)

    def max_kept(self, num_hosted: int, num_pairs: int) -> int:
        """How many pairs may take part in the backward; negative where not even the forward fits."""
        if self.peak_bytes(num_hosted, num_pairs, 0) > self.free_bytes:
            return -1
        return (self.free_bytes - self.resident_bytes(num_hosted, num_pairs) - self.chunk_bytes) // self.retained_bytes


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
class PairTimes:
    """Seconds of one pair on one core. selection_s: what a sampled backward costs for every pair, kept or not.

    As weights of a choice only their ratios matter; the defaults count products: two in the backward for one forward.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    selection_s: float = 0.1


@dataclass(frozen=True)
class Retention:
    """The share of pairs that takes part in the backward, chosen for the least time to a loss: state in, state out.

    A step's gradient has mean g and error V from its mini-batch; the steps to a loss are as 1 + V / |g|^2 (McCandlish et
    al., arXiv 1812.06162). Sampling adds V_s, so the steps grow by V_s / (|g|^2 + V), and |g|^2 + V is the expected square
    of the full gradient of a mini-batch. Time to loss is (forward + selection + share * backward) (1 + that): its smallest
    value among SHARES is taken, 1 without selection included.
    """

    num_steps: int
    """Steps of the whole run; the first 2 % keep everything."""
    rho: float = 1.0
    step: int = 0
    every: int = 20
    """Steps from one choice to the next."""
    variance: tuple[float, ...] = ()
    """V_s at each of SHARES, smoothed over choices."""
    squared_norm: float = 0.0
    """Of the mini-batch's full gradient, smoothed alike."""

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1 or self.every < 1:
            raise ConfigError(f"retention needs 0 < rho <= 1 and every >= 1: {self}")

    @classmethod
    def for_run(cls, num_steps: int) -> Retention:
        """Short runs must choose more often."""
        return cls(num_steps, every=5 if num_steps < 1000 else 20)

    @property
    def is_due(self) -> bool:
        """Whether this step's `update` wants measurements."""
        return (self.step + 1) % self.every == 0 and self.step + 1 > 0.02 * self.num_steps

    @property
    def extra_steps(self) -> float:
        """The further steps that sampling costs at the present share, over those of the full backward, as estimated."""
        return float(np.interp(self.rho, SHARES, self.variance)) / self.squared_norm if self.variance else 0.0

    def update(
        self, times: PairTimes, variance: Float | None = None, squared_norm: float = 0.0, *, spike: bool = False
    ) -> Retention:
        """Once per step. variance: V_s at each of SHARES, and the square of the full gradient in the same units, both of the
        whole group; None between choices. spike: the gradient norm jumped or was not finite; everything is kept for now.
        """
        following = replace(self, step=self.step + 1)
        if spike:
            return replace(following, rho=1.0)
        if variance is None or not np.isfinite(variance).all() or not np.isfinite(squared_norm) or squared_norm <= 0:
            return following
        if self.variance:
            variance = (np.array(self.variance) + variance) / 2
            squared_norm = (self.squared_norm + squared_norm) / 2
        share = np.array(SHARES)
        seconds = times.forward_s + times.selection_s * (share < 1) + times.backward_s * share
        best = int(np.argmin(seconds * (1 + variance / squared_norm)))
        return replace(following, rho=SHARES[best], variance=tuple(variance.tolist()), squared_norm=squared_norm)
