"""One rank of a gang whose ranks differ, for test_mixed_training.py."""

import itertools
from types import SimpleNamespace

import torch

from actors.job_run import Assignment
from placement.catalogue import GIB
from placement.mixed import Share
from zenray import queue_program


def train(transport, config):
    """Train by shares of the given speeds; a pretended clock makes every rank equally fast, as a sample counts."""
    torch.set_num_threads(1)
    sizes = config["micro_batches"]
    ticks = itertools.count()
    queue_program.perf_counter = lambda: next(ticks) * float(sizes[transport.rank])
    shares = {
        f"node{rank}": Share(speed=speed, micro_batch=size, upper_bytes=GIB, capacity_bytes=GIB)
        for rank, (speed, size) in enumerate(zip(config["speeds"], sizes, strict=True))
    }
    plan = Assignment(
        data=transport.size, micro_batch=1, recompute="none", upper_bytes=1, capacity_bytes=1, fake=True,
        folder=config["folder"], shares=shares,
    )  # fmt: skip
    said = []
    context = SimpleNamespace(
        run_id="test", epoch=1, rank=transport.rank, size=transport.size, node_id=f"node{transport.rank}",
        device=torch.device("cpu"), transport=transport, report=said.append,
    )  # fmt: skip
    result = queue_program.train_rank(config["request"], plan, context)
    return {"losses": result["losses"], "splits": [line["text"] for line in said if line["kind"] == "split"]}
