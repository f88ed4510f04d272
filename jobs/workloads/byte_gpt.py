"""A decoder that predicts the next byte of Python's own sources: real text on every machine, in any size.

A batch is a pure function of (seed, step), a rank's part of it a slice: so the same samples are seen in the same order
however many ranks, micro-batches or restarts there are.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from collectives.errors import ConfigError
from jobs.workloads.gpt import Block, feed_forward, windows
from placement.shapes import ModelShape, Recompute
from zenray.job_config import JobConfig

SOURCES = (
    "argparse.py",
    "ast.py",
    "dataclasses.py",
    "datetime.py",
    "decimal.py",
    "difflib.py",
    "inspect.py",
    "typing.py",
)


@lru_cache(maxsize=1)
def text() -> np.ndarray:
    """uint8 [bytes]: the sources one after the other."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = [(root / name).read_bytes() for name in SOURCES if (root / name).is_file()]
    if not parts:
        raise ConfigError(f"none of {', '.join(SOURCES)} is in {root}; install Python with its sources")
    return np.frombuffer(b"".join(parts), np.uint8)


class ByteGpt(nn.Module):
    """The decoder; called with inputs and targets it returns the mean loss."""

    def __init__(self, shape: ModelShape, recompute: Recompute, retained_floats: int, retained_calls: int):
        super().__init__()
        self.recompute, self.retained_floats, self.retained_calls = recompute, retained_floats, retained_calls
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Parameter(torch.zeros(shape.seq, shape.hidden))
        self.blocks = nn.ModuleList(
            Block(shape.hidden, shape.heads, feed_forward(shape.hidden, shape.ffn_width)) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.hidden)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.retained: list[Tensor] = []

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: int64 [batch, seq]; returns the mean cross entropy, a scalar."""
        x = self.embed(inputs) + self.positions
        for block in self.blocks:
            if self.recompute == "full":
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        x = self.norm(x)
        logits = functional.linear(x, self.embed.weight)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.retained_calls and self.training:
            self.retained.append(x.new_zeros(len(inputs), self.retained_floats))
            del self.retained[: -self.retained_calls]
        return loss


class ByteGptWorkload:
    """What the queue trains for a job file without another workload."""

    def __init__(self, job: JobConfig):
        if job.model is None:
            raise ConfigError(
                f"job '{job.name}': byte_gpt needs the section `model`, at least layers, hidden and heads"
            )
        self.job, self.shape = job, job.model.shape(job.seq)
        plain = ModelShape(
            layers=self.shape.layers,
            hidden=self.shape.hidden,
            heads=self.shape.heads,
            seq=self.shape.seq,
            vocab=self.shape.vocab,
            ffn=self.shape.ffn,
            learned_positions=self.shape.seq,
        )
        if plain != self.shape or self.shape.vocab < 256:
            raise ConfigError(
                f"job '{job.name}': byte_gpt is a plain decoder over bytes; of `model` it takes layers, hidden, heads, ffn "
                f"and a vocab of at least 256"
            )

    def model(self, recompute: Recompute) -> nn.Module:
        """The same initial weights on every rank."""
        retain = self.job.retain
        floats, calls = (retain.kib_per_sample * 256, retain.calls) if retain else (0, 0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.job.seed)
            return ByteGpt(self.shape, recompute, floats, calls)

    def samples(self, step: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Samples start .. stop - 1 of the global batch of `step`: inputs and targets, int64 [stop - start, seq]."""
        stream, seq = text(), self.job.seq
        rng = np.random.default_rng([self.job.seed, step])
        inputs, targets = windows(stream, rng.integers(0, len(stream) - seq - 1, self.job.batch)[start:stop], seq)
        return inputs.contiguous(), targets.contiguous()

    def example(self, micro_batch: int) -> tuple[Tensor, ...]:
        """Arguments of the model as they are in training, for a trace."""
        ids = torch.zeros(micro_batch, self.job.seq, dtype=torch.int64)
        return ids, ids.clone()


def workload(job: JobConfig) -> ByteGptWorkload:
    """The entry of the allow-list."""
    return ByteGptWorkload(job)
