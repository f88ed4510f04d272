"""A mixture-of-experts layer over a transport: routing, dispatch, experts, combine, and a backward that may be sampled.

A pair is one token with one of its experts. The forward computes every pair. The backward computes the pairs that `select`
keeps, weighted so that the gradient stays unbiased; the token's rank selects, since it has the output gradients, so that
no gradient of any other pair travels. Every rank takes part in every exchange, also with no token, and an expert without
pairs gets gradients of zeros, never None. Where pairs are computed, and how many of them count in the backward, is decided
above this room: the layer is given a function from counts to `Routes`.

Shapes: T tokens on this rank, k experts a token, d model width, f expert width, N ranks, E experts, s slots a rank. Rows are
pairs: H of this rank's tokens (at home) by destination, P computed on this rank, in order of arrival (by source) or by slot.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from collectives import movement
from collectives.channel import Channel, RoleRecord
from collectives.codecs import Codec
from collectives.errors import CollectiveMismatch
from collectives.policy import Role, SyncPolicy
from collectives.router import Routing, TopKRouter
from collectives.transport import Parcel, Transport, all_gather_records, others

DISPATCH, COMBINE, COUNTS = "moe_dispatch", "moe_combine", "moe_counts"
PLACE_BITS = 12
CHUNK_PAIRS = 1024
"""Pairs of one expert that are computed at once: bounds the activations that live only inside a product."""


@dataclass(frozen=True)
class Selection:
    """Pairs that take part in a backward: ascending index int64 [K], weight [K] = 1/probability."""

    index: Tensor
    weight: Tensor


@dataclass(frozen=True)
class ScoredPairs:
    """The pairs of this rank's tokens as a selector sees them, H in all, those of one destination after those of another."""

    scores: Tensor
    """|delta| |h|, float64 [H]: the norm of what the pair adds to the gradient of w2."""
    expert: Tensor
    """int64 [H]."""
    place: Tensor
    """int64 [H] below 2**PLACE_BITS: where a pair lies on a walk whose neighbours have output gradients of like direction."""
    count: np.ndarray
    """int64 [N]: pairs of each destination."""
    kept: np.ndarray
    """int64 [N]: how many of them to keep, exactly."""
    alike: Callable[[Tensor, Tensor], Tensor]
    """(int64 [n], int64 [n]) -> float [n]: how alike two pairs are in input and output gradient, as a product of cosines."""


Selector = Callable[[ScoredPairs], Selection]
"""Which pairs take part. See placement.quotas."""


@dataclass(frozen=True)
class Routes:
    """pairs[m, n, e]: how many of its pairs of expert e rank m sends to rank n, int64 [N, N, E]; slots: int32 [N, s].

    kept[m, n]: how many of the pairs of rank m that rank n computes count in the backward, int64 [N, N]; None: all. select:
    which, where kept is given. drop_key: None for plans that route every pair. With a key, pairs that the plan does not route
    are dropped, chosen at random by the key, and add nothing to their tokens (capacity limits, as in Switch Transformer).
    """

    pairs: np.ndarray
    slots: np.ndarray
    kept: np.ndarray | None = None
    select: Selector | None = None
    drop_key: tuple[int, ...] | None = None


def channels_for(policy: SyncPolicy, transport: Transport) -> tuple[Channel, Channel]:
    """The codecs of dispatch and combine as `policy` and this link have them; a collective call. Layers may share them."""
    dispatch = Channel(Role.MOE_DISPATCH, policy, transport)
    return dispatch, Channel(Role.MOE_COMBINE, policy, transport, beside=dispatch)


def places(rows: Tensor, planes: Tensor) -> Tensor:
    """Where each row lies on a walk through all directions, int64 [n] below 2**bits; its neighbours point where it points.

    rows: [n, d]; planes: [d, bits], normals of random hyperplanes. The sides that a row lies on (Charikar, STOC 2002) are
    read as a Gray code, so that two places one apart differ in one side.
    """
    sides = (rows @ planes.to(rows.dtype) > 0).to(torch.int64)
    return (sides.cumsum(1) & 1).mul_(2 ** torch.arange(planes.shape[1] - 1, -1, -1)).sum(1)


# --- moving rows ------------------------------------------------------------------------------------------------------


@dataclass
class _Rows:
    """Exchanges of rows of one role."""

    transport: Transport
    phase: str
    channel: Channel | None
    mean_values: int
    """Values that a rank sends on average: the same number on all ranks, so all choose the same codec."""

    def carry(self, rows: Tensor, send: np.ndarray, receive: np.ndarray) -> Tensor:
        """rows: [sum(send), d] ordered by destination, through the codec that the channel gives to an exchange of this size;
        returns [sum(receive), d] ordered by source."""
        if self.channel is None or rows.dtype != torch.float32:
            with self.under_way(rows, send, receive) as result:
                pass
            return result
        decision = self.channel.agree(rows, "once", self.mean_values)
        with self.channel.counted(rows.nbytes, decision):
            if decision.codec is None:
                with self.under_way(rows, send, receive) as result:
                    pass
                return result
            return self._encoded(rows, send, receive, decision.codec, self.channel)

    @contextmanager
    def under_way(self, rows: Tensor, send: np.ndarray, receive: np.ndarray) -> Iterator[Tensor]:
        """Rows of any kind as they are, [sum(send), ...], on their way while the block runs; complete when it ends."""
        result, incoming, outgoing = self._parts(rows.contiguous(), send, receive)
        transport = self.transport
        with transport.exchange(self.phase, [Parcel(peer, incoming[peer]) for peer in others(transport)]) as exchange:
            for peer in others(transport):
                exchange.send(peer, outgoing[peer])
            incoming[transport.rank].copy_(outgoing[transport.rank])
            yield result

    def _encoded(self, rows: Tensor, send: np.ndarray, receive: np.ndarray, codec: Codec, channel: Channel) -> Tensor:
        result, incoming, outgoing = self._parts(rows.contiguous(), send, receive)
        flat_in, flat_out = [part.reshape(-1) for part in incoming], [part.reshape(-1) for part in outgoing]
        seed = channel.seed()
        channel.note(movement.all_to_all(flat_in, flat_out, codec, self.transport, seed=seed, phase=self.phase))
        return result

    @staticmethod
    def _parts(
        rows: Tensor, send: np.ndarray, receive: np.ndarray
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """A buffer for what arrives, and both cut by rank."""
        result = rows.new_empty((int(receive.sum()), *rows.shape[1:]))
        return result, torch.split(result, receive.tolist()), torch.split(rows, send.tolist())


# --- the experts ------------------------------------------------------------------------------------------------------


class _Experts(torch.autograd.Function):
    """Output [T, d]: the sum over the pairs of a token of gate * gelu(x W1) W2, wherever they are computed. gates: [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, step: _Step) -> Tensor:
        arrived = step.dispatch.carry(x.index_select(0, step.token), step.sent, step.received)
        y, norm = torch.empty_like(arrived), torch.empty(len(arrived) if step.kept is not None else 0)
        hidden = arrived.new_empty((len(arrived), w1.shape[2])) if step.keep_hidden else arrived.new_empty(0)
        for slot, whole in step.slices:
            for some in _chunks(whole.start, whole.stop):
                at = step.grouping[some]
                rows = arrived.index_select(0, at)  # by chunk: what a product reads next is still in the cache
                p = torch.mm(rows, w1[slot], out=hidden[some]) if step.keep_hidden else rows @ w1[slot]
                h = F.gelu(p)
                if step.kept is not None:
                    norm[at] = torch.linalg.vector_norm(h, dim=1).float()
                y.index_copy_(0, at, (h @ w2[slot]).to(y.dtype))  # under autocast a product is narrower
        if step.kept is None:
            returned = step.combine.carry(y, step.received, step.sent)
        else:
            with step.combine.under_way(norm, step.received, step.sent) as norm:
                returned = step.combine.carry(y, step.received, step.sent)
        output = torch.zeros_like(x)
        for some in _chunks(0, len(gates)):
            output.index_add_(0, step.token[some], returned[some] * gates[some, None])
        ctx.save_for_backward(x, gates, arrived, w1, w2, hidden, returned, norm)
        ctx.step = step
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        started = time.perf_counter()
        x, gates, arrived, w1, w2, hidden, returned, norm = ctx.saved_tensors
        step: _Step = ctx.step
        (dy,) = gradients
        dgates = torch.empty_like(gates)
        for some in _chunks(0, len(gates)):
            dgates[some] = (dy.index_select(0, step.token[some]) * returned[some]).sum(1)
        if step.kept is None:
            token, send, receive = step.token, step.sent, step.received
            delta = dy.index_select(0, token).mul_(gates[:, None])
            order, kept = step.grouping, None
            delta = step.combine.carry(delta, send, receive)
        else:
            chosen = _choose(dy, x, gates, norm, step)
            token, (send, receive) = step.token[chosen.index], step.kept
            factor = chosen.weight.to(dy.dtype) * gates[chosen.index]
            delta = dy.index_select(0, token).mul_(factor[:, None])
            begins = np.cumsum(step.sent) - step.sent
            position = (chosen.index - torch.from_numpy(np.repeat(begins, send))).to(torch.int32)
            with step.combine.under_way(position, send, receive) as position:
                delta = step.combine.carry(delta, send, receive)
            begins = np.cumsum(step.received) - step.received
            kept, order = torch.sort(
                step.row_of_arrival[position.long() + torch.from_numpy(np.repeat(begins, receive))]
            )
        step.load.num_kept += len(delta)
        dinputs, dw1, dw2 = _gradients(delta, order, kept, arrived, hidden, w1, w2, step)
        del delta
        dx = torch.zeros_like(x).index_add_(0, token, step.dispatch.carry(dinputs, receive, send))
        step.load.backward_s += time.perf_counter() - started
        return dx, dgates, dw1, dw2, None


def _choose(dy: Tensor, x: Tensor, gates: Tensor, norm: Tensor, step: _Step) -> Selection:
    """Score the pairs of this rank's tokens and select. The output gradient of a pair is dy of its token times its gate, and no
    gate is negative, so pairs of a token have one direction. dy, x: [T, d]; gates, norm: [H]."""
    started = time.perf_counter()
    assert step.select is not None
    assert step.kept is not None

    def alike(first: Tensor, second: Tensor) -> Tensor:
        first, second = step.token[first], step.token[second]
        return F.cosine_similarity(x[first], x[second]) * F.cosine_similarity(dy[first], dy[second])

    scores = torch.linalg.vector_norm(dy, dim=1)[step.token].double() * gates * norm
    place, (kept, _) = places(dy, step.planes)[step.token], step.kept
    chosen = step.select(ScoredPairs(scores, step.expert, place, step.sent, kept, alike))
    step.load.selection_s += time.perf_counter() - started
    return chosen


def _gradients(
    delta: Tensor,
    order: Tensor,
    kept: Tensor | None,
    arrived: Tensor,
    hidden: Tensor,
    w1: Tensor,
    w2: Tensor,
    step: _Step,
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of the backward. delta: [K, d], output gradients as they arrived, those of slot after slot at `order`, int64
    [K]; kept: the grouped row of each in that order, int64 [K] ascending, None for all rows. Returns the gradients of the
    inputs, [K, d] in the order of delta, of w1, and of w2."""
    dinputs, dw1, dw2 = torch.empty_like(delta), torch.empty_like(w1), torch.empty_like(w2)
    unused = set(range(len(w1)))
    for slot, all_rows in step.slices:
        first, last = all_rows.start, all_rows.stop
        if kept is not None:
            first, last = np.searchsorted(kept.numpy(), [first, last]).tolist()
        if first == last:
            continue
        unused.remove(slot)
        for some in _chunks(first, last):
            beta = 0 if some.start == first else 1  # the first product overwrites what was never written
            rows = step.grouping[some] if kept is None else step.grouping[kept[some]]
            x, g = arrived.index_select(0, rows), delta.index_select(0, order[some])
            if not step.keep_hidden:
                p = x @ w1[slot]
            else:
                p = hidden[some] if kept is None else hidden.index_select(0, kept[some])
            h = F.gelu(p)
            dw2[slot].addmm_(h.T, g, beta=beta)
            del h
            dp = torch.ops.aten.gelu_backward(g @ w2[slot].T, p)
            dw1[slot].addmm_(x.T, dp, beta=beta)
            dinputs.index_copy_(0, order[some], dp @ w1[slot].T)
            del p, dp  # nothing of a chunk outlives it
    for slot in unused:  # zeros, never None: an optimizer must see every expert at every step
        dw1[slot].zero_()
        dw2[slot].zero_()
    return dinputs, dw1, dw2


def _chunks(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, CHUNK_PAIRS):
        yield slice(first, min(stop, first + CHUNK_PAIRS))


@dataclass
class _Step:
    """One call of the layer: what its forward and its backward share."""

    dispatch: _Rows
    combine: _Rows
    sent: np.ndarray
    """int64 [N]: pairs of this rank's tokens by destination."""
    received: np.ndarray
    """int64 [N]: pairs computed here by source."""
    kept: tuple[np.ndarray, np.ndarray] | None
    """Those of both that count in the backward; None: all."""
    token: Tensor
    """Token of each row at home, int64 [H]."""
    expert: Tensor
    """Logical expert of each row at home, int64 [H]."""
    slices: list[tuple[int, slice]]
    """(slot, rows of it) for each slot with rows."""
    grouping: Tensor
    """The arrived row that each grouped row was, int64 [P]; grouped rows are those of slot after slot."""
    row_of_arrival: Tensor
    """Its inverse: the grouped row that each arrived row became."""
    select: Selector | None
    planes: Tensor
    load: LayerLoad
    keep_hidden: bool


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

    plan: from A int64 [N, E] (pairs by the token's rank) to Routes, the same on all ranks; called anew where the forward is
    recomputed. keep_hidden=False recomputes the hidden activations in the backward and holds less memory. The weights of a
    slot are those of logical expert `slots[rank, slot]`; `collectives.expert_state` keeps them so. channels: codecs of
    dispatch and combine, see `channels_for`; None sends rows as they are.
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
        keep_hidden: bool = True,
        bias_rate: float = 0.0,
        channels: tuple[Channel, Channel] | None = None,
    ):
        super().__init__()
        self.channels: tuple[Channel | None, Channel | None] = channels or (None, None)
        self.num_experts, self.transport, self.plan = num_experts, transport, plan
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
        rank, top_k = self.transport.rank, routing.experts.shape[1]
        self.load = load = LayerLoad(counts, routes.pairs.sum((0, 2)))
        experts = routing.experts.reshape(-1)
        order = torch.from_numpy(_destinations(experts.numpy(), routes.pairs[rank], routes.drop_key))
        step = self._step(routes, order // top_k, experts.index_select(0, order), x.shape[1])
        gates = routing.gates.reshape(-1).index_select(0, order)
        output: Tensor = _Experts.apply(x, gates, self.w1, self.w2, step)  # type: ignore[no-untyped-call]
        load.forward_s = time.perf_counter() - started
        return output, routing

    def records(self) -> list[RoleRecord]:
        """Means per call of moe_dispatch and moe_combine on this rank; empty without channels."""
        return [channel.record() for channel in self.channels if channel is not None]

    def _step(self, routes: Routes, token: Tensor, expert: Tensor, width: int) -> _Step:
        """token, expert: int64 [H], of the rows that this rank sends."""
        transport, rank, slots = self.transport, self.transport.rank, routes.slots[self.transport.rank]
        received = routes.pairs[:, rank]
        by_arrival = np.repeat(np.tile(np.arange(self.num_experts), len(received)), received.reshape(-1))
        grouping = np.argsort(by_arrival, kind="stable")
        row_of_arrival = np.empty_like(grouping)
        row_of_arrival[grouping] = np.arange(len(grouping))
        total = received.sum(0)
        ends = np.cumsum(total)
        slices = [
            (int(np.flatnonzero(slots == e)[0]), slice(int(ends[e] - total[e]), int(ends[e])))
            for e in np.flatnonzero(total)
        ]
        mean_values = int(routes.pairs.sum()) * width // transport.size
        return _Step(
            dispatch=_Rows(transport, DISPATCH, self.channels[0], mean_values),
            combine=_Rows(transport, COMBINE, self.channels[1], mean_values),
            sent=routes.pairs[rank].sum(1),
            received=received.sum(1),
            kept=None if routes.kept is None else (routes.kept[rank], routes.kept[:, rank]),
            token=token,
            expert=expert,
            slices=slices,
            grouping=torch.from_numpy(grouping),
            row_of_arrival=torch.from_numpy(row_of_arrival),
            select=routes.select,
            planes=self.planes,
            load=self.load,
            keep_hidden=self.keep_hidden,
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
        kept = b"" if routes.kept is None else routes.kept.tobytes()
        digest = hashlib.blake2b(routes.pairs.tobytes() + routes.slots.tobytes() + kept, digest_size=8).digest()
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
