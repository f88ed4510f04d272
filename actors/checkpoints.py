"""`CheckpointStore`: the holder of checkpoint copies on one host, a process of its own that needs no torch.

It outlives the workers of its host. Copies lie in its own heap: an object reference would die with the worker that owns
the object. Two slots a shard: while a step arrives in one, the last committed one stays in the other. Every request
carries an epoch; once a later one has begun, earlier ones are refused. The same bytes, at commit, go to disk.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import ray

from actors.delivery import Address, Door
from actors.errors import CheckpointError, MemoryExhausted, StaleEpoch
from actors.folder import ShardFolder, Stamp
from actors.frames import HEADER_BYTES, Bytes, Frame, check_payload, parts, read, read_header
from placement.recovery import Held

SLOTS = 2


@dataclass(eq=False)
class Slot:
    """One copy: a buffer with a little room to spare, since JSON values change their length from step to step."""

    buffer: Bytes
    frame: Frame | None = None
    """None while it holds nothing that was verified."""
    is_filling: bool = False

    def content(self, frame: Frame) -> Bytes:
        """The frame's bytes, header included."""
        return self.buffer[: HEADER_BYTES + frame.payload_bytes]


class Slots:
    """The copies of one holder: bytes and rules, no Ray. Safe for use by several threads."""

    def __init__(self, run_id: str, host: str, limit_bytes: int):
        self.run_id, self.host, self.limit_bytes = run_id, host, limit_bytes
        self.epoch = 0
        self._kept: dict[int, list[Slot]] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Memory of all slots."""
        return sum(slot.buffer.nbytes for slots in self._kept.values() for slot in slots)

    def receive(self, head: Bytes, fill: Callable[[Bytes], None]) -> str:
        """Take one frame, of which `head` has come: `fill` puts the payload into the buffer that it is given.

        Returns the digest, which is the acknowledgement. Raises WireFormatError for damaged bytes, StaleEpoch after a
        fence, MemoryExhausted at the limit, and what `fill` raises; the other slot of the shard is untouched then.
        """
        frame = read_header(head, self.run_id, self.limit_bytes)
        with self._lock:
            self._check_epoch(frame.epoch)
            slot = self._free(frame)
            slot.frame, slot.is_filling = None, True
        content = slot.content(frame)
        try:
            fill(content[HEADER_BYTES:])
            content[:HEADER_BYTES] = head
            check_payload(content[HEADER_BYTES:], frame)
            with self._lock:
                self._publish(slot, frame)
        finally:
            slot.is_filling = False
        return frame.digest

    def _publish(self, slot: Slot, frame: Frame) -> None:
        self._check_epoch(frame.epoch)
        slots = self._kept.get(frame.rank, [])
        if slot not in slots:
            raise StaleEpoch(epoch=frame.epoch, fenced=self.epoch)
        for other in slots:
            if other.frame is not None and other.frame.key == frame.key:
                other.frame = None  # brought back to m copies after a recovery: the bytes were here already
        slot.frame = frame

    def _free(self, frame: Frame) -> Slot:
        """The slot for a new frame: an empty one, else a new one, else the one that nobody needs any more."""
        slots = self._kept.setdefault(frame.rank, [])
        for abandoned in [slot for slot in slots if slot.is_filling]:
            slots.remove(abandoned)  # its sender was replaced; what still arrives there must not meet this frame
        found = next((slot for slot in slots if slot.frame is None), None)
        if found is None and len(slots) == SLOTS:
            ages = [
                (s.frame.epoch, s.frame.step, i) for i, s in enumerate(slots) if s.frame and s.frame.key != frame.base
            ]
            found = slots[min(ages)[2]]
        num_bytes = HEADER_BYTES + frame.payload_bytes
        if found is None or num_bytes > found.buffer.nbytes:
            room_bytes = num_bytes + num_bytes // 16
            grown = room_bytes - (found.buffer.nbytes if found else 0)
            if self.used_bytes + grown > self.limit_bytes:
                raise MemoryExhausted(
                    host=self.host, need_bytes=grown, used_bytes=self.used_bytes, limit_bytes=self.limit_bytes
                )
            if found is not None:
                slots.remove(found)
            found = Slot(np.empty(room_bytes, np.uint8))
            slots.append(found)
        return found

    def fence(self, epoch: int) -> list[Held]:
        """Refuse everything before `epoch` from now on; returns what is kept."""
        with self._lock:
            self._check_epoch(epoch)
            self.epoch = epoch
            return [slot.frame.held() for slots in self._kept.values() for slot in slots if slot.frame]

    def discard(self, epoch: int, above: int) -> None:
        """Forget every step above `above`: the group goes back there."""
        with self._lock:
            self._check_epoch(epoch)
            for rank, slots in list(self._kept.items()):
                self._kept[rank] = [s for s in slots if s.frame and s.frame.step <= above]

    def retain(self, epoch: int, ranks: frozenset[int], num_shards: int) -> None:
        """Forget shards of other ranks and of other numbers of shards: their copies now lie elsewhere."""
        with self._lock:
            self._check_epoch(epoch)
            for rank in set(self._kept) - ranks:
                del self._kept[rank]
            for rank, slots in list(self._kept.items()):
                self._kept[rank] = [s for s in slots if not s.frame or s.frame.num_shards == num_shards]

    def find(self, rank: int, key: tuple[int, int]) -> Bytes | None:
        """A copy of the frame of shard `rank` of the set `key`, None if it is not kept."""
        with self._lock:
            for slot in self._kept.get(rank, []):
                if slot.frame is not None and slot.frame.key == key:
                    return slot.content(slot.frame).copy()
        return None

    def get(self, rank: int, key: tuple[int, int]) -> Bytes:
        """As `find`; raises CheckpointError if it is not kept."""
        if (found := self.find(rank, key)) is None:
            raise CheckpointError(f"host {self.host} does not keep shard {rank} of step {key[0]} ({key[1]} shards)")
        return found

    def clear(self, epoch: int) -> None:
        """Forget everything: another run begins with `epoch`."""
        with self._lock:
            self._check_epoch(epoch)
            self.epoch = epoch
            self._kept.clear()

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpoch(epoch=epoch, fenced=self.epoch)


class CheckpointStore:
    """The holder actor of one host; `actors.recovery` wraps it with `ray.remote` and pins it to the host."""

    def __init__(self, run_id: str, host: str, limit_bytes: int):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.slots = Slots(run_id, host, min(limit_bytes, psutil.virtual_memory().available // 2))
        self._writing = threading.Lock()
        self.door = Door(self.slots, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    @ray.method(concurrency_group="control")
    def sit(self) -> int:
        """Process id."""
        return os.getpid()

    @ray.method(concurrency_group="control")
    def address(self) -> Address:
        """Where frames are to be sent."""
        return self.door.address

    @ray.method(concurrency_group="control")
    def fence(self, epoch: int) -> list[Held]:
        """See `Slots.fence`."""
        return self.slots.fence(epoch)

    @ray.method(concurrency_group="control")
    def discard(self, epoch: int, above: int) -> None:
        """See `Slots.discard`."""
        self.slots.discard(epoch, above)

    @ray.method(concurrency_group="control")
    def retain(self, epoch: int, ranks: frozenset[int], num_shards: int) -> None:
        """See `Slots.retain`."""
        self.slots.retain(epoch, ranks, num_shards)

    @ray.method(concurrency_group="control")
    def clear(self, epoch: int) -> None:
        """See `Slots.clear`."""
        self.slots.clear(epoch)

    @ray.method
    def get(self, rank: int, key: tuple[int, int]) -> Bytes:
        """See `Slots.get`."""
        return self.slots.get(rank, key)

    @ray.method(concurrency_group="disk")
    def write(
        self, folder: str, ranks: Sequence[int], key: tuple[int, int], keep: int, identity: Mapping[str, str]
    ) -> bool:
        """Write committed shards to storage. `identity`: run_id and config_sha256.

        They are copied at once, however long the disk takes for earlier ones: training goes on meanwhile, and their
        slots are soon needed. Returns False if it went on so far that one is no longer kept.
        """
        kept = {rank: self.slots.find(rank, key) for rank in ranks}
        with self._writing:
            for rank, data in kept.items():
                if data is None:
                    return False
                frame = read(data, self.slots.run_id, data.nbytes)
                values, tensors = parts(data, frame)
                stamp = Stamp(
                    identity["run_id"], frame.step, frame.epoch, rank, frame.num_shards, identity["config_sha256"]
                )
                ShardFolder(Path(folder), rank, frame.num_shards, keep).write(stamp, tensors, values)
        return True

    @ray.method(concurrency_group="control")
    def end_process(self, pid: int) -> None:
        """End a worker process of this host that hangs: Ray's own kill waits for the process to answer."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
