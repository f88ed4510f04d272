"""Row 14: actors without GPUs see them, and may use them. Here: a rank that was given none sees none."""

import os
from collections.abc import Mapping

import torch

from actors.group import WorkerGroup
from actors.worker import WorkerContext


def test_14_a_rank_without_gpus_sees_none_whatever_the_environment_says(ray_cluster: Mapping[str, str]) -> None:
    def look(context: WorkerContext) -> tuple[str, bool, bool, str]:
        return (
            os.environ["CUDA_VISIBLE_DEVICES"],
            torch.cuda.is_available(),
            torch.cuda.is_initialized(),
            str(context.device),
        )

    with WorkerGroup(1) as group:
        assert group.run(look, timeout_s=60) == [("", False, False, "cpu")]
