"""Replay of allocations and frees through a model of torch's CUDA caching allocator: what it reserves for what is live.

The rules are those of the default settings on one stream: sizes are rounded to 512 bytes; up to 1 MiB comes from 2 MiB
segments, up to 10 MiB from 20 MiB segments, more in multiples of 2 MiB; best fit; a remainder is split off from 512
bytes (small) or above 1 MiB (large); free neighbours merge; at the card's limit wholly free segments are given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from collectives.errors import ConfigError
from placement.errors import PlacementError

KIB, MIB = 1 << 10, 1 << 20
ROUND_BYTES = 512
SMALL_LIMIT = 1 * MIB
SMALL_SEGMENT = 2 * MIB
MEDIUM_LIMIT = 10 * MIB
MEDIUM_SEGMENT = 20 * MIB
LARGE_ROUND = 2 * MIB


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The parts of PYTORCH_CUDA_ALLOC_CONF that change what is reserved."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    """Blocks of this size and above are neither split nor handed to smaller requests."""
    roundup_power2_divisions: int = 1
    """Sizes are rounded up to this many steps between two powers of two; 1: off."""
    capacity_bytes: int | None = None
    """Bytes the card has for torch; None: no limit."""

    def __post_init__(self) -> None:
        divisions = self.roundup_power2_divisions
        if divisions < 1 or divisions & (divisions - 1):
            raise ConfigError(f"roundup_power2_divisions = {divisions}; it is a power of two")
        if self.max_split_bytes is not None and self.max_split_bytes < MEDIUM_SEGMENT:
            raise ConfigError(f"max_split_bytes = {self.max_split_bytes}; the allocator accepts 20 MiB and above")


@dataclass(frozen=True)
class Replay:
    """Peaks of a replay, bytes. `requested` is what the tensors asked for, `allocated` counts whole blocks."""

    requested: int
    allocated: int
    reserved: int


@dataclass
class _Block:
    segment: int
    start: int
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


def replay(events: Iterable[tuple[int, int]], settings: AllocatorSettings | None = None) -> Replay:
    """Replay (tensor id, bytes) events: positive bytes allocate, negative free the whole tensor, zero is ignored.

    Raises PlacementError where the card's capacity is exceeded although everything free was given back.
    """
    pool = _Pool(settings or AllocatorSettings())
    for identity, size in events:
        if size > 0:
            pool.allocate(identity, size)
        elif size < 0:
            pool.release(identity)
    return Replay(pool.peak_requested, pool.peak_allocated, pool.peak_reserved)


class _Pool:
    def __init__(self, settings: AllocatorSettings):
        self.settings = settings
        self.live: dict[int, tuple[_Block, int]] = {}
        self.free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self.blocks: dict[tuple[int, int], _Block] = {}
        self.num_segments = 0
        self.tails: dict[bool, _Block] = {}
        self.requested = self.allocated = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0

    def allocate(self, identity: int, size: int) -> None:
        if identity in self.live:
            raise PlacementError(f"tensor {identity} is allocated twice without a free between")
        rounded = self._rounded(size)
        small = rounded <= SMALL_LIMIT
        block = self._best_fit(rounded, small) or self._grow(rounded, small)
        self._split(block, rounded)
        self.live[identity] = (block, size)
        self.requested += size
        self.allocated += block.size
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release(self, identity: int) -> None:
        if identity not in self.live:
            raise PlacementError(f"tensor {identity} is freed but not allocated")
        block, size = self.live.pop(identity)
        self.requested -= size
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                self._merge(block, neighbour)
        self._give(block)

    def _rounded(self, size: int) -> int:
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and size > ROUND_BYTES * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return max(ROUND_BYTES, -(-size // ROUND_BYTES) * ROUND_BYTES)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        free = self.free[small]
        index = bisect_left(free, (size, -1, -1))
        if index == len(free):
            return None
        block = self.blocks[free[index][1:]]
        limit = self.settings.max_split_bytes
        if limit is not None and (
            (size < limit <= block.size) or (size >= limit and block.size >= size + MEDIUM_SEGMENT)
        ):
            return None
        self._take(block)
        return block

    def _grow(self, size: int, small: bool) -> _Block:
        if self.settings.expandable_segments:
            return self._extend(size, small)
        if small:
            segment = SMALL_SEGMENT
        elif size < MEDIUM_LIMIT:
            segment = MEDIUM_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        self._reserve(segment)
        block = _Block(self.num_segments, 0, segment, small)
        self.num_segments += 1
        self.blocks[block.segment, 0] = block
        return block

    def _extend(self, size: int, small: bool) -> _Block:
        """One segment a pool that grows at its end; a free block at the end is used first."""
        page = SMALL_SEGMENT if small else MEDIUM_SEGMENT
        tail = self.tails.get(small)
        have = tail.size if tail is not None and tail.free else 0
        more = -(-(size - have) // page) * page
        self._reserve(more)
        if tail is not None and tail.free:
            self._take(tail)
            tail.size += more
            return tail
        start = tail.start + tail.size if tail is not None else 0
        block = _Block(-1 if small else -2, start, more, small, before=tail)
        if tail is not None:
            tail.after = block
        self.blocks[block.segment, start] = block
        self.tails[small] = block
        return block

    def _reserve(self, size: int) -> None:
        capacity = self.settings.capacity_bytes
        if capacity is not None and self.reserved + size > capacity:
            self._give_back()
            if self.reserved + size > capacity:
                raise PlacementError(
                    f"out of memory: {size} bytes more than {self.reserved} reserved exceed {capacity}; "
                    f"{self.allocated} are live"
                )
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """Return segments that are one free block; at the end of an expandable segment, its free tail."""
        free = [self.blocks[segment, start] for pool in self.free.values() for _, segment, start in pool]
        for block in free:
            whole = block.before is None and block.after is None
            if whole or (block.segment < 0 and block.after is None):
                self._take(block)
                del self.blocks[block.segment, block.start]
                self.reserved -= block.size
                if block.before is not None:
                    block.before.after = None
                if block.segment < 0:
                    if block.before is None:
                        del self.tails[block.small]
                    else:
                        self.tails[block.small] = block.before

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        limit = self.settings.max_split_bytes
        if block.small:
            splits = rest >= ROUND_BYTES
        else:
            splits = (rest >= ROUND_BYTES) if self.settings.expandable_segments else rest > SMALL_LIMIT
            splits = splits and (limit is None or size < limit)
        if not splits:
            return
        remainder = _Block(block.segment, block.start + size, rest, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = remainder
        block.after, block.size = remainder, size
        self.blocks[remainder.segment, remainder.start] = remainder
        if self.tails.get(block.small) is block:
            self.tails[block.small] = remainder
        self._give(remainder)

    def _merge(self, block: _Block, neighbour: _Block) -> None:
        """Grow `block` over a free neighbour."""
        del self.blocks[neighbour.segment, neighbour.start]
        if neighbour is block.before:
            del self.blocks[block.segment, block.start]
            block.start, block.before = neighbour.start, neighbour.before
            self.blocks[block.segment, block.start] = block
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size
        if self.tails.get(block.small) is neighbour:
            self.tails[block.small] = block

    def _give(self, block: _Block) -> None:
        block.free = True
        insort(self.free[block.small], (block.size, block.segment, block.start))

    def _take(self, block: _Block) -> None:
        free = self.free[block.small]
        del free[bisect_left(free, (block.size, block.segment, block.start))]
        block.free = False
