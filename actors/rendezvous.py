"""How ranks meet: a torch store on a port that the system chose, and, where nobody hands its address round, a way to
find it by name in Ray's key-value store.

The port is bound once and stays bound, so no second program can take it between the choice and the use. What is found
by name may be left over from an attempt that failed; a store counts only when its owner answers there.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta

import psutil
import ray
from ray.experimental import internal_kv
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from actors.errors import WorkerError
from collectives.errors import CollectiveTimeout

_ANSWER_WAIT_S = 2.0
_POLL_S = 0.02


def node_address() -> str:
    """The address by which Ray knows this node."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def pin_gloo_to(address: str) -> None:
    """Make Gloo use the interface that carries `address`, unless the environment names one already.

    Gloo would otherwise look up the host's name, which may resolve to nothing, or to another network.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
    raise WorkerError(f"no network interface of this host carries {address}; set GLOO_SOCKET_IFNAME")


def group_timeout(timeout_s: float) -> timedelta:
    """The limit to give a torch process group below a transport with `timeout_s`.

    It comes second: Gloo's own limit closes all connections at once, before ranks can say whom they waited for.
    """
    return timedelta(seconds=timeout_s + 5.0)


def open_store(size: int, timeout_s: float) -> TCPStore:
    """Open the store of `size` ranks on this node, on a free port; `.host` and `.port` are what the others need."""
    return TCPStore(
        node_address(), 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect_store(host: str, port: int, size: int, timeout_s: float) -> TCPStore:
    """Connect to a store that `open_store` made elsewhere."""
    return TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))


def meet(name: str, rank: int, size: int, timeout_s: float) -> Store:
    """A store shared by the `size` processes of this Ray job that call `meet` with this name; rank 0 holds it.

    Raises CollectiveTimeout naming the ranks that did not come.
    """
    key = f"zenray/{ray.get_runtime_context().get_job_id()}/{name}/store"
    return _hold(key, size, timeout_s) if rank == 0 else _find(key, rank, size, timeout_s)


def _hold(key: str, size: int, timeout_s: float) -> Store:
    deadline = time.monotonic() + timeout_s
    store = open_store(size, timeout_s)
    internal_kv._internal_kv_put(key, f"{store.host} {store.port}".encode(), overwrite=True)
    try:
        for peer in range(1, size):
            try:
                store.wait([f"here/{peer}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError:
                raise _nobody_came(
                    0, [p for p in range(1, size) if not store.check([f"here/{p}"])], timeout_s
                ) from None
            store.set(f"welcome/{peer}", "")
    finally:
        internal_kv._internal_kv_del(key)
    return PrefixStore("group", store)


def _find(key: str, rank: int, size: int, timeout_s: float) -> Store:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        entry = internal_kv._internal_kv_get(key)
        if entry is None:
            time.sleep(_POLL_S)
            continue
        host, port = entry.decode().split()
        with suppress(RuntimeError):  # nobody listens there any more, or its owner does not answer: look again
            store = connect_store(host, int(port), size, _ANSWER_WAIT_S)
            store.set(f"here/{rank}", "")
            store.wait([f"welcome/{rank}"], timedelta(seconds=_ANSWER_WAIT_S))
            store.set_timeout(timedelta(seconds=timeout_s))
            return PrefixStore("group", store)
    raise _nobody_came(rank, [0], timeout_s)


def _nobody_came(rank: int, missing: list[int], timeout_s: float) -> CollectiveTimeout:
    return CollectiveTimeout(rank=rank, phase="rendezvous", missing=missing, expected_bytes=0, timeout_s=timeout_s)
