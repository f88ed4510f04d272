"""The owner function: test vectors for every device, a bijection, and balance on ids that defeat affine maps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.kernels import twins
from collectives.kernels.hashing import HashedOwners, RangeOwners

VECTORS = {
    (1000, 7, 0): ([6, 3, 2, 6, 2, 3], [124, 100, 37, 79, 78, 46]),
    (2**20, 16, 0): ([14, 6, 1, 11, 4, 11], [33292, 28524, 1145, 14227, 56249, 18028]),
    (2**33, 16, 0): ([8, 2, 7, 2, 14, 9], [209407407, 469574622, 279113832, 201454705, 213591199, 47600952]),
    (20_000_000, 16, 1): ([12, 2, 15, 10, 10, 8], [351546, 1041916, 448053, 133498, 842728, 748676]),
}
"""(positions, owners, seed) -> owner and slot of positions 0, 1, 2, 3, the middle and the last."""


@pytest.mark.parametrize("case", VECTORS)
def test_owner_vectors(case) -> None:
    """Fixed forever: all ranks and all devices must agree, also across versions."""
    num_positions, size, seed = case
    ids = torch.tensor([0, 1, 2, 3, num_positions // 2, num_positions - 1])
    owners, slots = HashedOwners(num_positions, size, seed).split(ids)
    assert (owners.tolist(), slots.tolist()) == VECTORS[case]


@given(st.integers(1, 2**62), st.integers(0, 2**32), st.data())
def test_the_kernel_equals_its_definition(num_positions, seed, data) -> None:
    x = data.draw(st.integers(0, num_positions - 1))
    owners = HashedOwners(num_positions, 5, seed)
    owner, slot = owners.split(torch.tensor([x]))
    image = twins.permute(x, num_positions, owners.keys().tolist())
    assert (owner.item(), slot.item()) == (image % 5, image // 5)
    assert owners.join(int(owner), slot).tolist() == [x]


@pytest.mark.parametrize("kind", [HashedOwners, RangeOwners])
@pytest.mark.parametrize("num_positions", [1, 2, 3, 7, 31, 32, 33, 97, 1024, 1025, 4099])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_position_has_one_owner_and_slot(kind, num_positions, size) -> None:
    owners = kind(num_positions, size)
    ids = torch.arange(num_positions)
    owner, slot = owners.split(ids)
    for j in range(size):
        held = slot[owner == j]
        assert sorted(held.tolist()) == list(range(owners.num_slots(j)))
        assert owners.join(j, held).tolist() == ids[owner == j].tolist()
    sizes = [owners.num_slots(j) for j in range(size)]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == num_positions


def chernoff(balls: int, size: int, lists: int) -> float:
    """Imbalance exceeded with probability below 1e-3 by a random assignment of `balls` to `size` owners."""
    mean, slack = balls / size, math.log(lists) + math.log(size) + 6.9
    return 1 + (slack + math.sqrt(slack * slack + 8 * slack * mean)) / (2 * mean)


PATTERNS = {
    "random": lambda n: np.sort(np.random.default_rng(3).choice(20_000_000, 100_000, replace=False)),
    "contiguous": lambda n: np.arange(100_000),
    "stride 4": lambda n: np.arange(0, 400_000, 4),
    "stride 1024": lambda n: np.arange(0, 20_000_000, 1024),
    "stride 512 (a column)": lambda n: np.arange(7, 20_000_000, 512),
    "stride n * 512": lambda n: np.arange(0, 20_000_000, n * 512),
}


@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_balance_on_structured_ids(pattern, size) -> None:
    ids = torch.from_numpy(PATTERNS[pattern](size))
    owner, _ = HashedOwners(20_000_000, size).split(ids)
    counts = np.bincount(owner.numpy(), minlength=size)
    assert counts.max() * size / len(ids) <= chernoff(len(ids), size, 1)
