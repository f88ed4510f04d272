"""A plain Ray job: checked, submitted and followed to its end; the exit code says how it ended, unlike Ray's own.

Nothing is uploaded when a check says that the job cannot work. The job is told the digest of its code, so that it can
compare what it got; what is shown of its log is cut and free of secrets.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from collectives.errors import ConfigError
from placement.inventory import Inventory, gpu_nodes
from placement.plans import PlanList
from zenray import preflight
from zenray.environment import DIGEST_VARIABLE
from zenray.findings import Finding, is_broken
from zenray.head import HeadUnreachable, read_head
from zenray.job_config import JobConfig
from zenray.package import Package, package_of, tracked_sources
from zenray.planning import plan
from zenray.redact import redact, redact_text

EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 130}
DEADLINE_CODE = 124
POLL_S = 1.0
STOP_S = 15.0
SILENCE_S = 60.0
"""A head that does not answer for so long is taken for gone."""
MAX_LOG_CHARS = 2_000_000
"""What is shown of a job's log; the rest is where Ray keeps it."""
Say = Callable[[str], None]


class SubmissionRefused(ConfigError):
    """A check found what would keep the job from working; nothing was uploaded."""


def submit_entrypoint(config: JobConfig, client: Any, say: Say) -> int:
    """Check, submit and follow; returns the exit code of `follow`. Raises SubmissionRefused or HeadUnreachable."""
    package = package_of(Path(config.working_dir), config.excludes)
    findings = check(config, package, client)
    for finding in findings:
        say(str(finding))
    if is_broken(findings):
        raise SubmissionRefused("nothing was submitted; see what is marked as broken above")
    for attempt in range(config.max_retries + 1):
        code = follow(config, client, submit(config, package, client, say), say)
        if code != EXIT_CODES["FAILED"] or attempt == config.max_retries:
            break
        say(f"retry {attempt + 1} of {config.max_retries}")
    return code


def check(config: JobConfig, package: Package, client: Any) -> list[Finding]:
    """Everything that can be known before the upload. Raises HeadUnreachable."""
    assert config.entrypoint is not None
    folder = tempfile.gettempdir()
    findings = [
        *preflight.check_package(package, tracked_sources(package.folder)),
        preflight.check_space(package, shutil.disk_usage(folder).free, folder),
        *preflight.check_entrypoint(config.entrypoint, config.env_vars),
    ]
    head = read_head(client)
    here = {"ray": version("ray"), "python": platform.python_version()}
    findings += [
        *preflight.check_versions(here, {"ray": head.ray_version, "python": head.python_version}),
        preflight.check_clock(head.ahead_s),
        preflight.check_resources(config.entrypoint_resources, head.inventory),
    ]
    if config.model is not None:
        findings.append(_check_memory(config, head.inventory))
    return findings


def _check_memory(config: JobConfig, inventory: Inventory) -> Finding:
    cards = sorted({node.gpu.name for node in gpu_nodes(inventory)})
    return preflight.check_memory(plan(config, inventory) if cards else PlanList((), ()), cards)


def submit(config: JobConfig, package: Package, client: Any, say: Say) -> str:
    """Upload and start; returns the id. Secrets stay out of the metadata, which every user of the dashboard sees."""
    digest, need = package.digest(), dict(config.entrypoint_resources)
    job_id = str(
        client.submit_job(
            entrypoint=config.entrypoint,
            runtime_env={
                "working_dir": str(package.folder),
                "excludes": list(config.excludes),
                "env_vars": {**config.env_vars, DIGEST_VARIABLE: digest},
            },
            metadata={"name": config.name, "code_sha256": digest, "env_vars": str(redact(config.env_vars))},
            entrypoint_num_cpus=need.pop("CPU", None),
            entrypoint_num_gpus=need.pop("GPU", None),
            entrypoint_memory=int(need.pop("memory", 0)) or None,
            entrypoint_resources=need or None,
        )
    )
    say(f"{job_id} submitted, code {digest[:12]}")
    return job_id


def follow(config: JobConfig, client: Any, job_id: str, say: Say) -> int:
    """Show the job's log and wait: 0 SUCCEEDED, 1 FAILED, 130 STOPPED, also by Ctrl-C here; 124 when `deadline_s` passed,
    or `start_timeout_s` before the entrypoint ran. Whatever ends the wait early stops the job.

    Raises HeadUnreachable when the head has not answered for a while; the job may still run then.
    """
    started, log = time.monotonic(), _Log(say)
    answered, status = started, ""
    try:
        while True:
            try:
                status = str(client.get_job_status(job_id))
                log.show(client.get_job_logs(job_id))
                answered = time.monotonic()
            except (RuntimeError, OSError) as error:  # those of requests are OSErrors
                if time.monotonic() - answered > SILENCE_S:
                    raise HeadUnreachable(
                        f"the head has not answered for {SILENCE_S:g} s ({type(error).__name__}); {job_id} may still run: "
                        f"ask with `ray job status {job_id}`"
                    ) from None
            waited_s = time.monotonic() - started
            if status in EXIT_CODES:
                message = "" if status == "SUCCEEDED" else f": {_message(client, job_id)}"
                say(f"{job_id} {status}{message}")
                return EXIT_CODES[status]
            if status == "PENDING" and waited_s > config.start_timeout_s:
                why = _message(client, job_id)
                _stop(client, job_id)
                say(f"{job_id} did not start within {config.start_timeout_s:g} s and was stopped: {why}")
                return DEADLINE_CODE
            if config.deadline_s is not None and waited_s > config.deadline_s:
                _stop(client, job_id)
                say(f"{job_id} did not end within {config.deadline_s:g} s and was stopped")
                return DEADLINE_CODE
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        _stop(client, job_id)
        say(f"{job_id} was stopped")
        return EXIT_CODES["STOPPED"]


class _Log:
    """Shows what is new of a log, up to MAX_LOG_CHARS in all."""

    def __init__(self, say: Say):
        self._say, self._shown = say, 0

    def show(self, text: str) -> None:
        fresh, left = text[self._shown :], MAX_LOG_CHARS - self._shown
        for line in fresh[: max(left, 0)].splitlines():
            self._say(redact_text(line))
        if 0 < left < len(fresh):
            self._say(f"[the log is longer than {MAX_LOG_CHARS} characters: the rest is shown by `ray job logs`]")
        self._shown = len(text)


def _message(client: Any, job_id: str) -> str:
    """What Ray says about a job that does not run, on one line."""
    return redact_text(" ".join(str(client.get_job_info(job_id).message or "no reason is given").split())[:2000])


def _stop(client: Any, job_id: str) -> None:
    """Stop it and wait until it has ended."""
    client.stop_job(job_id)
    deadline = time.monotonic() + STOP_S
    while str(client.get_job_status(job_id)) not in EXIT_CODES and time.monotonic() < deadline:
        time.sleep(POLL_S)
