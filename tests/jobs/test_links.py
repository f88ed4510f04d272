"""Shaped links: parameters by rate, a bed that is what it says, and nothing left behind however a run ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives.errors import ConfigError
from jobs.links import ShapedBed, Shaping, leftovers, self_check, unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
needs_links = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no shaped links: {unavailable_reason()}")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=10).stdout


@pytest.mark.parametrize(
    ("rate", "burst_kb", "latency_ms"),
    [(1e8, 128, 200), (2e8, 128, 200), (6e8, 192, 150), (1e9, 256, 100), (5e9, 1024, 100), (2e10, 2048, 100)],
)
def test_burst_and_latency_follow_the_measured_table(rate: float, burst_kb: int, latency_ms: int) -> None:
    assert Shaping.for_rate(rate) == Shaping(rate, burst_kb, latency_ms)


def test_impossible_beds_are_refused() -> None:
    with pytest.raises(ConfigError, match="link rate"):
        ShapedBed(2, 1000.0)
    with pytest.raises(ConfigError, match="0 nodes"):
        ShapedBed(0, 1e9)


def test_a_run_is_void_when_the_dense_all_reduce_misses_theory() -> None:
    """64 MiB over 4 ranks at 1 Gbit/s: 6/4 of 2^29 bits over 0.956e9 bit/s, 842.4 ms."""
    bed = ShapedBed(4, 1e9)
    payload = 64 << 20
    check = self_check(bed, 4, payload, 0.85)
    assert check.expected_s == pytest.approx(0.84237, rel=1e-4)
    assert check.verdict == "ok"
    assert self_check(bed, 4, payload, 0.89).verdict == "void"
    assert self_check(bed, 4, payload, 0.79).verdict == "void"
    assert self_check(ShapedBed(4, 5e9), 4, payload, 9.0).verdict == "not judged"
    assert self_check(None, 4, payload, 0.1).expected_s is None


@pytest.mark.network
@needs_links
def test_a_bed_is_shaped_and_counts_bytes() -> None:
    with ShapedBed(2, 2e8) as bed:
        record = bed.record()
        assert (record["mtu"], record["congestion_control"], record["shaping"]["burst_kb"]) == (1500, "cubic", 128)
        for namespace, interface in ((bed.namespace(1), "eth0"), (bed.switch, "sw1")):
            shown = subprocess.run(
                ["tc", "-n", namespace, "qdisc", "show", "dev", interface], capture_output=True, text=True, timeout=10
            ).stdout
            assert "tbf" in shown
            assert "rate 200Mbit" in shown
        before = bed.tx_bytes(0)
        code = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(1000), (sys.argv[1], 9))"
        subprocess.run([*bed.exec_prefix(0), sys.executable, "-c", code, bed.address(1)], check=True, timeout=20)
        assert bed.tx_bytes(0) >= before + 1000 + 28 + 14


def start_and_fail(bed: ShapedBed, started: list[subprocess.Popen[bytes]]) -> None:
    with bed:
        started.append(subprocess.Popen([*bed.exec_prefix(1), "sleep", "100"]))
        listing = ["ip", "netns", "pids", bed.namespace(1)]
        while str(started[0].pid) not in subprocess.run(listing, capture_output=True, text=True, timeout=10).stdout:
            time.sleep(0.01)
        raise ValueError("stop")


@pytest.mark.network
@needs_links
def test_an_exception_ends_what_runs_inside_and_removes_the_namespaces() -> None:
    bed = ShapedBed(2, None)
    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ValueError, match="stop"):
        start_and_fail(bed, started)
    assert started[0].wait(timeout=5) == -signal.SIGTERM
    assert bed.name not in namespaces()


@pytest.mark.network
@needs_links
def test_sigterm_removes_the_namespaces() -> None:
    code = (
        "import time\n"
        "from jobs.links import ShapedBed\n"
        "with ShapedBed(2, 1e9) as bed:\n"
        "    print(bed.name, flush=True)\n"
        "    time.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert f"{name}-sw" in namespaces()
    process.terminate()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    process.stdout.close()
    assert name not in namespaces()


@pytest.mark.network
@needs_links
def test_leftovers_are_those_of_dead_processes_only() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=20)
    name = f"zr{ended.pid:x}x0-0"
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=10)
    try:
        with ShapedBed(1, None) as bed:
            assert name in leftovers()
            assert bed.namespace(0) not in leftovers()
            assert f"{os.getpid():x}" in bed.name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True, timeout=10)
    assert name not in leftovers()
