"""`python -m jobs.bench SUITE`: find the suite's module and run it as a job."""

import importlib
import pkgutil
import sys

import jobs.bench
from jobs.job import run_job


def main() -> int:
    suites = sorted(m.name for m in pkgutil.iter_modules(jobs.bench.__path__) if not m.name.startswith("_"))
    if len(sys.argv) < 2 or sys.argv[1] not in suites:
        print(
            f"usage: python -m jobs.bench SUITE [--out DIR] [key=value ...]\nsuites: {', '.join(suites)}",
            file=sys.stderr,
        )
        return 2
    suite = importlib.import_module(f"jobs.bench.{sys.argv[1]}")
    return run_job(f"bench-{sys.argv[1]}", suite.Config, suite.run, sys.argv[2:], suite.FILES)


if __name__ == "__main__":
    sys.exit(main())
