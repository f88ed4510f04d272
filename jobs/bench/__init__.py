"""Benchmarks: `python -m jobs.bench SUITE --out DIR key=value ...`, one module a suite.

A suite module defines `Config` (a `zenray.config.Section`), `FILES` (names of further file options, may be empty) and
`run(config, run) -> metrics`. Each suite measures the peers and the limit in the same run and reports ratios first.
"""
