"""What training costs, as Prometheus metrics: differences from one block of steps to the next, on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from actors.metrics import Metrics
from collectives.channel import RoleRecord
from collectives.ddp import SyncHook, hook_of
from collectives.moe import MoELayer
from collectives.policy import Role

ROLE = Role.DP_GRAD


class StepMetrics:
    """Exports what the steps of one model on one rank did. `run` tells runs, and variants within a run, apart."""

    def __init__(self, run: str, rank: int, model: nn.Module):
        self.model, self.rank = model, rank
        self._metrics = Metrics(run=run, rank=rank, role=ROLE)
        self._hook = hook_of(model)
        module = model.module if isinstance(model, DistributedDataParallel) else model
        trained = [p for p in module.parameters() if p.requires_grad]
        self._raw_bytes = sum(p.numel() * p.element_size() for p in trained)
        self._experts = [layer for layer in module.modules() if isinstance(layer, MoELayer)]
        self._exposed_s = 0.0
        self._calls: Counter[str] = Counter()
        self._num_events = 0
        self._schemes: dict[str, str] = {}

    def block(
        self,
        step_s: Sequence[float],
        loss: float,
        sent_bytes: Mapping[str, int] | None = None,
        imbalance: float | None = None,
    ) -> None:
        """Export one block; not during a backward pass.

        step_s: seconds of each step. loss: of the last one, the mean over ranks. sent_bytes: by phase, of the block.
        imbalance: bytes that the busiest rank sent over the mean.
        """
        metrics = self._metrics
        metrics.add("zenray_steps", len(step_s))
        for seconds in step_s:
            metrics.observe("zenray_step_seconds", seconds)
        metrics.add("zenray_raw_bytes", self._raw_bytes * len(step_s))
        for phase, num_bytes in (sent_bytes or {}).items():
            metrics.add("zenray_wire_bytes", num_bytes, phase=phase)
        if self.rank == 0:
            metrics.set("zenray_loss", loss)
            if imbalance is not None:
                metrics.set("zenray_imbalance", imbalance, kind="sent bytes")
            self._export_experts()
        if self._hook is not None:
            self._export_hook(self._hook, len(step_s))

    def _export_experts(self) -> None:
        """Load of experts as the router chose, and of ranks as the placement made of it; the worst layer of each."""
        loads = [layer.load for layer in self._experts if layer.load.counts.sum()]
        for kind, tables in (
            ("expert pairs", [load.counts.sum(0) for load in loads]),
            ("rank pairs", [load.computed for load in loads]),
        ):
            if tables:
                worst = max(float(table.max() / table.mean()) for table in tables)
                self._metrics.set("zenray_imbalance", worst, kind=kind)

    def _export_hook(self, hook: SyncHook, num_steps: int) -> None:
        metrics = self._metrics
        metrics.add("zenray_exposed_seconds", hook.exposed_s - self._exposed_s)
        self._exposed_s = hook.exposed_s
        segments = hook.segments()
        for segment in segments:
            if segment.codec_s:
                metrics.add("zenray_codec_seconds", segment.codec_s * num_steps, codec=segment.choice)
        if self.rank == 0:
            record: RoleRecord = hook.role_record()
            last = {call.tensor: call for call in hook.records()}
            sparse_s = [(call.predicted_s, call.observed_s) for call in last.values()]
            metrics.set("zenray_predicted_seconds", record.predicted_ms / 1e3 + sum(p for p, _ in sparse_s))
            metrics.set("zenray_observed_seconds", record.observed_ms / 1e3 + sum(o for _, o in sparse_s))
            schemes = {call.tensor: call.scheme for call in last.values()}
            schemes |= {name: segment.choice for segment in segments for name in segment.names if name not in last}
            self._export_choices(schemes)
            self._export_fallbacks(hook)

    def _export_choices(self, schemes: Mapping[str, str]) -> None:
        fresh = Counter(scheme for name, scheme in schemes.items() if self._schemes.get(name) != scheme)
        for scheme, count in fresh.items():
            self._metrics.add("zenray_scheme_choices", count, scheme=scheme)
        self._schemes |= schemes

    def _export_fallbacks(self, hook: SyncHook) -> None:
        """Events since the last block, by kind. Their texts name tensors and numbers, which no label should."""
        for call in hook.records():
            if call.call > self._calls[call.tensor]:
                self._calls[call.tensor] = call.call
                for event in filter(None, call.event.split(", ")):
                    self._metrics.add("zenray_fallbacks", reason=event)
        events = hook.events()
        for event in events[self._num_events :]:
            self._metrics.add(
                "zenray_fallbacks", reason="codec taken back" if " taken back " in event else "codec replaced"
            )
        self._num_events = len(events)
