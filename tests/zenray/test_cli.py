"""`zenray plan | submit | status | cancel`: what a user types, and what comes back."""

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zenray
from collectives.errors import ConfigError
from placement.catalogue import GIB, MIB, gpu_type
from placement.memory import predict
from placement.shapes import Layout, ModelShape, Setup
from zenray.__main__ import ROOMS, app, check_rooms, main
from zenray.config import Section, describe_keys, load
from zenray.findings import is_broken
from zenray.job_config import JobConfig, PlanConfig, load_job_or_plan, request_of
from zenray.plan_report import PARTS, plan_rows, size_text
from zenray.preflight import check_entrypoint
from zenray.queue_program import QueueProgram

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ModelShape(layers=4, hidden=256, heads=4, seq=512, vocab=1000, learned_positions=512)
PLAN = """
model: {layers: 16, hidden: 2048, heads: 16, vocab: 32000}
batch: 16
seq: 2048
cards: [T4, A100-40]
max_gpus: 8
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_lists_what_fits_with_its_memory_and_draws_it(plan_file: Path, tmp_path: Path) -> None:
    result = run("plan", plan_file, "--out", tmp_path / "bars.png")
    assert result.exit_code == 0, result.output
    for word in (*PARTS, "A100-40", "upper", "left out", "GiB more than the 15 of T4", "of the catalogue"):
        assert word in result.output
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_of_many_plans_the_ten_best_are_shown(plan_file: Path) -> None:
    cards = ["A100-40", "A100-80", "H100", "H200"]
    found = zenray.plan(load_job_or_plan(plan_file, []), cards)
    result = run("plan", plan_file, f"cards=[{','.join(cards)}]")
    assert f"the 10 best plans, and {len(found.plans) - 10} more" in result.output
    assert len(found.plans) > 10


def test_overrides_change_the_question_and_no_plan_is_exit_1_with_the_nearest_change(plan_file: Path) -> None:
    result = run("plan", plan_file, "cards=T4", "max_gpus=1", "recompute=none")
    assert result.exit_code == 1
    assert "no plan fits; the closest" in result.output
    assert "best plans" not in result.output, "an empty table"
    assert "lacks" in result.output
    assert "GiB a card" in result.output
    pinned = run("plan", plan_file, "cards=A100-40", "pin={micro_batch: 16}", "max_gpus=1", "recompute=none")
    assert pinned.exit_code == 1
    assert "instead of 16 fits A100-40" in pinned.output


def test_the_parts_of_a_row_add_up_to_the_prediction(plan_file: Path) -> None:
    config = load_job_or_plan(plan_file, [])
    found = zenray.plan(config, ["A100-40"])
    for plan in found.plans:
        memory = plan.memory
        total = memory.static + memory.activations + memory.logits + memory.workspace
        assert total == pytest.approx(memory.allocated)
        assert memory.nvml_upper <= 40 * GIB
        assert plan.data * plan.micro_batch * plan.num_micro == 16
    assert len(plan_rows(found.plans, [gpu_type("A100-40")], 16)) == len(found.plans)
    assert (size_text(3 * GIB), size_text(MIB)) == ("3.00 GiB", "1.0 MiB")


def test_a_file_with_a_key_of_jobs_is_planned_as_the_queue_would(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: {layers: 2, hidden: 32, heads: 2}\nsteps: 5\nbatch: 4\nseq: 16\ngpu_types: [fake-64]\n")
    assert isinstance(load_job_or_plan(path, []), JobConfig)
    result = run("plan", path)
    assert result.exit_code == 0, result.output
    assert "fake-64" in result.output
    path.write_text("model: {layers: 2, hidden: 32, heads: 2}\n")
    assert isinstance(load_job_or_plan(path, []), PlanConfig)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {layers: 2, hidden: 32, heads: 2}\ncards: [B52]\n", "'B52' is not in the catalogue"),
        ("model: {layers: 2, hidden: 32, heads: 2}\nbatches: 4\n", "did you mean 'batch'"),
        ("model: {layers: 2, hidden: 33, heads: 2}\n", "hidden 33 is not a multiple of heads 2"),
        ("name: a/b\nsteps: 1\n", "'name' = 'a/b'"),
    ],
)
def test_wrong_files_are_exit_2_and_say_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["zenray", "plan", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


# --- help and examples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "models"), [("plan", (PlanConfig, JobConfig)), ("submit", (JobConfig,))])
def test_help_lists_the_keys_of_the_file(command: str, models: tuple[type[Section], ...]) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    for model in models:
        for line in describe_keys(model):
            assert set(line.splitlines()) <= set(lines)
    assert any(line.startswith("  model.layers required") for line in lines)


def test_the_version_is_that_of_the_distribution() -> None:
    assert run("--version").output == f"zenray {version('zenray-train')}\n"


def test_the_examples_are_what_they_say() -> None:
    job = load(JobConfig, ROOT / "examples" / "job.yaml")
    assert job.entrypoint is not None
    assert not is_broken(check_entrypoint(job.entrypoint, job.env_vars))
    assert (ROOT / job.entrypoint.split("--config ")[1].split()[0]).exists()
    queued = load_job_or_plan(ROOT / "examples" / "model.yaml", [])
    assert isinstance(queued, JobConfig)
    assert queued.entrypoint is None
    assert QueueProgram().check(request_of(queued))
    assert isinstance(load_job_or_plan(ROOT / "examples" / "plan.yaml", []), PlanConfig)
    for name in ("model", "plan"):
        result = run("plan", ROOT / "examples" / f"{name}.yaml")
        assert result.exit_code == 0, result.output


# --- nobody there ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def complain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["zenray", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_status_without_a_cluster_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_port: int
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    line = complain(monkeypatch, capsys, "status")
    assert f"no Ray cluster answers at 127.0.0.1:{closed_port}" in line


def test_report_from_a_server_that_is_away_silent_or_something_else_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_port: int, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{closed_port}")
    line = complain(monkeypatch, capsys, "report", "run")
    assert "does not answer as it should: ConnectionError" in line
    assert "secret" not in line

    monkeypatch.setattr("zenray.report.ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "ReadTimeout" in complain(monkeypatch, capsys, "report", "run")

    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:  # 501 for everything
        monkeypatch.setattr(BaseHTTPRequestHandler, "log_message", lambda *words: None)
        threading.Thread(target=other.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{other.server_port}")
        assert "MlflowException" in complain(monkeypatch, capsys, "report", "run")
        other.shutdown()
    assert list(tmp_path.iterdir()) == []


# --- the functions ----------------------------------------------------------------------------------------------------


def test_predict_memory_takes_a_shape_a_configuration_and_a_module(tmp_path: Path) -> None:
    from torch import nn

    expected = predict(SHAPE, Setup(), Layout.of(micro_batch=4), gpu_type("A100-40")).prediction()
    assert zenray.predict_memory(SHAPE, 4, 512, gpu="A100-40") == expected
    published = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 1000, "n_positions": 512}
    (tmp_path / "config.json").write_text(json.dumps(published))
    by_mapping = zenray.predict_memory(published, 4, 512, gpu="A100-40")
    assert zenray.predict_memory(tmp_path / "config.json", 4, 512, gpu="A100-40") == by_mapping
    assert by_mapping.allocated == pytest.approx(expected.allocated, rel=0.2)  # plain layers, another padding
    split = zenray.predict_memory(SHAPE, 4, 512, gpu="A100-40", data=4, sharding=1)
    assert split.static < expected.static
    module = nn.Sequential(nn.Embedding(1000, 32), nn.Linear(32, 1000))
    traced = zenray.predict_memory(module, 8, 64, gpu="A100-40")
    assert traced.static >= 64_000 * 4 * 3
    with pytest.raises(ConfigError, match="traced as it is"):
        zenray.predict_memory(module, 8, 64, data=2)
    with pytest.raises(ConfigError, match=r"no\.json"):
        zenray.predict_memory(tmp_path / "no.json", 1, 1)


# --- the command itself -----------------------------------------------------------------------------------------------


def test_the_command_runs_from_any_folder_and_checks_the_rooms(tmp_path: Path, plan_file: Path) -> None:
    check_rooms()
    command = [sys.executable, "-m", "zenray", "plan", str(plan_file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    shadow = tmp_path / "stranger"
    (shadow / "placement").mkdir(parents=True)
    (shadow / "placement" / "__init__.py").write_text("")
    for room in ROOMS:
        if room != "placement":
            (shadow / room).symlink_to(ROOT / room)
    code = "from zenray.__main__ import check_rooms; check_rooms()"
    stranger = subprocess.run(
        [sys.executable, "-c", code], cwd=shadow, capture_output=True, text=True, timeout=120, check=False
    )
    assert stranger.returncode == 1
    assert "'placement' comes from" in stranger.stderr
    assert "shadows it" in stranger.stderr
