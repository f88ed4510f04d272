"""A small byte-level transformer on the sources of Python's standard library: dense gradients, no download.

The stream is the bytes of all modules (tests left out); every twentieth file, by a checksum of its name, is held out.
Pre-norm blocks, learned positions, tied input and output table, as GPT-2 (Radford et al., 2019), at a size of choice.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
import zlib
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
    """The bytes of both splits."""

    def __init__(self, root: Path):
        streams: dict[bool, list[bytes]] = {False: [], True: []}
        digest = hashlib.sha256()
        for path in sorted(p for p in root.rglob("*.py") if not EXCLUDED & set(p.relative_to(root).parts)):
            name, data = path.relative_to(root).as_posix(), path.read_bytes()
            digest.update(name.encode() + b"\0" + data)
            streams[zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0].append(data)
        train, held_out = (np.frombuffer(b"\n".join(streams[key]), np.uint8) for key in (False, True))
        if min(len(train), len(held_out)) < 2 * EVALUATION_BYTES:
            raise ConfigError(
                f"the standard library at {root} holds too few .py files to train on; install its sources"
            )
        self.train, self.held_out, self.sha256 = train, held_out, digest.hexdigest()


@lru_cache(maxsize=1)
def byte_corpus() -> ByteCorpus:
    """Read once per process; about fifteen million bytes."""
    return ByteCorpus(Path(sysconfig.get_path("stdlib")))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a skip."""

    def __init__(self, config: GptConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 [batch, positions, width]."""
        batch, positions, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, positions, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, positions, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return result


class GptModel(nn.Module):
    """See the module. Called with ids and targets it returns the mean loss in nats per byte."""

    def __init__(self, config: GptConfig):
        super().__init__()
        self.table, self.position = nn.Embedding(VOCABULARY, config.width), nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
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
        windows = stream[starts[:, None] + np.arange(self.config.context + 1)].astype(np.int64)
        return torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Mean loss in nats per byte on held-out text."""
        context = self.config.context
        count = EVALUATION_BYTES // context
        starts = np.linspace(0, len(byte_corpus().held_out) - context - 1, count).astype(np.int64)
        windows = torch.from_numpy(byte_corpus().held_out[starts[:, None] + np.arange(context + 1)].astype(np.int64))
        losses = [float(model(part[:, :-1], part[:, 1:])) * len(part) for part in torch.split(windows, 32)]
        return sum(losses) / count
