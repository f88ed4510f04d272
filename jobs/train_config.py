"""The keys of `python -m jobs.train`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jobs.workloads.click_log import ClickLogConfig
from jobs.workloads.gpt import GptConfig
from jobs.workloads.stdlib_lm import StdlibLmConfig
from zenray.config import Rate, Section

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
Policy = Annotated[str | dict[str, str], BeforeValidator(lambda value: "off" if value is False else value)]
"""YAML reads a bare `off` as false."""
Link = Annotated[Rate | None, BeforeValidator(lambda value: None if value in ("none", "off", False) else value)]


class CheckpointConfig(Section):
    """Checkpoints on disk, in a folder that all nodes see."""

    folder: str | None = None
    """Where they lie; none: `checkpoints` in the output folder of the job."""
    every_steps: Count = 0
    """Write one at the end of the block that reaches a multiple of this, and at the end; 0 writes none."""
    keep: PositiveCount = 2
    """Complete steps that remain."""
    resume: bool = False
    """Go on from the last complete step in `folder` (set it); the configuration must be the same."""


class RecoveryConfig(Section):
    """Copies of the training state in the memory of the hosts: after each update where one variant is trained, in a
    comparison between the timed blocks."""

    copies: Count = 2
    """Copies of each rank's shard, its own host's included (on fewer hosts fewer, which is said); 0: no recovery."""
    spares: Count = 0
    """Workers that wait in reserved bundles of their own. Without one a lost worker is started anew in its place."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 15.0
    """A worker that does not answer for so long counts as hung. Loading libraries can hold one up for seconds."""
    max_recoveries: Count = 16
    """Then the failure ends the job."""
    memory_mib: PositiveCount = 4096
    """Of each host, for copies; where the state does not fit, the job says so and trains without copies."""
    min_ranks: PositiveCount | None = None
    """Elastic: without a replacement go on with fewer ranks, at least so many, and grow back. Other batches are then
    trained than in the full group. None: never."""


class TrackingConfig(Section):
    """Where the run is recorded."""

    uri: str | None = None
    """MLflow's address; none: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the current directory."""
    project: str = "zenray"
    """Name of the MLflow experiment."""


class TrainConfig(Section):
    """One training job: a workload, how its gradients travel, and what it is compared with."""

    workload: Literal["stdlib_lm", "click_log", "gpt"] = "stdlib_lm"
    """The model and its data; its own section below sets the size."""
    stdlib_lm: StdlibLmConfig = StdlibLmConfig()
    """Language model on the sources of Python's standard library."""
    click_log: ClickLogConfig = ClickLogConfig()
    """Click prediction over categorical fields."""
    gpt: GptConfig = GptConfig()
    """Byte-level transformer on the same sources; all its gradients are dense."""
    ranks: PositiveCount = 2
    """Workers, one CPU each (one GPU each where the cluster has that many)."""
    steps: PositiveCount = 60
    """Steps each variant trains, warm-up included."""
    warmup_steps: Count = 10
    """First steps, trained and recorded but left out of the speed figures."""
    block_steps: PositiveCount = 10
    """Steps of one variant before it is the other's turn; shorter blocks share disturbances more evenly."""
    batch: PositiveCount = 512
    """Examples (text positions, click records, sequences) per rank and step."""
    optimizer: Literal["sgd", "adagrad", "adamw"] = "adagrad"
    """The first two leave untouched rows as they are, so sparse and dense gradients train alike; adamw: gpt alone."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Learning rate, at its highest."""
    schedule: Literal["constant", "cosine"] = "constant"
    """cosine: up over the first sixth of the steps, then down to a tenth. It needs the number of steps: a checkpoint resumes
    with the same one only."""
    seed: Count = 0
    """Of weights, data order and negatives."""
    policy: Policy = "auto"
    """How gradients travel: auto, off, a scheme for sparse ones, a preset (naive, mz, z, zeropp), one codec for dense
    ones, or a mapping of roles (dp_grad: int8b,int4b) and parameter-name patterns to what they may take."""
    dense_steps: Count = 100
    """First steps without codecs that drop values (topk, sq, powersgd, sign, randomk)."""
    scheme: str = "auto"
    """How sparse gradients travel where `policy` names codecs only: auto, off, or a scheme."""
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the elements that topk, sq and randomk keep (the top-k ratio); none: 0.01."""
    error_feedback: bool | None = None
    """Add what a codec left out to the next gradient; none: as each codec needs it."""
    bucket_mib: Annotated[float, Field(gt=0)] | None = None
    """Size of DDP's gradient buckets, for all variants; none: torch's 25 MiB."""
    link: Link = None
    """Rate of each node's link, such as 1gbit: one Ray node per rank, each in a network namespace of its own behind a
    shaped link. Needs root, ip and tc. None: the cluster of RAY_ADDRESS, or a new one on this machine."""
    link_required: bool = True
    """Whether a link that cannot be built ends the job; if not, it runs without one and says so."""
    baseline: bool = True
    """Train the same model with dense gradients under stock DDP as well, interleaved, and compare."""
    baseline_seeds: Count = 0
    """Further stock runs with other seeds: the spread of their losses is what a difference must be held against."""
    rivals: list[Literal["sparse", "auto", "fp16", "bf16", "powersgd"]] = Field(default=[])
    """More variants of the run: stock DDP with sparse embedding gradients, zenray's default policy, and stock DDP with
    torch's compression hooks."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints on disk."""
    recovery: RecoveryConfig = RecoveryConfig()
    """What a lost worker or node costs: some steps or the job."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""
    timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Limit of the training itself; single waits inside a collective are limited by the worker group."""
