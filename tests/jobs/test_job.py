"""The command line that all jobs share."""

import pytest

from jobs.job import run_job
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
