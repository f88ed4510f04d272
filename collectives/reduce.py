"""Dense reductions with a codec inside.

All functions are SPMD: every rank calls them with the same codec, sizes and order. `x` is contiguous and is replaced by
the result; fp32 is worked on in place, other float types go through fp32. Every rank uses the *decoded* values, for its
own chunk too, so the result is the same bytes on every rank. Sums are made in fp32, in rank order; `op="mean"` divides
them by the total weight. `weights` (one per rank, equal on all ranks; default 1 each) express uneven participation: a
rank of weight 0 takes part, what it sends is ignored, and it passes no residual, which thereby stays as it was.

Worst-case error of a sum of n ranks, with eb the bound of one encode of an input and eb' that of the result:
one-shot n*eb; two-shot n*eb + eb'; two-hop like two-shot with one more eb' per hop; recursive doubling 2(n-1)*eb;
homomorphic n*eb; data movement (movement.py) eb. A mean divides all but the eb' by n. With scales relative to a block,
eb is that of the largest partial sum. Codecs without an absolute bound give the same with their relative error.

All return the flags that any counted packet raised, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from collectives.codecs.bounded import ErrorBoundedSum
from collectives.codecs.codec import Codec, Flag, Residual, add_flags, packet_flags
from collectives.codecs.hashing import derive_seed
from collectives.errors import ConfigError
from collectives.packets import Workspace, share, swap
from collectives.subgroup import SubTransport
from collectives.transport import Parcel, Transport, others

Op = Literal["sum", "mean"]

PART_VALUES = 1 << 18
"""Aim for parts of about this many values per chunk, so that one is reduced while the next is on the wire."""
MAX_PARTS = 8


@dataclass(frozen=True)
class Chunks:
    """How n elements are cut: chunk j belongs to rank j, and each chunk is cut into parts that travel one by one.

    Chunk borders are multiples of `align`; the last chunks may be short or empty.
    """

    numel: int
    chunk: int
    part: int

    @classmethod
    def of(cls, numel: int, size: int, align: int, max_parts: int = MAX_PARTS) -> Chunks:
        """Cut `numel` elements for `size` ranks."""
        chunk = -(-max(numel, 1) // (size * align)) * align
        num_parts = min(max(chunk // PART_VALUES, 1), max_parts)
        return cls(numel, chunk, -(-chunk // (num_parts * align)) * align)

    @property
    def num_parts(self) -> int:
        """Parts per chunk, the same for all ranks."""
        return -(-self.chunk // self.part)

    def whole(self, owner: int) -> slice:
        """Elements of rank `owner`."""
        return slice(min(owner * self.chunk, self.numel), min((owner + 1) * self.chunk, self.numel))

    def span(self, part: int, owner: int) -> slice:
        """Elements of part `part` of rank `owner`."""
        start, stop = self.whole(owner).start, self.whole(owner).stop
        return slice(min(start + part * self.part, stop), min(start + (part + 1) * self.part, stop))


@dataclass(frozen=True)
class _Job:
    """What every step of one reduction needs."""

    codec: Codec
    result_codec: Codec
    """For the second encode: a bound relative to the tensor is taken from the result's chunk, not from the input."""
    transport: Transport
    weights: Sequence[float] | None
    scale: float
    residual: Residual | None
    owner_residual: Residual | None
    seed: int
    space: Workspace

    def encode(self, x: Tensor, span: slice, out: Tensor) -> Tensor:
        """The packet of x[span]; nothing for an empty span."""
        if span.start == span.stop:
            return out[:0]
        part = None if self.residual is None else self.residual.part(span.start, span.stop)
        rank = 0 if self.codec.shared_seed else self.transport.rank
        return self.codec.encode(x[span], part, out, derive_seed(self.seed, rank, span.start))

    def combine(self, packets: Sequence[Tensor], span: slice, offset: int, out: Tensor) -> Tensor:
        """The owner's step: decode, sum in rank order, scale, encode again. `offset`: where the owner's chunk starts."""
        if span.start == span.stop:
            return out[:0]
        part = self.owner_residual
        part = None if part is None else part.part(span.start - offset, span.stop - offset)
        seed = derive_seed(self.seed, self.transport.size, span.start)
        return self.result_codec.reduce_encode(packets, _numel(span), self.weights, self.scale, part, out, seed)

    def wire(self, span: slice) -> int:
        """Bytes of the packet of a span, at most."""
        return self.codec.wire_bytes(_numel(span)) if span.stop > span.start else 0


def two_shot(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    op: Op = "sum",
    weights: Sequence[float] | None = None,
    residual: Residual | None = None,
    owner_residual: Residual | None = None,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> Flag:
    """All-reduce: packets to the owner of each chunk, fp32 sum there, one more encode, packets to everybody.

    residual: fp32, as long as x. owner_residual: fp32, as long as this rank's chunk (`owner_span`), for the second
    encode. seed: equal on all ranks, new for each tensor and step (`derive_seed(seed, step, name)`).
    Bytes sent per rank: 2(n-1)/n of the packet of the whole tensor.
    """
    scale, space = _scale(op, transport.size, weights), workspace or Workspace(x.device)
    job = _Job(codec.for_tensor(x), codec, transport, weights, scale, residual, owner_residual, seed, space)
    return _run(x, job, op, _two_shot_parts if codec.fixed_size else _two_shot_sized)


def owner_span(numel: int, size: int, rank: int, codec: Codec) -> slice:
    """Elements of the flat tensor that `rank` owns in `two_shot`: the extent of its owner residual."""
    return Chunks.of(numel, size, codec.align).whole(rank)


def _two_shot_parts(x: Tensor, job: _Job) -> Flag:
    """Packets of known size: all receives first; one part is reduced while the next is on the wire."""
    codec, transport, rank = job.codec, job.transport, job.transport.rank
    peers, ranks = others(transport), range(transport.size)
    cuts = Chunks.of(x.numel(), transport.size, codec.align)
    parts = range(cuts.num_parts)

    def grid(use: str, size_of: Callable[[int, int], int]) -> list[list[Tensor]]:
        flat = iter(job.space.packets(use, [size_of(part, r) for part in parts for r in ranks]))
        return [[next(flat) for _ in ranks] for _ in parts]

    outgoing = grid("outgoing", lambda part, r: job.wire(cuts.span(part, r)))
    incoming = grid("incoming", lambda part, r: job.wire(cuts.span(part, rank)) if r != rank else 0)
    results = grid("results", lambda part, r: job.wire(cuts.span(part, r)))
    with (
        transport.exchange("reduce", [Parcel(r, incoming[part][r]) for part in parts for r in peers]) as reduce,
        transport.exchange("gather", [Parcel(r, results[part][r]) for part in parts for r in peers]) as gather,
    ):
        for part in parts:
            for r in [*peers, rank]:
                job.encode(x, cuts.span(part, r), outgoing[part][r])
                if r != rank:
                    reduce.send(r, outgoing[part][r])
            incoming[part][rank] = outgoing[part][rank]
        arrivals = reduce.arrivals()
        for part in parts:
            for _ in peers:
                next(arrivals)
            job.combine(incoming[part], cuts.span(part, rank), cuts.whole(rank).start, results[part][rank])
            for r in peers:
                gather.send(r, results[part][rank])
        flags = Flag.NONE
        for part in parts:
            flags |= _adopt(codec, results[part][rank], x[cuts.span(part, rank)])
        for number, parcel in enumerate(gather.arrivals()):
            flags |= _adopt(codec, parcel.data, x[cuts.span(number // len(peers), parcel.peer)])
    return flags


def _two_shot_sized(x: Tensor, job: _Job) -> Flag:
    """Packets of unknown size: each of the two exchanges comes after a round of sizes."""
    transport, rank, ranks = job.transport, job.transport.rank, range(job.transport.size)
    cuts = Chunks.of(x.numel(), transport.size, job.codec.align, max_parts=1)
    spans = [cuts.whole(r) for r in ranks]
    bounds = [job.wire(span) for span in spans]
    outgoing = [job.encode(x, *item) for item in zip(spans, job.space.packets("outgoing", bounds), strict=True)]
    incoming = swap(transport, "reduce", outgoing, [bounds[rank]] * transport.size, False, job.space)
    result = job.combine(incoming, spans[rank], spans[rank].start, job.space.take("result", bounds[rank]))
    results = share(transport, "gather", result, bounds, False, job.space)
    flags = Flag.NONE
    for packet, span in zip(results, spans, strict=True):
        flags |= _adopt(job.codec, packet, x[span])
    return flags


def reduce_scatter(
    x: Tensor,
    out: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    op: Op = "sum",
    weights: Sequence[float] | None = None,
    residual: Residual | None = None,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> Flag:
    """Rank r gets elements [r*m, (r+1)*m) of the reduced x in `out` (fp32), m = ceil(numel/size): FSDP's layout.

    x is left as it was. The flags are those of this rank's chunk alone. Bytes sent per rank: (n-1)/n of the packet.
    """
    codec, space = codec.for_tensor(x), workspace or Workspace(x.device)
    job = _Job(codec, codec, transport, weights, _scale(op, transport.size, weights), residual, None, seed, space)
    flat, cuts = x.reshape(-1).float(), Chunks.of(x.numel(), transport.size, 1)
    spans = [cuts.whole(r) for r in range(transport.size)]
    own = spans[transport.rank]
    if out.numel() != _numel(own):
        raise ConfigError(f"out has {out.numel()} elements; rank {transport.rank} owns {_numel(own)} of {x.numel()}")
    bounds = [job.wire(span) for span in spans]
    outgoing = [job.encode(flat, *item) for item in zip(spans, space.packets("outgoing", bounds), strict=True)]
    own_bounds = [bounds[transport.rank]] * transport.size
    incoming = swap(transport, "reduce", outgoing, own_bounds, codec.fixed_size, space)
    return codec.reduce(incoming, out.view(-1), weights, job.scale) if out.numel() else Flag.NONE


def one_shot(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    op: Op = "sum",
    weights: Sequence[float] | None = None,
    residual: Residual | None = None,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> Flag:
    """All-reduce: everybody's packet to everybody, summed locally. One quantisation, (n-1) packets sent per rank.

    For two ranks, small messages, and selection codecs, whose packets are small.
    """
    codec = codec.for_tensor(x)
    scale = _scale(op, transport.size, weights)
    job = _Job(codec, codec, transport, weights, scale, residual, None, seed, workspace or Workspace(x.device))
    return _run(x, job, op, _one_shot)


def _one_shot(x: Tensor, job: _Job) -> Flag:
    whole = slice(0, x.numel())
    bound = job.wire(whole)
    packet = job.encode(x, whole, job.space.take("outgoing", bound))
    packets = share(job.transport, "gather", packet, [bound] * job.transport.size, job.codec.fixed_size, job.space)
    return job.codec.reduce(packets, x, job.weights, job.scale) if x.numel() else Flag.NONE


def recursive_doubling(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    op: Op = "sum",
    seed: int = 0,
    workspace: Workspace | None = None,
) -> Flag:
    """All-reduce in log2(n) exchanges of whole packets, for small tensors. The number of ranks is a power of two.

    Both partners add D(C(own)) + D(received). Adding the exact own value instead would leave the replicas a whole
    quantisation error apart. Relative bounds are taken anew from each partial sum, which partners of later rounds share.
    """
    if transport.size & (transport.size - 1):
        raise ConfigError(f"recursive doubling needs a power of two of ranks, not {transport.size}; use two_shot")
    job = _Job(
        codec,
        codec,
        transport,
        None,
        _scale(op, transport.size, None),
        None,
        None,
        seed,
        workspace or Workspace(x.device),
    )
    return _run(x, job, op, _doubling)


def _doubling(x: Tensor, job: _Job) -> Flag:
    codec, transport, flags, distance = job.codec, job.transport, Flag.NONE, 1
    bound = codec.wire_bytes(x.numel())
    while distance < transport.size:
        peer = transport.rank ^ distance
        # Ranks that hold the same partial sum must write the same packet: the seed names the round, not the rank.
        packet = codec.encode(x, None, job.space.take("outgoing", bound), derive_seed(job.seed, distance))
        add_flags(packet, flags)
        outgoing = [packet if r == peer else packet[:0] for r in range(transport.size)]
        bounds = [bound if r == peer else 0 for r in range(transport.size)]
        received = swap(transport, f"double-{distance}", outgoing, bounds, codec.fixed_size, job.space)[peer]
        flags |= packet_flags(packet) | packet_flags(received)
        codec.decode(packet, x)
        codec.decode(received, x, accumulate=True)
        distance *= 2
    if job.scale != 1:
        x.mul_(job.scale)
    return flags


def homomorphic(
    x: Tensor,
    codec: ErrorBoundedSum,
    transport: Transport,
    *,
    op: Op = "sum",
    weights: Sequence[float] | None = None,
    residual: Residual | None = None,
    workspace: Workspace | None = None,
) -> Flag:
    """All-reduce that adds the compressed integers: error n*eb from the first quantisation alone, in any order of ranks.

    All ranks agree on the widest bin first. Weights may be 0 or 1 only.
    """
    if weights is not None and any(w not in (0, 1) for w in weights):
        raise ConfigError(f"{codec.name} adds integers, so weights must be 0 or 1; got {list(weights)}; use two_shot")
    agreed = codec.agree(x, transport)
    scale = _scale(op, transport.size, weights)
    job = _Job(agreed, agreed, transport, weights, scale, residual, None, 0, workspace or Workspace(x.device))
    return _run(x, job, op, _homomorphic)


def _homomorphic(x: Tensor, job: _Job) -> Flag:
    codec, transport, rank = job.codec, job.transport, job.transport.rank
    assert isinstance(codec, ErrorBoundedSum)
    cuts = Chunks.of(x.numel(), transport.size, codec.align, max_parts=1)
    spans = [cuts.whole(r) for r in range(transport.size)]
    bounds = [job.wire(span) for span in spans]
    outgoing = [job.encode(x, *item) for item in zip(spans, job.space.packets("outgoing", bounds), strict=True)]
    incoming = swap(transport, "reduce", outgoing, [bounds[rank]] * transport.size, False, job.space)
    counted = [p for p, w in zip(incoming, job.weights or [1.0] * len(incoming), strict=True) if w]
    result = job.space.take("result", bounds[rank])
    result = codec.add(counted, _numel(spans[rank]), result) if bounds[rank] else result
    flags = Flag.NONE
    for packet, span in zip(share(transport, "gather", result, bounds, False, job.space), spans, strict=True):
        flags |= _adopt(codec, packet, x[span], job.scale)
    return flags


def native(x: Tensor, codec: Codec, transport: Transport, *, op: Op = "sum", seed: int = 0) -> Flag:
    """All-reduce of a linear codec by the backend itself, which adds in the wire type. All ranks use one seed."""
    if not codec.linear:
        raise ConfigError(f"{codec.name} is not linear: its packets cannot be added by the backend; use two_shot")
    job = _Job(codec, codec, transport, None, _scale(op, transport.size, None), None, None, seed, Workspace(x.device))

    def body(x: Tensor, job: _Job) -> Flag:
        # Dividing before the cast keeps a mean in range at every hop of the backend's ring.
        packet = codec.encode(x.mul_(job.scale), seed=seed)
        transport.all_reduce("native", codec.summand(packet))
        codec.decode(packet, x)
        return Flag.NONE if bool(torch.isfinite(x).all()) else Flag.NONFINITE

    return _run(x, job, op, body)


def two_hop(
    x: Tensor,
    inner: Codec,
    outer: Codec,
    transport: Transport,
    *,
    ranks_per_node: int,
    op: Op = "sum",
    weights: Sequence[float] | None = None,
    residual: Residual | None = None,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> Flag:
    """All-reduce for n = nodes * ranks_per_node, ranks numbered node by node.

    Reduce-scatter inside the node with `inner`, two-shot between nodes on the shard with `outer`, all-gather inside the
    node with `inner`. Bytes between nodes per rank: 2(m-1)/(m*l) of the outer packet, for m nodes of l ranks.
    """
    size, rank = transport.size, transport.rank
    if ranks_per_node < 1 or size % ranks_per_node:
        raise ConfigError(f"{size} ranks are not a whole number of nodes of {ranks_per_node}")
    node, place = divmod(rank, ranks_per_node)
    members = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    inside = SubTransport(transport, list(members))
    between = SubTransport(transport, list(range(place, size, ranks_per_node)))
    scale, space = _scale(op, size, weights), workspace or Workspace(x.device)
    flat = x.view(-1).float()
    cuts = Chunks.of(flat.numel(), ranks_per_node, 1)
    shard = torch.empty(_numel(cuts.whole(place)), dtype=torch.float32, device=x.device)
    node_weights = None if weights is None else [weights[r] for r in members]
    flags = reduce_scatter(
        flat,
        shard,
        inner,
        inside,
        weights=node_weights,
        residual=residual,
        seed=derive_seed(seed, node),
        workspace=space,
    )
    flags |= two_shot(shard, outer, between, seed=derive_seed(seed, place), workspace=space)
    shard.mul_(scale)
    bounds = [inner.wire_bytes(_numel(cuts.whole(r))) for r in range(ranks_per_node)]
    # The same shard must give the same packet in every node: the seed must not name the node.
    packet = inner.encode(shard, None, space.take("outgoing", bounds[place]), derive_seed(seed, size, place))
    add_flags(packet, flags)
    packets = share(inside, "node-gather", packet, bounds, inner.fixed_size, space)
    flags = Flag.NONE
    for r, received in enumerate(packets):
        flags |= _adopt(inner, received, flat[cuts.whole(r)])
    if flat.data_ptr() != x.data_ptr():
        x.view(-1).copy_(flat)
    return flags


def _run(x: Tensor, job: _Job, op: Op, body: Callable[[Tensor, _Job], Flag]) -> Flag:
    """What all patterns share: other dtypes through fp32, a single rank. Empty tensors make the same calls."""
    if not x.is_contiguous():
        raise ConfigError(
            f"a reduction needs a contiguous tensor, not shape {tuple(x.shape)} with strides {x.stride()}"
        )
    flat = x.view(-1).float()
    if job.transport.size == 1:
        factor = 1.0 if job.weights is None else float(job.weights[0])
        if factor != 1 and (op == "sum" or factor == 0):
            flat.mul_(factor)
        flags = Flag.NONE if bool(torch.isfinite(flat).all()) else Flag.NONFINITE
    else:
        flags = body(flat, job)
    if flat.data_ptr() != x.data_ptr():
        x.view(-1).copy_(flat)
    return flags


def _scale(op: Op, size: int, weights: Sequence[float] | None) -> float:
    if weights is None:
        total = float(size)
    elif len(weights) != size or not all(math.isfinite(w) and w >= 0 for w in weights):
        raise ConfigError(f"weights must be {size} finite numbers >= 0, one per rank; got {list(weights)}")
    else:
        total = float(sum(weights))
    return 1.0 / total if op == "mean" and total > 0 else 1.0


def _adopt(codec: Codec, packet: Tensor, out: Tensor, scale: float = 1.0) -> Flag:
    """Decode a result packet into its place."""
    if not out.numel():
        return Flag.NONE
    codec.decode(packet, out, scale=scale)
    return packet_flags(packet)


def _numel(span: slice) -> int:
    return int(span.stop - span.start)
