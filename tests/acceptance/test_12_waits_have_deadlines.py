"""Row 12: `pg.ready()` takes resources or waits for ever, and so does `ray.get` without a timeout. Neither is used."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for room in ("placement", "actors", "zenray", "jobs") for path in (ROOT / room).rglob("*.py"))


def unbounded_waits(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, call) of every ray.get or ray.wait without timeout, and every placement group's ready()."""
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name in ("ray.get", "ray.wait") and "timeout" not in {keyword.arg for keyword in call.keywords}:
            found.append((call.lineno, name))
        if isinstance(call.func, ast.Attribute) and call.func.attr == "ready" and not call.args and not call.keywords:
            found.append((call.lineno, name))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_12_no_wait_without_a_deadline(path: Path) -> None:
    assert unbounded_waits(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("code", ["ray.get(ref)", "ray.wait([a, b])", "ray.get(group.ready())", "pg.ready()"])
def test_12_the_check_sees_them(code: str) -> None:
    assert unbounded_waits(ast.parse(code))


@pytest.mark.parametrize("code", ["ray.get(ref, timeout=1)", "ray.wait(refs, timeout=rest)", "pg.wait(1)"])
def test_12_the_check_lets_bounded_waits_pass(code: str) -> None:
    assert not unbounded_waits(ast.parse(code))
