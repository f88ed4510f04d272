"""What is checked before a job is uploaded: each check takes facts and returns findings, so that it needs no cluster."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from placement.inventory import GPU_LABEL, MEMORY_LABEL, Gang, Inventory, find_obstacle
from placement.plans import PlanList
from zenray.findings import Finding, broken, ok, warn
from zenray.package import Package, catch_alls, culprits
from zenray.redact import redact, redact_text

MIB = 1 << 20
MAX_PACKAGE_BYTES = 100 * MIB
"""The jobs API answers 413 above it."""
MAX_LISTED = 10
MAX_AHEAD_S = 5.0
_UV_COMMAND = re.compile(r"\buv\s+run\b.*\s--\s")


def check_package(package: Package, tracked: Sequence[str]) -> list[Finding]:
    """Nothing that would be refused by the server, run old code, or miss a module. tracked: sources that git knows."""
    if not package.files:
        patterns = ", ".join(catch_alls(package)) or "the folder is empty"
        return [
            broken(
                "package",
                f"no file of {package.folder} is left ({patterns}), and Ray gives all such packages one name, so that old "
                f"code would run",
                "name what to leave out, such as /data or *.bin, instead of everything",
            )
        ]
    found = [_size(package)]
    packed = {name for name, _ in package.files}
    missing = [name for name in tracked if name not in packed]
    if missing:
        shown = "; ".join(f"{name} (by {', '.join(culprits(package, name)) or '?'})" for name in missing[:MAX_LISTED])
        found.append(
            broken(
                "modules",
                f"{len(missing)} source files that git tracks would not be uploaded: {shown}",
                "start the pattern with / if it means a folder at the top, or name the file after a !",
            )
        )
    else:
        found.append(ok("modules", f"all {len(tracked)} tracked source files are in the package"))
    return found


def _size(package: Package) -> Finding:
    seen = f"{len(package.files)} files, {package.num_bytes / MIB:.1f} MiB, code {package.digest()[:12]}"
    if package.num_bytes <= MAX_PACKAGE_BYTES:
        return ok("package", seen)
    largest = package.largest(MAX_LISTED)
    listing = "".join(f"\n         {size / MIB:8.1f} MiB  {name}" for name, size in largest)
    lines = "".join(f"\n         /{name}" for name in _roots(largest))
    return broken(
        "package",
        f"{seen}; Ray takes {MAX_PACKAGE_BYTES // MIB} MiB at most. The largest:{listing}",
        f"keep data outside of working_dir, or add to {package.folder}/.rayignore what the job does not read:{lines}",
    )


def _roots(files: Sequence[tuple[str, int]]) -> list[str]:
    """The files themselves; where several lie in one folder, the folder."""
    folders = [name.rpartition("/")[0] for name, _ in files]
    lines = [
        f"{folder}/" if folder and folders.count(folder) > 1 else name
        for (name, _), folder in zip(files, folders, strict=True)
    ]
    return list(dict.fromkeys(lines))


def check_space(package: Package, free_bytes: int, folder: str) -> Finding:
    """Ray writes the archive to the temporary folder before it sends it."""
    if free_bytes >= 2 * package.num_bytes:
        return ok("space", f"{free_bytes / MIB:,.0f} MiB are free in {folder}")
    return broken(
        "space",
        f"{free_bytes / MIB:.1f} MiB are free in {folder}, the package takes {package.num_bytes / MIB:.1f}",
        "free some space, or set TMPDIR to a folder that has more",
    )


def check_versions(here: Mapping[str, str], there: Mapping[str, str]) -> list[Finding]:
    """Versions of "ray" and "python" on both sides; Ray refuses a difference even in the last number."""
    found = []
    for name, version in here.items():
        seen = f"{version} here, {there[name]} on the cluster"
        if version == there[name]:
            found.append(ok(name, seen))
        else:
            fix = f"use an environment with {name} {there[name]} here, or start the cluster with {version}"
            found.append(broken(name, seen, fix))
    return found


def check_clock(ahead_s: float) -> Finding:
    """ahead_s: the other clock minus ours."""
    if abs(ahead_s) <= MAX_AHEAD_S:
        return ok("clock", f"{abs(ahead_s):.1f} s apart from the cluster's")
    side = "ahead of" if ahead_s > 0 else "behind"
    return warn(
        "clock",
        f"the cluster's is {abs(ahead_s):.1f} s {side} ours",
        "run a time service (chrony) on all nodes: times of runs lie",
    )


def check_entrypoint(entrypoint: str, env_vars: Mapping[str, str]) -> list[Finding]:
    """What the command line and its environment give away, or cannot work."""
    found = []
    if redact_text(entrypoint) != entrypoint:
        found.append(
            broken(
                "secrets",
                f"the entrypoint holds a secret, and everyone who sees the dashboard sees it: {redact_text(entrypoint)}",
                "let the program read it from a file or an environment variable of the nodes",
            )
        )
    shown = [name for name, value in env_vars.items() if redact({name: value}) != {name: value}]
    if shown:
        found.append(
            warn(
                "secrets",
                f"env_vars {', '.join(shown)} can be read by everyone who may use the jobs API",
                "set them on the nodes instead, or keep the token of the cluster to yourself",
            )
        )
    if _UV_COMMAND.search(entrypoint):
        script = shlex.quote(entrypoint.split(" -- ", 1)[1].split()[-1]) if " -- " in entrypoint else "SCRIPT.py"
        found.append(
            broken(
                "uv",
                "`uv run ... -- COMMAND` starts no worker: Ray repeats the line up to the command for every one of them",
                f"give uv the script itself, as in: uv run --active {script}; or, best, use an environment that is installed "
                f"on the nodes and leave uv out",
            )
        )
    return found or [ok("entrypoint", redact_text(entrypoint))]


def check_resources(need: Mapping[str, float], inventory: Inventory) -> Finding:
    """The entrypoint runs on one node, which must have all of it."""
    wanted = {name: amount for name, amount in need.items() if amount}
    if not wanted:
        return ok("entrypoint resources", "none are asked for")
    shown = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    obstacle = find_obstacle(Gang((wanted,)), inventory, "total")
    if obstacle is None:
        return ok("entrypoint resources", f"a node has {shown}")
    best = obstacle.best
    has = "there is no node" if best is None else f"the best node, {best.address}, has " + ", ".join(
        f"{name} {best.total.get(name, 0):g}" for name in wanted
    )  # fmt: skip
    return broken(
        "entrypoint resources",
        f"no node has {shown}; {has}. The job would wait for ever",
        "ask for less (the entrypoint itself needs little: workers reserve their own), or add a node",
    )


def check_memory(plans: PlanList, cards: Sequence[str]) -> Finding:
    """Whether the model of the job fits the cards of the cluster in any way."""
    if not cards:
        return warn(
            "memory", "the cards of the cluster are not known", f"label its nodes with {GPU_LABEL} and {MEMORY_LABEL}"
        )
    if plans.plans:
        best = plans.plans[0]
        upper_gib = best.memory.nvml_upper / (1 << 30)
        return ok("memory", f"fits {best.num_gpus} x {best.gpu_type}, {upper_gib:.2f} GiB a card at most")
    return broken("memory", f"no way to run the model fits {', '.join(cards)}", plans.nearest or "")
