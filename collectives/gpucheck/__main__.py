import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from collectives.gpucheck import equality, ranks, speed
from collectives.gpucheck.report import Report, Row, Skip
from collectives.nccl import NcclTransport, new_unique_id

NO_CARD = 3
Part = Callable[[], Iterable[Row]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m collectives.gpucheck", description="Check the kernels on a card.")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder of gpu-check.json")
    parser.add_argument("--budget-s", type=float, default=345, help="seconds after which no part starts")
    parser.add_argument("--parts", default="", help="only these parts, separated by commas")
    parser.add_argument("--small", action="store_true", help="small sizes only, for compute-sanitizer")
    return parser.parse_args(argv)


def sanitizer() -> Iterator[Row]:
    """The equality part on small sizes under compute-sanitizer, in a process of its own."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise Skip("compute-sanitizer is not on the PATH")
    command = [tool, "--error-exitcode", "9", sys.executable, "-m", "collectives.gpucheck"]
    options = ["--parts", "rows", "--small", "--out", "runs/gpu-check/sanitizer"]
    found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=90)
    tail = (found.stdout + found.stderr).strip().splitlines()[-1:]
    yield Row("sanitizer", "row kernels", "failed" if found.returncode else "ok", note=" ".join(tail)[:300])


def own_nccl(device: torch.device) -> Iterator[Row]:
    """CuPy's communicator with one rank: the interface, streams and events, not the wire."""
    transport = NcclTransport(new_unique_id(), 0, 1, device, timeout_s=60)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(1000, device=device).to(dtype)
        expected = x.clone()
        transport.all_reduce("check", x, "sum")
        yield Row("NcclTransport x1", str(dtype), "ok" if torch.equal(x, expected) else "failed")
    transport.abort()


def parts(device: torch.device, report: Report, small: bool) -> dict[str, Part]:
    """In the order of what is needed first, by name."""
    large = 0 if small else equality.LARGE
    found: dict[str, Part] = {
        "registers": lambda: speed.check_registers(device),
        "codecs": lambda: equality.check_codecs(device, large),
        "rows": lambda: equality.check_rows(device, large),
        "host": lambda: speed.check_host_time(device),
        "speed": lambda: speed.check_speed(device, report, (1,) if small else speed.SIZES_MIB),
        "threads3": lambda: ranks.check_threads(3, device),
        "nccl1": lambda: ranks.check_ranks("nccl", 1, device, 75),
        "gloo2": lambda: ranks.check_ranks("gloo", 2, device, 90),
        "own-nccl": lambda: own_nccl(device),
        "nccl2": lambda: ranks.check_ranks("nccl", 2, device, 60, optional=True),
        "sanitizer": sanitizer,
    }
    return found


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print(
            f"gpu-check: no CUDA device here (torch {torch.__version__}, CUDA {torch.version.cuda}); nothing was run."
        )
        return NO_CARD
    if not dist.is_available():
        print("gpu-check: this torch has no torch.distributed; the parts with process groups will fail.")
    report = Report(options.budget_s)
    every = parts(torch.device("cuda", 0), report, options.small)
    wanted = [name for name in options.parts.split(",") if name] or list(every)
    unknown = [name for name in wanted if name not in every]
    if unknown:
        print(f"gpu-check: no part {', '.join(unknown)}; parts are {', '.join(every)}", file=sys.stderr)
        return 2
    for name in wanted:
        report.run(name, every[name])
        report.write(options.out)
    print(report.table())
    print(f"result: {report.write(options.out)}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
