"""Checkpoints: bit-identical restore, atomic writes, refusal of what does not verify."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from actors.state import (
    CheckpointError,
    CheckpointFolder,
    DataPosition,
    ModelState,
    OptimizerState,
    RandomState,
    Stamp,
    digest_of,
    pack,
    unpack,
)

CONFIG = digest_of({"lr": 0.1})


class Tied(nn.Module):
    """A sparse table, a tied pair and a trunk: the shapes that make checkpoints go wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(32, 4, sparse=True)
        self.trunk = nn.Linear(4, 32)
        self.head = nn.Linear(4, 32)
        self.head.weight = self.trunk.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.trunk(self.table(ids)) + self.head(self.table(ids))).square().mean()


class Loop:
    """A training loop whose every step depends on all of its state."""

    def __init__(self, seed: int) -> None:
        self.model = Tied(seed)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.sampler, self.torch_sampler = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.position = DataPosition()
        generators = {"numpy_sampler": self.sampler, "torch_sampler": self.torch_sampler}
        self.providers = [
            ModelState(self.model),
            OptimizerState(self.optimizer, self.model),
            RandomState(generators),
            self.position,
        ]

    def step(self) -> None:
        ids = torch.tensor(
            [
                random.randrange(32),
                int(np.random.randint(32)),
                int(torch.randint(32, ())),
                int(self.sampler.integers(32)),
                int(torch.randint(32, (), generator=self.torch_sampler)),
                self.position.consumed % 32,
            ]
        )
        self.optimizer.zero_grad()
        self.model(ids).backward()
        self.optimizer.step()
        self.position.consumed += 1


def stamp(step: int, rank: int = 0, size: int = 1, config: str = CONFIG) -> Stamp:
    return Stamp(run_id="r", step=step, epoch=0, rank=rank, world_size=size, config_sha256=config)


def test_resumed_loop_is_bit_identical_to_the_undisturbed_one(tmp_path):
    whole = Loop(1)
    for _ in range(3):
        whole.step()
    folder = CheckpointFolder(tmp_path, 0, 1)
    assert folder.save(stamp(3), whole.providers) > 0
    for _ in range(4):
        whole.step()
    resumed = Loop(2)
    random.seed(9)
    assert folder.latest() == 3
    assert folder.load(3, resumed.providers, CONFIG) == stamp(3)
    for _ in range(4):
        resumed.step()
    assert pack(resumed.providers) == pack(whole.providers)
    assert resumed.position.consumed == 7


def test_no_pickle_on_disk_and_the_manifest_names_every_file(tmp_path):
    CheckpointFolder(tmp_path, 0, 1).save(stamp(1), Loop(0).providers)
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["manifest.json", "tensors.safetensors"]
    assert not any(b"torch._utils" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_step_is_complete_only_with_every_rank(tmp_path):
    ranks = [CheckpointFolder(tmp_path, rank, 2) for rank in range(2)]
    for rank, folder in enumerate(ranks):
        folder.save(stamp(1, rank, 2), [DataPosition(rank)])
    ranks[0].save(stamp(2, 0, 2), [DataPosition(0)])
    assert ranks[0].latest() == ranks[1].latest() == 1
    position = DataPosition()
    ranks[1].load(1, [position], CONFIG)
    assert position.consumed == 1


def test_old_steps_are_pruned_but_never_the_newest_complete_ones(tmp_path):
    folder = CheckpointFolder(tmp_path, 0, 1, keep=2)
    for step in range(1, 6):
        folder.save(stamp(step), [DataPosition(step)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("file", ["tensors.safetensors", "manifest.json"])
def test_one_flipped_bit_is_refused_and_the_step_before_is_taken(tmp_path, file):
    folder = CheckpointFolder(tmp_path, 0, 1)
    for step in (1, 2):
        folder.save(stamp(step), Loop(0).providers)
    path = tmp_path / "step-00000002" / "rank-0" / file
    data = bytearray(path.read_bytes())
    position = data.find(b'"sha256"') + 12 if file == "manifest.json" else len(data) // 2
    data[position] ^= 1
    path.write_bytes(data)
    assert folder.latest() == 1
    with pytest.raises(CheckpointError, match="damaged"):
        folder.load(2, Loop(0).providers, CONFIG)


def test_other_configuration_or_world_is_refused_untouched(tmp_path):
    CheckpointFolder(tmp_path, 0, 1).save(stamp(1), [DataPosition(7)])
    position = DataPosition(1)
    with pytest.raises(CheckpointError, match="same settings"):
        CheckpointFolder(tmp_path, 0, 1).load(1, [position], digest_of({"lr": 0.2}))
    with pytest.raises(CheckpointError, match="2 ranks"):
        CheckpointFolder(tmp_path, 0, 2).load(1, [position], CONFIG)
    assert position.consumed == 1


def test_different_provider_lists_are_refused():
    data, values = pack([DataPosition(1)])
    with pytest.raises(CheckpointError, match="same model"):
        unpack(data, values, [DataPosition(), DataPosition(name="more")])
    with pytest.raises(CheckpointError, match="two state providers"):
        pack([DataPosition(), DataPosition()])


def test_empty_folder_has_no_latest(tmp_path):
    assert CheckpointFolder(tmp_path / "nothing", 0, 1).latest() is None
