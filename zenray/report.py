"""`zenray report RUN`: one run of the record as one HTML page that needs nothing else: no server, no network, no script.

Everything on it comes from MLflow: figures, settings and tags of the run and its children, its tables and pictures, and
curves drawn from the history of its metrics.
"""

from __future__ import annotations

import base64
import difflib
import html
import io
import json
import re
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import requests
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zenray.plots import COLOURS
from zenray.recorder import default_uri
from zenray.redact import redact_text
from zenray.tracking import TrackingError, connect

ANSWER_S = 5.0
"""A server that says nothing for so long is taken for absent."""
MAX_CAUSE_CHARS = 300
MAX_CHILDREN = 200
MAX_CURVES = 12
MAX_ROWS = 200
MAX_ARTIFACT_BYTES = 8 << 20
HEADLINES = {
    "speedup": ("{:.2f}x", "as fast as the baseline measured in the same run"),
    "bytes_ratio": ("{:.1f}x", "fewer bytes sent per step"),
    "loss_gap": ("{:.1e}", "largest relative difference of the loss curves"),
    "best_score": ("{:.3f}", "score of the best trial, lower is better"),
}
"""What the top of the page shows of a run's metrics, where it has them."""

HIDDEN_PREFIXES = ("system/", "nonfinite_values")


@dataclass(frozen=True)
class RunPage:
    """One run as the page needs it. artifacts: contents by path. curves: (step, value) by name of run, of `loss`."""

    run: Any
    children: tuple[Any, ...]
    artifacts: Mapping[str, bytes]
    left_out: tuple[str, ...]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    system: Mapping[str, Sequence[tuple[float, float]]]


def write_report(run: str, out: Path | None, uri: str | None = None) -> Path:
    """Find a run by its id or its name (the newest of that name), write its page, and return where.

    Without `out` the page is below runs/. Raises TrackingError where there is no such run, no store that answers, or no
    writing.
    """
    uri = uri or default_uri()
    check_answers(uri)
    client = connect(uri)
    try:
        page = read_page(client, find_run(client, run))
    except TrackingError:
        raise
    except Exception as error:  # MLflow's own, whose class this file does not import
        raise _unusable(uri, error) from None
    path = out or Path("runs", f"report-{page.run.info.run_id[:8]}.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page), encoding="utf-8")
    except OSError as error:
        raise TrackingError(f"cannot write {path}: {error.strerror}. Choose another file with --out.") from None
    return path


def check_answers(uri: str) -> None:
    """Raises TrackingError at once where nobody listens, which MLflow's client says only after several attempts."""
    if not uri.startswith(("http://", "https://")):
        return
    try:
        requests.get(uri, timeout=ANSWER_S)
    except requests.RequestException as error:
        raise _unusable(uri, error) from None


def _unusable(uri: str, error: Exception) -> TrackingError:
    cause = textwrap.shorten(redact_text(str(error)), MAX_CAUSE_CHARS, placeholder=" [...]")
    return TrackingError(
        f"the store {redact_text(uri)} does not answer as it should: {type(error).__name__}: {cause}. Start it, or set "
        f"MLFLOW_TRACKING_URI to where the record is"
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def find_run(client: Any, wanted: str) -> Any:
    """The run with this id, or the newest with this name in any experiment."""
    if re.fullmatch("[0-9a-f]{32}", wanted):
        with suppress(Exception):  # MLflow has its own class for "no such run", which this file does not import
            return client.get_run(wanted)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1000)
    for run in runs:
        if wanted == run.info.run_name:
            return run
    names = list(dict.fromkeys(run.info.run_name for run in runs))
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or names[:3]
    raise TrackingError(
        f"no run has the id or the name '{wanted}'. "
        + (f"There is: {', '.join(near)}" if names else "The store is empty; set MLFLOW_TRACKING_URI to another one")
    )


def read_page(client: Any, run: Any) -> RunPage:
    """Everything the page shows, in a few requests."""
    run_id = run.info.run_id
    children = client.search_runs(
        [run.info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{run_id}'",
        order_by=["attributes.start_time ASC"],
        max_results=MAX_CHILDREN,
    )
    artifacts, left_out = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for item in client.list_artifacts(run_id):
            if item.is_dir or not item.path.endswith((".png", ".json", ".yaml")):
                continue
            if (item.file_size or 0) > MAX_ARTIFACT_BYTES:
                left_out.append(item.path)
                continue
            artifacts[item.path] = Path(client.download_artifacts(run_id, item.path, folder)).read_bytes()
    shown = [run, *children][: MAX_CURVES + 1]
    curves = {r.info.run_name: history(client, r, "loss") for r in shown if "loss" in r.data.metrics}
    system = {name: history(client, run, name) for name in run.data.metrics if name.startswith("system/")}
    return RunPage(run, tuple(children), artifacts, tuple(left_out), curves, system)


def history(client: Any, run: Any, name: str) -> list[tuple[float, float]]:
    """(step, value) of one metric, by step; seconds since the start instead of steps for the metrics of the system."""
    entries = client.get_metric_history(run.info.run_id, name)
    if name.startswith("system/"):
        return sorted(((e.timestamp - run.info.start_time) / 1000, e.value) for e in entries)
    return sorted((e.step, e.value) for e in entries)


# --- writing ----------------------------------------------------------------------------------------------------------


def render(page: RunPage) -> str:
    """The page."""
    info, tags = page.run.info, page.run.data.tags
    title = info.run_name
    parts = [
        f"<h1>{esc(title)} <span class='status {esc(info.status.lower())}'>{esc(info.status)}</span></h1>",
        f"<p class='facts'>{esc(facts(page))}</p>",
        headlines(page.run.data.metrics),
    ]
    if reason := tags.get("zenray.ending"):
        parts.append(f"<p class='ending'>{esc(reason)}</p>")
    events = [text for key, text in tags.items() if key.startswith("event.")]
    if events:
        parts.append(section("Events", "<ul>" + "".join(f"<li>{esc(text)}</li>" for text in events) + "</ul>"))
    if page.children:
        parts.append(section("Variants and trials", children_table(page.children)))
    pictures = sorted((name for name in page.artifacts if name.endswith(".png")), key=place_of)
    figures = [picture(name, page.artifacts[name]) for name in pictures]
    if page.curves and "loss.png" not in pictures:
        figures.append(picture("loss by step", draw_curves(page.curves, "training loss", "step")))
    loads = {name.removeprefix("system/"): values for name, values in page.system.items() if is_load(name, values)}
    if loads:
        figures.append(picture("load of the nodes", draw_curves(loads, "percent", "seconds since the start")))
    parts += [section("Pictures", "".join(figures))] if figures else []
    for name, heading in (("schemes.json", "How each gradient travelled"), ("trials.json", "All trials")):
        if name in page.artifacts:
            parts.append(section(heading, rows_table(json.loads(page.artifacts[name]))))
    parts.append(section("Settings", pairs_table(page.run.data.params)))
    metrics = {k: cell(v) for k, v in page.run.data.metrics.items() if not k.startswith(HIDDEN_PREFIXES)}
    parts.append(section("Figures", pairs_table(metrics)))
    for name, heading in (
        ("environment.json", "Environment"),
        ("plan.json", "Plan"),
        ("config.json", "Configuration"),
        ("policy.yaml", "Best policy"),
    ):
        if name in page.artifacts:
            text = page.artifacts[name].decode("utf-8", "replace")
            parts.append(f"<details><summary>{esc(heading)}</summary><pre>{esc(text)}</pre></details>")
    if page.left_out:
        parts.append(f"<p class='facts'>too large for this page: {esc(', '.join(page.left_out))}</p>")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">'
    head = f"<meta charset='utf-8'>{policy}<title>{esc(title)}</title>"
    return f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def place_of(name: str) -> tuple[int, str]:
    """Pictures in the order in which people ask: did it pay, what was chosen, where did the time go; then the others."""
    order = ("loss.png", "pareto.png", "bytes.png", "time.png")
    return (order.index(name) if name in order else len(order), name)


def is_load(name: str, values: Sequence[tuple[float, float]]) -> bool:
    """Whether a metric of the system makes a line in the picture of loads."""
    return name.endswith(("cpu_utilization_percentage", "system_memory_usage_percentage")) and len(values) > 1


def facts(page: RunPage) -> str:
    """When, how long, where from."""
    info = page.run.info
    started = datetime.fromtimestamp(info.start_time / 1000, UTC)
    seconds = ((info.end_time or info.start_time) - info.start_time) / 1000
    return (
        f"started {started:%Y-%m-%d %H:%M:%S} UTC, {seconds:,.0f} s; run {info.run_id}; "
        f"{len(page.children)} variants or trials"
    )


def headlines(metrics: Mapping[str, float]) -> str:
    """Large figures, with what they mean."""
    boxes = [
        f"<div class='box'><b>{esc(form.format(metrics[name]))}</b><span>{esc(meaning)}</span></div>"
        for name, (form, meaning) in HEADLINES.items()
        if name in metrics
    ]
    return f"<div class='boxes'>{''.join(boxes)}</div>" if boxes else ""


def children_table(children: Sequence[Any]) -> str:
    """One row a child: the settings in which they differ, and their last figures."""
    params = sorted({key for child in children for key in child.data.params})
    differing = [key for key in params if len({child.data.params.get(key) for child in children}) > 1]
    metrics = sorted({key for c in children for key in c.data.metrics if not key.startswith(HIDDEN_PREFIXES)})
    plain = [key for key in metrics if "/" not in key]
    rows = [
        {"run": child.info.run_name, "status": child.info.status}
        | {key: child.data.metrics.get(key) for key in plain}
        | {key: short(child.data.params.get(key, "")) for key in differing if key != "variant"}
        for child in children
    ]
    detailed = [key for key in metrics if "/" in key]
    more = [
        {"figure": key} | {child.info.run_name: child.data.metrics.get(key) for child in children} for key in detailed
    ]
    folded = f"<details><summary>By role and phase</summary>{rows_table(more)}</details>" if more else ""
    return rows_table(rows) + folded


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with the keys of all rows as columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{esc(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{esc(cell(row.get(column)))}</td>" for column in columns) + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    rest = f"<p class='facts'>and {len(rows) - MAX_ROWS} more</p>" if len(rows) > MAX_ROWS else ""
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>{rest}"


def pairs_table(values: Mapping[str, Any]) -> str:
    """Names and values."""
    rows = "".join(f"<tr><th>{esc(k)}</th><td>{esc(v)}</td></tr>" for k, v in sorted(values.items()))
    return f"<table class='pairs'>{rows}</table>"


def cell(value: Any) -> str:
    """Four significant digits, thousands separators, nothing for nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={cell(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def short(text: str) -> str:
    """A param as it is, but numbers with four significant digits."""
    try:
        return text if text.lstrip("-").isdigit() else cell(float(text))
    except ValueError:
        return text


def picture(name: str, png: bytes) -> str:
    """One picture inside the page."""
    source = base64.b64encode(png).decode("ascii")
    return f"<figure><img alt='{esc(name)}' src='data:image/png;base64,{source}'><figcaption>{esc(name)}</figcaption></figure>"


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]], what: str, axis: str) -> bytes:
    """Lines over one axis as a PNG."""
    figure = Figure(figsize=(10.0, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, (name, values) in enumerate(curves.items()):
        style = ("-", "--", ":", "-.")[index // len(COLOURS) % 4]
        x, y = [point[0] for point in values], [point[1] for point in values]
        axes.plot(x, y, style, color=COLOURS[index % len(COLOURS)], linewidth=1.6, label=name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, alpha=0.25)
    axes.set(xlabel=axis, ylabel=what)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def section(heading: str, body: str) -> str:
    """A heading and what is below it."""
    return f"<h2>{esc(heading)}</h2>{body}"


def esc(value: object) -> str:
    """As text of the page, never as markup."""
    return html.escape(str(value), quote=True)


ALLOWED = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page's content security policy: whatever a record holds, it loads and runs nothing."""

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;color:#1d2733;max-width:1100px;margin:2rem auto;padding:0 1.2rem}
h1{font-size:1.6rem;margin-bottom:.2rem} h2{font-size:1.15rem;margin:2rem 0 .6rem;border-bottom:1px solid #dde3ea}
.facts{color:#5c6b7a;margin:.2rem 0} .ending{background:#fff3cd;padding:.5rem .8rem;border-radius:6px}
.status{font-size:.75rem;padding:.2rem .5rem;border-radius:1rem;vertical-align:middle;background:#dde3ea}
.status.finished{background:#d3f0e4;color:#0b5c47} .status.failed{background:#f8d7da;color:#842029}
.status.killed{background:#ffe5c7;color:#7a4100}
.boxes{display:flex;flex-wrap:wrap;gap:1rem;margin:1.2rem 0}
.box{flex:1 1 12rem;background:#f3f7f7;border-radius:8px;padding:.8rem 1rem}
.box b{display:block;font-size:1.7rem;color:#0b7a75} .box span{color:#5c6b7a;font-size:.85rem}
.scroll{overflow-x:auto} table{border-collapse:collapse;font-size:.85rem}
th,td{text-align:left;padding:.3rem .7rem;border-bottom:1px solid #e8edf2;vertical-align:top;white-space:nowrap}
td{font-variant-numeric:tabular-nums} tr:hover td{background:#f8fafb} .pairs td{white-space:normal;word-break:break-word}
figure{margin:1rem 0} img{max-width:100%} figcaption{color:#5c6b7a;font-size:.85rem}
details{margin:.7rem 0} summary{cursor:pointer;font-weight:600}
pre{background:#f3f5f7;padding:.8rem;border-radius:6px;overflow:auto;font-size:.8rem;max-height:32rem}
"""
