"""How frames reach holders: a plain connection from each rank to each of its holders, one round trip a frame.

Tensors go from the snapshot to the socket and from the socket into the slot, without an object store between. Whoever
connects shows the secret of the holder, which only the group's own processes were told.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from actors.errors import MemoryExhausted, StaleEpoch
from actors.frames import HEADER_BYTES, Bytes
from collectives.errors import WireFormatError, ZenrayError

SECRET_BYTES = 16
HELLO_S = 10.0
CHUNK_BYTES = 1 << 20
"""Sent at once, and the unit of what is fitted into idle spans of the network."""
MAX_ANSWER_BYTES = 4096
NICENESS = 10
"""By how much copies give way to training."""
_LENGTH = struct.Struct("<Q")
_REFUSALS: dict[str, type[ZenrayError]] = {error.__name__: error for error in (StaleEpoch, MemoryExhausted)}


@dataclass(frozen=True)
class Address:
    """Of a holder."""

    host: str
    port: int
    secret: bytes


class Receiver(Protocol):
    """What keeps frames: `actors.checkpoints.Slots`."""

    limit_bytes: int

    def receive(self, head: Bytes, fill: Callable[[Bytes], None]) -> str:
        """See `Slots.receive`."""


class Door:
    """The holder's side. One thread accepts, one serves each connection; they end with the process."""

    def __init__(self, receiver: Receiver, host: str):
        self.receiver = receiver
        self._listener = socket.create_server((host, 0))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(SECRET_BYTES))
        threading.Thread(target=self._accept, daemon=True, name="door").start()

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()  # ends: with the process
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="rank").start()

    def _serve(self, connection: socket.socket) -> None:
        give_way()
        with connection, suppress(OSError):  # the rank is gone, or was never one of ours
            connection.settimeout(HELLO_S)
            if not hmac.compare_digest(_read(connection, SECRET_BYTES).tobytes(), self.address.secret):
                return
            connection.settimeout(None)  # ends: by keep-alive; a rank may train for long between two frames
            _keep_alive(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                (num_bytes,) = _LENGTH.unpack(_read(connection, _LENGTH.size).tobytes())
                if not HEADER_BYTES <= num_bytes <= HEADER_BYTES + self.receiver.limit_bytes:
                    return
                answer = json.dumps(self._take(connection, num_bytes - HEADER_BYTES)).encode()
                connection.sendall(_LENGTH.pack(len(answer)) + answer)

    def _take(self, connection: socket.socket, payload_bytes: int) -> dict[str, Any]:
        """Receive one frame; whatever becomes of it, all of its bytes are read."""
        is_read = False

        def fill(out: Bytes) -> None:
            nonlocal is_read
            if out.size != payload_bytes:
                raise WireFormatError(f"a frame claims {out.size} bytes and has {payload_bytes}")
            _read_into(connection, out)
            is_read = True

        head = _read(connection, HEADER_BYTES)
        try:
            return {"digest": self.receiver.receive(head, fill)}
        except ZenrayError as error:
            if not is_read:
                _drain(connection, payload_bytes)
            facts = vars(error) if type(error).__name__ in _REFUSALS else {}
            return {"error": type(error).__name__, "facts": facts}


class Delivery:
    """The rank's side: a connection to one holder. All methods raise OSError when the holder is gone, and TimeoutError
    (one of them) when it takes or says nothing for `limit_s`.

    The limit is the kernel's: Python's own makes of one call many, and each takes the interpreter from the training.
    """

    def __init__(self, address: Address, limit_s: float):
        self._socket = socket.create_connection((address.host, address.port), timeout=limit_s)
        self._socket.settimeout(None)  # ends: by the kernel's limits
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(address.secret)

    def begin(self, num_bytes: int) -> None:
        """Announce a frame of so many bytes."""
        with _timely():
            self._socket.sendall(_LENGTH.pack(num_bytes))

    def send(self, part: Bytes) -> int:
        """Send what the connection takes of `part`; returns how many bytes that was."""
        with _timely():
            return self._socket.send(part.data)

    def wait(self) -> int:
        """Return when the answer has begun to arrive."""
        with _timely():
            return len(self._socket.recv(1, socket.MSG_PEEK))

    def answer(self) -> str:
        """The holder's digest of the frame. Raises WireFormatError if it arrived damaged, else why it was refused."""
        with _timely():
            (num_bytes,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size).tobytes())
            if num_bytes > MAX_ANSWER_BYTES:
                raise ConnectionError(f"the holder answers with {num_bytes} bytes")
            answer = json.loads(_read(self._socket, num_bytes).tobytes())
        if "digest" in answer:
            return str(answer["digest"])
        if answer["error"] in _REFUSALS:
            raise _REFUSALS[answer["error"]](**answer["facts"])
        raise WireFormatError("a frame arrived damaged at a holder")

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def give_way() -> None:
    """From now on this thread computes when training does not: copies have a whole step's time, training has none.

    Below the present priority, whatever it is: Ray's workers start at 15.
    """
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _keep_alive(connection: socket.socket) -> None:
    """A host without power says no farewell: what waits for it fails after 30 s of silence."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # elsewhere after the system's own two hours
        for option, value in ((socket.TCP_KEEPIDLE, 6), (socket.TCP_KEEPINTVL, 6), (socket.TCP_KEEPCNT, 4)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@contextmanager
def _timely() -> Iterator[None]:
    """A blocking call that ran into the kernel's limit reports "try again"."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError("nothing moved within the limit") from error


def _read(connection: socket.socket, num_bytes: int) -> Bytes:
    out = np.empty(num_bytes, np.uint8)
    _read_into(connection, out)
    return out


def _read_into(connection: socket.socket, out: Bytes) -> None:
    view, num_read = out.data, 0
    while num_read < out.size:
        count = connection.recv_into(view[num_read:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the other side has closed the connection")
        num_read += count


def _drain(connection: socket.socket, num_bytes: int) -> None:
    scrap = np.empty(min(num_bytes, CHUNK_BYTES), np.uint8)
    while num_bytes:
        part = scrap[: min(num_bytes, scrap.size)]
        _read_into(connection, part)
        num_bytes -= part.size
