"""`zenray doctor`: each check by its facts, and the command on a machine that really is broken."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from placement.inventory import Inventory, Node
from zenray import doctor
from zenray.doctor import GIB
from zenray.findings import Finding, Health
from zenray.head import Head

ROOT = Path(__file__).resolve().parents[2]
OK, WARN, BROKEN = Health.OK, Health.WARN, Health.BROKEN
TORCH: Mapping[str, Any] = {"version": "2.13", "gloo": True, "nccl": False, "cuda": False, "cards": 0, "cupy": None}
CARD = {**TORCH, "nccl": True, "cuda": True, "cards": 1, "cupy": "14.0"}
NODES = Inventory((Node("a", "10.0.0.1", {"CPU": 8.0, "GPU": 1.0}, {}),))
CANNOT_UNSHARE = os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("mount") is None


def healths(found: Finding | list[Finding]) -> list[Health]:
    return [finding.health for finding in (found if isinstance(found, list) else [found])]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (doctor.check_python(("3", "11", "7")), [OK]),
        (doctor.check_python(("3", "10", "9")), [BROKEN]),
        (doctor.check_torch(TORCH), [OK]),
        (doctor.check_torch(CARD), [OK]),
        (doctor.check_torch({"error": "no libtorch.so"}), [BROKEN]),
        (doctor.check_torch({**TORCH, "gloo": False}), [BROKEN]),
        (doctor.check_torch({**TORCH, "cards": 2}), [BROKEN]),
        (doctor.check_torch({**CARD, "nccl": False, "cupy": None}), [WARN, WARN]),
        (doctor.check_threads({}, 8), [WARN]),
        (doctor.check_threads({"OMP_NUM_THREADS": "4"}, 8), [WARN]),
        (doctor.check_threads({"OMP_NUM_THREADS": "1"}, 8), [OK]),
        (doctor.check_threads({}, 1), [OK]),
        (doctor.check_shm(4 * GIB), [OK]),
        (doctor.check_shm(GIB), [WARN]),
        (doctor.check_shm(64 << 20), [BROKEN]),
        (doctor.check_shm(0), [BROKEN]),
        (doctor.check_disk("/x", 50 * GIB, 100 * GIB), [OK]),
        (doctor.check_disk("/x", 4 * GIB, 100 * GIB), [WARN]),
        (doctor.check_disk("/x", GIB // 2, GIB), [BROKEN]),
        (doctor.check_files((1024, 1024)), [BROKEN]),
        (doctor.check_files((20_000, -1)), [WARN]),
        (doctor.check_files((65_536, 65_536)), [OK]),
        (doctor.check_files((-1, -1)), [OK]),
        (doctor.check_interface({}, ["lo", "eth0"], "10.0.0.2"), [OK]),
        (doctor.check_interface({"GLOO_SOCKET_IFNAME": "eth1"}, ["lo", "eth0"], "10.0.0.2"), [BROKEN]),
        (doctor.check_interface({"NCCL_SOCKET_IFNAME": "=eth0"}, ["lo", "eth0"], "10.0.0.2"), [OK]),
        (doctor.check_interface({}, ["lo"], "127.0.0.1"), [WARN]),
        (doctor.check_ports([], has_token=True), [OK]),
        (doctor.check_ports([("0.0.0.0", 6379, "redis-server *:6379")], has_token=True), [WARN]),
        (doctor.check_ports([("127.0.0.1", 6379, "/x/ray/core/gcs_server")], has_token=True), [OK]),
        (doctor.check_ports([("0.0.0.0", 8265, "/x/ray/dashboard/dashboard.py")], has_token=True), [WARN]),
        (doctor.check_head(Head("h", "2", "3", NODES, True, False, 0.0)), [OK]),
        (doctor.check_head(Head("h", "2", "3", Inventory(()), False, True, 0.0)), [BROKEN] * 3),
    ],
)  # fmt: skip
def test_a_check_judges_facts_and_a_trouble_comes_with_its_cure(found: Any, expected: list[Health]) -> None:
    assert healths(found) == expected
    for finding in found if isinstance(found, list) else [found]:
        assert (finding.health is OK) != bool(finding.fix)
        assert ("->" in str(finding)) == bool(finding.fix)


def test_packages_are_held_against_what_we_ask_for() -> None:
    wanted = [Requirement("ray[default]>=2.60,<2.61"), Requirement("numpy>=2"), Requirement("scipy>=1.14")]
    installed = {"ray": "2.60.0", "numpy": "1.26.4"}
    found = doctor.check_packages(wanted, installed.get)
    assert healths(found) == [BROKEN, BROKEN]
    assert ["numpy 1.26.4 is not >=2" in found[0].seen, "scipy is not installed" in found[1].seen] == [True, True]
    assert healths(doctor.check_packages(wanted[:1], installed.get)) == [OK]
    assert {"ray", "torch", "mlflow"} <= {requirement.name for requirement in doctor._required()}


def test_the_token_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "auth_token"
    assert healths(doctor.check_token(file, {})) == [WARN]
    file.write_text("x")
    file.chmod(0o644)
    tmp_path.chmod(0o700)
    found = doctor.check_token(file, {})
    assert (found.health, found.fix) == (WARN, f"chmod 600 {file}")
    assert f"only {tmp_path} keeps others out" in found.seen
    file.chmod(0o600)
    assert healths(doctor.check_token(file, {})) == [OK]
    assert healths(doctor.check_token(file, {"RAY_AUTH_MODE": "disabled"})) == [WARN]
    assert healths(doctor.check_token(tmp_path / "no", {"RAY_AUTH_TOKEN": "x"})) == [OK]


def test_a_token_that_others_can_read_is_broken() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o755)
        file = Path(folder, "auth_token")
        file.touch(mode=0o644)
        file.chmod(0o644)
        found = doctor.check_token(file, {})
    assert (found.health, found.fix) == (BROKEN, f"chmod 600 {file}")


@pytest.mark.parametrize(("has_token", "words"), [(True, "locked by the token alone"), (False, "there is no token")])
def test_ports_are_called_locked_only_where_there_is_a_token(has_token: bool, words: str) -> None:
    [found] = doctor.check_ports([("0.0.0.0", 6379, "/x/ray/core/gcs_server")], has_token=has_token)
    assert (found.health, words in found.seen) == (OK, True)
    [dashboard] = doctor.check_ports([("0.0.0.0", 8265, "/x/ray/dashboard/dashboard.py")], has_token=has_token)
    assert ("has the token" in dashboard.seen) == has_token


def test_the_tracking_store_is_tried_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    uri = f"sqlite:///{file}"
    assert healths(doctor.check_store(uri)) == [OK]
    assert not file.exists()
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE runs (id)")
    before = file.read_bytes()
    assert healths(doctor.check_store(uri)) == [OK]
    database.execute("BEGIN IMMEDIATE")
    busy = doctor.check_store(uri)
    database.rollback()
    database.close()
    assert (busy.health, "is busy" in busy.seen) == (WARN, True)
    assert file.read_bytes() == before
    file.write_bytes(b"not a database" * 100)
    assert "not a database" in doctor.check_store(uri).seen
    assert healths(doctor.check_store(f"sqlite:///{tmp_path}/no/such/folder/mlflow.db")) == [BROKEN]
    assert healths(doctor.check_store(f"file:{tmp_path}/mlruns")) == [BROKEN]
    found = doctor.check_store("http://user:secret@127.0.0.1:1")
    assert (found.health, "secret" in found.seen) == (BROKEN, False)


def test_this_machine_can_be_examined() -> None:
    """Whatever it is like, every check has an answer."""
    about = {finding.about for finding in doctor.examine(None)}
    assert about >= {
        "python",
        "packages",
        "torch",
        "threads",
        "shared memory",
        "disk",
        "open files",
        "network",
        "ports",
    }
    assert about >= {"token", "mlflow"}


BREAK = """
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o size=10m tmpfs {folder}/tmp
ip link set lo up 2>/dev/null
{python} -m http.server --bind 127.0.0.1 6379 >/dev/null 2>&1 &
server=$!
sleep 1.5
ulimit -n 512
cd {folder}/tmp
{python} -m zenray doctor --json
code=$?
kill $server
exit $code
"""


@pytest.mark.skipif(CANNOT_UNSHARE, reason="needs root, unshare and mount")
def test_a_broken_machine_is_seen_for_what_it_is(tmp_path: Path) -> None:
    """In namespaces of its own: tiny /dev/shm and disk, no way out, few files, a foreign port, a wrong torch and MLflow."""
    (tmp_path / "tmp").mkdir()
    shadow = tmp_path / "shadow"
    (shadow / "torch").mkdir(parents=True)
    (shadow / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: not found')")
    (shadow / "mlflow-3.1.0.dist-info").mkdir()
    (shadow / "mlflow-3.1.0.dist-info" / "METADATA").write_text("Name: mlflow\nVersion: 3.1.0\n")
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("x")
    (home / ".ray" / "auth_token").chmod(0o644)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": f"{shadow}:{ROOT}", "TMPDIR": f"{tmp_path}/tmp",
        "GLOO_SOCKET_IFNAME": "eth7", "MLFLOW_TRACKING_URI": "file:./mlruns", "RAY_ADDRESS": "http://127.0.0.1:1",
    }  # fmt: skip
    script = BREAK.format(folder=tmp_path, python=sys.executable)
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", script],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"namespaces are not allowed here: {done.stderr[:200]}")
    assert done.returncode == 1, done.stderr
    found = [(row["about"], row["health"]) for row in json.loads(done.stdout)]
    for about in ("packages", "torch", "shared memory", "disk", "open files", "network", "mlflow", "cluster"):
        assert (about, "broken") in found, (about, done.stdout)
    assert ("token", "warn") in found  # open to all, in a folder that shuts them out
    assert {("threads", "warn"), ("network", "warn"), ("ports", "warn"), ("python", "ok")} <= set(found), done.stdout
    assert all(row["fix"] for row in json.loads(done.stdout) if row["health"] != "ok")
