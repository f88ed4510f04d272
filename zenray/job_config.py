"""The job file: a model and a batch, and no GPU. Also the file of `zenray plan`, which adds a list of cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from placement.plans import Search
from placement.shapes import Attention, Experts, Loss, ModelShape, Optimizer, Recompute, Setup
from zenray.config import Section, keys_of, load

WORKLOADS: Mapping[str, str] = {"byte_gpt": "jobs.workloads.byte_gpt:workload"}
"""What a job may train, by name: `module:function`, a function of the job file. Nothing else is imported by name."""


class ExpertsSection(Section):
    """A mixture-of-experts layer in place of each MLP."""

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn: PositiveInt
    """Width of one expert."""
    shared_ffn: int = 0
    """Width of the shared expert; 0: none."""


class ModelSection(Section):
    """The shape of a transformer; widths in elements, 0 where the field says what it means."""

    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    vocab: PositiveInt = 256
    ffn: int = 0
    """0: four times hidden."""
    groups: int = 0
    """Key/value groups; 0: as many as heads."""
    gated: bool = False
    bias: bool = True
    norm: Literal["layer", "rms"] = "layer"
    rotary: bool = False
    """False: a learned table of positions."""
    tied: bool = True
    experts: ExpertsSection | None = None

    def shape(self, seq: int) -> ModelShape:
        """As the predictor takes it."""
        own = self.model_dump(exclude={"experts"})
        experts = None if self.experts is None else Experts(**self.experts.model_dump())
        return ModelShape(**own, seq=seq, learned_positions=0 if self.rotary else seq, experts=experts)


class RetainSection(Section):
    """States that the model keeps from call to call, as memory banks do. They grow after the first steps, so no prediction
    knows them: the way to see the queue re-plan a job."""

    kib_per_sample: PositiveInt
    """Kept for each sample of a micro-batch."""
    calls: PositiveInt
    """Kept for so many micro-batches back."""


class KubeRaySection(Section):
    """A cluster of Kubernetes that lives as long as the job."""

    image: str = Field(pattern=r"^[\w./:@-]+$")
    """With this repository and what it depends on; its working directory is the repository."""
    workers: PositiveInt = 1
    """Pods beside the head."""
    cpus: PositiveInt = 4
    """Of each pod."""
    memory_gib: PositiveInt = 16
    """Of each pod."""
    gpus: int = Field(default=0, ge=0)
    """NVIDIA cards of each worker."""
    token_secret: str = Field(default="ray-token", pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
    """Name of the Secret whose key `auth_token` is the token of the cluster."""


PLAIN_KEYS = (
    "entrypoint",
    "working_dir",
    "excludes",
    "env_vars",
    "entrypoint_resources",
    "start_timeout_s",
    "max_retries",
    "kuberay",
)
"""Keys of plain Ray jobs, which the queue does not take."""


class JobConfig(Section):
    """One job of the queue. With `entrypoint` it is a plain Ray job and the training keys are not used."""

    name: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Letters, digits, `_`, `.`, `-`; unique in a queue."""
    model: ModelSection | None = None
    workload: str = "byte_gpt"
    """What is trained: a name of the allow-list."""
    batch: PositiveInt = 8
    """Samples of one step over all cards; never changed."""
    seq: PositiveInt = 128
    """Tokens of a sample."""
    steps: PositiveInt = 100
    lr: PositiveFloat = 1e-3
    seed: int = 0
    checkpoint_every: PositiveInt = 10
    """Steps from one checkpoint to the next."""
    max_gpus: PositiveInt = 8
    recompute: list[Recompute] = Field(default=["none", "full"])
    """What may be recomputed; `none` alone forbids recomputation."""
    pin: dict[str, int] = Field(default_factory=dict)
    """What is fixed of the plan: `data` (ranks), `micro_batch`."""
    gpu_types: list[str] = Field(default_factory=list)
    """The only card types allowed; empty: all."""
    mixed: bool = False
    """Whether ranks may run on cards of different types at once, the batch split by their speed, where no single type has
    enough idle cards: then as many cards as `max_gpus`, or `pin.data`, allows."""
    host_memory_mib: PositiveInt = 512
    """Host memory that Ray reserves for each rank."""
    deadline_s: PositiveFloat | None = None
    """From submission to the end; plans that are predicted to make it go first, and then the job fails."""
    timeout_s: PositiveFloat = 3600.0
    """For one attempt."""
    boost_s: float = Field(default=0.0, ge=0.0)
    """Head start in the queue: as if it had been submitted so many seconds earlier."""
    policy: str = "off"
    """How gradients are synchronised; see `zenray.prepare_model`."""
    retain: RetainSection | None = None
    entrypoint: str | None = None
    """A shell command: run it as a plain Ray job. With `model` as well, memory is checked before that."""
    working_dir: str = "."
    """The folder whose files Ray copies to the cluster."""
    excludes: list[str] = Field(default_factory=list)
    """Patterns of files that are not copied, as in a `.gitignore`."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment of the entrypoint and of all workers. Whoever may read the jobs API can read them."""
    entrypoint_resources: dict[str, float] = Field(default_factory=dict)
    """What the entrypoint itself reserves on one node, by Ray's names: CPU, GPU, memory in bytes, custom ones."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest time from submission until the entrypoint runs; then the job is stopped."""
    max_retries: int = Field(default=0, ge=0)
    """How often an entrypoint that failed is submitted again."""
    kuberay: KubeRaySection | None = None
    """What `zenray submit --kuberay` asks of Kubernetes."""


class SetupSection(Section):
    """How a model of `zenray plan` is trained."""

    optimizer: Optimizer = "adam"
    attention: Attention = "fused"
    loss: Loss = "vocab_parallel"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    fp8: bool = False


class PlanConfig(Section):
    """What `zenray plan` reads: a model, a batch, and the cards to plan for."""

    model: ModelSection
    batch: PositiveInt = 8
    seq: PositiveInt = 2048
    training: SetupSection = SetupSection()
    cards: list[str] = Field(default=["A100-40", "A100-80", "H100", "H200"], min_length=1)
    """Names of the catalogue."""
    max_gpus: PositiveInt = 64
    recompute: list[Recompute] = Field(default=["none", "selective", "full"])
    sharding: int = Field(default=1, ge=0, le=3)
    """Optimizer sharding where there are several data-parallel ranks; 0 to 3 as in ZeRO."""
    pin: dict[str, int] = Field(default_factory=dict)
    """Degrees that are fixed, such as {tensor: 2}."""

    @classmethod
    def default_cards(cls) -> list[str]:
        """The cards that are planned for where a file names none."""
        return list(cls.model_fields["cards"].default)

    def setup(self) -> Setup:
        """The training setup as the predictor takes it."""
        return Setup(global_batch=self.batch, **self.training.model_dump())

    def search(self) -> Search:
        """What is tried. Raises ShapeError for a degree that cannot be pinned."""
        return Search(max_gpus=self.max_gpus, recompute=tuple(self.recompute), sharding=self.sharding, pinned=self.pin)


def request_of(config: JobConfig) -> dict[str, Any]:
    """The job file as plain values, as it travels to the queue."""
    return config.model_dump(mode="json", exclude=set(PLAIN_KEYS))


def job_of(request: Mapping[str, Any]) -> JobConfig:
    """The job file that `request_of` wrote."""
    return JobConfig.model_validate(request, strict=False)


def load_job_or_plan(path: Path, overrides: Sequence[str]) -> JobConfig | PlanConfig:
    """A file with a key that only jobs have is a job file, planned as the queue would; any other a plan file."""
    only_jobs = set(JobConfig.model_fields) - set(PlanConfig.model_fields)
    return load(JobConfig, path, overrides) if only_jobs & keys_of(path) else load(PlanConfig, path, overrides)
