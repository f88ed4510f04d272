"""What every job has in common: its command line, its output folder, progress, `result.json` and the closing table.

A job is a `Section` (its configuration) and a function from that and a `Run` to its metrics:

    python -m jobs.NAME [--config FILE.yaml] [--out DIR] key=value section.key=value ...
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from collectives.errors import ConfigError, ZenrayError
from zenray.config import Section, describe_keys, load
from zenray.environment import DIGEST_VARIABLE, code_digest, environment
from zenray.stopping import stop_on_sigterm

C = TypeVar("C", bound=Section)

LINK_RECORD = "ZENRAY_LINK_RECORD"
"""Environment variable by which a job that builds links tells the same job inside them what they are, as JSON."""

PLAIN_WIDTH = 140
"""Columns of tables that are not shown on a terminal."""


@dataclass
class Run:
    """One execution of a job: where it writes, how it speaks, and what it compares itself with."""

    name: str
    out: Path
    options: Mapping[str, Path]
    """Further file options of this job (--truth, --counts, --trace, --cluster), by name without dashes."""
    console: Console = field(default_factory=lambda: _new_console())
    baseline: dict[str, Any] = field(default_factory=dict)
    """Filled by the job: the figures of the baseline measured in the same run."""

    def say(self, line: str) -> None:
        """One plain line of progress, flushed."""
        self.console.print(line, markup=False)
        sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print one table."""
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(format_cell(cell) for cell in row))
        self.console.print(table)


def _new_console() -> Console:
    """The terminal as it is; into a file or a pipe, wide enough for tables."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def format_cell(value: object) -> str:
    """Four significant digits for floats, thousands separators for integers, text as it is."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no"}.get(value, "-")  # type: ignore[arg-type]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def run_job(
    name: str,
    model: type[C],
    body: Callable[[C, Run], dict[str, Any]],
    argv: Sequence[str] | None = None,
    files: Sequence[str] = (),
) -> int:
    """Parse the command line, run `body`, write `result.json`; returns the exit code (0, 1 failed, 2 bad input)."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(describe(name, model, files))
        return 0
    try:
        flags = [key for key, field in model.model_fields.items() if field.annotation is bool]
        config_path, out, options, overrides = parse_command(arguments, files, flags)
        config = load(model, config_path, overrides)
        run = Run(name, out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", options)
        created = [folder for folder in (run.out, *run.out.parents) if not folder.exists()]
        run.out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    if DIGEST_VARIABLE in os.environ:
        run.say(code_line(os.environ[DIGEST_VARIABLE], code_digest(Path.cwd())))
    try:
        with stop_on_sigterm():
            metrics = body(config, run)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        with suppress(OSError):  # of a folder with files in it
            for folder in created:
                folder.rmdir()
        return 2
    except ZenrayError as error:
        print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    write_result(run, config, metrics)
    if LINK_RECORD not in os.environ:  # the outer job has more to say before
        run.say(f"result: {run.out / 'result.json'}")
    return 0


def describe(name: str, model: type[Section], files: Sequence[str] = ()) -> str:
    """The text of --help: usage, then every key with its default and meaning."""
    options = " ".join(f"[--{option} PATH]" for option in ("config", "out", *files))
    return "\n".join([f"{name}: {options} [key=value ...]", "", *describe_keys(model)])


def code_line(submitted: str, here: str) -> str:
    """What the log of a submitted job says about its code."""
    if here == submitted:
        return f"code {here[:12]}, as submitted"
    return f"event: code {here[:12]} runs here, {submitted[:12]} was submitted"


def parse_command(
    argv: Sequence[str], files: Sequence[str], flags: Sequence[str] = ()
) -> tuple[Path | None, Path | None, dict[str, Path], list[str]]:
    """Split a command line into config file, output folder, further file options and overrides.

    flags: boolean keys; `--key` is another way to write `key=true`.
    """
    known = {"config", "out", *files}
    values: dict[str, Path] = {}
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            overrides.append(word)
            continue
        option, separator, value = word[2:].partition("=")
        if option in flags and not separator:
            overrides.append(f"{option}=true")
            continue
        if option not in known:
            names = ", ".join(f"--{name}" for name in sorted({*known, *flags}))
            raise ConfigError(f"unknown option {word}; options are {names}")
        argument = value if separator else next(words, None)
        if argument is None:
            raise ConfigError(f"--{option} needs a path")
        values[option] = Path(argument)
    config, out = values.pop("config", None), values.pop("out", None)
    return config, out, values, overrides


def write_result(run: Run, config: Section, metrics: dict[str, Any]) -> None:
    """`DIR/result.json` = job, config, metrics, environment, baseline. Numbers that are not finite become null."""
    document = {
        "job": run.name,
        "config": config.model_dump(mode="json"),
        "metrics": metrics,
        "environment": environment(),
        "baseline": run.baseline,
    }
    path = run.out / "result.json"
    path.write_text(json.dumps(_finite(document), indent=2, default=str) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    return value if not isinstance(value, float) or math.isfinite(value) else None
