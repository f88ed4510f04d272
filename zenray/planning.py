"""What a user asks before anything runs: how much memory does this take, and on which cards, how many, in which way?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.errors import ConfigError
from placement.catalogue import GpuType, gpu_type
from placement.configs import predict_config
from placement.data_plans import data_plans, too_large
from placement.inventory import Inventory, fake_card, gpu_nodes
from placement.memory import MemoryPrediction, predict
from placement.plans import PlanList, enumerate_plans
from placement.shapes import Layout, ModelShape, Setup
from zenray.job_config import JobConfig, PlanConfig, request_of

if TYPE_CHECKING:
    from torch import nn

Cards = Inventory | Sequence[str | GpuType]


def predict_memory(
    model_or_config: nn.Module | ModelShape | Mapping[str, Any] | str | Path,
    batch: int,
    seq: int,
    *,
    gpu: str | GpuType = "A100-80",
    setup: Setup | None = None,
    inputs: Any = None,
    **degrees: int,
) -> MemoryPrediction:
    """Bytes that one card needs to train with micro-batches of `batch` samples of `seq` tokens.

    A shape, or a published configuration (a mapping, or the path of its config.json), is predicted in closed form, with
    `setup` and degrees such as tensor=2, data=8, sharding=1. A module is traced; `inputs` are its example arguments, by
    default token ids int64 [batch, seq]. Raises ConfigError, ShapeError or PlacementError.
    """
    card = gpu_type(gpu) if isinstance(gpu, str) else gpu
    if isinstance(model_or_config, str | Path):
        model_or_config = read_model_config(Path(model_or_config))
    if isinstance(model_or_config, ModelShape):
        layout = Layout.of(micro_batch=batch, **degrees)
        return predict(_with_seq(model_or_config, seq), setup or Setup(), layout, card).prediction()
    if isinstance(model_or_config, Mapping):
        return predict_config(model_or_config, card, micro_batch=batch, seq=seq, setup=setup, **degrees)
    if degrees or setup is not None:
        raise ConfigError("a module is traced as it is: degrees and setup apply to shapes and configurations only")
    import torch

    from placement.traced import predict_module

    example = (torch.zeros(batch, seq, dtype=torch.int64),) if inputs is None else inputs
    return predict_module(model_or_config, example).prediction(card)


def plan(job: JobConfig | PlanConfig, cluster: Cards) -> PlanList:
    """Every way to run `job` on the cards of `cluster`, best first, with what was left out and why.

    cluster: names of cards (of the catalogue, or fake-MIB), card types, or an inventory read from Ray. A job file is
    planned as the queue does it, from a trace of its module, data-parallel; a plan file over all parallel degrees.
    """
    gpus = cards_of(cluster)
    if isinstance(job, PlanConfig):
        return enumerate_plans(job.model.shape(job.seq), job.setup(), gpus, job.search())
    from zenray.queue_program import QueueProgram

    program, request = QueueProgram(), request_of(job)
    needs = program.check(request)
    allowed = [gpu for gpu in gpus if not needs.gpu_types or gpu.name in needs.gpu_types]
    if allowed and (reason := too_large(program.floor_bytes(request), allowed)):
        return PlanList((), (), reason)
    profile = program.profile(request)
    return data_plans(
        profile, job.batch, allowed, max_gpus=job.max_gpus, recompute=needs.recompute, pinned=needs.pinned
    )


def cards_of(cluster: Cards) -> list[GpuType]:
    """The distinct card types. Raises ConfigError for unknown names."""
    if isinstance(cluster, Inventory):
        found = {node.gpu.name: node.gpu for node in gpu_nodes(cluster)}
    else:
        types = [_card(entry) if isinstance(entry, str) else entry for entry in cluster]
        found = {gpu.name: gpu for gpu in types}
    return list(found.values())


def read_model_config(path: Path) -> dict[str, Any]:
    """A config.json. Raises ConfigError if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model configuration {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not the keys of a model configuration")
    return values


def _card(name: str) -> GpuType:
    memory_mib = name.removeprefix("fake-")
    return fake_card(int(memory_mib), 8) if name.startswith("fake-") and memory_mib.isdigit() else gpu_type(name)


def _with_seq(shape: ModelShape, seq: int) -> ModelShape:
    from dataclasses import replace

    positions = seq if shape.learned_positions and shape.learned_positions < seq else shape.learned_positions
    return replace(shape, seq=seq, learned_positions=positions)
