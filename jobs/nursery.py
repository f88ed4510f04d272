"""A process that imports once what Ray's workers need, and forks each of them: a start takes 0.7 s of processor time, not 3.4.

For tests that end many workers. Each is a process of its own that dies, hangs and restarts by itself; only its imports are
not its own. Ray starts this file instead of its own worker script (`worker_path`), with the arguments of that script: it
hands them to the process that serves, with the standard streams and the environment, and lives as long as the worker,
whose end of the connection the kernel closes whatever ends it.

The process that serves imports and does nothing else, so that it has one thread when it forks; it ends with its parent. It
leaves Ray to the workers: Ray reads the environment, which names the worker's job and node, when it is imported.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

ADDRESS = "ZENRAY_NURSERY"
"""Environment variable: path of the socket."""
_LENGTH = struct.Struct("<Q")
_STREAMS = [0, 1, 2]


def ask(arguments: list[str]) -> None:
    """Have a worker forked; returns when it has ended."""
    wish = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
    data = json.dumps(wish).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])  # ends: a local socket that listens before Ray starts
        socket.send_fds(connection, [_LENGTH.pack(len(data))], _STREAMS)  # ends: as above
        connection.sendall(data)  # ends: as above
        connection.recv(1)  # ends: with the worker


def serve(path: str, modules: list[str]) -> None:
    """Import `modules` and fork a worker for each that asks, until the standard input ends. Returns in the workers too,
    when they are done. The modules must not import Ray."""
    import gc
    import importlib
    import select
    import signal

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        gc.disable()
        for module in modules:
            importlib.import_module(module)
        assert "ray" not in sys.modules
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the kernel lets them go
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])  # ends: with the parent
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()  # ends: one is waiting
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                gc.enable()
                break
            connection.close()
    become(connection)


def become(connection: socket.socket) -> None:
    """Be the worker that was asked for over `connection`, which stays open as long as this process lives."""
    import runpy
    from importlib.util import find_spec

    import numpy as np

    head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, len(_STREAMS))
    data = b""
    while len(data) < _LENGTH.unpack(head)[0]:
        data += connection.recv(1 << 16)  # ends: it was sent in one go
    wish = json.loads(data)
    for own, given in zip(_STREAMS, streams, strict=True):
        os.dup2(given, own)
        os.close(given)
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["folder"])
    os.setpriority(os.PRIO_PROCESS, 0, wish["niceness"])
    np.random.seed()  # a fork repeats the state of its parent
    script = find_spec("ray._private.workers.default_worker")
    assert script is not None
    assert script.origin is not None
    sys.argv = [script.origin, *wish["arguments"]]
    runpy.run_path(script.origin, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        ask(sys.argv[1:])
