"""`zenray doctor`: what is wrong with this machine, and with a cluster, and how to mend it.

Each `check_*` is a function from facts to findings; `examine` collects the facts. Nothing is written, started or changed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sqlite3
import stat
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from collectives.errors import ConfigError
from zenray.findings import Finding, broken, ok, warn
from zenray.head import Head, HeadUnreachable, connect_head, read_head
from zenray.preflight import check_clock, check_versions
from zenray.recorder import default_uri
from zenray.redact import redact_text
from zenray.tracking import TrackingError, check_uri

GIB = 1 << 30
OLDEST_PYTHON = (3, 11)
MIN_SHM_BYTES, GOOD_SHM_BYTES = GIB // 4, 2 * GIB
MIN_DISK_BYTES, FULL_DISK_SHARE = GIB, 0.95
"""Ray spills no object, and starts no worker, on a disk that is fuller than this share."""
MIN_FILES, GOOD_FILES = 4096, 65_536
LOOPBACK = ("127.", "::1")
RAY_PORTS: Mapping[int, str] = {6379: "head", 8265: "dashboard"}
SERVER_S = 5.0


def examine(address: str | None) -> list[Finding]:
    """Look at this machine, and at the cluster of `address`, RAY_API_SERVER_ADDRESS or RAY_ADDRESS if one is named."""
    shm, disks = Path("/dev/shm"), {str(folder) for folder in (tempfile.gettempdir(), Path.cwd())}
    sockets, token_file = _listening(), _token_file(os.environ)
    findings = [
        check_python(platform.python_version_tuple()),
        *check_packages(_required(), _installed),
        *check_torch(_torch_facts()),
        check_threads(os.environ, os.cpu_count() or 1),
        check_shm(psutil.disk_usage(str(shm)).total if shm.is_dir() else 0),
        *(check_disk(folder, *_disk(folder)) for folder in sorted(disks)),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        *check_interface(os.environ, list(psutil.net_if_addrs()), _own_address()),
        *check_ports(sockets, has_token=_has_token(token_file, os.environ)),
        check_token(token_file, os.environ),
        check_store(os.environ.get("MLFLOW_TRACKING_URI") or default_uri()),
    ]
    named = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    return findings + (examine_cluster(named) if named else [])


def examine_cluster(address: str) -> list[Finding]:
    """The head of `address`, as it answers over the jobs API."""
    try:
        head = read_head(connect_head(address))
    except HeadUnreachable as error:
        return [broken("cluster", str(error).partition(". ")[0], str(error).partition(". ")[2])]
    except ConfigError as error:
        return [broken("cluster", "RAY_ADDRESS is an address of Ray Client", str(error))]
    here = {"ray": importlib.metadata.version("ray"), "python": platform.python_version()}
    there = {"ray": head.ray_version, "python": head.python_version}
    return [*check_head(head), *check_versions(here, there), check_clock(head.ahead_s)]


# --- the machine ------------------------------------------------------------------------------------------------------


def check_python(found: Sequence[str]) -> Finding:
    """found: major, minor, patch."""
    shown = ".".join(found)
    if (int(found[0]), int(found[1])) >= OLDEST_PYTHON:
        return ok("python", shown)
    return broken("python", shown, f"use Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer")


def check_packages(required: Sequence[Requirement], installed: Callable[[str], str | None]) -> list[Finding]:
    """Every package that zenray needs, in a version that it is made for."""
    found = []
    for requirement in required:
        version = installed(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None:
            found.append(broken("packages", f"{requirement.name} is not installed", f"pip install '{wanted}'"))
        elif not requirement.specifier.contains(Version(version), prereleases=True):
            found.append(
                broken(
                    "packages",
                    f"{requirement.name} {version} is not {requirement.specifier}",
                    f"pip install '{wanted}'",
                )
            )
    return found or [ok("packages", f"{len(required)} packages are there, in versions that fit")]


def check_torch(facts: Mapping[str, Any]) -> list[Finding]:
    """facts: version, gloo, nccl, cuda (bools), cards (of the machine), cupy (its version, or why it is missing)."""
    if facts.get("error"):
        return [broken("torch", f"cannot be imported: {facts['error']}", "install it again, in a fresh environment")]
    found = []
    if not facts["gloo"]:
        found.append(broken("gloo", "this torch has no Gloo", "install a torch with torch.distributed and Gloo"))
    if facts["cards"] and not facts["cuda"]:
        found.append(
            broken(
                "cuda",
                f"{facts['cards']} NVIDIA cards are here, but torch {facts['version']} cannot use them",
                "install torch for CUDA, and compare `nvidia-smi` with torch.version.cuda: the driver may be too old",
            )
        )
    elif facts["cuda"] and not facts["nccl"]:
        found.append(
            warn(
                "nccl", "torch has no NCCL; cards talk through CuPy's", "install a torch with NCCL if ranks use NVLink"
            )
        )
    if facts["cuda"] and not facts["cupy"]:
        found.append(
            warn(
                "cupy",
                "missing: codecs run on the CPU",
                "pip install cupy-cuda12x or cupy-cuda13x, as torch.version.cuda says",
            )
        )
    device = f"{facts['cards']} cards, CuPy {facts['cupy'] or 'missing'}" if facts["cuda"] else "no card"
    return found or [ok("torch", f"{facts['version']} with Gloo, NCCL {'yes' if facts['nccl'] else 'no'}, {device}")]


def check_threads(environment: Mapping[str, str], num_cores: int) -> Finding:
    """One thread a rank. zenray's workers set it themselves; other processes of a rank read OMP_NUM_THREADS."""
    value = environment.get("OMP_NUM_THREADS")
    if value == "1" or num_cores == 1:
        return ok("threads", "one a rank")
    return warn(
        "threads",
        f"OMP_NUM_THREADS is {value or 'not set'} on {num_cores} cores",
        "export OMP_NUM_THREADS=1 before `ray start`: several threads a rank fight for cores, and are many times slower",
    )


def check_shm(total_bytes: int) -> Finding:
    """total_bytes of /dev/shm, 0 where there is none."""
    seen = f"/dev/shm has {total_bytes / GIB:.2f} GiB"
    fix = "give the container more: docker run --shm-size=4g, or an emptyDir with medium Memory on Kubernetes"
    if total_bytes < MIN_SHM_BYTES:
        return broken("shared memory", f"{seen}; Ray keeps its objects there", fix)
    return ok("shared memory", seen) if total_bytes >= GOOD_SHM_BYTES else warn("shared memory", seen, fix)


def check_disk(folder: str, free_bytes: int, total_bytes: int) -> Finding:
    """One folder that Ray or we write to."""
    used = 1 - free_bytes / max(total_bytes, 1)
    seen = f"{free_bytes / GIB:.1f} GiB of {total_bytes / GIB:.1f} free in {folder}"
    fix = "remove old sessions below /tmp/ray and old runs, or choose another disk (ray start --temp-dir, --out)"
    if free_bytes < MIN_DISK_BYTES:
        return broken("disk", seen, fix)
    return ok("disk", seen) if used < FULL_DISK_SHARE else warn("disk", f"{seen}: {used:.0%} full", fix)


def check_files(limits: tuple[int, int]) -> Finding:
    """limits: soft and hard limit of open files; -1 is none."""
    soft, hard = limits
    if soft == -1 or soft >= GOOD_FILES:
        return ok("open files", f"limit {soft}")
    fix = f"ulimit -n {GOOD_FILES}" + (
        f" needs the hard limit raised first, which is {hard}" if -1 < hard < GOOD_FILES else ""
    )
    return (broken if soft < MIN_FILES else warn)("open files", f"limit {soft}", fix)


def check_interface(environment: Mapping[str, str], interfaces: Sequence[str], own: str) -> list[Finding]:
    """own: the address that Ray would take for this node."""
    found = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environment.get(name, "").lstrip("=^").split(":")[0].split(",")[0]
        if wanted and not any(interface.startswith(wanted) for interface in interfaces):
            seen = f"{name}={environment[name]}, but the interfaces are {', '.join(interfaces)}"
            found.append(broken("network", seen, f"unset {name}, or name one of them"))
    if own.startswith(LOOPBACK):
        found.append(
            warn(
                "network",
                f"Ray takes {own} for this node, so no other node can join",
                "give the address: ray start --node-ip-address=ADDRESS, and look at /etc/hosts and the default route",
            )
        )
    return found or [ok("network", f"{own} on {', '.join(interfaces)}")]


def check_ports(sockets: Sequence[tuple[str, int, str]], *, has_token: bool) -> list[Finding]:
    """sockets: (address, port, command) of what listens here; command "" is a process of another user."""
    found = []
    holder, lock = "", "there is no token here that locks them"
    if has_token:
        holder, lock = "and has the token ", "locked by the token alone"
    for address, port, command in sockets:
        if port in RAY_PORTS and not _is_ray(command):
            found.append(
                warn(
                    "ports",
                    f"{address}:{port} is taken by '{command or 'a process of another user'}'",
                    f"end it, or start the {RAY_PORTS[port]} on another port",
                )
            )
        if port == 8265 and _is_ray(command) and not address.startswith(LOOPBACK):
            found.append(
                warn(
                    "ports",
                    f"the dashboard listens on {address}: whoever reaches it {holder}runs any code here",
                    "start it with --dashboard-host=127.0.0.1 and reach it through ssh -L 8265:127.0.0.1:8265",
                )
            )
    rays = [address for address, _, command in sockets if _is_ray(command)]
    outside = sum(not address.startswith(LOOPBACK) for address in rays)
    seen = f"Ray listens on {len(rays)} ports, {outside} of them reachable from outside; {lock}"
    return found or [ok("ports", seen if rays else "Ray's are free")]


def check_token(file: Path, environment: Mapping[str, str]) -> Finding:
    """The token is the only lock of a cluster."""
    if environment.get("RAY_AUTH_MODE") == "disabled":
        return warn(
            "token",
            "RAY_AUTH_MODE=disabled: a cluster started here runs code for everyone who reaches it",
            "export RAY_AUTH_MODE=token",
        )
    if environment.get("RAY_AUTH_TOKEN"):
        return ok("token", "in RAY_AUTH_TOKEN")
    if not file.is_file():
        return warn(
            "token",
            f"there is none ({file})",
            "`ray start` then locks nothing: export RAY_AUTH_MODE=token, ray get-auth-token --generate",
        )
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        closed = [folder for folder in file.resolve().parents if not folder.stat().st_mode & 0o011]
        if closed:
            return warn("token", f"{file} has mode {mode:o}; only {closed[0]} keeps others out", f"chmod 600 {file}")
        return broken("token", f"{file} can be read by others (mode {mode:o})", f"chmod 600 {file}")
    return ok("token", f"{file}, readable by its owner alone")


def check_store(uri: str) -> Finding:
    """Whether runs can be recorded there. Nothing is written: a sqlite file is opened for writing and left as it was."""
    shown = redact_text(uri)
    try:
        uri = check_uri(uri)
    except TrackingError as error:
        return broken("mlflow", f"{shown} is MLflow's old file store", str(error))
    if uri.startswith("sqlite:///"):
        return _check_sqlite(Path(uri.removeprefix("sqlite:///")))
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SERVER_S):
            return ok("mlflow", f"{shown} answers")
    except (OSError, ValueError) as error:
        return broken("mlflow", f"{shown} does not answer: {error}", "start it, or point MLFLOW_TRACKING_URI elsewhere")


def _check_sqlite(file: Path) -> Finding:
    fix = "make it writable for this user, or point MLFLOW_TRACKING_URI elsewhere"
    if not file.exists():
        if file.parent.is_dir() and os.access(file.parent, os.W_OK):
            return ok("mlflow", f"{file} will be made")
        return broken("mlflow", f"{file} cannot be made", fix)
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=rw", uri=True, timeout=1.0, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        if "locked" in str(error):
            return warn("mlflow", f"{file} is busy", "a run may be writing; look again")
        return broken("mlflow", f"{file}: {error}", f"{fix}; if it is damaged, move it away")
    return ok("mlflow", f"{file} can be written")


# --- a cluster --------------------------------------------------------------------------------------------------------


def check_head(head: Head) -> list[Finding]:
    """Health, nodes and lock of a head that answers."""
    nodes = head.inventory.nodes
    found = []
    if not head.is_healthy:
        found.append(
            broken("cluster", f"{head.address} answers, its GCS does not", "look at gcs_server.out; restart the head")
        )
    if not nodes:
        found.append(broken("cluster", "no node is alive", "look at raylet.out on the nodes, and start them again"))
    if head.is_open:
        found.append(
            broken(
                "cluster",
                f"{head.address} answers without a token: whoever reaches it runs any code there",
                "start the cluster anew with RAY_AUTH_MODE=token (CVE-2023-48022 was exploited on open ones)",
            )
        )
    cpus, gpus = (sum(node.total.get(name, 0) for node in nodes) for name in ("CPU", "GPU"))
    return found or [
        ok("cluster", f"{head.address}: {len(nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs, locked by a token")
    ]


# --- facts ------------------------------------------------------------------------------------------------------------


def _required() -> list[Requirement]:
    """What our own distribution asks for, extras left out."""
    found = [Requirement(text) for text in importlib.metadata.requires("zenray-train") or []]
    return [requirement for requirement in found if requirement.marker is None]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return {"error": str(error)}
    cards = Path("/proc/driver/nvidia/gpus")
    return {
        "version": torch.__version__,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "cuda": torch.cuda.is_available(),
        "cards": len(list(cards.iterdir())) if cards.is_dir() else torch.cuda.device_count(),
        "cupy": next((v for v in (_installed(f"cupy-cuda{n}x") for n in (12, 13)) if v), None),
    }


def _disk(folder: str) -> tuple[int, int]:
    usage = psutil.disk_usage(folder)
    return usage.free, usage.total


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _listening() -> list[tuple[str, int, str]]:
    """What listens on this machine, as far as this user may see."""
    found = []
    with suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr:
                found.append((connection.laddr.ip, connection.laddr.port, _command(connection.pid)))
    return found


def _command(pid: int | None) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline()[:4]) if pid else ""
    return ""


def _is_ray(command: str) -> bool:
    return any(word in command for word in ("ray::", "/ray/", "raylet", "gcs_server"))


def _has_token(file: Path, environment: Mapping[str, str]) -> bool:
    """Whether a cluster that is started here is locked."""
    return environment.get("RAY_AUTH_MODE") != "disabled" and (
        bool(environment.get("RAY_AUTH_TOKEN")) or file.is_file()
    )


def _token_file(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
