"""What the scheduler knows of nodes and jobs: plain frozen data, filled by the predictor and by the cluster's inventory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_GPUS_PER_NODE = 16


@dataclass(frozen=True)
class NodeSpec:
    """One machine: `num_gpus` equal cards of `gpu_type`, each with `memory_bytes` that a job may fill."""

    name: str
    gpu_type: str
    num_gpus: int
    memory_bytes: int


@dataclass(frozen=True)
class PlanOption:
    """One way to run a job class, as the plan enumeration hands it over: a GPU type, a size and its predictions.

    memory_bytes is the `upper` prediction per GPU, step_time_s the time of one step of the whole global batch.
    tp_group GPUs must sit inside one node; it divides num_gpus.
    """

    gpu_type: str
    num_gpus: int
    tp_group: int
    memory_bytes: int
    step_time_s: float


@dataclass(frozen=True)
class JobClass:
    """Jobs that share shape, batch, dtype and kernels, and so their ordered plan list (best first)."""

    name: str
    options: tuple[PlanOption, ...]


@dataclass(frozen=True)
class JobSpec:
    """One submitted job: `num_steps` steps of its class.

    boost_s is the head start of its priority: the job queues as if it had been submitted that many seconds earlier, so
    that every job outranks any newer one in bounded time, whatever the boosts of the newer ones.
    """

    job_id: str
    class_name: str
    num_steps: float
    submit_s: float
    boost_s: float = 0.0


@dataclass(frozen=True)
class NodeShare:
    """GPUs of one node: `gpus` are card indices on node `node` (its name)."""

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class Start:
    """Decision: run `job_id` by `option` on these cards."""

    job_id: str
    option: PlanOption
    cards: tuple[tuple[int, int], ...]
    """(node index, bit mask of its cards), nodes ascending; whole tp groups lie inside one node, in card order."""
    nodes: Sequence[NodeSpec] = field(repr=False, compare=False)
    """All nodes of the cluster by index."""

    @property
    def shares(self) -> tuple[NodeShare, ...]:
        """The cards by node name; spelt out on demand, as a decision may hold hundreds."""
        return tuple(
            NodeShare(self.nodes[node].name, tuple(g for g in range(mask.bit_length()) if mask >> g & 1))
            for node, mask in self.cards
        )


@dataclass(frozen=True)
class Blocker:
    """Why one plan cannot start now: `short_gpus` GPUs are missing; `node` is the nearest node, if one node must do.

    possible says whether the empty cluster could run it; then waiting helps, otherwise only another plan does.
    """

    option: PlanOption
    resource: str
    node: str | None
    short_gpus: int
    possible: bool


@dataclass(frozen=True)
class Explanation:
    """Answer to "why is my job pending?": the blockers, nearest plan first, and the reserved start if there is one."""

    job_id: str
    state: str
    blockers: tuple[Blocker, ...]
    reserved_start_s: float | None

    @property
    def nearest(self) -> Blocker | None:
        """The plan that lacks the fewest GPUs among those that the cluster could ever run."""
        return next((b for b in self.blockers if b.possible), None)


def order_options(options: Sequence[PlanOption], gpu_weight: dict[str, float]) -> tuple[PlanOption, ...]:
    """Best first: samples per second and weighted GPU, then the smallest sufficient memory, then fewer GPUs.

    gpu_weight: relative price of one GPU of a type; all options belong to one class, so their batch is the same.
    """
    return tuple(
        sorted(options, key=lambda o: (o.step_time_s * o.num_gpus * gpu_weight[o.gpu_type], o.memory_bytes, o.num_gpus))
    )
