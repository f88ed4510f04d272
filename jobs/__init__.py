"""Entry points: one short script per job (`python -m jobs.NAME`), their configs and their workloads."""
