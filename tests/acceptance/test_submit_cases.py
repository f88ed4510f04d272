"""`zenray submit` on a real `ray start --head`: what is refused, what runs, and the exit code of each way to end."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import requests
from typer.testing import CliRunner

from zenray.__main__ import app
from zenray.doctor import examine_cluster
from zenray.environment import code_digest
from zenray.findings import Health
from zenray.job_config import JobConfig
from zenray.package import package_of, tracked_sources
from zenray.submission import SubmissionRefused, submit_entrypoint

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 3.0
MAIN = """
import os, sys
from pathlib import Path
from zenray.environment import DIGEST_VARIABLE, code_digest
print("version 1", sys.argv[1:], code_digest(Path.cwd()) == os.environ[DIGEST_VARIABLE])
"""
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("ready", os.getpid(), child.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def code(tmp_path):
    """A working directory whose name has a blank, a quote and a letter outside of ASCII."""
    folder = tmp_path / "it's \u00fcber code"
    folder.mkdir()
    (folder / "main.py").write_text(MAIN)
    return folder


def submit(client, folder, entrypoint="python main.py", on_line=lambda line: None, **keys):
    """(exit code, what was said)."""
    said = []

    def say(line):
        said.append(line)
        on_line(line)

    config = JobConfig.model_validate({"entrypoint": entrypoint, "working_dir": str(folder), **keys})
    return submit_entrypoint(config, client, say), said


def refused(client, folder, **keys):
    """What was said about a job that was refused; no job was made."""
    said = []
    before = len(client.list_jobs())
    config = JobConfig.model_validate({"entrypoint": "python main.py", "working_dir": str(folder), **keys})
    with pytest.raises(SubmissionRefused):
        submit_entrypoint(config, client, said.append)
    assert len(client.list_jobs()) == before
    return "\n".join(said)


def test_case_01_a_directory_over_100_mib_is_refused_with_what_makes_it_large(jobs_client, code):
    (code / "data").mkdir()
    for index in range(12):
        with (code / "data" / f"part{index}.bin").open("wb") as file:
            file.truncate(9_000_000 + index)
    text = refused(jobs_client, code)
    assert "Ray takes 100 MiB at most" in text
    assert [f"part{index}.bin" in text for index in range(12)] == [False] * 2 + [True] * 10
    assert f"{code}/.rayignore" in text
    assert "\n         /data/" in text
    (code / ".rayignore").write_text("/data/\n")
    assert package_of(code).num_bytes < 1000


def test_case_02_08_a_catch_all_is_refused_and_an_edit_runs_whatever_the_names_hold(jobs_client, code):
    for pattern in ("*", ".*", "**"):
        text = refused(jobs_client, code, excludes=[pattern])
        assert f"excludes: {pattern}" in text
        assert "old code would run" in text
    arguments = """'two words' "it's" \u00e4\u00f6 '$HOME' 'a"b'"""
    digests = []
    for version in ("version 1", "version 2"):
        (code / "main.py").write_text(MAIN.replace("version 1", version))
        ended, said = submit(jobs_client, code, f"python main.py {arguments}")
        assert ended == 0, said
        expected = ["two words", "it's", "\u00e4\u00f6", "$HOME", 'a"b']
        assert any(line == f"{version} {expected} True" for line in said), said
        digests.append(code_digest(code))
        assert any(line.endswith(f"submitted, code {digests[-1][:12]}") for line in said)
        newest = max(jobs_client.list_jobs(), key=lambda job: job.start_time or 0)
        assert newest.metadata["code_sha256"] == digests[-1]
    assert len(set(digests)) == 2


def test_case_03_an_ignore_pattern_that_drops_a_module_is_named(jobs_client, code):
    for name in ("pkg/logging.py", "pkg/build/tool.py"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(code)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True, timeout=30)
    (code / ".gitignore").write_text("build\n")
    (code / "pkg" / ".rayignore").write_text("log*\n")
    text = refused(jobs_client, code)
    assert "2 source files that git tracks would not be uploaded" in text
    assert "pkg/logging.py (by pkg/.rayignore: log*)" in text
    assert "pkg/build/tool.py (by .gitignore: build)" in text


def test_case_03_every_tracked_source_of_this_repository_is_in_its_package():
    tracked = tracked_sources(ROOT)
    if not tracked:
        pytest.skip("this tree is no git repository")
    assert set(tracked) <= {name for name, _ in package_of(ROOT).files}


def test_case_05_a_stopped_job_exits_130_and_a_failed_one_1(jobs_client, code):
    (code / "main.py").write_text(SLEEPER)

    def stop(line):
        if line.startswith("ready"):
            jobs_client.stop_job(max(jobs_client.list_jobs(), key=lambda job: job.start_time or 0).submission_id)

    ended, said = submit(jobs_client, code, on_line=stop)
    assert (ended, said[-1].split(":")[0].split()[-1]) == (130, "STOPPED")
    ended, said = submit(jobs_client, code, "python -c 'raise SystemExit(7)'")
    assert ended == 1
    assert "FAILED: " in said[-1]


def test_case_06_resources_that_no_node_has_are_refused_and_a_busy_node_is_waited_for_until_a_deadline(
    jobs_client, code
):
    text = refused(jobs_client, code, entrypoint_resources={"GPU": 1, "CPU": 1})
    assert re.search(r"no node has GPU 1, CPU 1; the best node, [\d.]+, has GPU 0, CPU 2", text), text
    (code / "main.py").write_text(SLEEPER)
    late = []

    def submit_another(line):
        if line.startswith("ready"):
            late.append(submit(jobs_client, code, entrypoint_resources={"CPU": 1}, start_timeout_s=3.0))
            jobs_client.stop_job(holder[0])

    holder = []
    note = lambda line: holder.append(line.split()[0]) if " submitted, code" in line else submit_another(line)  # noqa: E731
    assert submit(jobs_client, code, on_line=note, entrypoint_resources={"CPU": 2})[0] == 130
    ((ended, said),) = late
    assert ended == 124
    assert "did not start within 3 s and was stopped" in said[-1]


def test_case_07_ctrl_c_ends_the_job_and_all_its_processes(jobs_head, code, wait_until):
    (code / "main.py").write_text(SLEEPER)
    file = code / "job.yaml"
    file.write_text("entrypoint: python main.py\nworking_dir: .\n")
    command = [sys.executable, "-m", "zenray", "submit", str(file)]
    environment = {**os.environ, **jobs_head, "PYTHONPATH": str(ROOT)}
    user = subprocess.Popen(command, cwd=code, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        ready = next(line for line in user.stdout if line.startswith("ready"))
        pids = [int(pid) for pid in ready.split()[1:]]
        assert all(psutil.pid_exists(pid) for pid in pids)
        user.send_signal(signal.SIGINT)
        assert user.wait(120) == 130
        assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 5 * PATIENCE)
    finally:
        if user.poll() is None:
            user.kill()
        user.communicate()


def test_case_39_versions_of_both_sides_are_printed_and_a_patch_apart_is_refused(jobs_client, code, monkeypatch):
    monkeypatch.setattr("zenray.submission.platform.python_version", lambda: "3.11.99")
    text = refused(jobs_client, code)
    ours = ".".join(map(str, sys.version_info[:3]))
    assert f"python: 3.11.99 here, {ours} on the cluster" in text
    assert "ok ray: " in text


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["submit", "job.yaml"]])
def test_case_40_ray_client_is_refused_with_the_line_to_use(command, code, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    monkeypatch.chdir(code)
    Path("job.yaml").write_text("entrypoint: python main.py\n")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    text = result.output + str(result.exception)
    assert "Ray Client" in text


def test_the_token_is_the_lock_and_the_doctor_says_so(jobs_head, jobs_client, monkeypatch):
    from jobs.cluster import reread_auth

    address = jobs_head["RAY_ADDRESS"]
    assert requests.get(f"{address}/api/jobs/", timeout=10).status_code == 401
    token = Path(jobs_head["RAY_AUTH_TOKEN_PATH"]).read_text()
    headers = {"Authorization": f"Bearer {token}"}
    assert requests.get(f"{address}/api/jobs/", headers=headers, timeout=10).status_code == 200
    findings = examine_cluster(address)
    assert {finding.health for finding in findings} == {Health.OK}, findings
    assert "1 nodes, 2 CPUs, 0 GPUs, locked by a token" in findings[0].seen
    (elsewhere,) = examine_cluster("http://127.0.0.1:1")  # what is asked for wins over RAY_ADDRESS
    assert "no Ray head answers at http://127.0.0.1:1" in elsewhere.seen
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    reread_auth()
    (finding,) = examine_cluster(address)
    assert finding.health is Health.BROKEN
    assert "refuses this user" in finding.seen


LOUD = """
import os, ray
from pathlib import Path
ray.init(log_to_driver=False)

@ray.remote
def shout():
    for _ in range(8000):
        print("x" * 999)
    return os.getpid()

pid = ray.get(shout.remote(), timeout=60)
folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
print("bytes", sum(file.stat().st_size for file in folder.glob(f"worker-*-{pid}.*")), flush=True)
"""


def test_case_19_the_log_of_a_worker_is_rotated(jobs_client, code):
    (code / "main.py").write_text(LOUD)
    ended, said = submit(jobs_client, code)
    assert ended == 0, said
    num_bytes = int(next(line for line in said if line.startswith("bytes")).split()[1])
    assert 0 < num_bytes <= 2 * 1_000_000 + 100_000, "8 MB were written, a file and one backup of 1 MB each are kept"
