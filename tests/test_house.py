"""The rules of the house: names, imports, packaging. What a newcomer may rely on when reading the folder list."""

import ast
import importlib.metadata
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("collectives", "placement", "actors", "zenray", "jobs")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_ours(room: str) -> None:
    """A stranger's package of the same name would win silently; the origin must lie in this tree."""
    spec = importlib.util.find_spec(room)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve().is_relative_to(ROOT)


@pytest.mark.parametrize("room", ROOMS)
def test_no_other_distribution_claims_a_room(room: str) -> None:
    owners = set(importlib.metadata.packages_distributions().get(room, []))
    assert owners <= {"zenray-train"}


def test_the_root_holds_the_rooms_and_no_other_code() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    roots = {line.split("/")[0] for line in tracked.splitlines()}
    assert roots <= {*ROOMS, "tests", "dashboards"}


def test_every_room_says_what_it_is() -> None:
    for room in ROOMS:
        docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
        assert docstring is not None
        assert len(docstring) > 80, room


def test_the_distribution_cannot_be_uploaded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "zenray-train"
    assert "Private :: Do Not Upload" in project["classifiers"]


def test_import_zenray_is_cheap_and_offers_every_public_name() -> None:
    code = (
        "import sys, zenray; "
        "heavy = {'torch', 'ray', 'mlflow', 'numba', 'cupy'} & set(sys.modules); assert not heavy, heavy; "
        "[getattr(zenray, name) for name in zenray.__all__]; assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_each_module_imports_alone_and_does_no_work() -> None:
    """Importing may not start threads, configure logging or touch the environment."""
    names = [m.name for room in ROOMS for m in pkgutil.walk_packages([str(ROOT / room)], f"{room}.")]
    names = [name for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, logging, os, sys, threading\n"
        "import numpy, torch.distributed.pipelining, ray, mlflow, numba, matplotlib\n"
        "before = (dict(os.environ), list(logging.getLogger().handlers), threading.active_count())\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    after = (dict(os.environ), list(logging.getLogger().handlers), threading.active_count())\n"
        "    assert after == before, (name, set(after[0].items()) ^ set(before[0].items()), after[1:], before[1:])\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)


def test_entry_scripts_define_no_classes() -> None:
    """cloudpickle sends what lives in __main__ by value, and a class that exists twice breaks isinstance."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if path.name == "__main__.py":
            assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], path


def test_source_is_plain_ascii_and_speaks_of_the_project_alone() -> None:
    machine_path = re.compile(r"/(work|root|home)/")
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), path
        assert not machine_path.search(text), path


def test_no_bare_except_and_no_pickle_on_wires_or_disks() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: bare except"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                assert "pickle" not in names, f"{path}:{node.lineno}: pickle"


def test_every_wait_has_a_limit_or_says_what_ends_it() -> None:
    """Of calls that block: a limit among their arguments, or a comment `# ends: ...` in their line."""
    blocking = {"wait", "wait_for", "get", "join", "acquire", "result", "communicate", "accept"}
    outside = {("ray", "get"), ("ray", "wait"), ("subprocess", "run"), ("socket", "create_connection")}
    outside |= {("requests", "get"), ("requests", "post"), ("request", "urlopen")}
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, ast.unparse(node.func.value).rpartition(".")[2]
            is_limited = any("timeout" in (keyword.arg or "") for keyword in node.keywords)
            if (owner, name) not in outside:
                lifts = name == "settimeout" and ast.unparse(node.args[0]) == "None"
                is_limited |= not lifts and (name not in blocking or len(node.args) > (name == "wait_for"))
            line = text.splitlines()[node.lineno - 1]
            assert is_limited or "# ends: " in line, f"{path}:{node.lineno}: {line.strip()}"


def test_ignore_patterns_are_anchored() -> None:
    """A pattern without a leading slash drops source files from the package that Ray uploads."""
    anchored = re.compile(r"^(/|\*\.|__pycache__/$)")
    for name in (".gitignore", ".rayignore"):
        for line in (ROOT / name).read_text().splitlines():
            assert not line or anchored.match(line), (name, line)
