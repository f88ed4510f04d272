"""What is checked before a job is submitted, what is submitted, and the exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placement.inventory import Inventory, Node
from zenray.environment import DIGEST_VARIABLE, code_digest
from zenray.findings import Health
from zenray.head import HeadUnreachable
from zenray.job_config import JobConfig, PlanConfig
from zenray.package import package_of
from zenray.planning import plan
from zenray.preflight import check_clock, check_entrypoint, check_memory, check_resources, check_space, check_versions
from zenray.submission import DEADLINE_CODE, MAX_LOG_CHARS, SubmissionRefused, submit_entrypoint

Make = Callable[..., Any]
MODEL = {"layers": 2, "hidden": 64, "heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    code = tmp_path / "a folder"
    code.mkdir()
    (code / "main.py").write_text("print(1)\n")
    return code


def run(folder: Path, client: Any, **keys: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    config = JobConfig.model_validate({"name": "a", "entrypoint": "python main.py", "working_dir": str(folder), **keys})
    return submit_entrypoint(config, client, said.append), said


@pytest.mark.parametrize(("end", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("STOPPED", 130)])
def test_case_05_the_exit_code_says_how_a_job_ended(folder: Path, fake_client: Make, end: str, code: int) -> None:
    client = fake_client("PENDING", "RUNNING", end, message="driver exited")
    found, said = run(folder, client)
    assert found == code
    assert said[-3:] == ["line one", "line two", f"raysubmit_1 {end}" + ("" if code == 0 else ": driver exited")]


def test_what_is_submitted_names_the_code_and_hides_secrets_in_the_metadata(folder: Path, fake_client: Make) -> None:
    client = fake_client()
    client.log = "Authorization: Bearer abcdef\n"
    resources = {"CPU": 1.0, "memory": 1e9, "slot": 1.0}
    node = {
        "node_id": "a",
        "node_ip": "h",
        "state": "ALIVE",
        "resources_total": {"CPU": 2.0, "memory": 2e9, "slot": 1.0},
    }
    client._nodes = [node]
    _, said = run(folder, client, env_vars={"API_TOKEN": "s3cret", "A": "1"}, entrypoint_resources=resources)
    (sent,) = client.submitted
    digest = code_digest(folder)
    assert sent["runtime_env"]["env_vars"] == {"API_TOKEN": "s3cret", "A": "1", DIGEST_VARIABLE: digest}
    assert (sent["metadata"]["code_sha256"], sent["metadata"]["name"]) == (digest, "a")
    assert "s3cret" not in str(sent["metadata"])
    assert (sent["entrypoint_num_cpus"], sent["entrypoint_memory"]) == (1.0, 1_000_000_000)
    assert sent["entrypoint_resources"] == {"slot": 1.0}
    assert any("env_vars API_TOKEN can be read" in line for line in said)
    assert not any("s3cret" in line or "abcdef" in line for line in said)


def test_a_job_that_fails_is_retried_as_often_as_asked(folder: Path, fake_client: Make) -> None:
    client = fake_client("FAILED", "FAILED", "SUCCEEDED")
    assert run(folder, client, max_retries=2)[0] == 0
    assert len(client.submitted) == 3
    client = fake_client("FAILED")
    assert run(folder, client, max_retries=1)[0] == 1
    assert len(client.submitted) == 2


@pytest.mark.parametrize(
    ("state", "keys", "words"),
    [
        ("RUNNING", {"deadline_s": 1e-6}, "did not end within"),
        (
            "PENDING",
            {"start_timeout_s": 1e-6},
            "did not start within 1e-06 s and was stopped: waits for an environment",
        ),
    ],
)
def test_case_04_06_deadlines_stop_the_job_and_say_why_it_did_not_start(
    folder: Path, fake_client: Make, state: str, keys: dict[str, Any], words: str
) -> None:
    client = fake_client(state, message="waits for an environment")
    code, said = run(folder, client, **keys)
    assert code == DEADLINE_CODE
    assert client.stopped
    assert words in said[-1]


def test_a_head_that_is_silent_for_a_moment_is_forgiven_and_a_dead_one_is_an_error(
    folder: Path, fake_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = fake_client()
    answers = iter([ConnectionError("reset"), RuntimeError("503"), "SUCCEEDED"])

    def status(job_id: str) -> str:
        answer = next(answers, ConnectionError("refused"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    client.get_job_status = status
    assert run(folder, client)[0] == 0
    monkeypatch.setattr("zenray.submission.SILENCE_S", 0.0)
    with pytest.raises(HeadUnreachable, match="raysubmit_2 may still run"):
        run(folder, client)


def test_case_19_a_long_log_is_cut(folder: Path, fake_client: Make) -> None:
    client = fake_client("RUNNING", "SUCCEEDED")
    client.log = "x" * 99 + "\n"
    client.log *= 2 * MAX_LOG_CHARS // 100
    _, said = run(folder, client)
    assert sum(len(line) + 1 for line in said) < MAX_LOG_CHARS + 2000
    assert any("the rest is shown by `ray job logs`" in line for line in said)


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({"entrypoint": "python main.py --password=hunter2"}, {}, "holds a secret"),
        ({"entrypoint": "uv run --with x -- python main.py"}, {}, "uv run --active main.py"),
        ({"entrypoint_resources": {"GPU": 1}}, {}, "the best node, 10.0.0.1, has GPU 0"),
        ({"entrypoint_resources": {"CPU": 64}}, {"nodes": []}, "there is no node"),
        ({}, {"ray": "2.59.0"}, "2.59.0 on the cluster"),
        ({}, {"python": "3.11.2"}, "3.11.2 on the cluster"),
    ],
)
def test_case_04_06_39_what_cannot_work_is_refused_before_the_upload(
    folder: Path, fake_client: Make, keys: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    client = fake_client(**options)
    said: list[str] = []
    config = JobConfig.model_validate({"entrypoint": "python main.py", "working_dir": str(folder), **keys})
    with pytest.raises(SubmissionRefused):
        submit_entrypoint(config, client, said.append)
    assert client.submitted == []
    text = "\n".join(said)
    assert words in text
    assert "hunter2" not in text


def closed_form(job: JobConfig, cards: Any) -> Any:
    """The planner without its trace, which takes seconds."""
    own = {"model": job.model, "batch": job.batch, "seq": job.seq, "max_gpus": 1, "recompute": ["none"]}
    return plan(PlanConfig.model_validate(own), cards)


def test_a_model_that_fits_no_card_is_refused_and_one_that_does_is_shown(
    folder: Path, fake_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zenray.submission.plan", closed_form)

    def node(mib: int) -> dict[str, Any]:
        total, labels = {"CPU": 4.0, "zenray_fake_gpu": 1.0}, {"zenray.io/fake-gpu-mib": str(mib)}
        return {"node_id": "a", "node_ip": "h", "state": "ALIVE", "resources_total": total, "labels": labels}

    keys: dict[str, Any] = {"model": MODEL, "batch": 16, "seq": 64, "max_gpus": 1}
    with pytest.raises(SubmissionRefused):
        run(folder, fake_client(nodes=[node(2)]), **keys)
    _, said = run(folder, fake_client(nodes=[node(64)]), **keys)
    assert any("memory: fits 1 x fake-64" in line for line in said)
    _, said = run(folder, fake_client(), **keys)
    assert any("the cards of the cluster are not known" in line for line in said)


def test_checks_say_ok_too() -> None:
    inventory = Inventory((Node("a", "h", {"CPU": 2.0}, {}),))
    assert check_resources({"CPU": 2}, inventory).health is Health.OK
    assert check_resources({}, Inventory(())).health is Health.OK
    assert [f.health for f in check_versions({"ray": "1"}, {"ray": "1"})] == [Health.OK]
    assert (check_clock(1.0).health, check_clock(-60.0).health) == (Health.OK, Health.WARN)
    assert "60.0 s behind" in check_clock(-60.0).seen
    assert [f.health for f in check_entrypoint("uv run main.py", {"A": "b"})] == [Health.OK]
    job = JobConfig.model_validate({"model": MODEL, "batch": 4, "seq": 32, "max_gpus": 1})
    assert check_memory(closed_form(job, ["fake-1"]), ["fake-1"]).health is Health.BROKEN
    assert "lacks" in check_memory(closed_form(job, ["fake-1"]), ["fake-1"]).fix


def test_a_full_temporary_disk_is_seen_before_ray_fills_it(folder: Path) -> None:
    (folder / "data.bin").write_bytes(bytes(3 << 20))
    finding = check_space(package_of(folder), 1 << 20, "/tmp")
    assert finding.health is Health.BROKEN
    assert "1.0 MiB are free in /tmp, the package takes 3.0" in finding.seen
