"""A byte-level mixture-of-experts transformer on sources that every installation has, with domains that drift.

Three domains: `py`, the modules of the standard library; `headers`, the C++ headers that come with torch; `prose`, licences,
readmes and metadata of the installed packages. Through the run the mix moves from the first over the second to the last,
as far as `drift` says, so experts grow popular and fade. One file in ten of each domain is held out.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from collectives.moe import MoELayer
from collectives.router import Routing
from jobs.workloads.gpt import VOCABULARY, Block, ByteCorpus, stdlib_files, windows
from zenray.config import Section

DOMAINS = ("py", "headers", "prose")
FILE_BYTES, DOMAIN_BYTES = 60_000, 3_000_000
HELD_OUT_SHARE = 10
LEAST_SHARE = 0.05
"""Of a batch, for each domain, at any point of a full drift."""


class MoeLmConfig(Section):
    """Size of the model and of a sequence; `batch` counts sequences of the whole group."""

    layers: int = 2
    """Transformer blocks, each with one expert layer."""
    width: int = 64
    """Values per position, a multiple of `heads`."""
    heads: int = 4
    """Attention heads."""
    context: int = 128
    """Bytes of a sequence."""
    experts: int = 16
    """Experts of each layer."""
    top_k: int = 2
    """Experts that each position takes."""
    hidden: int = 256
    """Width of one expert."""
    balance: float = 1e-3
    """Factor of the balance loss."""
    drift: float = 0.5
    """How far the mix of domains moves: 0 mixes them equally all the time, 1 starts with one and ends with another."""
    evaluation_bytes: int = 12_288
    """Held-out bytes of each evaluation, equally from all domains."""


class MoeLmModel(nn.Module):
    """Called with ids and targets, int64 [batch, positions], it returns the mean loss in nats per byte.

    Only the tables start small. Attention that starts small as well leaves the residual stream to the experts alone, and
    then each pair that a capacity drops costs far more than it does in any trained model.
    """

    def __init__(self, config: MoeLmConfig, make_layer: Callable[[], MoELayer]):
        super().__init__()
        width = config.width
        self.table, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(Block(width, config.heads, ExpertMlp(make_layer())) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for table in (self.table, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss; 0 of no sequences, whose backward takes part in every exchange all the same."""
        x = self.table(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        if not len(ids):
            return cast(Tensor, x.sum())
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class ExpertMlp(nn.Module):
    """A `MoELayer` in the place of a block's feed-forward; keeps its last routing for the balance loss."""

    def __init__(self, layer: MoELayer):
        super().__init__()
        self.layer = layer
        self.routing: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 [batch, positions, width]."""
        y, self.routing = self.layer(x.flatten(0, 1))
        return cast(Tensor, y.view_as(x))

    def balance_loss(self) -> Tensor:
        """Of the last call, over the pairs of the whole group."""
        assert self.routing is not None
        return self.routing.balance_loss(torch.from_numpy(self.layer.load.counts.sum(0)))


def prose_files() -> Iterator[tuple[str, bytes]]:
    """Texts of the installed packages, by path."""
    root = Path(sysconfig.get_path("purelib"))
    wanted = ("*.dist-info/METADATA", "*.dist-info/**/LICENSE*", "*.dist-info/**/*.txt", "*/**/*.md", "*/**/*.rst")
    for path in sorted({path for pattern in wanted for path in root.glob(pattern) if path.is_file()}):
        yield path.relative_to(root).as_posix(), path.read_bytes()


def header_files() -> Iterator[tuple[str, bytes]]:
    """The C++ headers of torch, by path."""
    root = Path(torch.__file__).parent / "include"
    for path in sorted(root.rglob("*.h")):
        yield path.relative_to(root).as_posix(), path.read_bytes()


def _first_bytes(files: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Every file's start, until the domain is full; every third file, to reach across packages."""
    total = 0
    for name, data in islice(files, 0, None, 3):
        if total >= DOMAIN_BYTES:
            return
        total += min(len(data), FILE_BYTES)
        yield name, data[:FILE_BYTES]


@lru_cache(maxsize=1)
def domains() -> tuple[ByteCorpus, ...]:
    """The corpora in the order of DOMAINS, read once per process."""
    sources = (stdlib_files(), header_files(), prose_files())
    return tuple(
        ByteCorpus(_first_bytes(files), f"the domain '{name}'", HELD_OUT_SHARE)
        for name, files in zip(DOMAINS, sources, strict=True)
    )


class MoeLm:
    """The workload. `batch` is sequences of all ranks together per step."""

    def __init__(self, config: MoeLmConfig, batch: int, seed: int, steps: int):
        self.config, self.batch_size, self.seed, self.steps = config, batch, seed, steps

    def facts(self) -> dict[str, object]:
        """What the numbers depend on; equal on all ranks, or the ranks must not train together."""
        facts: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
        for name, corpus in zip(DOMAINS, domains(), strict=True):
            facts[f"{name}_sha256"] = corpus.sha256
            facts[f"{name}_bytes"] = [len(corpus.train), len(corpus.held_out)]
        return facts

    def model(self, make_layer: Callable[[], MoELayer]) -> MoeLmModel:
        """The same initial dense weights on every rank; the experts' are the business of who holds their state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return MoeLmModel(self.config, make_layer)

    def mix(self, step: int) -> np.ndarray:
        """Share of each domain at `step`, float64 [domains]."""
        z = step / max(1, self.steps - 1)
        moving = np.maximum(LEAST_SHARE, [1 - 2 * z, 1 - abs(2 * z - 1), 2 * z - 1])
        even = np.full(len(DOMAINS), 1 / len(DOMAINS))
        return np.asarray(self.config.drift * moving / moving.sum() + (1 - self.config.drift) * even)

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Ids and targets of this rank's part of the batch at `step`; the batch itself does not depend on `size`."""
        rng = np.random.default_rng([self.seed, 5, step])
        chosen = rng.choice(len(DOMAINS), self.batch_size, p=self.mix(step))
        position = rng.random(self.batch_size)
        context, parts = self.config.context, []
        for domain, where in list(zip(chosen, position, strict=True))[rank::size]:
            stream = domains()[domain].train
            parts.append(windows(stream, np.array([int(where * (len(stream) - context - 1))]), context))
        if not parts:
            nothing = torch.zeros(0, context, dtype=torch.int64)
            return nothing, nothing
        return torch.cat([ids for ids, _ in parts]), torch.cat([targets for _, targets in parts])

    @cached_property
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Ids and targets, int64 [sequences, context], equally many of each domain."""
        context = self.config.context
        count = max(1, self.config.evaluation_bytes // context // len(DOMAINS))
        parts = [
            windows(c.held_out, np.linspace(0, len(c.held_out) - context - 1, count).astype(np.int64), context)
            for c in domains()
        ]
        return torch.cat([ids for ids, _ in parts]), torch.cat([targets for _, targets in parts])
