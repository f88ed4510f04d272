"""A mixture-of-experts layer over a transport: routing, dispatch, experts, combine, and a backward that may be sampled.

A pair is one token with one of its experts. The forward computes every pair; the backward computes the pairs that
`select` keeps, weighted so that the gradient stays unbiased. Every rank takes part in every exchange, also with no token,
and an expert without pairs gets gradients of zeros, never None. Where pairs are computed is decided above this room:
the layer is given a function from counts to `Routes`.

Shapes: T tokens on this rank, k experts a token, d model width, f expert width, N ranks, E experts, s slots a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives.errors import CollectiveMismatch
from collectives.transport import Parcel, Transport, all_gather_records, others

DISPATCH, COMBINE, COUNTS = "moe_dispatch", "moe_combine", "moe_counts"


@dataclass(frozen=True)
class Routes:
    """pairs[m, n, e]: how many of its pairs of expert e rank m sends to rank n, int64 [N, N, E]; slots: int32 [N, s]."""

    pairs: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Selection:
    """Pairs that take part in a backward: ascending index int64 [K], weight [K] = 1/probability."""

    index: Tensor
    weight: Tensor


Selector = Callable[[Tensor, Tensor], Selection]
"""(scores float64 [P], expert int64 [P]) -> Selection, for the pairs computed on this rank. See placement.quotas."""


def keep_all(scores: Tensor, expert: Tensor) -> Selection:
    """The full backward."""
    return Selection(torch.arange(len(scores)), torch.ones(len(scores), dtype=scores.dtype))


# --- routing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """Token choices of this rank: gates [T, k] summing to 1 per token, experts int64 [T, k], probabilities [T, E]."""

    gates: Tensor
    experts: Tensor
    probabilities: Tensor

    @property
    def counts(self) -> Tensor:
        """Pairs of each expert, int64 [E]."""
        return torch.bincount(self.experts.reshape(-1), minlength=self.probabilities.shape[1])

    def balance_loss(self) -> Tensor:
        """E * sum_e (share of pairs) * (mean probability): 1 at perfect balance (Switch Transformer, section 2.2)."""
        num_experts = self.probabilities.shape[1]
        if not len(self.gates):
            return self.probabilities.sum()
        share = self.counts.to(self.probabilities.dtype) / self.experts.numel()
        return num_experts * (share * self.probabilities.mean(0)).sum()


class TopKRouter(nn.Module):
    """Softmax router with k experts a token, gates renormalised over the k.

    bias_rate > 0 balances without a loss term: after each step `rebalance` moves a bias, used for choosing only, by
    this much against the sign of each expert's load error (arXiv 2408.15664).
    """

    def __init__(self, width: int, num_experts: int, top_k: int, *, bias_rate: float = 0.0):
        super().__init__()
        self.top_k, self.bias_rate = top_k, bias_rate
        self.gate = nn.Linear(width, num_experts, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, x: Tensor) -> Routing:
        """x: [T, d]."""
        probabilities = F.softmax(self.gate(x), dim=-1)
        experts = torch.topk(probabilities.detach() + self.bias, self.top_k, dim=-1).indices
        chosen = probabilities.gather(1, experts)
        return Routing(chosen / chosen.sum(1, keepdim=True), experts, probabilities)

    def rebalance(self, counts: Tensor) -> None:
        """counts: int64 [E], the pairs of the whole group in the last step."""
        self.bias += self.bias_rate * torch.sign(counts.sum() / len(counts) - counts).to(self.bias.dtype)


# --- moving rows ------------------------------------------------------------------------------------------------------


class _MoveRows(torch.autograd.Function):
    """Rows to their ranks; in the backward their gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: _Move) -> Tensor:
        ctx.move = move
        return _exchange_rows(rows.contiguous(), move.transport, move.phase, move.send, move.receive)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        move: _Move = ctx.move
        (gradient,) = gradients
        if move.kept is None:
            back = _exchange_rows(gradient.contiguous(), move.transport, move.phase, move.receive, move.send)
        else:
            back = _return_kept_rows(gradient, move.kept, move)
        return back, None


@dataclass
class _Move:
    """One direction of an exchange of rows: how many to and from each rank, int [N]."""

    transport: Transport
    phase: str
    send: np.ndarray
    receive: np.ndarray
    kept: Tensor | None = None
    """Set in the backward: bool [rows received], the rows whose gradient is not zero; only those travel back."""


def _exchange_rows(rows: Tensor, transport: Transport, phase: str, send: np.ndarray, receive: np.ndarray) -> Tensor:
    """rows: [sum(send), ...] ordered by destination; returns [sum(receive), ...] ordered by source."""
    result = rows.new_empty((int(receive.sum()), *rows.shape[1:]))
    outgoing, incoming = torch.split(rows, send.tolist()), torch.split(result, receive.tolist())
    with transport.exchange(phase, [Parcel(peer, incoming[peer]) for peer in others(transport)]) as exchange:
        for peer in others(transport):
            exchange.send(peer, outgoing[peer])
        incoming[transport.rank].copy_(outgoing[transport.rank])
    return result


def _return_kept_rows(gradient: Tensor, kept: Tensor, move: _Move) -> Tensor:
    """Send back only the kept rows, with one byte a row that says which they are."""
    mask = _exchange_rows(kept.to(torch.uint8), move.transport, move.phase, move.receive, move.send).bool()
    sent = np.array([int(part.sum()) for part in torch.split(kept, move.receive.tolist())])
    received = np.array([int(part.sum()) for part in torch.split(mask, move.send.tolist())])
    back = gradient.new_zeros((len(mask), *gradient.shape[1:]))
    back[mask] = _exchange_rows(gradient[kept], move.transport, move.phase, sent, received)
    return back


# --- the experts ------------------------------------------------------------------------------------------------------


class _ExpertFFN(torch.autograd.Function):
    """y = gelu(x W1) W2 for rows grouped by slot. All rows forward; backward only those that `select` keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, step: _Step) -> Tensor:
        y = x.new_empty(x.shape)
        norm = x.new_empty(len(x), dtype=torch.float32)
        hidden = x.new_empty((len(x), w1.shape[2])) if step.keep_hidden else x.new_empty(0)
        for slot, rows in step.slices:
            p = x[rows] @ w1[slot]
            h = F.gelu(p)
            norm[rows] = torch.linalg.vector_norm(h, dim=1).to(torch.float32)
            if step.keep_hidden:
                hidden[rows] = p
            torch.matmul(h, w2[slot], out=y[rows])
        ctx.save_for_backward(x, w1, w2, norm, hidden)
        ctx.step = step
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, w1, w2, norm, hidden = ctx.saved_tensors
        step: _Step = ctx.step
        (delta,) = gradients
        scores = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64) * norm
        selection = step.select(scores, step.expert)
        kept = torch.zeros(len(x), dtype=torch.bool)
        kept[selection.index] = True
        if step.select is not keep_all:  # the same on all ranks, so all use the same messages
            step.dispatch.kept = kept[step.arrival_of_row]
        dx, dw1, dw2 = torch.zeros_like(x), torch.zeros_like(w1), torch.zeros_like(w2)
        for slot, rows in step.slices:
            first, last = np.searchsorted(selection.index.numpy(), [rows.start, rows.stop])
            index = selection.index[first:last]
            if not len(index):
                continue
            inputs, g = x[index], delta[index] * selection.weight[first:last, None].to(delta.dtype)
            p = hidden[index] if step.keep_hidden else inputs @ w1[slot]
            dw2[slot] = F.gelu(p).T @ g
            dp = torch.ops.aten.gelu_backward(g @ w2[slot].T, p)
            dw1[slot] = inputs.T @ dp
            dx[index] = dp @ w1[slot].T
        return dx, dw1, dw2, None


@dataclass
class _Step:
    """What one call of the layer shares between its autograd functions."""

    slices: list[tuple[int, slice]]
    """(slot, rows of it) for each slot with rows."""
    expert: Tensor
    """Logical expert of each row, int64 [P]."""
    arrival_of_row: Tensor
    """The grouped row that each arrived row became, int64 [P]: kept rows in order of arrival."""
    select: Selector
    dispatch: _Move
    keep_hidden: bool


@dataclass
class LayerLoad:
    """What the last forward did: exact counts for planners and records."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """A[m, e], int64 [N, E]: pairs by the token's rank."""
    computed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Pairs computed on each rank, int64 [N]."""


class MoELayer(nn.Module):
    """Token-choice experts spread over the ranks of `transport`.

    plan: from A int64 [N, E] (pairs by the token's rank) to Routes, the same on all ranks. select: which computed pairs
    take part in the backward. keep_hidden=False recomputes the hidden activations in the backward and holds less memory.
    The weights of a slot are those of logical expert `slots[rank, slot]`; `collectives.expert_state` keeps them so.
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
    ):
        super().__init__()
        self.num_experts, self.transport, self.plan, self.select = num_experts, transport, plan, select
        self.keep_hidden = keep_hidden
        self.router = TopKRouter(width, num_experts, top_k, bias_rate=bias_rate)
        self.w1 = nn.Parameter(torch.zeros(num_slots, width, hidden))
        self.w2 = nn.Parameter(torch.zeros(num_slots, hidden, width))
        self.load = LayerLoad()

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x: [T, d], T may be 0. Returns [T, d] and the routing (for the balance loss)."""
        routing: Routing = self.router(x)
        counts = all_gather_records(self.transport, COUNTS, routing.counts.tolist())
        routes = self.plan(counts)
        self._check(routes, counts)
        pairs, rank, top_k = routes.pairs, self.transport.rank, routing.experts.shape[1]
        destination = _destinations(routing.experts.reshape(-1).numpy(), pairs[rank])
        order = torch.from_numpy(destination)
        dispatch = _Move(self.transport, DISPATCH, pairs[rank].sum(1), pairs[:, rank].sum(1))
        combine = _Move(self.transport, COMBINE, dispatch.receive, dispatch.send)

        arrived: Tensor = _MoveRows.apply(x[order // top_k], dispatch)  # type: ignore[no-untyped-call]
        grouping, step = self._group(pairs[:, rank], routes.slots[rank], dispatch)
        computed: Tensor = _ExpertFFN.apply(arrived[grouping], self.w1, self.w2, step)  # type: ignore[no-untyped-call]
        returned: Tensor = _MoveRows.apply(computed[step.arrival_of_row], combine)  # type: ignore[no-untyped-call]
        weighted = returned * routing.gates.reshape(-1)[order, None]
        self.load = LayerLoad(counts, pairs.sum((0, 2)))
        return torch.zeros_like(x).index_add(0, order // top_k, weighted), routing

    def _group(self, received: np.ndarray, slots: np.ndarray, dispatch: _Move) -> tuple[Tensor, _Step]:
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
        step = _Step(
            slices=slices,
            expert=torch.from_numpy(expert[grouping]),
            arrival_of_row=torch.from_numpy(row_of_arrival),
            select=self.select,
            dispatch=dispatch,
            keep_hidden=self.keep_hidden,
        )
        return torch.from_numpy(grouping), step

    def _check(self, routes: Routes, counts: np.ndarray) -> None:
        """Conservation here, and the same routes on all ranks: a receiver that expects too much would read rubbish."""
        if (routes.pairs.sum(1) != counts).any():
            lost = np.argwhere(routes.pairs.sum(1) != counts)[0]
            raise CollectiveMismatch(
                f"rank {self.transport.rank}: the plan routes {routes.pairs.sum(1)[tuple(lost)]} of "
                f"{counts[tuple(lost)]} pairs of expert {lost[1]} from rank {lost[0]}; a plan must route all of them"
            )
        digest = hashlib.blake2b(routes.pairs.tobytes() + routes.slots.tobytes(), digest_size=8).digest()
        table = all_gather_records(self.transport, COUNTS, [int.from_bytes(digest, "little", signed=True)])
        if len(set(table[:, 0].tolist())) > 1:
            raise CollectiveMismatch(
                f"rank {self.transport.rank}: ranks hold different expert plans (digests {table[:, 0].tolist()}); no "
                f"row was sent. A new plan must be adopted by all ranks at the same step."
            )


def _destinations(expert: np.ndarray, routed: np.ndarray) -> np.ndarray:
    """Order of this rank's pairs on the wire: by destination rank, then expert, then pair. routed: int64 [N, E].

    The pairs of one expert are cut into consecutive runs, one a destination, ranks ascending.
    """
    by_expert = np.argsort(expert, kind="stable")
    target = np.concatenate(
        [np.repeat(np.arange(len(routed)), routed[:, e]) for e in range(routed.shape[1])] or [np.zeros(0, np.int64)]
    )
    return by_expert[np.argsort(target, kind="stable")]
