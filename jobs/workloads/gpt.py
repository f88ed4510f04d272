"""A small byte-level transformer on the sources of Python's standard library: dense gradients, no download.

The stream is the bytes of all modules (tests left out); every twentieth file, by a checksum of its name, is held out.
Pre-norm blocks, learned positions, tied input and output table, as GPT-2 (Radford et al., 2019), at a size of choice.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from collectives.errors import ConfigError
from jobs.workloads.stdlib_lm import EXCLUDED, HELD_OUT_SHARE
from zenray.config import Section

VOCABULARY = 256
EVALUATION_BYTES = 16_384


class GptConfig(Section):
    """Size of the model and of a sequence; `batch` counts sequences."""

    layers: int = 4
    """Transformer blocks, of 12 * width^2 parameters each."""
    width: int = 192
    """Values per position, a multiple of `heads`."""
    heads: int = 4
    """Attention heads."""
    context: int = 64
    """Bytes of a sequence."""


class ByteCorpus:
    """The bytes of both splits of (name, content) files; one file in `share`, by a checksum of its name, is held out."""

    def __init__(self, files: Iterable[tuple[str, bytes]], origin: str, share: int = HELD_OUT_SHARE):
        streams: dict[bool, list[bytes]] = {False: [], True: []}
        digest = hashlib.sha256()
        for name, data in files:
            digest.update(name.encode() + b"\0" + data)
            streams[zlib.crc32(name.encode()) % share == 0].append(data)
        train, held_out = (np.frombuffer(b"\n".join(streams[key]), np.uint8) for key in (False, True))
        if min(len(train), len(held_out)) < 2 * EVALUATION_BYTES:
            raise ConfigError(f"{origin} holds too few bytes to train on; install its sources")
        self.train, self.held_out, self.sha256 = train, held_out, digest.hexdigest()


def stdlib_files() -> Iterator[tuple[str, bytes]]:
    """Name and content of every module of the standard library, tests left out, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(p for p in root.rglob("*.py") if not EXCLUDED & set(p.relative_to(root).parts)):
        yield path.relative_to(root).as_posix(), path.read_bytes()


@lru_cache(maxsize=1)
def byte_corpus() -> ByteCorpus:
    """Read once per process; about fifteen million bytes."""
    return ByteCorpus(stdlib_files(), "the standard library")


def windows(stream: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Ids and targets, int64 [len(starts), context], of the stretches of `stream` that begin at `starts`."""
    cut = torch.from_numpy(stream[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return cut[:, :-1], cut[:, 1:]


def feed_forward(width: int, hidden: int) -> nn.Module:
    """The dense feed-forward of a block."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a skip. mlp: another feed-forward than the dense one."""

    def __init__(self, width: int, heads: int, mlp: nn.Module | None = None):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp or feed_forward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 [batch, positions, width]."""
        batch, positions, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, positions, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, positions, width))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class GptModel(nn.Module):
    """See the module. Called with ids and targets it returns the mean loss in nats per byte."""

    def __init__(self, config: GptConfig):
        super().__init__()
        self.table, self.position = nn.Embedding(VOCABULARY, config.width), nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets: int64 [batch, positions]."""
        x = self.table(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.table.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Gpt:
    """The workload. `batch` is sequences per rank and step."""

    def __init__(self, config: GptConfig, batch: int, seed: int):
        if config.width % config.heads:
            raise ConfigError(f"gpt.width = {config.width} is no multiple of gpt.heads = {config.heads}")
        self.config, self.batch_size, self.seed = config, batch, seed

    def facts(self) -> dict[str, object]:
        """What the numbers depend on; equal on all ranks, or the ranks must not train together."""
        corpus = byte_corpus()
        return {
            "python": platform.python_version(),
            "corpus_sha256": corpus.sha256,
            "train_bytes": len(corpus.train),
            "held_out_bytes": len(corpus.held_out),
        }

    def model(self, sparse: bool) -> nn.Module:
        """The same initial weights on every rank; `sparse` makes no difference, all gradients are dense."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return GptModel(self.config)

    def batch(self, step: int, rank: int) -> tuple[Tensor, ...]:
        """Ids and targets at `step`: a pure function of (seed, rank, step)."""
        stream = byte_corpus().train
        rng = np.random.default_rng([self.seed, 3, rank, step])
        starts = rng.integers(0, len(stream) - self.config.context - 1, self.batch_size)
        return windows(stream, starts, self.config.context)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Mean loss in nats per byte on held-out text."""
        context = self.config.context
        count = EVALUATION_BYTES // context
        starts = np.linspace(0, len(byte_corpus().held_out) - context - 1, count).astype(np.int64)
        ids, targets = windows(byte_corpus().held_out, starts, context)
        parts = zip(torch.split(ids, 32), torch.split(targets, 32), strict=True)
        return sum(float(model(*part)) * len(part[0]) for part in parts) / count
