"""What the head of a cluster says about itself over the address of the jobs API."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import requests
from ray.job_submission import JobSubmissionClient

from collectives.errors import ConfigError, ZenrayError
from placement.inventory import Inventory, Node

REQUEST_S = 10.0
GCS_PORT = 6379
"""Where `ray start --head` puts the cluster's own address unless told otherwise."""
MAX_ERROR_CHARS = 300
SERVER_VARIABLE = "RAY_API_SERVER_ADDRESS"


class HeadUnreachable(ZenrayError):
    """No Ray head answers, or it refuses this user."""


@dataclass(frozen=True)
class Head:
    """ahead_s: the head's clock minus ours. is_open: it answers without a token."""

    address: str
    ray_version: str
    python_version: str
    inventory: Inventory
    is_healthy: bool
    is_open: bool
    ahead_s: float


def check_address(address: str) -> None:
    """Raises ConfigError for Ray Client, which breaks on other versions and when it reconnects."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is Ray Client, which breaks on other versions of Ray or Python and when it reconnects. Submit a job "
            f"instead: ray job submit --working-dir . --address http://HEAD:8265 -- python -m jobs.NAME ..., or give zenray "
            f"that address"
        )


def check_cluster_address(address: str) -> None:
    """Raises ConfigError for what `ray.init` cannot join: Ray Client, the address of the jobs API, and no address."""
    check_address(address)
    try:
        _ = urlsplit(f"//{address}").port
    except ValueError:
        raise ConfigError(f"'{address}' is no address of a cluster; set RAY_ADDRESS to HOST:PORT") from None
    if address.startswith(("http://", "https://")):
        host = urlsplit(address).hostname or "HOST"
        raise ConfigError(
            f"{address} is the jobs API of a cluster; only whole programs are submitted to it (ray job submit, or zenray "
            f"submit with an `entrypoint`). To join the cluster, set RAY_ADDRESS to its own address, HOST:PORT as "
            f"`ray start --head` printed it, usually {host}:{GCS_PORT}"
        )


def connect_head(address: str | None) -> Any:
    """A JobSubmissionClient; None: the cluster of RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else the one on this host.

    An address that is given wins over the environment; with Ray's own client it would lose.
    Raises HeadUnreachable, or ConfigError for an address of Ray Client.
    """
    named = address or os.environ.get(SERVER_VARIABLE) or os.environ.get("RAY_ADDRESS") or "this host"
    check_address(named)
    try:
        with _preferred(address):
            return JobSubmissionClient(address)
    except Exception as error:  # Ray raises bare RuntimeErrors, ConnectionErrors, and its own AuthenticationError
        text = _shortened(str(error))
        if "uthenticat" in type(error).__name__ + text or "401" in text:
            raise HeadUnreachable(
                f"the Ray head of {named} refuses this user: {text}. Give the token of the cluster in RAY_AUTH_TOKEN, "
                f"or its file in RAY_AUTH_TOKEN_PATH, and set RAY_AUTH_MODE=token"
            ) from None
        raise HeadUnreachable(
            f"no Ray head answers at {named}: {text}. Start one (ray start --head), or give the address of its "
            f"dashboard, http://HOST:8265, in RAY_ADDRESS"
        ) from None


def _shortened(text: str) -> str:
    """On one line, cut between words, without the full stop at its end."""
    return textwrap.shorten(text.strip().rstrip("."), MAX_ERROR_CHARS, placeholder=" [...]")


@contextmanager
def _preferred(address: str | None) -> Iterator[None]:
    before = os.environ.get(SERVER_VARIABLE)
    if address is not None:
        os.environ[SERVER_VARIABLE] = address
    try:
        yield
    finally:
        if before is not None:
            os.environ[SERVER_VARIABLE] = before
        elif address is not None:
            del os.environ[SERVER_VARIABLE]


def read_head(client: Any) -> Head:
    """Ask the head. Raises HeadUnreachable."""
    try:
        before = time.time()
        version = client._do_request("GET", "/api/version", timeout=REQUEST_S)
        ours = (before + time.time()) / 2
        metadata = client._do_request("GET", "/api/v0/cluster_metadata", timeout=REQUEST_S).json()["data"]
        nodes = client._do_request("GET", "/api/v0/nodes?detail=1", timeout=REQUEST_S).json()["data"]["result"][
            "result"
        ]
        healthy = client._do_request("GET", "/api/gcs_healthz", timeout=REQUEST_S)
        address = client.get_address()
        open_answer = requests.get(f"{address}/api/jobs/", timeout=REQUEST_S)
    except (requests.RequestException, RuntimeError, KeyError, ValueError) as error:
        raise HeadUnreachable(
            f"the Ray head stopped answering: {type(error).__name__}: {_shortened(str(error))}. Look into its dashboard.log"
        ) from None
    return Head(
        address=address,
        ray_version=version.json()["ray_version"],
        python_version=metadata.get("pythonVersion", "unknown"),
        inventory=Inventory(tuple(_node(row) for row in nodes if row["state"] == "ALIVE")),
        is_healthy=healthy.status_code == 200,
        is_open=open_answer.status_code == 200,
        ahead_s=_server_time(version.headers) - ours,
    )


def _node(row: Mapping[str, Any]) -> Node:
    total = row["resources_total"]
    return Node(row["node_id"], row["node_ip"], total, total, row.get("labels") or {})


def _server_time(headers: Mapping[str, str]) -> float:
    """The Date of an answer has whole seconds; half a second more is nearest on average."""
    return parsedate_to_datetime(headers["Date"]).timestamp() + 0.5
