"""`zenray doctor | plan | submit | status | cancel | report`: a model and a batch in, cards out. Also `python -m zenray`."""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from collectives.errors import ConfigError, ZenrayError
from zenray.command_help import KeysCommand, PlanCommand

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("collectives", "placement", "actors", "zenray", "jobs")
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "2",  # attempts to join a cluster, a second each
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # what went wrong is said once, by us
}
MAX_PLANS = 10
MAX_REJECTED = 12

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Memory-aware training jobs on Ray.")
File = Annotated[Path, typer.Argument(help="A job or plan file, YAML.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value or section.key=value")]


def show_version(wanted: bool) -> None:
    """Print the version, and end."""
    if wanted:
        typer.echo(f"zenray {version('zenray-train')}")
        raise typer.Exit


@app.callback()
def options(
    show: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Memory-aware training jobs on Ray."""


@app.command(cls=PlanCommand)
def plan(
    file: File,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Where to draw the bars, a PNG file.")] = None,
) -> None:
    """List every way to run a model: cards, degrees, memory broken down, speed; and why others were left out."""
    from zenray import plan_report
    from zenray.job_config import PlanConfig, load_job_or_plan
    from zenray.planning import cards_of
    from zenray.planning import plan as find_plans

    config = load_job_or_plan(file, overrides or [])
    names = config.cards if isinstance(config, PlanConfig) else config.gpu_types or PlanConfig.default_cards()
    gpus = cards_of(names)
    typer.echo(
        f"planned without a cluster, for cards of the catalogue: {', '.join(gpu.name for gpu in gpus)}", err=True
    )
    if not isinstance(config, PlanConfig):
        typer.echo("tracing the model ...", err=True)
    found = find_plans(config, gpus)
    if found.plans:
        rows = plan_report.plan_rows(found.plans[:MAX_PLANS], gpus, config.batch)
        more = f", and {len(found.plans) - MAX_PLANS} more" if len(found.plans) > MAX_PLANS else ""
        show_table(f"the {len(rows)} best plans{more}", plan_report.COLUMNS, rows)
    if found.rejected:
        rows = plan_report.rejected_rows(found.rejected, MAX_REJECTED)
        show_table(f"left out: {len(found.rejected)}, the nearest first", ("card", "degrees", "why"), rows)
    if found.nearest:
        typer.echo(f"no plan fits; {found.nearest}")
    if out is not None and found.plans:
        plan_report.plot_plans(found, gpus, out)
        typer.echo(f"bars: {out}")
    raise typer.Exit(0 if found.plans else 1)


@app.command(cls=KeysCommand)
def submit(
    file: File,
    overrides: Overrides = None,
    address: Annotated[str | None, typer.Option(help="Of the jobs API, http://HOST:8265; else RAY_ADDRESS.")] = None,
    kuberay: Annotated[
        Path | None, typer.Option(help="Write a RayJob for Kubernetes there, and submit nothing.")
    ] = None,
) -> None:
    """Queue a job that names no card; with `entrypoint` check it, run it as a plain Ray job, and exit as it ended.

    0 succeeded, 1 failed, 130 stopped, 124 a deadline passed, 2 wrong input.
    """
    from zenray.config import load
    from zenray.job_config import JobConfig, request_of

    config = load(JobConfig, file, overrides or [])
    if kuberay is not None:
        from zenray.kuberay import manifest

        kuberay.write_text(manifest(config), encoding="utf-8")
        typer.echo(f"RayJob: {kuberay}")
        return
    if config.entrypoint is not None:
        from zenray.head import connect_head
        from zenray.submission import submit_entrypoint

        raise typer.Exit(submit_entrypoint(config, connect_head(address), typer.echo))
    from zenray.queue_client import connected

    with connected() as queue:
        typer.echo(f"{queue.submit(request_of(config))} submitted; follow it with: zenray status {config.name}")


@app.command()
def doctor(
    address: Annotated[str | None, typer.Option(help="Of the jobs API of a cluster, http://HOST:8265.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Say what is wrong with this machine, and with a cluster, and how to mend it; exit 1 if something is broken."""
    from dataclasses import asdict

    from zenray.doctor import examine
    from zenray.findings import is_broken

    findings = examine(address)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            typer.echo(str(finding))
    raise typer.Exit(1 if is_broken(findings) else 0)


@app.command()
def status(job: Annotated[str | None, typer.Argument(help="Its name; without it, all jobs.")] = None) -> None:
    """Where a job is, why, and what would help it."""
    from zenray.queue_client import connected

    with connected() as queue:
        if job is None:
            rows = [(row["job_id"], row["state"], row["plan"], row["step"], row["reason"]) for row in queue.jobs()]
            show_table("Jobs", ("job", "state", "plan", "step", "why"), rows)
            return
        found = queue.status(job)
    typer.echo(f"{found['job_id']}: {found['explanation']}")
    for line in found["history"]:
        typer.echo(f"  {line}")
    for key, value in {**found["live"], **found["outcome"]}.items():
        if key != "losses":
            typer.echo(f"  {key}: {value}")


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run's id or name in MLflow.")],
    out: Annotated[Path | None, typer.Option(help="The page to write, an HTML file.")] = None,
) -> None:
    """Write one run and its variants or trials as one HTML page that needs no server."""
    from zenray.report import write_report

    typer.echo(f"report: {write_report(run, out)}")


@app.command()
def cancel(job: str) -> None:
    """End a job, whether it waits or runs."""
    from zenray.queue_client import connected

    with connected() as queue:
        typer.echo(f"{job} {queue.cancel(job)}")


def show_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    """One table, wide enough for a file."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 220, highlight=False).print(table)


def check_rooms() -> None:
    """Raises ConfigError if one of our five packages would come from somewhere else."""
    for room in ROOMS:
        spec = importlib.util.find_spec(room)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or not origin.is_relative_to(ROOT):
            raise ConfigError(
                f"the package '{room}' comes from {origin}, not from {ROOT}: another distribution shadows it. Uninstall "
                f"that, or put {ROOT} first on PYTHONPATH."
            )


def main() -> None:
    """Entry point: exit code 2 for wrong input, 1 for what failed."""
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        check_rooms()
        app()
    except ConfigError as error:
        typer.echo(f"zenray: {error}", err=True)
        raise SystemExit(2) from None
    except ZenrayError as error:
        typer.echo(f"zenray: {type(error).__name__}: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
