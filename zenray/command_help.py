"""Commands whose --help ends with the keys of the file they read."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from zenray.config import describe_keys


class KeysCommand(TyperCommand):
    """Of a command that reads a job file."""

    def get_help(self, ctx: Any) -> str:
        """As Typer writes it, and the keys."""
        return "\n".join(filter(None, [super().get_help(ctx), *self.keys()]))

    @staticmethod
    def keys() -> list[str]:
        """Those of a job file."""
        from zenray.job_config import JobConfig

        return ["", "Keys of a job file (examples/job.yaml, examples/model.yaml):", *describe_keys(JobConfig)]


class PlanCommand(KeysCommand):
    """Of `plan`, which reads two kinds of files."""

    @staticmethod
    def keys() -> list[str]:
        """Those of a plan file, then those of a job file."""
        from zenray.job_config import PlanConfig

        plan_keys = ["", "Keys of a plan file (examples/plan.yaml):", *describe_keys(PlanConfig)]
        return [*plan_keys, *KeysCommand.keys()]
