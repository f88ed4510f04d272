"""Memory of any `nn.Module` under any optimizer, from a trace with fake tensors: no parameter is ever materialised.

Two training steps run in a forked process under FakeTensorMode, and a dispatch mode books every storage that appears and
disappears. Where the model repeats a block, only two and three (on first sight also four) of them are traced and the
rest is extrapolated: memory is linear in depth, for the forward and backward peak and for the optimizer's peak apart.

Not seen: workspaces of cuBLAS and NCCL, and temporaries inside a kernel. The fork keeps an abort of the tracer away from
the caller, and lets the trace take a live module to pieces.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import multiprocessing
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from placement.allocator import AllocatorSettings, replay
from placement.errors import PlacementError
from placement.peaks import CATEGORIES, Peak, TracedMemory

Device = Literal["cuda", "cpu"]
"""Whose kernels are imitated: on CUDA dropout keeps a 1-byte mask and attention runs fused, on CPU neither does."""

MIN_DEPTH_TO_EXTRAPOLATE = 5
LINEAR_TOLERANCE = 1e-3
LossFunction = Callable[[Any], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def default_loss(output: Any) -> Tensor:
    """`output.loss` where there is one, else the mean of the first tensor in fp32."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if first is None:
        raise PlacementError("the model returned no tensor; give a loss function that makes one of its output")
    return first.float().mean()


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters)


def predict_module(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    loss: LossFunction = default_loss,
    optimizer: OptimizerFactory = default_optimizer,
    device: Device = "cuda",
    full: bool = False,
    settings: AllocatorSettings | None = None,
    cache: MutableMapping[str, TracedMemory] | None = None,
    timeout_s: float = 120.0,
) -> TracedMemory:
    """Memory of training `model` on `inputs` (example tensors on any device, meta included; only shapes matter).

    `full` traces every layer. `cache` maps `trace_key` to results and is filled. The model, its parameters and its
    gradients are left as they are. Raises PlacementError if the trace fails or outlasts `timeout_s`; a model whose
    memory is not linear in its blocks is traced in full.
    """
    key = trace_key(model, inputs, loss, optimizer, device, full)
    if cache is not None and key in cache:
        return cache[key]
    allocator = settings or AllocatorSettings()
    deadline = time.monotonic() + timeout_s
    job = _Job(model, inputs, loss, optimizer, device, allocator)
    block = repeated_block(model)
    result = None
    if block is not None and not full:
        with contextlib.suppress(_DepthRefused):
            result = _extrapolate(job, block, deadline)
    if result is None:
        (trace,) = _in_child(job, None, (0,), deadline)
        result = TracedMemory(
            forward_backward=Peak(**trace["forward_backward"]),
            step=Peak(**trace["step"]),
            blocks_over_requested=trace["blocks_over_requested"],
            cached=trace["cached"],
            depths=(len(block),) if block is not None else (),
            extrapolated=False,
        )
    if cache is not None:
        cache[key] = result
    return result


def repeated_block(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The longest list of at least five children of one class and equal parameter shapes, or None."""
    best: nn.ModuleList | nn.Sequential | None = None
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < MIN_DEPTH_TO_EXTRAPOLATE:
            continue
        signatures = {(type(child), tuple(_shapes(child))) for child in module}
        if len(signatures) == 1 and (best is None or len(module) > len(best)):
            best = module
    return best


def trace_key(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    loss: LossFunction,
    optimizer: OptimizerFactory,
    device: Device,
    full: bool,
) -> str:
    """Hash of the code and shapes that the trace depends on: forward code and settings of each module, parameters,
    inputs, loss, optimizer, imitated device."""
    digest = hashlib.sha256()
    code_of: dict[type, str] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in code_of:
            code_of[kind] = f"{kind.__module__}.{kind.__qualname__}:{_code(kind.forward)}"
            digest.update(code_of[kind].encode())
        digest.update(f"{name}|{kind.__qualname__}|{module.extra_repr()}|{module.training}".encode())
    for name, shape, dtype, trainable in _shapes(model):
        digest.update(f"{name}|{shape}|{dtype}|{trainable}".encode())
    leaves = [(tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else repr(x) for x in tree_leaves(inputs)]
    digest.update(f"{leaves}|{_code(loss)}|{_code(optimizer)}|{device}|{full}|{torch.__version__}".encode())
    return digest.hexdigest()


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    for name, parameter in module.named_parameters():
        yield name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad


def _code(function: Any) -> str:
    """Byte code, constants, defaults and simple closure values of a function; its name where it has none."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    simple = [
        repr(cell) if isinstance(cell, int | float | str | bool | tuple) else type(cell).__name__ for cell in cells
    ]
    constants = [repr(c) for c in code.co_consts if not hasattr(c, "co_code")]
    nested = [_code_object(c) for c in code.co_consts if hasattr(c, "co_code")]
    return f"{code.co_code.hex()}{code.co_names}{constants}{nested}{simple}{getattr(function, '__defaults__', None)}"


def _code_object(code: Any) -> str:
    return f"{code.co_code.hex()}{code.co_names}"


@dataclass(frozen=True)
class _Job:
    model: nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    loss: LossFunction
    optimizer: OptimizerFactory
    device: Device
    settings: AllocatorSettings


class _DepthRefused(Exception):
    """The block list cannot be cut short, or memory is not linear in its length."""


def _extrapolate(job: _Job, block: nn.ModuleList | nn.Sequential, deadline: float) -> TracedMemory:
    depths = (2, 3, 4)
    try:
        two, three, four = _in_child(job, block, depths, deadline)
    except PlacementError as error:
        if time.monotonic() > deadline:
            raise
        raise _DepthRefused from error
    peaks = {}
    for name in ("forward_backward", "step"):
        for category in CATEGORIES:
            slope = three[name][category] - two[name][category]
            expected = three[name][category] + slope
            if abs(expected - four[name][category]) > LINEAR_TOLERANCE * sum(four[name].values()):
                raise _DepthRefused
        peaks[name] = Peak(
            **{
                category: two[name][category] + (len(block) - 2) * (three[name][category] - two[name][category])
                for category in CATEGORIES
            }
        )
    return TracedMemory(
        forward_backward=peaks["forward_backward"],
        step=peaks["step"],
        blocks_over_requested=four["blocks_over_requested"],
        cached=max(trace["cached"] for trace in (two, three, four)),
        depths=depths,
        extrapolated=True,
    )


def _in_child(
    job: _Job, block: nn.ModuleList | nn.Sequential | None, depths: tuple[int, ...], deadline: float
) -> list[dict[str, Any]]:
    """Trace at each depth in one forked process. Raises PlacementError with the child's own words if it fails."""
    # The tracer loads this lazily: once before the fork instead of once in every child.
    importlib.import_module("torch._dynamo")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(job, block, depths, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            raise PlacementError(
                f"tracing {type(job.model).__name__} took longer than its time limit; raise timeout_s, "
                f"or give the layers as one list of equal blocks, so that a few of them suffice"
            )
        answer = json.loads(receiver.recv_bytes())
    except EOFError:
        child.join(timeout=5.0)
        raise PlacementError(
            f"tracing {type(job.model).__name__} ended its process with exit code {child.exitcode}: an operation has "
            f"no fake kernel on CPU"
        ) from None
    finally:
        receiver.close()
        if child.is_alive():
            child.kill()
        child.join(timeout=5.0)
    if "error" in answer:
        raise PlacementError(f"tracing {type(job.model).__name__} failed: {answer['error']}")
    traces: list[dict[str, Any]] = answer["traces"]
    return traces


def _child(job: _Job, block: nn.ModuleList | nn.Sequential | None, depths: tuple[int, ...], sender: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    try:
        layers = None if block is None else dict(block._modules)
        traces = []
        for depth in depths:
            if block is not None and layers is not None:
                block._modules = dict(list(layers.items())[:depth])
            traces.append(_trace(job))
        answer: dict[str, Any] = {"traces": traces}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    sender.send_bytes(json.dumps(answer).encode())
    sender.close()


def _trace(job: _Job) -> dict[str, Any]:
    """Two training steps under fake tensors; the peaks are those of the second, which has the optimizer's state."""
    with FakeTensorMode(allow_non_fake_inputs=True), _imitate(job.device):
        memo: dict[int, Tensor] = {}
        _make_fake(job.model, memo)
        inputs = tree_map(lambda leaf: _fake(leaf, memo) if isinstance(leaf, Tensor) else leaf, job.inputs)
        trainable = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
        if not trainable:
            raise PlacementError("no parameter needs a gradient; there is nothing to train")
        optimizer = job.optimizer(trainable)
        with _Ledger(list(memo.values()), trainable) as ledger:
            for _ in range(2):
                ledger.start_phase("forward_backward", "activations")
                output = job.model(**inputs) if isinstance(inputs, Mapping) else job.model(*inputs)
                loss = job.loss(output)
                del output
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
                ledger.start_phase("step", "activations")
                optimizer.step()
                ledger.adopt(optimizer.state.values(), "optimizer")
                optimizer.zero_grad(set_to_none=True)
        ledger.remove_hooks()
    whole = replay(ledger.events, job.settings)
    return {
        "forward_backward": ledger.peaks["forward_backward"],
        "step": ledger.peaks["step"],
        "blocks_over_requested": whole.allocated / max(1, whole.requested),
        "cached": whole.reserved - whole.allocated,
    }


def _make_fake(model: nn.Module, memo: dict[int, Tensor]) -> None:
    """Put fake parameters and buffers in place of the real ones; what was shared stays shared."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = memo.get(id(parameter))
                if fresh is None:
                    fresh = nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)
                    memo[id(parameter)] = fresh
                module._parameters[name] = fresh  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _fake(buffer, memo)


def _fake(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = _empty(tensor).requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books every storage from its first appearance to its end, by category."""

    def __init__(self, given: list[Tensor], trainable: list[nn.Parameter]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self.peaks: dict[str, dict[str, int]] = {}
        self._live = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._known: dict[int, tuple[str, int, int]] = {}
        self._next = 0
        self._phase, self._category = "forward_backward", "activations"
        self._highest = 0
        for tensor in given:
            self._book(tensor, "parameters")
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
            for parameter in trainable
        ]

    def start_phase(self, phase: str, category: str) -> None:
        """Begin a phase anew: its peak is the highest point from here on."""
        self._phase, self._category = phase, category
        self._highest = self._total
        self.peaks[phase] = dict(self._live)

    def adopt(self, values: Iterable[Any], category: str) -> None:
        """Book these tensors under another category."""
        for leaf in tree_leaves(list(values)):
            if isinstance(leaf, Tensor):
                self._move(leaf, category)

    def remove_hooks(self) -> None:
        """Forget the parameters."""
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and book what it returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._book(leaf, self._category)
        return out

    def _gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._move(parameter.grad, "gradients")

    def _move(self, tensor: Tensor, category: str) -> None:
        place = tensor.untyped_storage()._cdata
        if place in self._known:
            old, size, identity = self._known[place]
            self._live[old] -= size
            self._live[category] += size
            self._known[place] = (category, size, identity)

    def _book(self, tensor: Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place in self._known or size == 0:
            return
        self._known[place] = (category, size, self._next)
        self.events.append((self._next, size))
        self._next += 1
        self._live[category] += size
        self._total += size
        if self._total > self._highest:
            self._highest = self._total
            self.peaks[self._phase] = dict(self._live)
        weakref.finalize(storage, self._end, place).atexit = False

    def _end(self, place: int) -> None:
        category, size, identity = self._known.pop(place)
        self.events.append((identity, -1))
        self._live[category] -= size
        self._total -= size


@contextlib.contextmanager
def _imitate(device: Device) -> Iterator[None]:
    """CUDA's dropout and attention in place of the CPU's, for what is kept for backward."""
    if device == "cpu":
        yield
        return
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def masked_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        out: Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
        return out

    def fused_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if attn_mask is not None or query.dim() != 4 or options.get("enable_gqa"):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        # The CPU's flash kernel keeps what CUDA's keeps: output and one fp32 number a row.
        return attention(query, key, value, None, 0.0, is_causal, **options)

    F.dropout, F.scaled_dot_product_attention = masked_dropout, fused_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention
