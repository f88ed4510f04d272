"""A jobs API without a cluster."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

Replies = Mapping[str, Any]
NODE = {
    "node_id": "a",
    "node_ip": "10.0.0.1",
    "state": "ALIVE",
    "labels": {},
    "resources_total": {"CPU": 4.0, "memory": 8e9},
}


class FakeClient:
    """Goes through `states`, one a question, and stays at the last; answers of the head may be replaced."""

    def __init__(self, *states: str, ray: str, python: str, nodes: list[dict[str, Any]], message: str = ""):
        self.states, self.message, self.stopped = list(states), message, False
        self.log = "line one\nline two\n"
        self.submitted: list[dict[str, Any]] = []
        self._ray, self._python, self._nodes = ray, python, nodes

    def submit_job(self, **arguments: Any) -> str:
        self.submitted.append(arguments)
        return f"raysubmit_{len(self.submitted)}"

    def get_job_status(self, job_id: str) -> str:
        if self.stopped:
            return "STOPPED"
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def get_job_logs(self, job_id: str) -> str:
        return self.log

    def get_job_info(self, job_id: str) -> Any:
        return SimpleNamespace(message=self.message)

    def stop_job(self, job_id: str) -> None:
        self.stopped = True

    def get_address(self) -> str:
        return "http://127.0.0.1:1"

    def _do_request(self, method: str, path: str, **options: Any) -> Any:
        bodies = {
            "/api/version": {"ray_version": self._ray},
            "/api/v0/cluster_metadata": {"data": {"pythonVersion": self._python}},
            "/api/v0/nodes?detail=1": {"data": {"result": {"result": self._nodes}}},
            "/api/gcs_healthz": {},
        }
        from email.utils import formatdate

        return SimpleNamespace(status_code=200, headers={"Date": formatdate(usegmt=True)}, json=lambda: bodies[path])


@pytest.fixture
def fake_client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeClient]:
    """fake_client(*states, ray=, python=, nodes=, message=): versions are ours unless given."""
    import platform
    from importlib.metadata import version

    monkeypatch.setattr("zenray.submission.POLL_S", 0.0)
    monkeypatch.setattr("zenray.head.requests.get", lambda *_, **__: SimpleNamespace(status_code=401))

    def make(*states: str, **options: Any) -> FakeClient:
        defaults = {"ray": version("ray"), "python": platform.python_version(), "nodes": [NODE]}
        return FakeClient(*states or ("SUCCEEDED",), **{**defaults, **options})

    return make
