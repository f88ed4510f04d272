"""Network links of a chosen rate on one machine: namespaces joined by a bridge, shaped in both directions.

Needs root, `ip` and `tc`; `unavailable_reason` says what is missing. The bridge lives in a namespace of its own with no
route out, so beds cannot clash with the host or with each other and may repeat addresses.

What the bed cannot do: add delay, jitter or loss. What always holds: a bed removes exactly the namespaces it made, after
ending what runs in them, also on an exception or SIGTERM.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from collectives.errors import ConfigError
from zenray.stopping import stop_on_sigterm

MTU = 1500
CONGESTION_CONTROL = "cubic"
WIRE_EFFICIENCY = 0.956
"""Payload share of a full Ethernet frame as tbf counts it: 1448 of 1514 bytes."""
MAX_JUDGED_RATE = 1e9
"""Above this the CPU may be the limit, and the self-check gives no verdict."""
TOLERANCE = 0.05
COMMAND_TIMEOUT_S = 10.0

# tbf sees large offloaded packets: with a burst below about 128 KB at 1 Gbit/s the rate collapses.
_RATES = (200e6, 1e9, 5e9, 10e9)
_BURST_KB = (128, 256, 1024, 2048)
_LATENCY_MS = (200, 100, 100, 100)

_BED_NUMBERS = itertools.count()
_BED_NAME = re.compile(r"zr([0-9a-f]+)x[0-9]+-(?:[0-9]+|sw)")


@dataclass(frozen=True)
class Shaping:
    """Parameters of the token bucket for one rate."""

    rate_bits_per_s: float
    burst_kb: int
    latency_ms: int

    @classmethod
    def for_rate(cls, rate_bits_per_s: float) -> Shaping:
        """Burst and latency measured to hold the rate, interpolated between the measured rates."""
        if not 1e6 <= rate_bits_per_s <= 1e11:
            raise ConfigError(f"link rate {rate_bits_per_s:g} bit/s; the bed can shape 1mbit to 100gbit")
        return cls(
            rate_bits_per_s,
            round(float(np.interp(rate_bits_per_s, _RATES, _BURST_KB))),
            round(float(np.interp(rate_bits_per_s, _RATES, _LATENCY_MS))),
        )


class ShapedBed:
    """`num_nodes` namespaces on one switch, every link limited to `rate_bits_per_s` (None: not limited). A context."""

    def __init__(self, num_nodes: int, rate_bits_per_s: float | None):
        if not 1 <= num_nodes <= 200:
            raise ConfigError(f"a bed of {num_nodes} nodes; 1 to 200 are possible")
        self.num_nodes = num_nodes
        self.shaping = None if rate_bits_per_s is None else Shaping.for_rate(rate_bits_per_s)
        self.name = f"zr{os.getpid():x}x{next(_BED_NUMBERS)}"
        self.switch = f"{self.name}-sw"

    def namespace(self, node: int) -> str:
        """Name of the node's network namespace."""
        return f"{self.name}-{node}"

    def address(self, node: int) -> str:
        """IPv4 address of the node's eth0."""
        return f"10.77.0.{node + 1}"

    def exec_prefix(self, node: int) -> list[str]:
        """Words to put before a command so that it runs on the node, under the same process id."""
        return ["ip", "netns", "exec", self.namespace(node)]

    def tx_bytes(self, node: int) -> int:
        """Bytes the node's eth0 has sent, headers included: the ground truth of every byte counter."""
        return int(_run([*self.exec_prefix(node), "cat", "/sys/class/net/eth0/statistics/tx_bytes"]))

    def record(self) -> dict[str, Any]:
        """What a reader must know about the links: rate, burst, latency, congestion control and MTU as set."""
        route = json.loads(_run(["ip", "-j", "-n", self.namespace(0), "route", "show", "dev", "eth0"]))
        return {
            "num_nodes": self.num_nodes,
            "shaping": asdict(self.shaping) if self.shaping else None,
            "congestion_control": route[0]["metrics"][0]["congestion"],
            "mtu": int(_run([*self.exec_prefix(0), "cat", "/sys/class/net/eth0/mtu"])),
        }

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise ConfigError("a shaped link needs root and the commands ip and tc; set link=none to run without")
        with ExitStack() as stack:
            stop = stack.enter_context(stop_on_sigterm())
            stack.callback(self._remove)
            stack.callback(stop.hold)
            self._build()
            self._leave = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.__exit__(kind, error, trace)

    def _build(self) -> None:
        switch = self.switch
        _run(["ip", "netns", "add", switch])
        _ip(switch, "link set lo up")
        _ip(switch, "link add br0 type bridge")
        _ip(switch, "link set br0 up")
        tables = [f"net.bridge.bridge-nf-call-{table}" for table in ("iptables", "ip6tables", "arptables")]
        settings = [f"{name}=0" for name in tables if Path("/proc/sys", name.replace(".", "/", 2)).exists()]
        if settings:
            _run(["ip", "netns", "exec", switch, "sysctl", "-qw", *settings])
        for node in range(self.num_nodes):
            self._add_node(node)

    def _add_node(self, node: int) -> None:
        name, port, address = self.namespace(node), f"sw{node}", self.address(node)
        _run(["ip", "netns", "add", name])
        _ip(name, "link set lo up")
        _run(f"ip link add {port} netns {self.switch} type veth peer name eth0 netns {name}".split())
        _ip(self.switch, f"link set {port} master br0 up")
        _ip(name, f"addr add {address}/24 dev eth0")
        _ip(name, f"link set eth0 mtu {MTU} up")
        _ip(
            name,
            f"route change 10.77.0.0/24 dev eth0 proto kernel scope link src {address} congctl {CONGESTION_CONTROL}",
        )
        if self.shaping is not None:
            self._shape(name, "eth0", self.shaping)
            self._shape(self.switch, port, self.shaping)

    def _shape(self, namespace: str, interface: str, shaping: Shaping) -> None:
        _run(
            f"tc -n {namespace} qdisc add dev {interface} root tbf rate {shaping.rate_bits_per_s:.0f}bit "
            f"burst {shaping.burst_kb}kb latency {shaping.latency_ms}ms".split()
        )

    def _remove(self) -> None:
        existing = set(_namespaces())
        for name in [self.switch, *map(self.namespace, range(self.num_nodes))]:
            if name in existing:
                _end_processes(name)
                _run(["ip", "netns", "del", name])


def leftovers() -> list[str]:
    """Namespaces of beds whose process is gone: something ended it without a chance to clean up."""
    names = [(name, _BED_NAME.fullmatch(name)) for name in _namespaces()]
    return [name for name, match in names if match and not Path(f"/proc/{int(match[1], 16)}").exists()]


@functools.cache
def unavailable_reason() -> str | None:
    """Why this machine cannot shape links, or None if it can. Tries it once, with one node."""
    if os.geteuid() != 0:
        return "not root"
    missing = [command for command in ("ip", "tc") if not shutil.which(command)]
    if missing:
        return f"command {missing[0]} not found (package iproute2)"
    try:
        with ShapedBed(1, 1e9):
            return None
    except ConfigError as error:
        return str(error)


@dataclass(frozen=True)
class SelfCheck:
    """Dense all-reduce against theory, in the run that it vouches for. A void run proves nothing about schemes."""

    verdict: str
    """"ok", "void", or "not judged" (no shaping, or above 1 Gbit/s)."""
    measured_s: float
    expected_s: float | None
    load_1min: float


def self_check(bed: ShapedBed | None, num_ranks: int, payload_bytes: int, all_reduce_s: float) -> SelfCheck:
    """Judge a dense Gloo all-reduce of `payload_bytes` that took `all_reduce_s`: within 5 % of 2 (n-1)/n B / rate."""
    load = round(os.getloadavg()[0], 2)
    if bed is None or bed.shaping is None or num_ranks == 1:
        return SelfCheck("not judged", all_reduce_s, None, load)
    rate = bed.shaping.rate_bits_per_s
    expected_s = 2 * (num_ranks - 1) / num_ranks * 8 * payload_bytes / (WIRE_EFFICIENCY * rate)
    if rate > MAX_JUDGED_RATE:
        verdict = "not judged"
    else:
        verdict = "ok" if abs(all_reduce_s / expected_s - 1) <= TOLERANCE else "void"
    return SelfCheck(verdict, all_reduce_s, expected_s, load)


def _ip(namespace: str, words: str) -> None:
    _run(["ip", "-n", namespace, *words.split()])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise ConfigError(f"links cannot be shaped here: '{' '.join(command)}' failed: {reason}")
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _end_processes(namespace: str) -> None:
    """End what still runs in a namespace of our own: SIGTERM, after a second SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
        pids = [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).split()]
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + patience_s
        while pids and time.monotonic() < deadline:
            time.sleep(0.02)
            pids = [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).split()]
