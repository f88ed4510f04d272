"""The queue as a job: its demonstration, whole and as a file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.serverless_config import ServerlessConfig
from placement.catalogue import MIB
from zenray.config import load
from zenray.job_config import request_of
from zenray.queue_program import QueueProgram

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "jobs/configs/serverless.yaml"


def test_the_demonstration_is_twenty_jobs_on_five_unequal_nodes_and_names_no_card() -> None:
    config = load(ServerlessConfig, DEMO)
    assert len({job.name for job in config.jobs}) == len(config.jobs) == 20
    assert len({node.memory_mib for node in config.fake_nodes}) == len(config.fake_nodes) == 5
    program = QueueProgram()
    for job in config.jobs:
        assert job.gpu_types == []
        needs = program.check(request_of(job))
        assert (needs.global_batch, needs.steps) == (job.batch, job.steps)


def test_a_class_is_what_plans_depend_on_and_no_more() -> None:
    program, [first, *_] = QueueProgram(), load(ServerlessConfig, DEMO).jobs
    key = program.class_key(request_of(first))
    same = first.model_copy(update={"name": "other", "steps": 7, "seed": 9, "lr": 0.5})
    assert program.class_key(request_of(same)) == key
    for change in (
        {"batch": 32},
        {"seq": 32},
        {"max_gpus": 1},
        {"recompute": ["none"]},
        {"gpu_types": ["fake-16"]},
        {"pin": {"data": 2}},
    ):
        assert program.class_key(request_of(first.model_copy(update=change))) != key


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_jobs_through_the_queue(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs.serverless", "--config", str(DEMO), "--out", str(tmp_path / "out")]
    uri = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    done = subprocess.run([*command, uri], cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())["metrics"]
    rows = {row["job_id"]: row for row in metrics["jobs"]}
    memory = {node["name"]: node["memory_bytes"] for node in metrics["nodes"]}
    assert metrics["states"] == {"DONE": 19, "INFEASIBLE": 1}
    assert "lacks" in rows["too-large"]["reason"]
    for name, row in rows.items():
        if row["state"] == "DONE":
            assert row["outcome"]["peak_bytes"] <= min(memory[node] for node in row["nodes"]), name
            assert not any("card out of memory" in line for line in row["history"]), row["history"]
        keys = [attempt["key"] for attempt in row["attempts"]]
        assert row["plan"] not in keys
        assert len(set(keys)) == len(keys)
    assert any(rows[name]["attempts"] for name in ("drifts-0", "drifts-1"))
    assert all(memory_bytes >= 16 * MIB for memory_bytes in memory.values())
