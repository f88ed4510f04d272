"""What of the card's check runs without one: arguments, guard, table, equality through the shim, ranks on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from collectives.gpucheck import equality, speed
from collectives.gpucheck.__main__ import NO_CARD, main, parse, parts
from collectives.gpucheck.ranks import check_ranks, check_threads
from collectives.gpucheck.report import Report, Row, Skip
from collectives.kernels import cuda
from collectives.staging import StagedTransport
from collectives.transport import LocalTransport, Parcel, run_local

AsGpu = Callable[[int], AbstractContextManager[list[str]]]
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so_and_imports_no_other_room() -> None:
    code = (
        "import sys; from collectives.gpucheck.__main__ import main; code = main([]);\n"
        "foreign = {'ray', 'mlflow', 'pydantic', 'zstandard', 'cupy', 'actors', 'placement', 'zenray', 'jobs'};\n"
        "assert not foreign & set(sys.modules), foreign & set(sys.modules); sys.exit(code)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == NO_CARD, found.stderr
    assert "no CUDA device" in found.stdout


def test_arguments_and_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse([]).budget_s < 360
    assert list(parts(CPU, Report(1), True))[:3] == ["registers", "codecs", "rows"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["--parts", "nonsense", "--out", str(tmp_path)]) == 2
    assert main(["--parts", "rows", "--out", str(tmp_path), "--budget-s", "0"]) == 0
    assert "used up" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu-check.json").read_text())["rows"][0]["status"] == "skipped"


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    report = Report(60)

    def breaks() -> Iterator[Row]:
        yield Row("a", "first", "ok", 256, 12.34, 4100.0, 0.951, 7.2)
        raise RuntimeError("boom")

    def absent() -> Iterator[Row]:
        raise Skip("not here")
        yield

    for name, body in (("a", breaks), ("b", absent), ("c", lambda: [Row("c", "last", "ok")])):
        report.run(name, body)
    assert [(row.name, row.status) for row in report.rows] == [
        ("first", "ok"),
        ("all", "failed"),
        ("all", "skipped"),
        ("last", "ok"),
    ]
    assert report.failed
    lines = report.table().splitlines()
    assert lines[1].split() == ["a", "first", "ok", "256", "12.3", "4100", "95%", "7.2x"]
    assert "RuntimeError: boom" in lines[2]
    content = json.loads(report.write(tmp_path).read_text())
    assert content["rows"][0]["of_copy"] == 0.951
    assert "torch" in "".join(content["environment"]["packages"])


def test_equality_holds_on_the_shim(as_gpu: AsGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "SIZES", (0, 33, 2049))
    with as_gpu(0):
        found = [*equality.check_codecs(CPU, large=0), *equality.check_rows(CPU, large=0)]
    assert [row.note for row in found if row.status != "ok"] == []
    assert len(found) >= len(equality.CODECS) + 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equality_holds_on_a_card() -> None:
    card = torch.device("cuda", 0)
    found = [*equality.check_codecs(card, large=0), *equality.check_rows(card, large=0)]
    assert [row.note for row in found if row.status != "ok"] == []


def test_equality_notices_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = equality.CODECS["int8b"], torch.randn(300)
    monkeypatch.setattr(equality, "same", lambda ours, theirs: ours.numel() != 300)
    assert "residual" in equality.codec_faults(codec, codec.twin(), x, CPU)


def test_every_benchmark_runs(as_gpu: AsGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a thousandth of its size, on the shim; what it measures there means nothing."""
    monkeypatch.setattr(speed, "MIB", 64 << 10)
    monkeypatch.setattr(speed, "ROTATION_BYTES", 1)
    monkeypatch.setattr(speed, "seconds", lambda calls, device: sum(call() is None for call in calls) + 1.0)
    with as_gpu(0) as launched:
        monkeypatch.setattr(cuda, "launch", sys.modules["collectives.codecs.gpu"].launch)
        found = list(speed.check_speed(CPU, Report(600), (1,)))
    assert [row.note for row in found if row.status != "ok"] == []
    assert len(found) == 17
    assert {"int8b_reduce", "int8b_decode", "partition_scatter", "magnitude_histogram"} <= set(launched)


def test_time_is_the_best_of_repeated_calls() -> None:
    calls = [0]

    def call() -> None:
        calls[0] += 1

    assert speed.seconds([call, call], CPU, target_s=1e-4) > 0
    assert calls[0] > 9


def test_threads_run_whole_collectives_on_the_shim(as_gpu: AsGpu) -> None:
    with as_gpu(0) as launched:
        found = list(check_threads(2, CPU))
    assert [row.status for row in found] == ["ok", "ok"]
    assert {"int8b_reduce_encode", "partition_scatter", "scatter_add_rows_f32"} <= set(launched)


def test_ranks_run_every_check_on_gloo() -> None:
    found = list(check_ranks("gloo", 2, CPU, 120))
    assert [row.note for row in found if row.status != "ok"] == []
    assert len(found) == 4


def test_a_group_that_cannot_be_formed_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    found = list(check_ranks("no-such-backend", 1, CPU, 60, optional=True))
    assert {row.status for row in found[:-1]} == {"skipped"}
    assert "rank 0 ended with code 1" in found[0].note
    assert found[-1].status == "ok"


def test_staged_messages_arrive_in_order_and_in_full() -> None:
    def body(inner: LocalTransport) -> list[float]:
        transport = StagedTransport(inner, CPU)
        peer = 1 - transport.rank
        inbox = [torch.zeros(3), torch.zeros(2), torch.zeros(0)]
        with transport.exchange("x", [Parcel(peer, data) for data in inbox]) as exchange:
            for value, data in enumerate(inbox):
                exchange.send(peer, torch.full_like(data, value + 10.0 * transport.rank))
            assert next(exchange.arrivals()).data is inbox[0]
        total = torch.ones(4)
        transport.all_reduce("sum", total)
        assert transport.traffic.sent_bytes("x") == 20
        values: Tensor = torch.cat([*inbox, total])
        return values.tolist()

    assert run_local(2, body) == [[10.0] * 3 + [11.0] * 2 + [2.0] * 4, [0.0] * 3 + [1.0] * 2 + [2.0] * 4]
