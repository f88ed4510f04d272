"""The codec benchmark on a small scale: every promised figure, true model sizes, bytes that equal those on the wire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from collectives.codecs import CODECS, Codec
from collectives.reduce import native, one_shot, two_shot
from collectives.transport import LocalTransport, run_local
from jobs.bench import compress
from jobs.job import run_job
from jobs.workloads.shapes import FAMILIES, Parameter, family, gradient_like, sample_gradient


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("bert-large", 335_141_888),
        ("gpt2-xl", 1_557_611_200),
        ("gpt3-175b", 174_604_259_328),
        ("resnet50", 25_557_032),
    ],
)
def test_families_have_their_published_sizes(name: str, numel: int) -> None:
    parameters = family(name)
    assert sum(p.numel for p in parameters) == numel
    assert len({p.name for p in parameters}) == len(parameters)
    sample = sample_gradient(parameters, 5000, seed=1)
    assert sample.shape == (5000,)
    assert bool(sample.isfinite().all())
    assert not sample.equal(sample_gradient(parameters, 5000, seed=2))


def test_gradients_are_scaled_by_row() -> None:
    norms = gradient_like(200, 500, 0).norm(dim=1)
    assert float(norms.max() / norms.min()) > 20


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.fixed_size and n not in ("powersgd", "lossless")])
def test_predicted_bytes_are_those_on_the_wire(name: str) -> None:
    codec: Codec = CODECS[name]
    parameter = Parameter("w", (130, 1000))

    def body(t: LocalTransport) -> int:
        x = torch.randn(130_000)
        how = compress.pattern(codec)
        {"native": native, "one_shot": one_shot, "two_shot": two_shot}[how](x, codec, t)  # type: ignore[operator]
        return t.traffic.sent_bytes()

    sent = run_local(4, body, 30)
    assert sum(sent) / 4 == pytest.approx(compress.sent_bytes(codec, parameter, 4, 0.0), rel=2e-3)


def test_the_suite_reports_every_promised_figure(tmp_path: Path) -> None:
    arguments = ["mib=1", "rounds=1", "ranks=2,3", "sample=4096", "families=resnet50", "--out", str(tmp_path)]
    assert run_job("bench-compress", compress.Config, compress.run, arguments, compress.FILES) == 0
    metrics = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert set(metrics["codecs"]) == set(CODECS)
    for name, figures in metrics["codecs"].items():
        steps = ("encode", "decode") if name == "lossless" else ("encode", "decode", "ef")
        for step in steps:
            assert figures[f"{step}_gbps"] > 0
            assert figures[f"{step}_vs_memcpy"] == pytest.approx(figures[f"{step}_gbps"] / figures["memcpy_gbps"])
        assert 0 < figures["bits_per_value"] < 33
        assert 0 <= figures["rel_l2"] <= 1.01
    assert metrics["codecs"]["lossless"]["rel_l2"] == 0
    resnet = metrics["families"]["resnet50"]["codecs"]
    assert set(resnet["int8b"]["rel_l2_of_mean"]) == {"2", "3"}
    assert 3.5 < resnet["int8b"]["fp32_over_codec"] < 4
    assert (tmp_path / "codecs.png").stat().st_size > 10_000


def test_wrong_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["families=bert", "--out", str(tmp_path)]
    assert run_job("bench-compress", compress.Config, compress.run, arguments, compress.FILES) == 2
    error = capsys.readouterr().err
    assert "unknown: bert" in error
    assert FAMILIES[0] in error
