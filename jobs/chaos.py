"""`python -m jobs.chaos seeds=200 --out DIR`: kill anything at any instant, and show that nothing is lost.

Each seed draws one fault: what, where, in which phase of which step. A small training runs through it on a real Ray
cluster of several nodes on this host, and must end with the weights of the undisturbed run. Reported: how many seeds
finished and were bit-identical, committed steps lost, steps computed again, and the time from the fault to the moment
at which every rank has applied the next step.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import ray
from pydantic import Field

from actors.group import GroupState
from actors.journal import read_journal
from actors.keeper import Kept, Phase
from actors.protection import Protection, Recovery
from actors.recovery import RecoverableGroup
from actors.storage import Storage
from actors.worker import Report
from collectives.errors import ZenrayError
from jobs.chaos_plots import plot_chaos
from jobs.chaos_rank import Fault, Kind, Striker, Training
from jobs.job import Run, run_job
from jobs.nodes import Nodes, local_nodes
from jobs.record import record_figures, recorded
from jobs.train_config import TrackingConfig
from zenray.config import Section
from zenray.recoveries import record_recoveries

CYCLE = (
    *(Kind.RECOVER, Kind.SLOW, Kind.CORRUPT, Kind.DELAY, Kind.KILL, Kind.HANG, Kind.KILL, Kind.KILL, Kind.HOLDER),
    *(Kind.KILL, Kind.DISK_FULL, Kind.RECOVER, Kind.KILL, Kind.HANG, Kind.KILL, Kind.KILL, Kind.KILL, Kind.KILL),
    *(Kind.KILL, Kind.NODE),
)
"""Kinds by seed: 20 hold each of them, and half of all are plain kills. What needs no standby follows what took some:
they start beside it. A node comes last: Ray takes 14 s until it fills the bundle of a lost one."""
SPARES_OF = {Kind.RECOVER: 2, Kind.KILL: 1, Kind.HANG: 1, Kind.NODE: 1}
"""Standbys that must be up before a fault strikes; none for the other kinds."""
PHASES = (Phase.COMPUTE, Phase.REDUCE, Phase.UPDATE, Phase.SNAPSHOT, Phase.REPLICATE, Phase.ACK, Phase.COMMIT)
SPARES = 2
"""Standbys. A seed begins once those are up that its fault needs; the others start beside its training."""
IMPORTS = (
    "torch._dynamo",
    "collectives.feedback",
    "collectives.torch_transport",
    "safetensors.torch",
    "placement.inventory",
    "psutil",
)
"""What the workers of this job and their holders import apart from Ray; a process's first optimizer imports the first."""
WHOLE_S = 120.0
LIMITS_S: Mapping[Kind, float] = {Kind.KILL: 3.0, Kind.NODE: 6.0}
"""Required p95 of the recovery; a hang has the heartbeat's limit and 3 s."""
HANG_EXTRA_S = 3.0

Count = Annotated[int, Field(ge=1)]


class ChaosConfig(Section):
    """How much is broken."""

    seeds: Count = 200
    """Faulty runs; 20 hold every kind of fault."""
    first_seed: Annotated[int, Field(ge=0)] = 0
    """The first of them."""
    ranks: Annotated[int, Field(ge=2, le=16)] = 4
    """Workers, one a node; SPARES more nodes hold a standby each."""
    steps: Annotated[int, Field(ge=6)] = 8
    """Of each run."""
    hidden: Count = 64
    """Width of the model."""
    copies: Annotated[int, Field(ge=2)] = 2
    """Copies of each shard, the own host's included."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 2.0
    """A worker that is silent for so long counts as hung."""
    storage_every: Count = 2
    """Steps between checkpoints on disk."""
    kinds: (
        list[Literal["kill", "hang", "node", "holder", "disk_full", "delay", "slow", "corrupt", "recover"]] | None
    ) = None
    """Only these kinds of fault; none: all."""
    forked: bool = False
    """Fork workers from one process that has imported what they need: many more seeds a minute. False: start each anew."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Limit of one seed."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""


@dataclass
class Outcome:
    """What became of one seed. recovery_s: None where the fault needs no recovery."""

    fault: Fault
    took_place: bool = False
    finished: bool = False
    bit_identical: bool = False
    lost_committed_steps: int = 0
    redone_steps: int = 0
    recovery_s: float | None = None
    error: str = ""
    events: list[str] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    applied: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    struck_s: float = 0.0


def draw(seed: int, config: ChaosConfig) -> Fault:
    """The fault of one seed. Kinds and phases take turns, so that few seeds hold many combinations."""
    kinds = tuple(kind for kind in CYCLE if config.kinds is None or kind in config.kinds)
    kind = kinds[seed % len(kinds)]
    chance = random.Random(seed)
    phase = PHASES[(seed // 2 + seed // len(kinds)) % len(PHASES)]
    if phase is Phase.COMMIT and kind is not Kind.KILL:
        phase = Phase.ACK  # at the commit only the driver can strike, and it kills
    rank = chance.randrange(config.ranks)
    step = chance.randint(2, config.steps - 3)
    second = chance.randrange(config.ranks)
    return Fault(seed, kind, rank, phase, step, second, chance.uniform(0.2, 0.6 * config.heartbeat_s))


class Bench:
    """One cluster and one group that serve all seeds."""

    def __init__(self, config: ChaosConfig, nodes: Nodes, out: Path):
        self.config, self.nodes, self.out = config, nodes, out
        self.group = self._new_group()
        self.num_groups = 1
        self.num_removed = 0
        """Nodes that the seed before took away."""

    def _new_group(self) -> RecoverableGroup:
        group = RecoverableGroup(
            self.config.ranks,
            journal=self.out / "journal.jsonl",
            protection=Protection(copies=self.config.copies, spares=SPARES, heartbeat_s=self.config.heartbeat_s),
            strategy="STRICT_SPREAD",
            start_timeout_s=WHOLE_S,
            collective_timeout_s=30.0,
        )
        group.start()
        return group

    def reference(self) -> Any:
        """The undisturbed run: the digests that all others must reach."""
        results = self.group.run(self._training("reference"), timeout_s=self.config.timeout_s)
        assert all(result == results[0] for result in results)
        return results[0]

    def strike(self, fault: Fault, reference: Any) -> Outcome:
        """One faulty run, judged."""
        self._mend(spares=SPARES_OF.get(fault.kind, 0))
        outcome = Outcome(fault)
        folder = self.out / f"seed-{fault.seed:04d}"
        training = self._training(folder.name)
        storage = Storage(folder / "checkpoints", self.config.storage_every)

        def on_report(report: Report) -> None:
            if "remove_node_of_rank" in report.metrics:
                host = self.group.members[report.rank].place.seat.node_id
                self._note_fault(folder)
                self.nodes.remove(host)
                self.num_removed += 1

        def on_commit(step: int) -> None:
            if (fault.phase, fault.kind, fault.step) == (Phase.COMMIT, Kind.KILL, step) and not self._struck(folder):
                self._note_fault(folder)
                os.kill(self.group.members[fault.rank].pid, signal.SIGKILL)

        try:
            results = self.group.run(
                training,
                timeout_s=self.config.timeout_s,
                on_report=on_report,
                on_commit=on_commit,
                storage=storage,
                probe=Striker(fault, folder),
            )
            outcome.finished = True
            outcome.bit_identical = all(result == reference for result in results)
            if not outcome.bit_identical:
                differ = {rank: [n for n in reference if r[n] != reference[n]] for rank, r in enumerate(results)}
                outcome.error = f"parameters that differ, by rank: {differ}"
        except ZenrayError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        self._judge(outcome, folder)
        return outcome

    def _training(self, name: str) -> Training:
        folder = (self.out / name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return Training(self.config.steps, self.config.hidden, folder)

    @staticmethod
    def _note_fault(folder: Path) -> None:
        with (folder / "fault.jsonl").open("a") as file:
            file.write(json.dumps({"by": "driver", "time_s": time.time()}) + "\n")

    @staticmethod
    def _struck(folder: Path) -> bool:
        return (folder / "fault.jsonl").exists()

    def _judge(self, outcome: Outcome, folder: Path) -> None:
        """Fill in what journal, traces and the group's own record say."""
        group, fault = self.group, outcome.fault
        outcome.events, outcome.recoveries = list(group.events), list(group.recoveries)
        strikes = read_lines(folder / "fault.jsonl")
        outcome.struck_s = strikes[-1]["time_s"] if strikes else 0.0
        outcome.applied = {rank: read_lines(folder / f"applied-{rank}.jsonl") for rank in range(self.config.ranks)}
        outcome.took_place = len(strikes) == (2 if fault.kind is Kind.RECOVER else 1) and self._had_effect(fault)
        outcome.lost_committed_steps = lost_steps(read_journal(group.journal_path))
        outcome.redone_steps = redone_steps(outcome.applied)
        if group.recoveries:
            last = len(group.recoveries)
            next_s = [
                min((line["time_s"] for line in lines if line["attempt"] == last), default=None)
                for lines in outcome.applied.values()
            ]
            if None not in next_s:
                outcome.recovery_s = max(s for s in next_s if s is not None) - outcome.struck_s

    def _had_effect(self, fault: Fault) -> bool:
        group = self.group
        match fault.kind:
            case Kind.KILL | Kind.HANG | Kind.NODE | Kind.RECOVER:
                return any(fault.rank in recovery.lost_ranks for recovery in group.recoveries)
            case Kind.HOLDER:
                return bool(group.recoveries)
            case Kind.CORRUPT:
                return any(kept.num_resent for kept in group.kept)
            case Kind.DISK_FULL:
                return any("storage is off" in event for event in group.events)
            case Kind.DELAY | Kind.SLOW:
                return True

    def _mend(self, spares: int) -> None:
        """Put the cluster back as it was before the seed before, with so many standbys; a broken group is replaced."""
        for _ in range(self.num_removed):
            self.nodes.add()
        self.num_removed = 0
        if self.group.state is GroupState.BROKEN:
            self.group.shutdown()
            self.group = self._new_group()
            self.num_groups += 1
        self.group.wait_whole(timeout_s=WHOLE_S, spares=spares)
        for holder in self.group.crew.holders.values():
            with suppress(ProcessLookupError):
                pid = ray.get(holder.sit.remote(), timeout=10.0)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; a line that a kill cut off is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def lost_steps(journal: Iterable[Mapping[str, Any]]) -> int:
    """Committed steps that a later start went back behind."""
    committed, lost = -1, 0
    for entry in journal:
        if "commit" in entry:
            committed = max(committed, entry["commit"])
        elif "start" in entry and entry["start"] < committed:
            lost += committed - max(0, entry["start"])
    return lost


def redone_steps(applied: Mapping[int, list[dict[str, Any]]]) -> int:
    """The most steps that any rank applied again in one recovery."""
    most = 0
    for lines in applied.values():
        attempts = {line["attempt"] for line in lines}
        for attempt in attempts:
            before = {line["step"] for line in lines if line["attempt"] < attempt}
            most = max(most, len(before & {line["step"] for line in lines if line["attempt"] == attempt}))
    return most


def summarise(outcomes: list[Outcome]) -> dict[str, Any]:
    """The metrics of result.json."""
    kinds: dict[str, Any] = {}
    for kind in Kind:
        of_kind = [outcome for outcome in outcomes if outcome.fault.kind is kind]
        seconds = [outcome.recovery_s for outcome in of_kind if outcome.recovery_s is not None]
        if of_kind:
            kinds[kind] = {
                "n": len(of_kind),
                "recovery_p50_s": float(np.percentile(seconds, 50)) if seconds else None,
                "recovery_p95_s": float(np.percentile(seconds, 95)) if seconds else None,
            }
    return {
        "seeds": len(outcomes),
        "finished": sum(outcome.finished for outcome in outcomes),
        "bit_identical": sum(outcome.bit_identical for outcome in outcomes),
        "faults_took_place": sum(outcome.took_place for outcome in outcomes),
        "lost_committed_steps": sum(outcome.lost_committed_steps for outcome in outcomes),
        "max_redone_steps": max(outcome.redone_steps for outcome in outcomes),
        "kinds": kinds,
    }


def lengthening(kept: Iterable[Kept]) -> dict[str, float]:
    """What copies cost an undisturbed step, as the plan of their traffic predicts it and as it was measured."""
    rows = [row for row in kept if row.predicted_s is not None]
    if not rows:
        return {}
    return {
        "shard_bytes": median(row.frame_bytes for row in rows),
        "replicate_s": median(row.replicate_s for row in rows),
        "idle_s": median(row.idle_s for row in rows),
        "predicted_lengthening_s": median(row.predicted_s for row in rows if row.predicted_s is not None),
        "measured_lengthening_s": median(row.gate_s for row in rows),
    }


def chaos(config: ChaosConfig, run: Run) -> dict[str, Any]:
    """The job: cluster, undisturbed run, all seeds, table, picture."""
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        run.say(
            f"starting {config.ranks + SPARES} Ray nodes on this host, for {config.ranks} workers and {SPARES} standbys"
        )
        nodes = stack.enter_context(local_nodes(config.ranks + SPARES, forked=IMPORTS if config.forked else ()))
        record = stack.enter_context(recorded(config, config.tracking, run))
        bench = Bench(config, nodes, run.out.resolve())
        stack.callback(lambda: bench.group.shutdown())
        reference = bench.reference()
        undisturbed = lengthening(bench.group.kept)
        for seed in range(config.first_seed, config.first_seed + config.seeds):
            outcome = bench.strike(draw(seed, config), reference)
            outcomes.append(outcome)
            run.say(line_of(outcome))
        metrics = summarise(outcomes) | {"undisturbed_step": undisturbed, "groups": bench.num_groups}
        limits = {**LIMITS_S, Kind.HANG: config.heartbeat_s + HANG_EXTRA_S}
        table = json.dumps([asdict(outcome) for outcome in outcomes], indent=1, default=str)
        (run.out / "outcomes.json").write_text(table)
        plot_chaos(outcomes, limits, run.out / "chaos.png")
        record_recoveries(record, [r for outcome in outcomes for r in outcome.recoveries], [])
        record_figures(record, metrics, [run.out / "outcomes.json", run.out / "chaos.png"])
    show(metrics, limits, run)
    return metrics


def line_of(outcome: Outcome) -> str:
    """One seed as one line."""
    fault = outcome.fault
    verdict = (
        "identical"
        if outcome.bit_identical
        else f"DIFFERENT {outcome.error}"
        if outcome.finished
        else f"FAILED {outcome.error}"
    )
    took = "" if outcome.took_place else "  FAULT DID NOT TAKE PLACE"
    seconds = "" if outcome.recovery_s is None else f"  {outcome.recovery_s:.2f} s"
    place = f"rank {fault.rank}, {fault.phase} of step {fault.step}"
    return f"seed {fault.seed:>4}  {fault.kind:<9} {place:<32} {verdict}, {outcome.redone_steps} redone{seconds}{took}"


def show(metrics: Mapping[str, Any], limits: Mapping[Kind, float], run: Run) -> None:
    """The closing table."""
    rows = [
        (kind, row["n"], row["recovery_p50_s"], row["recovery_p95_s"], limits.get(Kind(kind)))
        for kind, row in metrics["kinds"].items()
    ]
    run.table(
        "From the fault to the next step applied on every rank", ("fault", "seeds", "p50 s", "p95 s", "limit s"), rows
    )
    run.say(
        f"{metrics['finished']} of {metrics['seeds']} seeds finished, {metrics['bit_identical']} bit-identical, "
        f"{metrics['lost_committed_steps']} committed steps lost, at most {metrics['max_redone_steps']} redone"
    )


def main() -> int:
    """Entry point."""
    return run_job("chaos", ChaosConfig, chaos)


if __name__ == "__main__":
    sys.exit(main())
