"""The reference user: Ray's TorchTrainer and an embedding with sparse gradients.

NCCL cannot reduce sparse gradients, so such users stay on Gloo and on what PyTorch does there
(https://github.com/pytorch/pytorch/issues/111422). With zenray the loop changes in one line:

    def train_loop(config):
        model = zenray.prepare_model(model)              # instead of ray.train.torch.prepare_model(model)
        ...                                              # the rest of the loop stays as it was

    TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2)).fit()
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

NUM_ROWS, WIDTH, NUM_WORKERS, STEPS, BATCH = 2000, 8, 2, 3, 16


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Embedding(NUM_ROWS, WIDTH, sparse=True), nn.Flatten(), nn.Linear(4 * WIDTH, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids [BATCH, 4]; rank 1 sees only padding in step 1, a gradient of one row."""
    if (step, rank) == (1, 1):
        return torch.zeros(BATCH, 4, dtype=torch.int64)
    return torch.randint(NUM_ROWS, (BATCH, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    embedding, *others = model.parameters()
    return [torch.optim.SparseAdam([embedding], lr=0.01), torch.optim.SGD(others, lr=0.1)]


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    import ray.train

    import zenray
    from collectives.replicas import check_replicas
    from collectives.torch_transport import TorchTransport

    torch.set_num_threads(1)
    context = ray.train.get_context()
    model = zenray.prepare_model(make_model())
    steps = optimizers(model.module)
    for step in range(STEPS):
        for optimizer in steps:
            optimizer.zero_grad()
        loss = model(batch(step, context.get_world_rank())).square().mean()
        loss.backward()
        assert model.module[0].weight.grad.is_sparse
        for optimizer in steps:
            optimizer.step()
        ray.train.report({"loss": loss.item()})
    explanation = zenray.explain(model)
    table = {row.tensor: row.scheme for row in explanation.rows}
    check_replicas(dict(model.module.named_parameters()), TorchTransport(timeout_s=60.0))
    weights = {name: value.numpy() for name, value in model.module.state_dict().items()}
    return {"weights": weights, "schemes": table, "size": context.get_world_size()}


def oracle() -> dict[str, torch.Tensor]:
    """The same training in one process: the mean over ranks of the dense gradients."""
    model = make_model()
    steps = optimizers(model)
    for step in range(STEPS):
        for optimizer in steps:
            optimizer.zero_grad()
        sum(model(batch(step, rank)).square().mean() / NUM_WORKERS for rank in range(NUM_WORKERS)).backward()
        embedding = model[0].weight  # type: ignore[union-attr]
        embedding.grad = embedding.grad.coalesce()  # type: ignore[union-attr]
        for optimizer in steps:
            optimizer.step()
    return model.state_dict()


def test_torch_trainer_with_sparse_embeddings(
    ray_cluster: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    trainer = TorchTrainer(
        train_loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(storage_path=str(tmp_path), name="sparse"),
    )
    result = trainer.fit()
    assert result.error is None
    told = result.return_value
    assert told["size"] == NUM_WORKERS
    assert told["schemes"]["0.weight"] not in ("dense", "off", "plain DDP"), told["schemes"]
    for name, expected in oracle().items():
        torch.testing.assert_close(torch.tensor(told["weights"][name]), expected, rtol=1e-5, atol=1e-6)
