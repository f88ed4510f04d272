"""A mixture-of-experts layer over a transport: routing, dispatch, experts, combine, and a backward that may be sampled.

A pair is one token with one of its experts. The forward computes every pair; the backward computes the pairs that
`select` keeps, weighted so that the gradient stays unbiased. Every rank takes part in every exchange, also with no token,
and an expert without pairs gets gradients of zeros, never None. Where pairs are computed is decided above this room:
the layer is given a function from counts to `Routes`.

Shapes: T tokens on this rank, k experts a token, d model width, f expert width, N ranks, E experts, s slots a rank.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives import movement
from collectives.channel import Channel, RoleRecord
from collectives.codecs import Codec
from collectives.errors import CollectiveMismatch
from collectives.policy import Role, SyncPolicy
from collectives.router import Routing, TopKRouter
from collectives.transport import Parcel, Transport, all_gather_records, others

DISPATCH, COMBINE, COUNTS = "moe_dispatch", "moe_combine", "moe_counts"
PLACE_BITS = 12
FACT_BYTES = 6
"""A row's norm in float32 and its place in int16."""
CHUNK_PAIRS = 1024
"""Pairs of one expert that are computed at once: bounds the activations that live only inside a product."""


@dataclass(frozen=True)
class Routes:
    """pairs[m, n, e]: how many of its pairs of expert e rank m sends to rank n, int64 [N, N, E]; slots: int32 [N, s].

    drop_key: None for plans that route every pair. With a key, pairs that the plan does not route are dropped, chosen at
    random by the key, and add nothing to their tokens (capacity limits, as in Switch Transformer).
    """

    pairs: np.ndarray
    slots: np.ndarray
    drop_key: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Selection:
    """Pairs that take part in a backward: ascending index int64 [K], weight [K] = 1/probability."""

    index: Tensor
    weight: Tensor


@dataclass(frozen=True)
class ScoredPairs:
    """The pairs computed on this rank, as a selector sees them, ordered by slot."""

    scores: Tensor
    """|delta| |h|, float64 [P]: the norm of what the pair adds to the gradient of w2."""
    expert: Tensor
    """int64 [P]."""
    place: Tensor
    """int64 [P] below 2**PLACE_BITS: where a pair lies on a walk whose neighbours have output gradients of like direction."""
    alike: Callable[[Tensor, Tensor], Tensor] | None = None
    """(int64 [n], int64 [n]) -> float [n]: cosine of what two pairs add to the gradient of w2. None where the rows of output
    gradients are not here yet."""


Selector = Callable[[ScoredPairs], Selection]
"""Which pairs take part. See placement.quotas."""


def channels_for(policy: SyncPolicy, transport: Transport) -> tuple[Channel, Channel]:
    """The codecs of dispatch and combine as `policy` and this link have them; a collective call. Layers may share them."""
    dispatch = Channel(Role.MOE_DISPATCH, policy, transport)
    return dispatch, Channel(Role.MOE_COMBINE, policy, transport, beside=dispatch)


def keep_all(pairs: ScoredPairs) -> Selection:
    """The full backward."""
    return Selection(torch.arange(len(pairs.scores)), torch.ones_like(pairs.scores))


def places(rows: Tensor, planes: Tensor) -> Tensor:
    """Where each row lies on a walk through all directions, int64 [n] below 2**bits; its neighbours point where it points.

    rows: [n, d]; planes: [d, bits], normals of random hyperplanes. The sides that a row lies on (Charikar, STOC 2002) are
    read as a Gray code, so that two places one apart differ in one side.
    """
    sides = (rows @ planes.to(rows.dtype) > 0).to(torch.int64)
    return (sides.cumsum(1) & 1).mul_(2 ** torch.arange(planes.shape[1] - 1, -1, -1)).sum(1)


# --- moving rows ------------------------------------------------------------------------------------------------------


class _Dispatch(torch.autograd.Function):
    """Rows of tokens to the ranks that compute them; in the backward the gradients of those rows the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: _Move, step: _Step) -> Tensor:
        ctx.move, ctx.step = move, step
        return move.carry(rows.contiguous(), move.send, move.receive)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), step = gradients, ctx.step
        back = ctx.move.carry_back(gradient, step.kept_here, step.kept_home)
        step.load.backward_s += time.perf_counter()
        return back, None, None


class _Combine(torch.autograd.Function):
    """Computed rows back to their tokens; in the backward the output gradients to the ranks that compute."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: _Move, step: _Step) -> Tensor:
        ctx.move, ctx.step = move, step
        return move.carry(rows.contiguous(), move.send, move.receive)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), step = gradients, ctx.step
        step.load.backward_s -= time.perf_counter()
        if step.kept_rows_only:
            _select_by_norms(gradient, ctx.move, step)
        return ctx.move.carry_back(gradient, step.kept_home, step.kept_here), None, None


@dataclass
class _Move:
    """One direction of an exchange of rows: how many to and from each rank, int [N]."""

    transport: Transport
    phase: str
    send: np.ndarray
    receive: np.ndarray
    channel: Channel | None
    mean_values: int
    """Values that a rank sends on average: the same number on all ranks, so all choose the same codec."""

    def carry(self, rows: Tensor, send: np.ndarray, receive: np.ndarray) -> Tensor:
        """Rows there (or back), through the codec that the channel gives to an exchange of this size."""
        if self.channel is None or rows.dtype != torch.float32:
            return _exchange_rows(rows, self.transport, self.phase, send, receive)
        decision = self.channel.agree(rows, "once", self.mean_values)
        with self.channel.counted(rows.nbytes, decision):
            return _exchange_rows(rows, self.transport, self.phase, send, receive, decision.codec, self.channel)

    def carry_back(self, gradient: Tensor, received: Tensor | None, sent: Tensor | None) -> Tensor:
        """The gradient of the rows received, back to where they came from: all of them, or those that a mask over the rows
        received here names, with the mask over the rows sent from here. Others are zero."""
        if received is None or sent is None:
            return self.carry(gradient.contiguous(), self.receive, self.send)
        back = gradient.new_zeros((len(sent), *gradient.shape[1:]))
        back[sent] = self.carry(gradient[received], _named(received, self.receive), _named(sent, self.send))
        return back


def _named(mask: Tensor, count: np.ndarray) -> np.ndarray:
    """How many rows `mask` names to or from each rank, int64 [N]."""
    return np.array([int(part.sum()) for part in torch.split(mask, count.tolist())])


def _exchange_rows(
    rows: Tensor,
    transport: Transport,
    phase: str,
    send: np.ndarray,
    receive: np.ndarray,
    codec: Codec | None = None,
    channel: Channel | None = None,
) -> Tensor:
    """rows: [sum(send), ...] ordered by destination; returns [sum(receive), ...] ordered by source.

    channel: the codec's.
    """
    result = rows.new_empty((int(receive.sum()), *rows.shape[1:]))
    outgoing, incoming = torch.split(rows, send.tolist()), torch.split(result, receive.tolist())
    if codec is not None and channel is not None:
        flat_in, flat_out = [part.reshape(-1) for part in incoming], [part.reshape(-1) for part in outgoing]
        channel.note(movement.all_to_all(flat_in, flat_out, codec, transport, seed=channel.seed(), phase=phase))
        return result
    with transport.exchange(phase, [Parcel(peer, incoming[peer]) for peer in others(transport)]) as exchange:
        for peer in others(transport):
            exchange.send(peer, outgoing[peer])
        incoming[transport.rank].copy_(outgoing[transport.rank])
    return result


def _select_by_norms(gradient: Tensor, move: _Move, step: _Step) -> None:
    """Select before a row of the output gradient travels: six bytes a row, its norm and place, go to the rank that computes
    it, and one byte comes back that says whether it is kept. gradient: [rows of this rank's tokens, d]."""
    started = time.perf_counter()
    facts = torch.empty((len(gradient), FACT_BYTES), dtype=torch.uint8)
    norm = torch.linalg.vector_norm(gradient, dim=1).float()
    facts[:, :4] = norm[:, None].view(torch.uint8)
    facts[:, 4:] = places(gradient, step.planes).to(torch.int16)[:, None].view(torch.uint8)
    arrived = _exchange_rows(facts, move.transport, move.phase, move.receive, move.send)[step.grouping]
    scores = arrived[:, :4].flatten().view(torch.float32).double() * step.norm
    place = arrived[:, 4:].flatten().view(torch.int16).long()
    step.selection = step.select(ScoredPairs(scores, step.expert, place))
    step.kept_here = torch.zeros(len(scores), dtype=torch.bool)
    step.kept_here[step.grouping[step.selection.index]] = True
    mask = _exchange_rows(step.kept_here.view(torch.uint8), move.transport, move.phase, move.send, move.receive)
    step.kept_home = mask.bool()
    step.load.selection_s += time.perf_counter() - started


# --- the experts ------------------------------------------------------------------------------------------------------


class _ExpertFFN(torch.autograd.Function):
    """y = gelu(x W1) W2 for rows in order of arrival. All rows forward; backward only those that `select` keeps."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, w1: Tensor, w2: Tensor, step: _Step) -> Tensor:
        x = arrived.index_select(0, step.grouping)
        y = torch.empty_like(x)
        hidden = x.new_empty((len(x), w1.shape[2])) if step.keep_hidden else x.new_empty(0)
        for slot, whole in step.slices:
            for rows in _chunks(whole.start, whole.stop):
                p = torch.mm(x[rows], w1[slot], out=hidden[rows]) if step.keep_hidden else x[rows] @ w1[slot]
                h = F.gelu(p)
                if step.select is not keep_all:
                    step.norm[rows] = torch.linalg.vector_norm(h, dim=1)
                torch.mm(h, w2[slot], out=y[rows])
        ctx.save_for_backward(x, w1, w2, hidden)
        ctx.step = step
        return y.index_select(0, step.row_of_arrival)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, w1, w2, hidden = ctx.saved_tensors
        step: _Step = ctx.step
        (delta,) = gradients  # in order of arrival
        kept = step.selection if step.selection is not None else _select_by_rows(delta, x, hidden, step)
        step.load.num_kept += len(kept.index)
        whole = len(kept.index) == len(x)
        inputs, delta = x.index_select(0, kept.index), delta.index_select(0, step.grouping[kept.index])
        if not whole:
            delta *= kept.weight[:, None].to(delta.dtype)
        dinputs, dw1, dw2 = torch.empty_like(inputs), torch.empty_like(w1), torch.empty_like(w2)
        unused = set(range(len(w1)))
        for slot, rows in step.slices:
            first, last = np.searchsorted(kept.index.numpy(), [rows.start, rows.stop])
            if first == last:
                continue
            unused.remove(slot)
            for rows in _chunks(first, last):
                beta = 0 if rows.start == first else 1  # the first product overwrites what was never written
                x_rows, g = inputs[rows], delta[rows]
                if not step.keep_hidden:
                    p = x_rows @ w1[slot]
                else:  # gathered by chunk: what a product reads next is still in the cache
                    p = hidden[rows] if whole else hidden.index_select(0, kept.index[rows])
                h = F.gelu(p)
                dw2[slot].addmm_(h.T, g, beta=beta)
                del h
                dp = torch.ops.aten.gelu_backward(g @ w2[slot].T, p)
                dw1[slot].addmm_(x_rows.T, dp, beta=beta)
                torch.mm(dp, w1[slot].T, out=dinputs[rows])
                del p, dp  # nothing of a chunk outlives it
        for slot in unused:  # zeros, never None: an optimizer must see every expert at every step
            dw1[slot].zero_()
            dw2[slot].zero_()
        dx = torch.empty_like(x) if whole else torch.zeros_like(x)
        return dx.index_copy_(0, step.grouping[kept.index], dinputs), dw1, dw2, None


def _chunks(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, CHUNK_PAIRS):
        yield slice(first, min(stop, first + CHUNK_PAIRS))


def _select_by_rows(delta: Tensor, x: Tensor, hidden: Tensor, step: _Step) -> Selection:
    """Select where all rows of the output gradient have arrived, so that pairs can be compared with each other as well."""
    started = time.perf_counter()

    def inputs(rows: Tensor) -> Tensor:
        return F.gelu(hidden[rows]) if step.keep_hidden else x[rows]

    def alike(first: Tensor, second: Tensor) -> Tensor:
        of_gradients = F.cosine_similarity(delta[step.grouping[first]], delta[step.grouping[second]])
        return F.cosine_similarity(inputs(first), inputs(second)) * of_gradients

    if step.select is keep_all:
        return keep_all(ScoredPairs(step.norm, step.expert, step.expert, alike))
    scores = torch.linalg.vector_norm(delta, dim=1)[step.grouping].double() * step.norm
    selection = step.select(ScoredPairs(scores, step.expert, places(delta, step.planes)[step.grouping], alike))
    step.load.selection_s += time.perf_counter() - started
    return selection


@dataclass
class _Step:
    """What one call of the layer shares between its autograd functions."""

    slices: list[tuple[int, slice]]
    """(slot, rows of it) for each slot with rows."""
    expert: Tensor
    """Logical expert of each row, int64 [P]."""
    grouping: Tensor
    """The arrived row that each grouped row was, int64 [P]; grouped rows are those of slot after slot."""
    row_of_arrival: Tensor
    """Its inverse: the grouped row that each arrived row became."""
    norm: Tensor
    """|h| of each row, float32 [P]; set in the forward where `select` wants it."""
    select: Selector
    planes: Tensor
    load: LayerLoad
    keep_hidden: bool
    kept_rows_only: bool
    """Whether the pairs are selected before any row of a gradient travels."""
    selection: Selection | None = None
    kept_here: Tensor | None = None
    """bool [P]: the rows kept, in order of arrival."""
    kept_home: Tensor | None = None
    """bool: the rows kept of those that this rank sent."""


@dataclass
class LayerLoad:
    """What the last forward and backward did: exact counts for planners and records, seconds on this rank."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """A[m, e], int64 [N, E]: pairs by the token's rank."""
    computed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Pairs computed on each rank, int64 [N]."""
    num_kept: int = 0
    """Pairs of this rank that took part in the backward."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    """From the start of the layer to its end, waiting for other ranks included."""
    selection_s: float = 0.0
    """The part of the backward that scores and selects."""


class MoELayer(nn.Module):
    """Token-choice experts spread over the ranks of `transport`.

    plan: from A int64 [N, E] (pairs by the token's rank) to Routes, the same on all ranks. select: which computed pairs
    take part in the backward. keep_hidden=False recomputes the hidden activations in the backward and holds less memory.
    The weights of a slot are those of logical expert `slots[rank, slot]`; `collectives.expert_state` keeps them so.
    channels: codecs of dispatch and combine, see `channels_for`; None sends rows as they are.
    kept_rows_only: whether gradients of kept rows alone travel, after two rounds of seven bytes a row in all that agree which;
    else all do. The same on all ranks.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        num_slots: int,
        top_k: int,
        *,
        transport: Transport,
        plan: Callable[[np.ndarray], Routes],
        select: Selector = keep_all,
        keep_hidden: bool = True,
        bias_rate: float = 0.0,
        channels: tuple[Channel, Channel] | None = None,
    ):
        super().__init__()
        self.channels: tuple[Channel | None, Channel | None] = channels or (None, None)
        self.kept_rows_only = True
        self.num_experts, self.transport, self.plan, self.select = num_experts, transport, plan, select
        self.keep_hidden = keep_hidden
        self.router = TopKRouter(width, num_experts, top_k, bias_rate=bias_rate)
        self.w1 = nn.Parameter(torch.zeros(num_slots, width, hidden))
        self.w2 = nn.Parameter(torch.zeros(num_slots, hidden, width))
        self.planes = torch.randn(width, PLACE_BITS, generator=torch.Generator().manual_seed(0))
        self.load = LayerLoad()

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x: [T, d], T may be 0. Returns [T, d] and the routing (for the balance loss)."""
        started = time.perf_counter()
        routing: Routing = self.router(x)
        counts = all_gather_records(self.transport, COUNTS, routing.counts.tolist())
        routes = self.plan(counts)
        self._check(routes, counts)
        pairs, rank, top_k = routes.pairs, self.transport.rank, routing.experts.shape[1]
        self.load = load = LayerLoad(counts, pairs.sum((0, 2)))
        order = torch.from_numpy(_destinations(routing.experts.reshape(-1).numpy(), pairs[rank], routes.drop_key))
        mean_values = int(pairs.sum()) * x.shape[1] // self.transport.size
        sent, received = pairs[rank].sum(1), pairs[:, rank].sum(1)
        dispatch = _Move(self.transport, DISPATCH, sent, received, self.channels[0], mean_values)
        combine = _Move(self.transport, COMBINE, received, sent, self.channels[1], mean_values)
        step = self._group(pairs[:, rank], routes.slots[rank])

        token = order // top_k
        arrived: Tensor = _Dispatch.apply(x.index_select(0, token), dispatch, step)  # type: ignore[no-untyped-call]
        computed: Tensor = _ExpertFFN.apply(arrived, self.w1, self.w2, step)  # type: ignore[no-untyped-call]
        returned: Tensor = _Combine.apply(computed, combine, step)  # type: ignore[no-untyped-call]
        weighted = returned * routing.gates.reshape(-1).index_select(0, order)[:, None]
        output = torch.zeros_like(x).index_add(0, token, weighted)
        load.forward_s = time.perf_counter() - started
        return output, routing

    def records(self) -> list[RoleRecord]:
        """Means per call of moe_dispatch and moe_combine on this rank; empty without channels."""
        return [channel.record() for channel in self.channels if channel is not None]

    def _group(self, received: np.ndarray, slots: np.ndarray) -> _Step:
        """received: int64 [N, E], rows that arrived from each rank for each expert, in that order."""
        expert = np.repeat(np.tile(np.arange(self.num_experts), len(received)), received.reshape(-1))
        grouping = np.argsort(expert, kind="stable")
        row_of_arrival = np.empty_like(grouping)
        row_of_arrival[grouping] = np.arange(len(grouping))
        total = received.sum(0)
        ends = np.cumsum(total)
        slices = [
            (int(np.flatnonzero(slots == e)[0]), slice(int(ends[e] - total[e]), int(ends[e])))
            for e in np.flatnonzero(total)
        ]
        return _Step(
            slices=slices,
            expert=torch.from_numpy(expert[grouping]),
            grouping=torch.from_numpy(grouping),
            row_of_arrival=torch.from_numpy(row_of_arrival),
            norm=torch.zeros(len(expert)),
            select=self.select,
            planes=self.planes,
            load=self.load,
            keep_hidden=self.keep_hidden,
            kept_rows_only=self.kept_rows_only and self.select is not keep_all,
        )

    def _check(self, routes: Routes, counts: np.ndarray) -> None:
        """Conservation here, and the same routes on all ranks: a receiver that expects too much would read rubbish."""
        routed = routes.pairs.sum(1)
        wrong = routed != counts if routes.drop_key is None else routed > counts
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            raise CollectiveMismatch(
                f"rank {self.transport.rank}: the plan routes {routed[place]} of {counts[place]} pairs of expert "
                f"{place[1]} from rank {place[0]}; a plan must route all of them"
            )
        digest = hashlib.blake2b(routes.pairs.tobytes() + routes.slots.tobytes(), digest_size=8).digest()
        table = all_gather_records(self.transport, COUNTS, [int.from_bytes(digest, "little", signed=True)])
        if len(set(table[:, 0].tolist())) > 1:
            raise CollectiveMismatch(
                f"rank {self.transport.rank}: ranks hold different expert plans (digests {table[:, 0].tolist()}); no "
                f"row was sent. A new plan must be adopted by all ranks at the same step."
            )


def _destinations(expert: np.ndarray, routed: np.ndarray, drop_key: tuple[int, ...] | None = None) -> np.ndarray:
    """Order of this rank's pairs on the wire: by destination rank, then expert, then pair. routed: int64 [N, E].

    The pairs of one expert are cut into consecutive runs, one a destination, ranks ascending. With a key, pairs beyond
    what is routed are left out, drawn at random.
    """
    by_expert = np.argsort(expert, kind="stable")
    if drop_key is not None:
        shuffled = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(drop_key)))).permutation(
            len(expert)
        )
        by_expert = shuffled[np.argsort(expert[shuffled], kind="stable")]
        count = np.bincount(expert, minlength=routed.shape[1])
        place = np.arange(len(expert)) - np.repeat(np.cumsum(count) - count, count)
        by_expert = by_expert[place < np.repeat(routed.sum(0), count)]
    target = np.concatenate(
        [np.repeat(np.arange(len(routed)), routed[:, e]) for e in range(routed.shape[1])] or [np.zeros(0, np.int64)]
    )
    return by_expert[np.argsort(target, kind="stable")]
