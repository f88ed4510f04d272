"""zenray behind `ray.util.collective`: the same calls as with GLOO, and a sparse path where the tensor allows it.

    register()                                                    # in the driver and in every actor; may be repeated
    collective.init_collective_group(world_size, rank, "ZENRAY", "grads")     # in every actor
    collective.allreduce(gradient, "grads")                                   # torch dense or sparse COO, or numpy

A sum of COO tensors, or of dense ones with few non-zero rows, sends only those rows; the result is written into the
caller's tensor, as Ray's interface wants it. Everything else runs dense. All waits end by the deadline given to
`register`. What this does not do: tensors on several devices of one process (Ray's `*_multigpu` calls), CuPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from ray.util.collective import backend_registry
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp
from torch import Tensor

from actors.rendezvous import group_timeout, meet, node_address, pin_gloo_to
from collectives.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, PeerLost
from collectives.kernels.rows import nonzero_rows
from collectives.sparse.all_reduce import sparse_all_reduce
from collectives.sparse.ids import DTYPES, to_coo
from collectives.torch_transport import TorchTransport
from collectives.transport import Parcel, all_gather, all_gather_records, all_to_all, others

BACKEND = "ZENRAY"
MOSTLY_ZERO = 0.25
"""A dense tensor is summed as rows if on no rank more than this share of its rows holds a value."""
_RING_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_OPS: Mapping[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
}


def register(*, timeout_s: float = 60.0) -> None:
    """Make the backend known to this process; `timeout_s` bounds the waits of groups that are made afterwards."""
    ZenrayGroup.timeout_s = timeout_s
    if not backend_registry._global_registry.is_registered(BACKEND):
        backend_registry.register_collective_backend(BACKEND, ZenrayGroup)


class ZenrayGroup(BaseGroup):
    """One rank of a collective group. `transport.traffic` counts its bytes.

    Ray hands every tensor in a list of one, and every list of tensors in a list of one.
    """

    timeout_s: ClassVar[float] = 60.0
    _owners_of_world: ClassVar[set[str]] = set()
    """Groups of this process that rely on a default process group that one of them has made."""

    def __init__(self, world_size: int, rank: int, group_name: str):
        super().__init__(world_size, rank, group_name)
        timeout = group_timeout(self.timeout_s)
        pin_gloo_to(node_address())
        if not dist.is_initialized():
            store = meet(group_name, rank, world_size, self.timeout_s)
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            self._owners_of_world.add(group_name)
        elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ConfigError(
                f"group '{group_name}': rank {rank} of {world_size} was asked for, but this process is rank "
                f"{dist.get_rank()} of {dist.get_world_size()} in its default process group; use the same numbers"
            )
        elif self._owners_of_world:
            self._owners_of_world.add(group_name)
        self.process_group = dist.new_group(timeout=timeout)
        self.transport = TorchTransport(self.process_group, timeout_s=self.timeout_s)
        # Single sends concern two ranks only, so they need a tag space apart from the numbered exchanges of all ranks.
        self.direct = dist.new_group(timeout=timeout)

    @classmethod
    def backend(cls) -> str:
        """The name that Ray's calls use."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether this build of torch can communicate."""
        return dist.is_available()

    def destroy_group(self) -> None:
        """Leave the group; the default process group goes with the last group that relies on it."""
        for group in (self.process_group, self.direct):
            dist.destroy_process_group(group)
        if self.group_name in self._owners_of_world:
            self._owners_of_world.discard(self.group_name)
            if not self._owners_of_world:
                dist.destroy_process_group()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Reduce in place. A sum of COO tensors, or of mostly zero rows, takes the sparse path on all ranks."""
        data, op = self._tensor(tensor), _op(allreduce_options)
        if self._agree_on_sparse(data, op):
            shape = tuple(data.shape)
            reduced = sparse_all_reduce(None, data, shape, transport=self.transport, name=self.group_name).rows
            if data.layout == torch.strided:
                data.view(reduced.num_rows, reduced.width).index_copy_(0, reduced.ids, reduced.values)
            else:
                with torch.no_grad():
                    data.copy_(to_coo(reduced, shape))
            return
        with _Contiguous(data) as flat:
            if op is ReduceOp.SUM and data.dtype in _RING_DTYPES:
                self.transport.all_reduce("allreduce", flat)
            else:
                parts = list(flat.tensor_split(self.world_size))
                parts[self.rank].copy_(self._reduce_parts("allreduce", parts, op))
                all_gather(self.transport, "allreduce", parts)

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        """Reduce in place on the root; the tensors of other ranks stay as they are."""
        data, root = self._dense(self._tensor(tensor)), reduce_options.root_rank
        with _Contiguous(data) as flat:
            parts = list(flat.tensor_split(self.world_size))
            mine = self._reduce_parts("reduce", parts, _op(reduce_options))
            recvs = [Parcel(peer, parts[peer]) for peer in others(self.transport)] if self.rank == root else []
            with self.transport.exchange("reduce", recvs) as exchange:
                if self.rank == root:
                    parts[self.rank].copy_(mine)
                else:
                    exchange.send(root, mine)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        """Copy the root's tensor into everybody's."""
        data, root = self._dense(self._tensor(tensor)), broadcast_options.root_rank
        with _Contiguous(data) as flat:
            recvs = [] if self.rank == root else [Parcel(root, flat)]
            with self.transport.exchange("broadcast", recvs) as exchange:
                if self.rank == root:
                    for peer in others(self.transport):
                        exchange.send(peer, flat)

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        """Collect the tensors of all ranks, of one shape and dtype, into `tensor_list` by rank."""
        data, outputs = self._dense(self._tensor(tensor)), self._tensors(tensor_list, tensor)
        received = [torch.empty_like(data, memory_format=torch.contiguous_format) for _ in outputs]
        received[self.rank].copy_(data)
        all_gather(self.transport, "allgather", received)
        for output, part in zip(outputs, received, strict=True):
            output.copy_(part)

    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None) -> None:
        """Reduce `tensor_list[r]` of all ranks into `tensor` of rank r."""
        output = self._dense(self._tensor(tensor))
        parts = [part.contiguous().view(-1) for part in self._tensors(tensor_list, tensor)]
        reduced = self._reduce_parts("reducescatter", parts, _op(reducescatter_options))
        output.copy_(reduced.view(output.shape))

    def barrier(self, barrier_options: Any = None) -> None:
        """Return when every rank has called it."""
        all_gather_records(self.transport, "barrier", [0])

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send to one rank, which calls `recv` with a tensor of the same size."""
        data, peer = self._dense(self._tensor(tensor)).contiguous(), send_options.dst_rank
        self._finish("send", dist.isend(_bytes(data), group=self.direct, group_dst=peer), peer, data.nbytes)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive from one rank into `tensor`."""
        data, peer = self._dense(self._tensor(tensor)), recv_options.src_rank
        with _Contiguous(data) as flat:
            self._finish("recv", dist.irecv(_bytes(flat), group=self.direct, group_src=peer), peer, data.nbytes)

    def _tensor(self, boxed: list[Any]) -> Tensor:
        [value] = boxed
        data = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if not isinstance(data, Tensor) or data.device.type != self.transport.device.type:
            found = data.device if isinstance(data, Tensor) else type(data).__name__
            raise ConfigError(
                f"group '{self.group_name}' works on torch tensors (or numpy arrays) on {self.transport.device}, "
                f"not on {found}"
            )
        # A detached COO tensor keeps its own indices, and the result would not reach the caller's tensor.
        return data.detach() if data.layout == torch.strided else data

    def _tensors(self, boxed: list[list[Any]], like: list[Any]) -> list[Tensor]:
        [values] = boxed
        tensors, model = [self._dense(self._tensor([value])) for value in values], self._tensor(like)
        odd = [t for t in tensors if t.shape != model.shape or t.dtype != model.dtype]
        if odd or len(tensors) != self.world_size:
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)
            raise ConfigError(
                f"group '{self.group_name}': {self.world_size} tensors of {tuple(model.shape)} {model.dtype} are "
                f"needed, one a rank; got {shapes}"
            )
        return tensors

    def _dense(self, data: Tensor) -> Tensor:
        if data.layout != torch.strided:
            raise ConfigError(f"group '{self.group_name}': sparse tensors can be summed by allreduce only")
        return data

    def _agree_on_sparse(self, data: Tensor, op: ReduceOp) -> bool:
        """Whether all ranks sum `data` as rows: decided from one round of records, hence alike everywhere."""
        is_sparse = data.layout != torch.strided
        what = f"{op.name} of {tuple(data.shape)} {data.dtype}"
        num_rows = -1 if is_sparse or op is not ReduceOp.SUM else _num_nonzero_rows(data)
        table = all_gather_records(self.transport, "layout", [crc32(what.encode()), is_sparse, num_rows])
        differing = np.flatnonzero(table[:, 0] != table[0, 0])
        if len(differing):
            raise CollectiveMismatch(
                f"group '{self.group_name}': rank(s) {', '.join(map(str, differing))} ask for something else than rank 0 "
                f"in allreduce; rank {self.rank} asks for the {what}. All ranks must pass one shape, dtype and op."
            )
        if table[:, 1].any():
            if op is not ReduceOp.SUM:
                raise ConfigError(f"group '{self.group_name}': sparse tensors can be summed, not reduced by {op.name}")
            return True
        return bool((table[:, 2] >= 0).all() and table[:, 2].max() <= MOSTLY_ZERO * data.shape[0])

    def _reduce_parts(self, phase: str, parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
        """Send part r to rank r and reduce this rank's part in rank order, 16-bit floats in float32."""
        mine = parts[self.rank]
        received = [torch.empty_like(mine) for _ in parts]
        all_to_all(self.transport, phase, received, parts)
        wide = torch.float32 if mine.dtype in (torch.float16, torch.bfloat16) else mine.dtype
        total = received[0].to(wide)
        for contribution in received[1:]:
            _OPS[op](total, contribution.to(wide))
        return total.to(mine.dtype)

    def _finish(self, phase: str, work: dist.Work | None, peer: int, num_bytes: int) -> None:
        assert work is not None
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            self.transport.abort()
            if "imed out" in str(error):
                raise CollectiveTimeout(
                    rank=self.rank, phase=phase, missing=[peer], expected_bytes=num_bytes, timeout_s=self.timeout_s
                ) from None
            cause = str(error).splitlines()[0]
            raise PeerLost(rank=self.rank, phase=phase, peer=peer, expected_bytes=num_bytes, cause=cause) from None


class _Contiguous:
    """A flat contiguous view of a dense tensor, or a copy that is written back on leaving."""

    def __init__(self, data: Tensor):
        self.data, self.flat = data, data.contiguous().view(-1)

    def __enter__(self) -> Tensor:
        return self.flat

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and not self.data.is_contiguous():
            self.data.copy_(self.flat.view(self.data.shape))


def _num_nonzero_rows(data: Tensor) -> int:
    """Rows that hold a value, or -1 where a tensor cannot be taken as rows."""
    if data.dim() < 2 or data.numel() == 0 or data.dtype not in DTYPES or not data.is_contiguous():
        return -1
    return len(nonzero_rows(data.view(data.shape[0], -1)))


def _bytes(data: Tensor) -> Tensor:
    return data.view(-1).view(torch.uint8)


def _op(options: Any) -> ReduceOp:
    op: ReduceOp = ReduceOp.SUM if options is None else options.reduceOp
    return op
