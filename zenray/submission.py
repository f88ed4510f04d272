"""A plain Ray job, followed to its end: the exit code says how it ended, which `ray job submit` does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from collectives.errors import ConfigError
from zenray.job_config import JobConfig

EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 130}
DEADLINE_CODE = 124
POLL_S = 1.0
STOP_S = 15.0


def run_entrypoint(config: JobConfig, client: Any, say: Callable[[str], None]) -> int:
    """Submit `config.entrypoint` through a JobSubmissionClient and wait; returns the exit code.

    0 SUCCEEDED, 1 FAILED, 130 STOPPED, 124 when `deadline_s` passed, after stopping it.
    """
    if config.entrypoint is None:
        raise ConfigError(f"job '{config.name}' has no entrypoint")
    runtime_env = {"working_dir": config.working_dir, "env_vars": config.env_vars}
    job_id = client.submit_job(entrypoint=config.entrypoint, runtime_env=runtime_env, metadata={"name": config.name})
    say(f"{job_id} submitted")
    started, shown = time.monotonic(), 0
    while True:
        status = str(client.get_job_status(job_id))
        logs = client.get_job_logs(job_id)
        for line in logs[shown:].splitlines():
            say(line)
        shown = len(logs)
        if status in EXIT_CODES:
            say(f"{job_id} {status}")
            return EXIT_CODES[status]
        if config.deadline_s is not None and time.monotonic() - started > config.deadline_s:
            client.stop_job(job_id)
            _wait_for_end(client, job_id)
            say(f"{job_id} did not end within {config.deadline_s:g} s and was stopped")
            return DEADLINE_CODE
        time.sleep(POLL_S)


def _wait_for_end(client: Any, job_id: str) -> None:
    deadline = time.monotonic() + STOP_S
    while str(client.get_job_status(job_id)) not in EXIT_CODES and time.monotonic() < deadline:
        time.sleep(POLL_S)
