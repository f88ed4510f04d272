"""`python -m jobs.serverless --config jobs/configs/serverless.yaml`: jobs that name no GPU, one queue, a cluster.

Shows what happens while it happens, one line a change, and ends with a table: which plan each job got, on which card,
how much memory was predicted and seen, and how long it waited.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.scheduler import JobScheduler
from collectives.errors import ConfigError
from jobs.cluster import connect, wait_for_nodes
from jobs.job import Run, run_job
from jobs.nodes import START_S, local_nodes
from jobs.serverless_config import ServerlessConfig
from placement.catalogue import MIB
from placement.queue import OVER, JobState
from zenray.job_config import request_of
from zenray.queue_client import SCHEDULER_NAME, SCHEDULER_NAMESPACE
from zenray.queue_program import QueueProgram
from zenray.recorder import Recorder, RunRecord

POLL_S = 0.5
CALL_S = 60.0
MAX_REASON = 60
"""Characters of a reason in the table."""
SETTLED = OVER | {JobState.INFEASIBLE}


@contextmanager
def cluster_of(config: ServerlessConfig, run: Run) -> Iterator[None]:
    """The cluster to run on, connected."""
    if not config.fake_nodes:
        with connect() as cluster:
            run.say(f"joined the cluster at {cluster.address}")
            yield
        return
    run.say(f"{len(config.fake_nodes)} Ray nodes with pretended cards on this machine; starting them takes a while")
    with local_nodes(0) as nodes:
        for node in config.fake_nodes:
            nodes.add_fake_gpus(node.gpus, node.memory_mib)
        wait_for_nodes(len(config.fake_nodes) + 1, timeout_s=START_S)
        yield


@contextmanager
def scheduler_of(folder: Path, config: ServerlessConfig) -> Iterator[Any]:
    """The queue's actor. Ray restarts it when it dies, and it goes on from its folder; ends with this process."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor_class: Any = ray.remote(JobScheduler)
    options = {"max_restarts": -1, "max_task_retries": 3, "num_cpus": 0, "scheduling_strategy": here}
    actor = actor_class.options(name=SCHEDULER_NAME, namespace=SCHEDULER_NAMESPACE, **options).remote(
        str(folder), QueueProgram(), f"torch-{version('torch')}", config.patience_s, config.residence_s
    )
    try:
        yield actor
    finally:
        ray.get(actor.close.remote(), timeout=CALL_S)
        ray.kill(actor)


def serve(config: ServerlessConfig, run: Run) -> dict[str, Any]:
    """The job: cluster, queue, progress, table. Raises ConfigError without jobs and without `serve`."""
    if not config.jobs and not config.serve:
        raise ConfigError(
            "there is nothing to do: give jobs, such as --config jobs/configs/serverless.yaml, or serve=true to stay and "
            "take those of `zenray submit`"
        )
    folder = Path(config.folder) if config.folder else run.out / "queue"
    with (
        cluster_of(config, run),
        Recorder(config.tracking.project, config.tracking.uri, run.out.parent / ".spool", run.say) as recorder,
        recorder.job(
            "serverless",
            config=config.model_dump(mode="json"),
            params={"jobs": len(config.jobs), "serve": config.serve},
            tags={"zenray.job": run.name, "out": run.out.resolve()},
        ) as record,
        scheduler_of(folder.resolve(), config) as actor,
    ):
        known = {row["job_id"] for row in ray.get(actor.jobs.remote(), timeout=CALL_S)}
        for job in config.jobs:
            if job.name not in known:
                ray.get(actor.submit.remote(request_of(job)), timeout=CALL_S)
        rows = follow(actor, config, run, record)
        run.say(f"browse the record: {recorder.ui_command()}")
        nodes = ray.get(actor.inventory.remote(), timeout=CALL_S)
    show(rows, run)
    return {"jobs": rows, "nodes": nodes, "states": count_states(rows)}


def follow(actor: Any, config: ServerlessConfig, run: Run, record: RunRecord) -> list[dict[str, Any]]:
    """Print every change and record every end, until all jobs are settled or the time is up; returns the last rows."""
    shown: dict[str, str] = {}
    recorded: set[str] = set()
    deadline = time.monotonic() + config.timeout_s
    while True:
        rows: list[dict[str, Any]] = ray.get(actor.jobs.remote(), timeout=CALL_S)
        for row in rows:
            last, lines = shown.get(row["job_id"]), row["history"]
            for line in lines[lines.index(last) + 1 :] if last in lines else lines:
                run.say(f"{row['job_id']:>14} {line}")
                shown[row["job_id"]] = line
            if row["state"] in OVER and row["job_id"] not in recorded:
                recorded.add(row["job_id"])
                record_job(row, record)
        settled = all(row["state"] in SETTLED for row in rows)
        if (settled and not config.serve) or (time.monotonic() > deadline and not config.serve):
            return rows
        time.sleep(POLL_S)


def record_job(row: Mapping[str, Any], record: RunRecord) -> None:
    """One job as a run of its own: its plan, its losses, and its memory against the prediction."""
    outcome = row["outcome"]
    params = {"state": str(row["state"]), "plan": row["plan"], "starts": row["starts"], "replans": len(row["attempts"])}
    with record.child(row["job_id"], params, {"why": row["reason"]}) as child:
        child.document("job.json", row)
        numbers = ("peak_bytes", "predicted_bytes", "upper_bytes", "sampling_share")
        child.metrics({name: outcome[name] for name in numbers if name in outcome})
        for step, peak_bytes in outcome.get("peaks", []):
            child.metrics({"step_peak_bytes": peak_bytes}, step=step)
        every = max(1, row["request"]["steps"] // max(1, len(outcome.get("losses", []))))
        for index, loss in enumerate(outcome.get("losses", [])):
            child.metrics({"loss": loss}, step=index * every)


def count_states(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Jobs by state."""
    states = [str(row["state"]) for row in rows]
    return {state: states.count(state) for state in sorted(set(states))}


def show(rows: list[dict[str, Any]], run: Run) -> None:
    """The closing table."""
    columns = (
        "job",
        "state",
        "plan",
        "starts",
        "re-planned",
        "waited s",
        "ran s",
        "predicted MiB",
        "peak MiB",
        "last loss",
        "why",
    )
    run.table("Jobs", columns, [_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    outcome, start_s, end_s = row["outcome"], row["start_s"], row["end_s"]
    return (
        row["job_id"],
        str(row["state"]),
        row["plan"],
        row["starts"],
        len(row["attempts"]),
        None if start_s is None else start_s - row["submit_s"],
        None if start_s is None or end_s is None else end_s - start_s,
        outcome["predicted_bytes"] / MIB if outcome else None,
        outcome["peak_bytes"] / MIB if outcome else None,
        outcome.get("last_loss"),
        _cut(row["reason"]),
    )


def _cut(reason: str) -> str:
    """The beginning of a long reason; result.json has all of it."""
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."


def main() -> int:
    """Entry point."""
    return run_job("serverless", ServerlessConfig, serve)


if __name__ == "__main__":
    sys.exit(main())
