"""A word-level language model on the sources of Python's own standard library: no download, the same on every machine.

Words, numbers and punctuation of all modules (tests left out) form one stream per split; every twentieth file, by a
checksum of its name, is held out. Words and word pairs are hashed into one input table, words into one output table.
The softmax is sampled: the negatives come from a seed that all ranks share, so both tables get row-sparse gradients and
the ranks' row sets overlap as they do in practice.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sysconfig
import zlib
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from collectives.errors import ConfigError
from zenray.config import Section

TOKEN = re.compile(r"[^\W\d]\w*|\d+|[^\w\s]", re.ASCII)
HELD_OUT_SHARE = 20
"""One file in this many is held out."""

EVALUATION_POSITIONS = 2048
EXCLUDED = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3"})


class StdlibLmConfig(Section):
    """Size of the model and of a step."""

    rows: int = 131_072
    """Rows of each of the two tables; words and word pairs are hashed into them."""
    width: int = 64
    """Values per row, and width of the dense trunk."""
    context: int = 4
    """Words before the predicted one that the model sees, at least 2."""
    negatives: int = 2048
    """Words drawn per step for the sampled softmax, the same on all ranks."""


class Corpus:
    """Token numbers of both splits, and each token's row and frequency."""

    def __init__(self, root: Path):
        numbers: dict[str, int] = {}
        streams: dict[bool, list[np.ndarray]] = {False: [], True: []}
        digest = hashlib.sha256()
        for path in sorted(p for p in root.rglob("*.py") if not EXCLUDED & set(p.relative_to(root).parts)):
            text = path.read_text(encoding="utf-8", errors="replace")
            name = path.relative_to(root).as_posix()
            digest.update(name.encode() + b"\0" + text.encode("utf-8", "replace"))
            tokens = [numbers.setdefault(token, len(numbers)) for token in TOKEN.findall(text)]
            streams[zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0].append(np.asarray(tokens, np.int32))
        if not streams[False] or not streams[True]:
            raise ConfigError(
                f"the standard library at {root} holds too few .py files to train on; install Python with its sources"
            )
        self.train, self.held_out = np.concatenate(streams[False]), np.concatenate(streams[True])
        self.num_files = len(streams[False]) + len(streams[True])
        self.sha256 = digest.hexdigest()
        self.word_hash = np.array([zlib.crc32(word.encode()) for word in numbers], np.uint64)
        self.frequency = np.bincount(self.train, minlength=len(numbers))


@lru_cache(maxsize=1)
def stdlib_corpus() -> Corpus:
    """Read once per process; about two and a half million tokens, a second and a half."""
    return Corpus(Path(sysconfig.get_path("stdlib")))


class LanguageModel(nn.Module):
    """The last words and word pairs are looked up, mixed by a small trunk, and scored against candidate words."""

    def __init__(self, config: StdlibLmConfig, sparse: bool):
        super().__init__()
        width, inputs = config.width, 2 * config.context - 1
        self.embed = nn.Embedding(config.rows, width, sparse=sparse)
        self.output = nn.Embedding(config.rows, width, sparse=sparse)
        self.trunk = nn.Sequential(nn.Linear(inputs * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.output.weight, std=0.1)

    def hidden(self, inputs: Tensor) -> Tensor:
        """inputs: int64 [batch, 2 * context - 1] rows of words and pairs; returns float32 [batch, width]."""
        result: Tensor = self.trunk(self.embed(inputs).flatten(1))
        return result

    def forward(self, inputs: Tensor, targets: Tensor, negatives: Tensor, log_expected: Tensor) -> Tensor:
        """Sampled softmax loss, a scalar.

        targets: int64 [batch]. negatives: int64 [num_negatives] rows. log_expected: float32 [batch + num_negatives],
        log of how often each candidate is expected among the negatives (the correction of the sampled softmax).
        """
        hidden = self.hidden(inputs)
        rows = self.output(torch.cat([targets, negatives]))
        num_targets = len(targets)
        true_score = (hidden * rows[:num_targets]).sum(1) - log_expected[:num_targets]
        scores = hidden @ rows[num_targets:].T - log_expected[num_targets:]
        scores = scores.masked_fill(negatives[None, :] == targets[:, None], -torch.inf)
        return functional.cross_entropy(
            torch.cat([true_score[:, None], scores], 1), torch.zeros(num_targets, dtype=torch.int64)
        )


class StdlibLm:
    """See the module. `batch` is positions of the stream per rank and step."""

    def __init__(self, config: StdlibLmConfig, batch: int, seed: int):
        if config.context < 2:
            raise ConfigError(f"stdlib_lm.context = {config.context}: the model needs at least 2 words of context")
        self.config, self.batch_size, self.seed = config, batch, seed

    def __reduce__(self) -> tuple[object, ...]:
        return (StdlibLm, (self.config, self.batch_size, self.seed))  # each process reads the sources itself

    @cached_property
    def _sampling(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cumulative probability by word, row by word, and probability by row, of one negative."""
        corpus = stdlib_corpus()
        weight = corpus.frequency.astype(np.float64) ** 0.75
        weight /= weight.sum()
        rows = (corpus.word_hash % np.uint64(self.config.rows)).astype(np.int64)
        return np.cumsum(weight), rows, np.bincount(rows, weight, minlength=self.config.rows)

    def facts(self) -> dict[str, object]:
        """What the numbers depend on; equal on all ranks, or the ranks must not train together."""
        corpus = stdlib_corpus()
        return {
            "python": platform.python_version(),
            "corpus_sha256": corpus.sha256,
            "num_files": corpus.num_files,
            "train_tokens": len(corpus.train),
            "held_out_tokens": len(corpus.held_out),
            "distinct_words": len(corpus.word_hash),
        }

    def model(self, sparse: bool) -> nn.Module:
        """The same initial weights on every rank and in both forms."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return LanguageModel(self.config, sparse)

    def batch(self, step: int, rank: int) -> tuple[Tensor, ...]:
        """The arguments of the model at `step`: a pure function of (seed, rank, step), so nothing is kept between."""
        corpus = stdlib_corpus()
        cumulative, word_rows, row_probability = self._sampling
        rng = np.random.default_rng([self.seed, 1, rank, step])
        positions = rng.integers(self.config.context, len(corpus.train), self.batch_size)
        shared = np.random.default_rng([self.seed, 2, step])
        drawn = np.minimum(np.searchsorted(cumulative, shared.random(self.config.negatives)), len(cumulative) - 1)
        targets, negatives = word_rows[corpus.train[positions]], word_rows[drawn]
        candidates = np.concatenate([targets, negatives])
        expected = self.config.negatives * row_probability[candidates]
        inputs = self._inputs(corpus.train, positions)
        log_expected = np.log(np.maximum(expected, 1e-9)).astype(np.float32)
        return tuple(torch.from_numpy(array) for array in (inputs, targets, negatives, log_expected))

    def _inputs(self, stream: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows of the words before each position and of their pairs, int64 [positions, 2 * context - 1]."""
        before = stream[positions[:, None] - np.arange(self.config.context, 0, -1)[None, :]]
        words = stdlib_corpus().word_hash[before]
        pairs = (words[:, :-1] * np.uint64(0x9E3779B1) + words[:, 1:] * np.uint64(0x85EBCA6B)) >> np.uint64(7)
        return (np.concatenate([words, pairs], 1) % np.uint64(self.config.rows)).astype(np.int64)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Mean loss on held-out text, full softmax over all rows that hold a word."""
        assert isinstance(model, LanguageModel)
        corpus, (_, word_rows, _) = stdlib_corpus(), self._sampling
        held_out = corpus.held_out
        positions = np.linspace(self.config.context, len(held_out) - 1, EVALUATION_POSITIONS).astype(np.int64)
        used, place = np.unique(word_rows, return_inverse=True)
        targets = torch.from_numpy(place[held_out[positions]])
        table = model.output.weight[torch.from_numpy(used)]
        losses = []
        inputs = torch.from_numpy(self._inputs(held_out, positions))
        for start in range(0, len(positions), 256):
            part = slice(start, start + 256)
            losses.append(
                functional.cross_entropy(model.hidden(inputs[part]) @ table.T, targets[part], reduction="sum")
            )
        return float(torch.stack(losses).sum()) / len(positions)
