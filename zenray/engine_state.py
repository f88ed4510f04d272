"""What of a training run outlives its processes: the synchroniser's state, checkpoints on disk, copies in peers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from actors.keeper import Keeper
from actors.state import CheckpointError, CheckpointFolder, Stamp, State, StateProvider
from actors.worker import WorkerContext
from collectives.ddp import SyncHook, reshard_states
from collectives.transport import all_gather_records

if TYPE_CHECKING:
    from zenray.engine import TrainPlan


@dataclass(frozen=True)
class HookState:
    """What the synchroniser has learnt: its choices after a restart are those it would have made.

    Residuals and factors are this rank's own tensors, by `residuals/offset/numel/parameter` and `factor/parameter`.
    """

    hook: SyncHook
    name: str

    def state_dict(self) -> State:
        state = self.hook.state_dict()
        feedback, powersgd, rows = state.pop("feedback"), state.pop("powersgd"), state.pop("rows")
        state |= {f"rows/{parameter}": table for parameter, table in rows.items()}
        for kind, pieces in feedback.items():
            for parameter, entries in pieces.items():
                state |= {f"{kind}/{offset}/{numel}/{parameter}": values for offset, numel, values in entries}
        return state | {f"factor/{parameter}": q for parameter, q in powersgd["factors"].items()}

    def load_state_dict(self, state: State) -> None:
        self.hook.load_state_dict(_hook_state(state))

    def load_all(self, states: Sequence[State]) -> None:
        """In a group of another size: residuals are shared out anew."""
        self.hook.load_state_dict(reshard_states([_hook_state(state) for state in states]))


def _hook_state(state: State) -> dict[str, Any]:
    feedback: dict[str, dict[str, list[tuple[int, int, Tensor]]]] = {"residuals": {}, "owner_residuals": {}}
    factors: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for key in [key for key in state if "/" in key]:
        kind, _, rest = key.partition("/")
        if kind == "factor":
            factors[rest] = state[key]
        elif kind == "rows":
            rows[rest] = state[key]
        else:
            offset, numel, parameter = rest.split("/", 2)
            feedback.setdefault(kind, {}).setdefault(parameter, []).append((int(offset), int(numel), state[key]))
    return {**state, "feedback": feedback, "rows": rows, "powersgd": {"seed": 0, "factors": factors}}


class DiskCheckpoints:
    """Disk checkpoints of all variants of one rank; a full disk turns them off, on all ranks, with an event."""

    def __init__(self, plan: TrainPlan, providers: Sequence[StateProvider], context: WorkerContext):
        self.plan, self.context, self.providers = plan, context, providers
        settings = plan.checkpoint
        self.folder: CheckpointFolder | None = None
        if settings is not None and (settings.every_steps or settings.resume):
            self.folder = CheckpointFolder(settings.folder, context.rank, context.size, settings.keep)

    def resume(self) -> None:
        """Load the last step that is complete for all ranks, if asked to."""
        if self.folder is None or self.plan.checkpoint is None or not self.plan.checkpoint.resume:
            return
        found = all_gather_records(self.context.transport, "metadata", [self.folder.latest() or 0])
        step = int(found.min())
        if step:
            self.folder.load(step, self.providers, self.plan.config_sha256)
        if self.context.rank == 0:
            self.context.report({"kind": "event", "text": f"resumed at step {step}" if step else "nothing to resume"})

    def save_if_due(self, steps: range) -> None:
        """Write a checkpoint if a multiple of `every_steps` lies in the block, or the run is over."""
        every = self.plan.checkpoint.every_steps if self.plan.checkpoint else 0
        if self.folder is None or not every:
            return
        if steps.stop // every == steps.start // every and steps.stop != self.plan.steps:
            return
        context = self.context
        stamp = Stamp(context.run_id, steps.stop, context.epoch, context.rank, context.size, self.plan.config_sha256)
        failed = 0
        try:
            self.folder.save(stamp, self.providers)
        except CheckpointError as error:
            failed = 1
            context.report({"kind": "event", "text": f"checkpoints are off from here on: {error}"})
        if all_gather_records(context.transport, "metadata", [failed]).any():
            self.folder = None


class Copies:
    """Copies in peers' memory of one rank's training state: of every update, or of the end of every round of blocks.

    Without a keeper it does nothing.
    """

    def __init__(self, keeper: Keeper | None, each_update: bool):
        self.keeper, self.each_update = keeper, each_update
        self.number = 0
        """Of the copy made last."""

    def restore(self, own: Sequence[StateProvider], replicated: Sequence[StateProvider]) -> None:
        """Load the newest copy, if there is one; a collective call."""
        if self.keeper is not None:
            self.number = self.keeper.restore(own, replicated)

    def busy(self) -> AbstractContextManager[None]:
        """To be held while gradients travel: copies wait as long as they can."""
        return nullcontext() if self.keeper is None else self.keeper.busy()

    def gate(self) -> None:
        """Before an update: wait until the copy made last is committed."""
        if self.keeper is not None:
            self.keeper.gate()

    def after_update(self) -> None:
        """Copy at once, send beside the next step."""
        if self.keeper is not None and self.each_update:
            self.number += 1
            self.keeper.prepare(self.number)

    def after_round(self) -> None:
        """After the reports of a round, so that what was reported is never computed again without being known."""
        if self.keeper is not None:
            self.number += 1
            self.keeper.prepare(self.number)
            if not self.each_update:
                self.keeper.gate()  # the next blocks are timed: nothing may be under way then

    def finish(self) -> None:
        """Wait for the last commit."""
        if self.keeper is not None:
            self.keeper.finish()
