"""Compressed data movement: encoded once at the source, forwarded unchanged, decoded once at the end.

So the error is that of one encode, over any number of hops. The source, too, uses the decoded values where all ranks
shall hold the same tensor (all-gather, broadcast). Every rank of the transport makes the call; a rank with nothing to
send or receive passes empty lists. Sizes that receivers cannot know are exchanged first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collectives.codecs.codec import Codec, Flag, packet_flags
from collectives.codecs.hashing import derive_seed
from collectives.errors import ConfigError
from collectives.packets import Workspace, share, swap
from collectives.transport import Parcel, Transport, all_gather_records, others


def all_gather(
    outputs: Sequence[Tensor], codec: Codec, transport: Transport, *, seed: int = 0, workspace: Workspace | None = None
) -> Flag:
    """Give every rank's part to everybody: outputs[r] receives rank r's part, outputs[rank] holds the own one.

    The tensors may have different lengths, known to all. The own part is replaced by its decoded form.
    """
    rank, space = transport.rank, workspace or Workspace(outputs[transport.rank].device)
    codec = codec.for_tensor(outputs[rank])
    bounds = [_bound(codec, out) for out in outputs]
    own = outputs[rank]
    packet = space.take("outgoing", bounds[rank])
    if own.numel():
        packet = codec.encode(own, None, packet, derive_seed(seed, rank))
    flags = Flag.NONE
    packets = share(transport, "all-gather", packet, bounds, codec.fixed_size, space)
    for received, out in zip(packets, outputs, strict=True):
        flags |= _open(codec, received, out)
    return flags


def broadcast(
    x: Tensor, codec: Codec, transport: Transport, *, root: int = 0, seed: int = 0, workspace: Workspace | None = None
) -> Flag:
    """Replace x on every rank, root included, by the decoded packet of root's x."""
    space = workspace or Workspace(x.device)
    bound = _bound(codec, x)
    packet = space.take("outgoing", bound)
    if transport.rank == root and x.numel():
        packet = codec.for_tensor(x).encode(x, None, packet, seed)
    size = bound
    if not codec.fixed_size:
        size = int(all_gather_records(transport, "broadcast-sizes", [packet.numel()])[root, 0])
        if not 0 <= size <= bound:
            raise ConfigError(f"rank {root} announces a packet of {size} bytes, at most {bound}: do the shapes differ?")
    packet = packet[:size]
    recvs = [] if transport.rank == root else [Parcel(root, packet)]
    with transport.exchange("broadcast", recvs) as exchange:
        for peer in others(transport) if transport.rank == root else []:
            exchange.send(peer, packet)
    return _open(codec, packet, x)


def all_to_all(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    workspace: Workspace | None = None,
    phase: str = "all-to-all",
) -> Flag:
    """Send inputs[j] to rank j and receive rank j's part into outputs[j]; lengths may differ and may be zero.

    What stays on the rank goes through the codec as well, so that the placement of a value does not change it.
    """
    space = workspace or Workspace(inputs[transport.rank].device)
    codecs = [codec.for_tensor(x) for x in inputs]
    outgoing = space.packets("outgoing", [_bound(codec, x) for x in inputs])
    for peer, x in enumerate(inputs):
        if x.numel():
            outgoing[peer] = codecs[peer].encode(x, None, outgoing[peer], derive_seed(seed, transport.rank, peer))
    bounds = [_bound(codec, out) for out in outputs]
    flags = Flag.NONE
    for received, out in zip(swap(transport, phase, outgoing, bounds, codec.fixed_size, space), outputs, strict=True):
        flags |= _open(codec, received, out)
    return flags


def point_to_point(
    sends: Mapping[int, Tensor],
    recvs: Mapping[int, Tensor],
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> Flag:
    """Send sends[peer] to each peer named and fill recvs[peer] from each peer named: pipeline stages, ring shifts.

    All ranks call it together, those without a neighbour with empty mappings.
    """
    nothing = torch.empty(0, device=next(iter([*sends.values(), *recvs.values()]), torch.empty(0)).device)
    ranks = range(transport.size)
    inputs = [sends.get(peer, nothing) for peer in ranks]
    outputs = [recvs.get(peer, nothing) for peer in ranks]
    return all_to_all(outputs, inputs, codec, transport, seed=seed, workspace=workspace)


def _bound(codec: Codec, x: Tensor) -> int:
    return codec.wire_bytes(x.numel(), x.dtype) if x.numel() else 0


def _open(codec: Codec, packet: Tensor, out: Tensor) -> Flag:
    if not out.numel():
        return Flag.NONE
    codec.decode(packet, out)
    return packet_flags(packet)
