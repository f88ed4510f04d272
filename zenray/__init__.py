"""The face: what a user imports or types. Importing it loads neither torch, ray nor mlflow until a name is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.errors import GroupStateError, HolderLost, MemoryExhausted, WorkerError, WorkerLost, WorkerTimeout
    from actors.expert_placement import ExpertPlacementActor, PlanClient
    from actors.keeper import Keeper
    from actors.protection import Protection
    from actors.recovery import RecoverableGroup
    from actors.state import CheckpointError, DataPosition, ModelState, OptimizerState, RandomState, ResidualState
    from actors.storage import Storage
    from collectives.errors import (
        CollectiveError,
        CollectiveMismatch,
        CollectiveTimeout,
        ConfigError,
        GradientError,
        PeerLost,
        WireFormatError,
        ZenrayError,
    )
    from collectives.fsdp import compress_fsdp
    from collectives.moe import MoELayer
    from collectives.outer import OuterLoop
    from collectives.pipeline import CompressedStage
    from collectives.policy import SyncPolicy
    from collectives.replicas import clip_grad_norm_
    from collectives.tensor_parallel import TensorParallel
    from collectives.zero import ShardedOptimizer
    from placement.errors import GangDoesNotFit, PlacementError
    from zenray.head import HeadUnreachable
    from zenray.moe import ExpertBalancer
    from zenray.moe_state import ExpertsState, load_experts
    from zenray.planning import plan, predict_memory
    from zenray.queue_client import QueueMissing
    from zenray.submission import SubmissionRefused
    from zenray.tracking import TrackingError
    from zenray.train import explain, prepare_model, sparse_all_reduce

_HOMES = {
    "prepare_model": "zenray.train",
    "explain": "zenray.train",
    "sparse_all_reduce": "zenray.train",
    "clip_grad_norm_": "collectives.replicas",
    "CompressedStage": "collectives.pipeline",
    "OuterLoop": "collectives.outer",
    "ShardedOptimizer": "collectives.zero",
    "TensorParallel": "collectives.tensor_parallel",
    "compress_fsdp": "collectives.fsdp",
    "predict_memory": "zenray.planning",
    "plan": "zenray.planning",
    "SyncPolicy": "collectives.policy",
    "MoELayer": "collectives.moe",
    "ExpertBalancer": "zenray.moe",
    "ExpertPlacementActor": "actors.expert_placement",
    "PlanClient": "actors.expert_placement",
    "ExpertsState": "zenray.moe_state",
    "load_experts": "zenray.moe_state",
    "ZenrayError": "collectives.errors",
    "ConfigError": "collectives.errors",
    "GradientError": "collectives.errors",
    "WireFormatError": "collectives.errors",
    "CollectiveError": "collectives.errors",
    "CollectiveMismatch": "collectives.errors",
    "CollectiveTimeout": "collectives.errors",
    "PeerLost": "collectives.errors",
    "PlacementError": "placement.errors",
    "GangDoesNotFit": "placement.errors",
    "WorkerError": "actors.errors",
    "WorkerLost": "actors.errors",
    "WorkerTimeout": "actors.errors",
    "GroupStateError": "actors.errors",
    "CheckpointError": "actors.state",
    "HolderLost": "actors.errors",
    "MemoryExhausted": "actors.errors",
    "RecoverableGroup": "actors.recovery",
    "Protection": "actors.protection",
    "Storage": "actors.storage",
    "Keeper": "actors.keeper",
    "ModelState": "actors.state",
    "OptimizerState": "actors.state",
    "RandomState": "actors.state",
    "DataPosition": "actors.state",
    "ResidualState": "actors.state",
    "QueueMissing": "zenray.queue_client",
    "HeadUnreachable": "zenray.head",
    "SubmissionRefused": "zenray.submission",
    "TrackingError": "zenray.tracking",
}
"""Where each public name lives; read at its first use."""

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CompressedStage",
    "ConfigError",
    "DataPosition",
    "ExpertBalancer",
    "ExpertPlacementActor",
    "ExpertsState",
    "GangDoesNotFit",
    "GradientError",
    "GroupStateError",
    "HeadUnreachable",
    "HolderLost",
    "Keeper",
    "MemoryExhausted",
    "MoELayer",
    "ModelState",
    "OptimizerState",
    "OuterLoop",
    "PeerLost",
    "PlacementError",
    "PlanClient",
    "Protection",
    "QueueMissing",
    "RandomState",
    "RecoverableGroup",
    "ResidualState",
    "ShardedOptimizer",
    "Storage",
    "SubmissionRefused",
    "SyncPolicy",
    "TensorParallel",
    "TrackingError",
    "WireFormatError",
    "WorkerError",
    "WorkerLost",
    "WorkerTimeout",
    "ZenrayError",
    "clip_grad_norm_",
    "compress_fsdp",
    "explain",
    "load_experts",
    "plan",
    "predict_memory",
    "prepare_model",
    "sparse_all_reduce",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zenray' has no attribute '{name}'; public names are {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
