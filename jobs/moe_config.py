"""The keys of `python -m jobs.moe`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jobs.train_config import Count, Link, PositiveCount, TrackingConfig, TrainConfig
from jobs.workloads.moe_lm import MoeLmConfig
from zenray.config import Rate, Section

Policy = Literal[
    "static",
    "symi_cap",
    "symi_dropless",
    "eplb",
    "window_fill",
    "robust",
    "llep",
    "lrmoe",
    "lrmoe_topq",
]


class MoeConfig(Section):
    """One comparison: a mixture-of-experts model trained under several placement policies, over several seeds."""

    model: MoeLmConfig = MoeLmConfig()
    """The language model and its data."""
    policies: list[Policy] = Field(default=["lrmoe", "symi_cap", "symi_dropless"])
    """lrmoe: robust placement, exact split, sampled backward; lrmoe_topq: the same with the largest scores kept, a control
    that must fail. The others run the full backward; symi_cap drops pairs beyond its capacity."""
    seeds: PositiveCount = 3
    """Runs of each policy; figures are medians over them."""
    first_seed: Count = 0
    """Of weights and data order; all policies share each seed."""
    ranks: PositiveCount = 4
    """Workers, one CPU each."""
    slots: PositiveCount = 8
    """Expert instances per rank; least-loaded parallelism (llep) takes what it needs."""
    steps: PositiveCount = 300
    """Steps of each run."""
    batch: PositiveCount = 16
    """Sequences of all ranks together per step."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Largest learning rate; warm-up over 20 steps, then a cosine down to a tenth."""
    block_steps: PositiveCount = 10
    """Steps of one policy before it is the next one's turn."""
    evaluate_every: PositiveCount = 10
    """Steps between two evaluations on held-out text."""
    codecs: str = "off"
    """How dispatched and combined rows travel: off, or auto to let the roles moe_dispatch and moe_combine compress them
    where the link makes it pay."""
    modelled_link: Rate = 100e9
    """Rate at which bytes count in the modelled time where no link is shaped."""
    link: Link = None
    """Rate of each node's link, such as 1gbit: one Ray node per rank, each in a network namespace of its own."""
    link_required: bool = True
    """Whether a link that cannot be built ends the job; if not, it runs without one and says so."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""
    timeout_s: Annotated[float, Field(gt=0)] = 3000.0
    """Limit of the training itself."""

    def cluster(self) -> TrainConfig:
        """What the cluster must be."""
        return TrainConfig(
            ranks=self.ranks,
            link=self.link,
            link_required=self.link_required,
            timeout_s=self.timeout_s,
            tracking=self.tracking,
        )
