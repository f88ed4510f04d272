"""What the ranks of the transport tests do: the same code on threads and on processes. Started by jobs.ranks."""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.errors import CollectiveError
from collectives.torch_transport import NUM_EXCHANGE_TAGS, TorchTransport
from collectives.transport import (
    Parcel,
    Transport,
    all_gather,
    all_gather_records,
    all_to_all,
    broadcast_bytes,
    others,
)

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def pattern(source: int, destination: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Bytes that differ for every pair of ranks and every dtype; small, so that bool and floats are valid."""
    numel = torch.Size(shape).numel()
    values = torch.arange(numel) * 3 + source * 5 + destination * 11
    return (values % 2 if dtype == torch.bool else values % 13).to(torch.float32).to(dtype).view(shape)


def digest(tensors: list[Tensor]) -> str:
    data = b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + b"|" for t in tensors)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert digest(actual) == digest(expected), (actual, expected)


def workout(transport: Transport, config: dict[str, Any]) -> dict[str, Any]:
    """Every kind of call; each result is compared with what it must be. Returns digests and byte counts."""
    rank, size = transport.rank, transport.size
    digests = {}
    table = all_gather_records(transport, "records", [rank, -rank, 1 << 40])
    assert table.tolist() == [[r, -r, 1 << 40] for r in range(size)]
    for dtype in DTYPES:
        gathered = [torch.zeros((r * 2) % 5, 3, dtype=dtype) for r in range(size)]
        gathered[rank].copy_(pattern(rank, 0, tuple(gathered[rank].shape), dtype))
        all_gather(transport, "gather", gathered)
        assert_same(gathered, [pattern(r, 0, ((r * 2) % 5, 3), dtype) for r in range(size)])
        inputs = [pattern(rank, j, ((rank * j) % 4 * 5,), dtype) for j in range(size)]
        outputs = [torch.zeros((j * rank) % 4 * 5, dtype=dtype) for j in range(size)]
        all_to_all(transport, "uneven", outputs, inputs)
        assert_same(outputs, [pattern(j, rank, ((j * rank) % 4 * 5,), dtype) for j in range(size)])
        digests[str(dtype)] = digest(gathered + outputs)
    payloads = [b"", b"x", bytes(range(256)) * 300]
    for number, payload in enumerate(payloads):
        root = number % size
        assert broadcast_bytes(transport, "plan", payload if rank == root else None, root) == payload
    digests["ordered"] = ordered_parcels(transport)
    digests["pipelined"] = pipelined(transport)
    with transport.exchange("nothing", []):
        pass
    dense = torch.arange(size * 6, dtype=torch.float32) + rank
    transport.all_reduce("dense", dense)
    assert_same([dense], [torch.arange(size * 6, dtype=torch.float32) * size + sum(range(size))])
    return {"digests": digests, "sent": counts(transport, True), "received": counts(transport, False)}


def counts(transport: Transport, sent: bool) -> dict[str, Any]:
    """Bytes by phase and peer; of the ring only the sum, since its route is the backend's own."""
    table = transport.traffic.sent if sent else transport.traffic.received
    return {phase: int(row.sum()) if phase == "dense" else row.tolist() for phase, row in table.items()}


def ordered_parcels(transport: Transport) -> str:
    """Several parcels between the same two ranks, of equal and of different sizes, arrive in their order."""
    sizes = (4, 4, 0, 1000, 4)
    recvs = [Parcel(peer, torch.zeros(s, dtype=torch.int16)) for s in sizes for peer in others(transport)]
    with transport.exchange("ordered", recvs) as exchange:
        for number, s in enumerate(sizes):
            for peer in others(transport):
                exchange.send(peer, pattern(transport.rank, peer + number, (s,), torch.int16))
        arrived = list(exchange.arrivals())
    assert [p.peer for p in arrived] == [p.peer for p in recvs]
    expected = [
        pattern(peer, transport.rank + number, (s,), torch.int16)
        for number, s in enumerate(sizes)
        for peer in others(transport)
    ]
    assert_same([p.data for p in arrived], expected)
    return digest(expected)


def pipelined(transport: Transport) -> str:
    """Three exchanges open at once, served last first, with equal sizes in all of them; across the wrap of the tags."""
    if isinstance(transport, TorchTransport) and transport.watch is not None:
        transport.watch.num_exchanges = NUM_EXCHANGE_TAGS - 2
    rank = transport.rank
    inboxes = [[Parcel(peer, torch.zeros(50)) for peer in others(transport)] for _ in range(3)]
    exchanges = [transport.exchange(f"stage{stage}", inbox) for stage, inbox in enumerate(inboxes)]
    for stage in (2, 1, 0):
        for peer in others(transport):
            exchanges[stage].send(peer, pattern(rank, peer + stage, (50,), torch.float32))
    for exchange in exchanges:
        with exchange:
            pass
    expected = [pattern(p.peer, rank + stage, (50,), torch.float32) for stage in range(3) for p in inboxes[stage]]
    assert_same([p.data for inbox in inboxes for p in inbox], expected)
    return digest(expected)


def workouts_and_failures(transport: TorchTransport, config: dict[str, Any]) -> None:
    """Both in one start of processes; what each rank saw goes into files, because most ranks do not survive."""
    workouts(transport, config)
    failures(transport, config)


def workouts(transport: TorchTransport, config: dict[str, Any]) -> None:
    """The workout on the last 1, 2, ... ranks of the world, so that ranks of the group are not those of the world."""
    for size in config["sizes"]:
        members = list(range(transport.size - size, transport.size))
        group = dist.new_group(members)
        if transport.rank in members:
            member = TorchTransport(group, timeout_s=60)
            write_json(Path(config["folder"]) / f"workout{size}" / f"{member.rank}.json", workout(member, config))


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


# --- failures ---------------------------------------------------------------------------------------------------------


def one_ring(transport: TorchTransport) -> None:
    transport.all_reduce("ring", torch.ones(1 << 20))


def one_round(transport: TorchTransport) -> None:
    all_gather_records(transport, "metadata", [1, 2])


def one_exchange(transport: TorchTransport, sent_floats: int = 1 << 18) -> None:
    with transport.exchange("data", [Parcel(peer, torch.empty(1 << 18)) for peer in others(transport)]) as exchange:
        for peer in others(transport):
            exchange.send(peer, torch.ones(sent_floats))


def one_chain(transport: TorchTransport) -> None:
    """Every rank waits for the next one only; the last one fails, so that most ranks know it by hearsay."""
    after = (transport.rank + 1) % transport.size
    with transport.exchange("chain", [Parcel(after, torch.empty(1000))]):
        pass


PHASES = {"ring": one_ring, "metadata": one_round, "data": one_exchange, "chain": one_chain}


def failures(transport: TorchTransport, config: dict[str, Any]) -> None:
    """One group per stage; its last rank fails in the given way, all others note what they see and how long after."""
    groups = [dist.new_group(list(range(size))) for _, size, _ in config["stages"]]
    for number, (phase, size, fate) in enumerate(config["stages"]):
        if transport.rank < size:
            folder = Path(config["folder"]) / f"stage{number}"
            folder.mkdir(exist_ok=True)
            timeout_s = config["deadline_s"] if fate in ("stopped", "disagrees") else 60.0
            TorchTransport(groups[number])  # dropped at once; a second transport on the same group must not suffer
            member = TorchTransport(groups[number], timeout_s=timeout_s)
            note = one_stage(member, phase, fate, folder)
            write_json(folder / f"{transport.rank}.json", note)


def one_stage(member: TorchTransport, phase: str, fate: str, folder: Path) -> dict[str, Any]:
    meet(folder, "ready", member.rank, member.size)
    started = time.monotonic()
    note: dict[str, Any] = {"error": "none", "text": ""}
    try:
        if member.rank < member.size - 1:
            PHASES[phase](member)
        else:
            time.sleep(0.1)
            (folder / "failing").write_text(str(time.monotonic()), encoding="utf-8")
            FATES[fate](member)
    except CollectiveError as error:
        note = {"error": type(error).__name__, "text": str(error), "fields": fields(error)}
    note["waited_s"] = time.monotonic() - started
    note["after_failure_s"] = time.monotonic() - float((folder / "failing").read_text(encoding="utf-8"))
    note["later"] = later_call(member)
    return note


def meet(folder: Path, name: str, rank: int, size: int) -> None:
    """A barrier through files: ranks leave a failed stage at different times, and groups are what fails here."""
    (folder / f"{rank}.{name}").touch()
    while len(list(folder.glob(f"*.{name}"))) < size:
        time.sleep(0.005)


def raise_own_error(member: TorchTransport) -> None:
    with member.exchange("data", [Parcel(peer, torch.empty(1 << 18)) for peer in others(member)]):
        raise CollectiveError("an error of its own")


def abort_while_waiting(member: TorchTransport) -> None:
    threading.Timer(0.05, member.abort).start()
    one_chain(member)


FATES = {
    "killed": lambda member: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda member: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": raise_own_error,
    "aborts": abort_while_waiting,
    "disagrees": lambda member: one_exchange(member, sent_floats=1000),
}


def fields(error: CollectiveError) -> dict[str, Any]:
    return {k: v for k, v in error.__dict__.items() if isinstance(v, int | float | str | list | tuple)}


def later_call(transport: TorchTransport) -> str:
    transport.abort()
    transport.abort()
    try:
        transport.exchange("later", [])
    except CollectiveError as error:
        return str(error)
    return "no error"


# --- the wire ---------------------------------------------------------------------------------------------------------


def wire_bytes(transport: TorchTransport, config: dict[str, Any]) -> dict[str, list[int]]:
    """[our counter, the interface's counter] of 16 MiB: an all-to-all and a dense all-reduce."""
    numel = 16 << 18
    data = torch.ones(numel)
    parts = list(torch.ones(numel).chunk(transport.size))
    received = [torch.empty_like(part) for part in parts]
    return {
        "exchange": measured(transport, "exchange", lambda: all_to_all(transport, "exchange", received, parts)),
        "dense": measured(transport, "dense", lambda: transport.all_reduce("dense", data)),
    }


def measured(transport: TorchTransport, phase: str, call: Callable[[], None]) -> list[int]:
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    call()
    dist.barrier()
    return [transport.traffic.sent_bytes(phase), int(counter.read_text()) - before]
