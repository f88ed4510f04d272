"""Click prediction over categorical fields: one embedding table, a small dense network on top, synthetic clicks.

Field values follow a power law, p(value r) ~ (r + shift)^-exponent, as in the fitted Criteo model: 26 fields with the
published cardinalities of that data set, capped. The clicks come from a fixed random effect per value, so there is
something to learn and the loss falls.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from collectives.errors import ConfigError
from jobs.workloads.zipf import zipf_probabilities
from zenray.config import Section

CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
LOG_ODDS_SCALE = 2.0
"""Standard deviation of the log-odds of a click over records."""

EVALUATION_RECORDS = 8192


class ClickLogConfig(Section):
    """Size of the model and shape of the data."""

    cap: int = 40_000
    """Rows per field at most; the 26 Criteo fields then have 367,398 rows together."""
    width: int = 32
    """Values per row."""
    hidden: int = 64
    """Width of the dense network."""
    exponent: float = 0.93
    """Of the power law of every field."""
    shift: float = 0.0
    """Added to the rank in the power law; larger values flatten the head."""


class ClickModel(nn.Module):
    """One table for all fields, then a network with one hidden layer; returns the loss."""

    def __init__(self, num_rows: int, num_fields: int, config: ClickLogConfig, sparse: bool):
        super().__init__()
        self.embed = nn.Embedding(num_rows, config.width, sparse=sparse)
        self.trunk = nn.Sequential(
            nn.Linear(num_fields * config.width, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1)
        )
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, rows: Tensor, clicks: Tensor) -> Tensor:
        """rows: int64 [batch, fields]. clicks: float32 [batch], 0 or 1. Binary cross-entropy, a scalar."""
        score = self.trunk(self.embed(rows).flatten(1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(score, clicks)


class ClickLog:
    """See the module. `batch` is records per rank and step."""

    def __init__(self, config: ClickLogConfig, batch: int, seed: int):
        if config.cap < 1 or config.exponent < 0 or config.shift < 0:
            raise ConfigError(
                f"click_log: cap {config.cap}, exponent {config.exponent}, shift {config.shift}: negative"
            )
        self.config, self.batch_size, self.seed = config, batch, seed
        self.sizes = np.minimum(CRITEO_CARDINALITIES, config.cap)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)])

    def __reduce__(self) -> tuple[object, ...]:
        return (ClickLog, (self.config, self.batch_size, self.seed))

    @cached_property
    def _cumulative(self) -> list[np.ndarray]:
        """Per field the cumulative probabilities of its values."""
        return [np.cumsum(zipf_probabilities(size, self.config.exponent, self.config.shift)) for size in self.sizes]

    @cached_property
    def _effects(self) -> np.ndarray:
        """The hidden effect of each row on the log-odds of a click."""
        scale = LOG_ODDS_SCALE / np.sqrt(len(self.sizes))
        effects: np.ndarray = np.random.default_rng([self.seed, 3]).normal(0, scale, int(self.offsets[-1]))
        return effects

    def facts(self) -> dict[str, object]:
        """What the numbers depend on."""
        return {"fields": len(self.sizes), "num_rows": int(self.offsets[-1]), "generator": "power law, seeded"}

    def model(self, sparse: bool) -> nn.Module:
        """The same initial weights on every rank and in both forms."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ClickModel(int(self.offsets[-1]), len(self.sizes), self.config, sparse)

    def batch(self, step: int, rank: int) -> tuple[Tensor, ...]:
        """The arguments of the model at `step`: a pure function of (seed, rank, step)."""
        return self._records(np.random.default_rng([self.seed, 1, rank, step]), self.batch_size)

    def _records(self, rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
        uniform = rng.random((count, len(self.sizes)))
        columns = [
            np.minimum(np.searchsorted(cumulative, uniform[:, field]), len(cumulative) - 1) + self.offsets[field]
            for field, cumulative in enumerate(self._cumulative)
        ]
        rows = np.stack(columns, 1).astype(np.int64)
        log_odds = self._effects[rows].sum(1)
        clicks = (rng.random(count) < 1 / (1 + np.exp(-log_odds))).astype(np.float32)
        return torch.from_numpy(rows), torch.from_numpy(clicks)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Mean loss on records that no rank trains on."""
        return float(model(*self._records(np.random.default_rng([self.seed, 4]), EVALUATION_RECORDS)))
