"""The queue as a job: its demonstration, whole and as a file."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import actors

from jobs import serverless
from jobs.job import run_job
from jobs.nodes import local_nodes
from jobs.serverless_config import ServerlessConfig
from placement.queue import JobState
from zenray.config import load
from zenray.job_config import request_of
from zenray.queue_client import SCHEDULER_NAME, SCHEDULER_NAMESPACE
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


def test_neither_jobs_nor_serve_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job("serverless", ServerlessConfig, serverless.serve, ["--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "--config jobs/configs/serverless.yaml, or serve=true" in told.out + told.err


class Saboteur(threading.Thread):
    """Kills the scheduler's process, and with it a node that runs a job, once a third of the jobs are done."""

    def __init__(self, nodes: Any):
        super().__init__(daemon=True)
        self.nodes, self.said, self.hit = nodes, "", ""

    def run(self) -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not self.hit:
            time.sleep(0.2)
            try:
                actor = ray.get_actor(SCHEDULER_NAME, namespace=SCHEDULER_NAMESPACE)
                rows = ray.get(actor.jobs.remote(), timeout=30)
                waiting = [row["job_id"] for row in rows if row["state"] == JobState.QUEUED]
                running = [row for row in rows if row["state"] == JobState.RUNNING and row["done_steps"]]
                if waiting and not self.said.startswith("QUEUED"):
                    self.said = ray.get(actor.explain.remote(waiting[0]), timeout=30)
                if sum(row["state"] == JobState.DONE for row in rows) >= 6 and running:
                    self.hit = running[0]["job_id"]
                    os.kill(int(actors()[actor._actor_id.hex()]["Pid"]), signal.SIGKILL)
                    self.nodes.remove(running[0]["nodes"][0])
            except (ValueError, ray.exceptions.RayError):
                continue


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_jobs_lose_nothing_when_the_scheduler_and_a_node_are_killed_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saboteurs: list[Saboteur] = []

    @contextmanager
    def fragile_nodes(num_nodes: int) -> Iterator[Any]:
        with local_nodes(num_nodes) as nodes:
            saboteurs.append(Saboteur(nodes))
            saboteurs[0].start()
            yield nodes

    monkeypatch.setattr(serverless, "local_nodes", fragile_nodes)
    out, uri = tmp_path / "out", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    assert (
        run_job("serverless", ServerlessConfig, serverless.serve, ["--config", str(DEMO), "--out", str(out), uri]) == 0
    )
    [saboteur] = saboteurs
    metrics = json.loads((out / "result.json").read_text())["metrics"]
    rows = {row["job_id"]: row for row in metrics["jobs"]}
    assert metrics["states"] == {"DONE": 19, "INFEASIBLE": 1}, {name: row["history"] for name, row in rows.items()}
    assert len(metrics["nodes"]) == 4, "one of the five nodes was killed"
    assert saboteur.said.startswith("QUEUED: ")
    assert " are missing (" in saboteur.said
    assert rows[saboteur.hit]["starts"] >= 2
    assert any("the scheduler was restarted" in line for line in rows[saboteur.hit]["history"])
    assert "lacks" in rows["too-large"]["reason"]
    assert "add a node with larger cards" in rows["too-large"]["reason"]
    memory = {node["name"]: node["memory_bytes"] for node in metrics["nodes"]}
    for name, row in rows.items():
        if row["state"] == "DONE":
            assert row["done_steps"] == row["request"]["steps"]
            cards = [memory[node] for node in row["nodes"] if node in memory]  # the lost node is not listed
            assert row["outcome"]["peak_bytes"] <= min(cards, default=math.inf), name
            assert not any("card out of memory" in line for line in row["history"]), row["history"]
        keys = [attempt["key"] for attempt in row["attempts"]]
        assert row["plan"] not in keys
        assert len(set(keys)) == len(keys)
    assert any(rows[name]["attempts"] for name in ("drifts-0", "drifts-1"))
