"""Settings of `jobs.serverless`."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from jobs.train_config import TrackingConfig
from placement.resize import MIN_RESIDENCE_S
from zenray.config import Section
from zenray.job_config import JobConfig


class FakeNodeSection(Section):
    """A node with pretended cards."""

    gpus: PositiveInt
    memory_mib: PositiveInt
    """Of each card."""


class ServerlessConfig(Section):
    """The queue: where it runs, and the jobs it starts with."""

    fake_nodes: list[FakeNodeSection] = Field(default_factory=list)
    """Start a cluster of such nodes on this machine; empty: join the cluster of RAY_ADDRESS."""
    jobs: list[JobConfig] = Field(default_factory=list)
    """Submitted at the start, in this order."""
    serve: bool = False
    """Stay and take jobs of `zenray submit`; False: end when all jobs are over."""
    folder: str = ""
    """Where the queue and the checkpoints are kept; empty: below the output folder. Shared by all nodes."""
    patience_s: PositiveFloat = 600.0
    """A job that waited so long gets the next cards reserved."""
    residence_s: PositiveFloat = MIN_RESIDENCE_S
    """How long a running job keeps its cards at least before it is given more or fewer."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow: one run for the queue, one below it for each job."""
    timeout_s: PositiveFloat = 1800.0
    """For all jobs together; with `serve` it has no effect."""
