"""Frames over a real connection: kept, refused, damaged; strangers; a holder that goes away. And when chunks may travel."""

import os
import socket
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from actors.checkpoints import Slots
from actors.delivery import CHUNK_BYTES, NICENESS, Address, Delivery, Door, give_way
from actors.errors import MemoryExhausted, StaleEpoch
from actors.frames import HEADER_BYTES, Frame, read, seal
from actors.pace import PROFILE_STEPS, Pace
from collectives.errors import WireFormatError

LIMIT = 8 << 20


def frame(step: int, num_bytes: int = 3_000_000) -> np.ndarray:
    data = np.full(HEADER_BYTES + 8 + num_bytes, step, np.uint8)
    seal(data, Frame("r", 1, 0, 2, step, (step - 1, 2), 8, num_bytes, ""))
    return data


def send(delivery: Delivery, data: np.ndarray) -> None:
    delivery.begin(data.size)
    sent = 0
    while sent < data.size:
        sent += delivery.send(data[sent:])


@pytest.fixture
def slots() -> Slots:
    return Slots("r", "h", LIMIT)


@pytest.fixture
def door(slots: Slots) -> Iterator[Door]:
    door = Door(slots, "127.0.0.1")
    yield door
    door.close()


def test_frames_are_kept_and_refusals_leave_the_connection_usable(slots: Slots, door: Door) -> None:
    delivery = Delivery(door.address, 5.0)
    first = frame(1)
    send(delivery, first)
    assert delivery.answer() == read(first, "r", LIMIT).digest
    for position in (3, HEADER_BYTES + 2_000_000):  # the header, the payload
        damaged = frame(2)
        damaged[position] ^= 4
        send(delivery, damaged)
        with pytest.raises(WireFormatError, match="damaged"):
            delivery.answer()
    send(delivery, frame(2))
    delivery.answer()
    send(delivery, frame(3, 6_000_000))
    with pytest.raises(MemoryExhausted, match="its limit is"):
        delivery.answer()
    slots.fence(2)
    send(delivery, frame(3))
    with pytest.raises(StaleEpoch, match="epoch 1 is over"):
        delivery.answer()
    assert sorted(held.step for held in slots.fence(2)) == [1, 2]
    delivery.close()


def test_strangers_and_senseless_lengths_are_shown_the_door(door: Door) -> None:
    for address, length in ((Address("127.0.0.1", door.address.port, bytes(16)), 200), (door.address, 1 << 60)):
        delivery = Delivery(address, 5.0)
        delivery.begin(length)
        with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
            delivery.answer()
        delivery.close()


def test_a_silent_holder_is_a_timeout_and_a_late_frame_of_a_replaced_rank_is_dropped(slots: Slots, door: Door) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        delivery = Delivery(Address("127.0.0.1", deaf.getsockname()[1], bytes(16)), 0.05)
        with pytest.raises(TimeoutError):
            delivery.wait()
        delivery.close()
    old, new, data = Delivery(door.address, 5.0), Delivery(door.address, 5.0), frame(1)
    old.begin(data.size)
    half = old.send(data[: data.size // 2])
    while not any(slot.is_filling for slot in slots._kept.get(0, [])):
        threading.Event().wait(0.01)
    send(new, data)
    assert new.answer() == read(data, "r", LIMIT).digest
    while half < data.size:
        half += old.send(data[half:])
    with pytest.raises(StaleEpoch):
        old.answer()
    assert read(slots.get(0, (1, 2)), "r", LIMIT).step == 1


class Clock:
    """Time that passes when a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def step(pace: Pace, clock: Clock, *, before_s: float, busy_s: float, after_s: float, send_s: float) -> None:
    """A step whose copy of 8 chunks leaves 0.1 s after its beginning, and whose commit comes 5 s late."""
    pace.begin()
    clock.now_s += 0.1
    pace.allow(CHUNK_BYTES)
    clock.now_s += before_s - 0.1
    with pace.busy():
        clock.now_s += busy_s
    clock.now_s += after_s
    pace.delivered(8 * CHUNK_BYTES, send_s)
    pace.lift()
    clock.now_s += 5.0


def test_a_plan_counts_what_is_idle_between_the_first_byte_that_can_leave_and_the_wait_for_the_commit() -> None:
    clock = Clock()
    pace = Pace(num_remote=1, timeout_s=60.0, clock=clock)
    for _ in range(PROFILE_STEPS):
        assert pace.plan is None
        step(pace, clock, before_s=0.6, busy_s=3.0, after_s=0.25, send_s=0.8)
    pace.begin()
    assert pace.plan is not None
    # 0.8 of 0.5 s, at 0.1 s a chunk; the rest needs 0.4 s of the last span, of which 0.8 of 0.25 s count
    assert [sum(size for _, size in span) for span in pace.plan.spans] == [4 * CHUNK_BYTES, 4 * CHUNK_BYTES]
    assert pace.plan.exposed_s == pytest.approx(0.2)
    assert pace.needed_s == pytest.approx(0.9)
    for _ in range(PROFILE_STEPS):  # plans follow the steps as they are now, waiting for room apart
        step(pace, clock, before_s=1.35, busy_s=3.0, after_s=0.25, send_s=0.8)
    pace.begin()
    assert pace.plan.exposed_s == 0.0
    assert [sum(size for _, size in span) for span in pace.plan.spans] == [8 * CHUNK_BYTES, 0]


def test_chunks_fill_the_planned_spans_and_a_waiting_trainer_lifts_the_limits() -> None:
    clock = Clock()
    pace = Pace(num_remote=1, timeout_s=60.0, clock=clock)
    for _ in range(PROFILE_STEPS):
        step(pace, clock, before_s=0.6, busy_s=3.0, after_s=0.25, send_s=0.8)
    pace.begin()
    assert sum(pace.allow(8 * CHUNK_BYTES) for _ in range(4)) == 4 * CHUNK_BYTES
    waiting = threading.Thread(target=pace.allow, args=(1000,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # the span has its bytes, the next has not begun
    pace.lift()
    waiting.join(5.0)
    assert not waiting.is_alive()
    pace.begin()
    pace.timeout_s = 0.05
    with pace.busy():  # a collective that does not end
        assert pace.allow(1000) == 1000


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_threads_that_copy_give_way_whatever_the_priority_of_their_process() -> None:
    found = []

    def copy() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, 7)
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, thread))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(5.0)
    assert found == [7 + NICENESS]
