"""How a command reaches the queue that runs on a cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import ray

from collectives.errors import ZenrayError
from zenray.head import check_cluster_address

SCHEDULER_NAME = "zenray/scheduler"
SCHEDULER_NAMESPACE = "zenray"
CALL_S = 60.0
ANSWER_S = 3.0
"""For a cluster to accept a connection."""


class QueueMissing(ZenrayError):
    """No queue runs on the cluster."""


@contextmanager
def connected() -> Iterator[QueueClient]:
    """The queue of the cluster of RAY_ADDRESS, or of the one on this host; connected while the block runs.

    Raises QueueMissing, or ConfigError for an address that cannot be joined.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    check_cluster_address(address)
    try:
        if (place := urlsplit(f"//{address}")).port is not None:  # Ray itself waits more than a minute for nobody
            socket.create_connection((place.hostname or "", place.port), timeout=ANSWER_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ray.exceptions.RaySystemError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        where = "on this host" if address == "auto" else f"at {address}"
        raise QueueMissing(f"no Ray cluster answers {where}: {why}. Set RAY_ADDRESS, or start the queue.") from None
    try:
        yield QueueClient()
    finally:
        ray.shutdown()


class QueueClient:
    """The queue of the connected cluster. Raises QueueMissing if there is none."""

    def __init__(self) -> None:
        try:
            self._actor = ray.get_actor(SCHEDULER_NAME, namespace=SCHEDULER_NAMESPACE)
        except ValueError:
            raise QueueMissing(
                "no queue runs on this cluster; start one with `python -m jobs.serverless serve=true`, as a Ray job if it is "
                "to outlive this terminal"
            ) from None

    def submit(self, request: dict[str, Any]) -> str:
        """Queue a job; returns its id."""
        return str(self._call("submit", request))

    def status(self, job_id: str) -> dict[str, Any]:
        """Everything known of a job."""
        found: dict[str, Any] = self._call("status", job_id)
        return found

    def jobs(self) -> list[dict[str, Any]]:
        """One row a job."""
        rows: list[dict[str, Any]] = self._call("jobs")
        return rows

    def cancel(self, job_id: str) -> str:
        """End a job; returns its state."""
        return str(self._call("cancel", job_id))

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=CALL_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ZenrayError):
                raise error.cause from None
            raise
