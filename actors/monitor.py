"""`MemoryMonitor`: the memory of one rank's card while it trains, held against what was predicted.

A `Card` counts bytes: a real one through torch and NVML, a pretended one through a guard that books every storage torch
makes on this thread and raises at its limit as a full card would. The monitor samples at step ends and lets
`placement.watch` judge. What it does not do: decide what to do about it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.errors import WorkerError
from placement.inventory import CardReport
from placement.watch import Alarm, Limits, Verdict, judge

HISTORY = 64


class CardOutOfMemory(WorkerError):
    """A rank's card is full. Nothing of this step was applied: go on from the last checkpoint with another plan."""

    def __init__(self, *, rank: int, step: int, phase: str, planned_bytes: int, used_bytes: int, limit_bytes: int):
        self.rank, self.step, self.phase = rank, step, phase
        self.planned_bytes, self.used_bytes, self.limit_bytes = planned_bytes, used_bytes, limit_bytes
        super().__init__(
            f"rank {rank}, step {step}, {phase}: the card is full: {used_bytes} bytes wanted of {limit_bytes}, "
            f"{planned_bytes} planned. Use a smaller micro-batch, recomputation, or a larger card."
        )


class HostOutOfMemory(WorkerError):
    """A rank's host has no memory left; the card is not the reason."""

    def __init__(self, *, rank: int, step: int, phase: str, cause: str):
        self.rank, self.step, self.phase, self.cause = rank, step, phase, cause
        super().__init__(
            f"rank {rank}, step {step}, {phase}: the host is out of memory: {cause}. Use fewer ranks a node or a host "
            f"with more memory; another card does not help."
        )


@dataclass(frozen=True)
class Sample:
    """Bytes of one card at a step's end; `peak` is the highest `nvml` since the last sample."""

    allocated: int
    reserved: int
    nvml: int
    peak: int


class Card(Protocol):
    """What counts bytes."""

    def sample(self) -> Sample:
        """The present bytes and the peak since the last call; cheap."""

    def release_cache(self) -> None:
        """Give back what is held and not used."""


class FakeCardFull(torch.OutOfMemoryError):
    """The pretended card's own error, of the type that a real one raises."""

    def __init__(self, used_bytes: int, limit_bytes: int):
        self.used_bytes, self.limit_bytes = used_bytes, limit_bytes
        super().__init__(f"out of memory on a pretended card: {used_bytes} bytes wanted, {limit_bytes} there")


class FakeCard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A card of `limit_bytes`, pretended on the CPU: live bytes of all storages made inside the `with` block.

    Exact for what torch allocates through its operators on this thread, backward included; temporaries inside a kernel
    are not seen, as a trace does not see them either.
    """

    def __init__(self, limit_bytes: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self._peak_bytes = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and book what it returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._book(leaf)
        return out

    def sample(self) -> Sample:
        """The card's bytes; nothing is cached on it, so all three truths are one."""
        peak, self._peak_bytes = self._peak_bytes, self.allocated_bytes
        return Sample(self.allocated_bytes, self.allocated_bytes, self.allocated_bytes, peak)

    def release_cache(self) -> None:
        """Nothing: no byte is held that is not used."""

    def _book(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place in self._known or size == 0:
            return
        self._known[place] = size
        weakref.finalize(storage, self._end, place).atexit = False
        self.allocated_bytes += size
        self._peak_bytes = max(self._peak_bytes, self.allocated_bytes)
        if self.allocated_bytes > self.limit_bytes:
            raise FakeCardFull(self.allocated_bytes, self.limit_bytes)

    def _end(self, place: int) -> None:
        self.allocated_bytes -= self._known.pop(place)


class CudaCard:
    """The current CUDA device, by torch's counters and NVML."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.reset_peak_memory_stats(device)

    def sample(self) -> Sample:
        """Peak: what NVML counts now, plus what torch held more at its own peak."""
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        peak_reserved = torch.cuda.max_memory_reserved(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return Sample(allocated, reserved, total - free, total - free + max(0, peak_reserved - reserved))

    def release_cache(self) -> None:
        """Give cached segments back to the driver."""
        torch.cuda.empty_cache()


class MemoryMonitor:
    """Watches one card. Call `step_end` after every step; it costs microseconds, counted in `sampling_s`."""

    def __init__(self, card: Card, limits: Limits, first_step: int):
        self.card, self.limits, self.first_step = card, limits, first_step
        self.peak_bytes = 0
        self.sampling_s = 0.0
        self.peaks: list[tuple[int, int]] = []
        """(step, highest bytes within it) of the last steps."""
        self._released = False

    def step_end(self, step: int, checkpoint_step: int) -> Verdict:
        """Judge the memory after `step`; the next checkpoint is due before step `checkpoint_step`.

        Growth of what the allocator only holds is first answered by giving it back, once; the trend starts anew then.
        """
        started = time.perf_counter()
        sample = self.card.sample()
        self.peak_bytes = max(self.peak_bytes, sample.peak)
        self.peaks = [*self.peaks[-HISTORY + 1 :], (step, sample.peak)]
        verdict = judge(self.peaks, self.limits, first_step=self.first_step, checkpoint_step=checkpoint_step)
        if verdict.alarm is Alarm.CROSSING and sample.reserved > sample.allocated and not self._released:
            self.card.release_cache()
            self._released, self.first_step = True, step
            verdict = replace(verdict, alarm=Alarm.ABOVE_UPPER)
        self.sampling_s += time.perf_counter() - started
        return verdict


@contextmanager
def told_apart(rank: int, limits: Limits, where: list[Any]) -> Iterator[None]:
    """Turn torch's and Python's out-of-memory errors into ours. `where` is [step, phase], kept up to date inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = error.used_bytes if isinstance(error, FakeCardFull) else limits.capacity_bytes
        raise CardOutOfMemory(
            rank=rank,
            step=where[0],
            phase=where[1],
            planned_bytes=limits.upper_bytes,
            used_bytes=used,
            limit_bytes=limits.capacity_bytes,
        ) from error
    except MemoryError as error:
        raise HostOutOfMemory(rank=rank, step=where[0], phase=where[1], cause=str(error) or "MemoryError") from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        cause = str(error).strip().splitlines()[0]
        raise HostOutOfMemory(rank=rank, step=where[0], phase=where[1], cause=cause) from error


def read_cards(node_id: str) -> list[CardReport]:
    """What NVML says of this node's cards; empty without cards or without its Python package."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        reports = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
            name = name.decode() if isinstance(name, bytes) else str(name)
            reports.append(CardReport(node_id, index, name, int(memory.total), int(memory.used)))
        return reports
    finally:
        pynvml.nvmlShutdown()
