"""The command line that all jobs share."""

from pathlib import Path
from typing import Any

import pytest

from collectives.errors import ConfigError
from jobs.job import LINK_RECORD, Run, run_job
from jobs.train_config import TrainConfig


def test_help_names_every_key_with_its_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_job("train", TrainConfig, lambda config, run: pytest.fail("must not run"), ["--help"], ("truth",))
    printed = capsys.readouterr().out
    assert code == 0
    assert "train: [--config PATH] [--out PATH] [--truth PATH] [key=value ...]" in printed
    assert "  ranks = 2\n      Workers, one CPU each" in printed
    assert "  gpt.layers = 4\n" in printed
    keys = [line.split()[0] for line in printed.splitlines() if line.startswith("  ") and not line.startswith("   ")]
    assert set(TrainConfig.model_fields) <= {key.split(".")[0] for key in keys}


def test_a_configuration_that_the_job_refuses_leaves_no_folder(tmp_path: Path) -> None:
    def refuse(config: TrainConfig, run: Run) -> dict[str, Any]:
        raise ConfigError("no")

    def write_and_refuse(config: TrainConfig, run: Run) -> dict[str, Any]:
        (run.out / "kept").touch()
        raise ConfigError("no")

    out = tmp_path / "runs" / "out"
    assert run_job("train", TrainConfig, refuse, ["--out", str(out)]) == 2
    assert list(tmp_path.iterdir()) == []
    out.mkdir(parents=True)
    assert run_job("train", TrainConfig, refuse, ["--out", str(out)]) == 2
    assert out.exists(), "it was there before"
    assert run_job("train", TrainConfig, write_and_refuse, ["--out", str(out / "deeper")]) == 2
    assert (out / "deeper" / "kept").exists()


def test_the_result_is_announced_once_by_the_outer_of_two_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_inner(config: TrainConfig, run: Run) -> dict[str, Any]:
        with monkeypatch.context() as inside:
            inside.setenv(LINK_RECORD, "{}")
            assert run_job("train", TrainConfig, lambda config, run: {}, ["--out", str(tmp_path)]) == 0
        assert (tmp_path / "result.json").exists()
        return {}

    assert run_job("train", TrainConfig, run_inner, ["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"result: {tmp_path / 'result.json'}\n"


def test_a_boolean_key_may_be_written_as_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[bool] = []

    def note(config: TrainConfig, run: Run) -> dict[str, Any]:
        seen.append(config.link_required)
        return {}

    for words in (["--link_required"], ["link_required=false"]):
        assert run_job("train", TrainConfig, note, [*words, "--out", str(tmp_path)]) == 0
    assert seen == [True, False]
    assert run_job("train", TrainConfig, note, ["--ranks"]) == 2
    assert "unknown option --ranks; options are --baseline, --config, --link_required" in capsys.readouterr().err
