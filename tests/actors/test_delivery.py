"""Frames over a real connection: kept, refused, damaged; strangers; a holder that goes away. And when chunks may travel."""

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from actors.checkpoints import Slots
from actors.delivery import CHUNK_BYTES, Address, Delivery, Door
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


def test_chunks_fill_the_planned_spans_and_a_waiting_trainer_lifts_the_limits() -> None:
    pace = Pace(num_remote=1, timeout_s=60.0)
    for _ in range(PROFILE_STEPS + 1):
        pace.begin()
        with pace.busy():
            pass
        assert pace.allow(5 * CHUNK_BYTES) == CHUNK_BYTES  # measured as it comes
        pace.delivered(1000, 1.0)
    assert pace.plan is not None
    assert pace.plan.sent_bytes == 1000
    assert len(pace.plan.spans) == 2
    assert pace.plan.exposed_s == pytest.approx(1.0, rel=0.01)  # a second of sending, next to no idle time
    pace.begin()
    first = sum(size for _, size in pace.plan.spans[0])
    if first:
        assert pace.allow(1000) == first
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
