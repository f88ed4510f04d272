"""Start n rank processes on this machine: the one launcher of benchmarks and of tests with several processes.

Every rank joins one Gloo group before its target is called. They meet through a file, so no port can be taken. A rank
whose launcher dies is killed by the kernel; whatever happens, leaving the launcher ends every rank, by its pid.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from collectives.errors import ConfigError, ZenrayError

if TYPE_CHECKING:
    from jobs.links import ShapedBed

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.01
FOLLOW_UP_S = 0.2
"""From the first failure seen to choosing which one was the cause."""
STDERR_TAIL_CHARS = 2000
PR_SET_PDEATHSIG = 1


class RankFailed(ZenrayError):
    """A rank process ended with an error, was killed, or did not finish in time."""

    def __init__(self, *, rank: int, num_ranks: int, target: str, reason: str, detail: str):
        self.rank, self.num_ranks, self.target, self.reason, self.detail = rank, num_ranks, target, reason, detail
        super().__init__(f"rank {rank} of {num_ranks} running {target}: {reason}\n{detail}".rstrip())


class RankProcesses:
    """n processes running `target(transport, config)`; use as a context manager.

    target: "package.module:function" or "path/file.py:function"; it gets a `TorchTransport` over all ranks and the
    JSON-able `config`, and returns something JSON-able. bed: rank i runs in its namespace i. timeout_s: for everything,
    from start to last result; also the time limit of the transport unless config["transport_timeout_s"] says otherwise.
    env: further environment variables of the ranks.
    """

    def __init__(
        self,
        num_ranks: int,
        target: str,
        config: Mapping[str, Any],
        *,
        bed: ShapedBed | None = None,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ):
        self.num_ranks, self.target, self.bed, self.timeout_s = num_ranks, target, bed, timeout_s
        self.env = dict(env or {})
        self.spec = {"num_ranks": num_ranks, "target": target, "config": dict(config), "timeout_s": timeout_s}
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="zenray-ranks-"))
        self.deadline = time.monotonic() + self.timeout_s
        try:
            (self.folder / "spec.json").write_text(json.dumps(self.spec), encoding="utf-8")
            for rank in range(self.num_ranks):
                self.processes.append(self._start(rank))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def pid(self, rank: int) -> int:
        """The process id of a rank, for tests that kill or stop it."""
        return self.processes[rank].pid

    def wait(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """The results of `ranks` (default: all), in that order. Raises RankFailed for the first of them to fail."""
        wanted = list(range(self.num_ranks) if ranks is None else ranks)
        running = set(wanted)
        while running := {rank for rank in running if not self._result_path(rank).exists()}:
            if any(self.processes[rank].poll() is not None for rank in running):
                time.sleep(FOLLOW_UP_S)
                raise self._failure(min(running, key=self._time_of_failure))
            if time.monotonic() > self.deadline:
                raise self._failure(min(running))
            time.sleep(POLL_S)
        return [json.loads(self._result_path(rank).read_text(encoding="utf-8")) for rank in wanted]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        prefix = self.bed.exec_prefix(rank) if self.bed is not None else []
        code = "import sys; from jobs.ranks import rank_main; rank_main(sys.argv[1], int(sys.argv[2]))"
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "GLOO_SOCKET_IFNAME": "eth0" if self.bed is not None else "lo",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        with (self.folder / f"output-{rank}.txt").open("wb") as output:
            return subprocess.Popen(
                [*prefix, sys.executable, "-c", code, str(self.folder), str(rank)],
                env=env | self.env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )

    def _result_path(self, rank: int) -> Path:
        return self.folder / f"result-{rank}.json"

    def _time_of_failure(self, rank: int) -> float:
        """The first to fail is the cause, the others fail on its account. A killed rank could not write its time."""
        if self.processes[rank].poll() is None:
            return math.inf
        path = self.folder / f"failed-{rank}"
        return float(path.read_text(encoding="utf-8")) if path.exists() else 0.0

    def _failure(self, rank: int) -> RankFailed:
        code = self.processes[rank].poll()
        if code is None:
            reason = f"did not finish within {self.timeout_s:g} s"
        elif code < 0:
            reason = f"was ended by {signal.Signals(-code).name}"
        else:
            reason = f"ended with exit code {code}"
        output = (self.folder / f"output-{rank}.txt").read_text(encoding="utf-8", errors="replace")
        return RankFailed(
            rank=rank, num_ranks=self.num_ranks, target=self.target, reason=reason, detail=output[-STDERR_TAIL_CHARS:]
        )

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


def run_ranks(
    num_ranks: int,
    target: str,
    config: Mapping[str, Any],
    *,
    bed: ShapedBed | None = None,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `target` on `num_ranks` processes and return its results by rank; see `RankProcesses`. Raises RankFailed."""
    with RankProcesses(num_ranks, target, config, bed=bed, timeout_s=timeout_s, env=env) as ranks:
        return ranks.wait()  # ends: by `timeout_s`


# --- in the rank's process --------------------------------------------------------------------------------------------


def rank_main(folder: str, rank: int) -> None:
    """The life of one rank: join the group, call the target, write the result, stay until the launcher ends it.

    It stays because a socket that closes with unread bytes resets, and bytes on their way to a slower rank are lost.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    import torch
    import torch.distributed as dist

    from collectives.torch_transport import TorchTransport

    torch.set_num_threads(1)
    spec = json.loads((Path(folder) / "spec.json").read_text(encoding="utf-8"))
    function = load_target(spec["target"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=spec["num_ranks"],
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    timeout_s = spec["config"].get("transport_timeout_s", spec["timeout_s"])
    transport = TorchTransport(timeout_s=timeout_s)
    dist.barrier()
    try:
        result = function(transport, spec["config"])
        text = json.dumps(result)
    except BaseException:
        (Path(folder) / f"failed-{rank}").write_text(str(time.monotonic()), encoding="utf-8")
        traceback.print_exc()
        sys.stderr.flush()
        transport.abort()
        os._exit(1)
    unfinished = Path(folder) / f"unfinished-{rank}.json"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(Path(folder) / f"result-{rank}.json")
    sys.stdin.read()


def load_target(target: str) -> Callable[..., Any]:
    """The function named by "package.module:function" or "path/file.py:function"."""
    place, separator, name = target.rpartition(":")
    if not separator:
        raise ConfigError(f"'{target}' names no function; write package.module:function or path/file.py:function")
    if place.endswith(".py"):
        module_spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"'{target}': {place} has no function {name}")
    return function  # type: ignore[no-any-return]
