"""Which experts each token takes: softmax top-k routing, with a balance loss and bias balancing.

Shapes: T tokens on this rank, k experts a token, d model width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """Token choices of this rank: gates [T, k] summing to 1 per token, experts int64 [T, k], probabilities [T, E]."""

    gates: Tensor
    experts: Tensor
    probabilities: Tensor

    @property
    def counts(self) -> Tensor:
        """Pairs of each expert, int64 [E]."""
        return torch.bincount(self.experts.reshape(-1), minlength=self.probabilities.shape[1])

    def balance_loss(self, pairs: Tensor | None = None) -> Tensor:
        """E * sum_e (share of pairs) * (mean probability): 1 at perfect balance (Switch Transformer, section 2.2).

        pairs: int64 [E] of the whole group; the mean of this loss over ranks is then that of one process with all tokens.
        """
        num_experts = self.probabilities.shape[1]
        if not len(self.gates):
            return self.probabilities.sum()
        pairs = self.counts if pairs is None else pairs
        share = pairs.to(self.probabilities.dtype) / pairs.sum()
        return num_experts * (share * self.probabilities.mean(0)).sum()


class TopKRouter(nn.Module):
    """Softmax router with k experts a token, gates renormalised over the k.

    bias_rate > 0 balances without a loss term: after each step `rebalance` moves a bias, used for choosing only, by
    this much against the sign of each expert's load error (arXiv 2408.15664).
    """

    def __init__(self, width: int, num_experts: int, top_k: int, *, bias_rate: float = 0.0):
        super().__init__()
        self.top_k, self.bias_rate = top_k, bias_rate
        self.gate = nn.Linear(width, num_experts, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, x: Tensor) -> Routing:
        """x: [T, d]."""
        probabilities = F.softmax(self.gate(x), dim=-1)
        experts = torch.topk(probabilities.detach() + self.bias, self.top_k, dim=-1).indices
        chosen = probabilities.gather(1, experts)
        return Routing(chosen / chosen.sum(1, keepdim=True), experts, probabilities)

    def rebalance(self, counts: Tensor) -> None:
        """counts: int64 [E], the pairs of the whole group in the last step."""
        self.bias += self.bias_rate * torch.sign(counts.sum() / len(counts) - counts).to(self.bias.dtype)
