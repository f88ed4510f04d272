"""A full disk: noticed before the first byte, or in the middle; a clear error, and earlier checkpoints stay."""

import resource
import shutil
from collections import namedtuple

import pytest
import torch

from actors.state import CheckpointError, CheckpointFolder, DataPosition, Stamp, digest_of

Usage = namedtuple("Usage", "total used free")


class Big(DataPosition):
    def state_dict(self):
        return {"weights": torch.zeros(1 << 18)}


def stamp(step: int) -> Stamp:
    return Stamp("r", step, 0, 0, 1, digest_of({}))


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path, 0, 1)
    folder.save(stamp(1), [DataPosition(1)])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 4096))
    with pytest.raises(CheckpointError, match="4096 free"):
        folder.save(stamp(2), [Big()])
    assert folder.latest() == 1
    assert not list(tmp_path.rglob("*.partial"))


def test_a_write_that_fails_in_the_middle_leaves_nothing_behind(tmp_path):
    folder = CheckpointFolder(tmp_path, 0, 1)
    folder.save(stamp(1), [DataPosition(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, hard))
    try:
        with pytest.raises(CheckpointError, match="step 2"):
            folder.save(stamp(2), [Big()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.latest() == 1
    assert not list(tmp_path.rglob("*.partial"))
