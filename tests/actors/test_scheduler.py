"""The queue on a real Ray with pretended cards: what it places, what it explains, and what it survives.

One cluster for the file; a trace of a model costs seconds, so jobs share as few models as the cases allow.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.util import placement_group_table

from actors.errors import WorkerError
from actors.job_run import Assignment
from collectives.errors import ConfigError
from placement.catalogue import GIB
from placement.queue import OVER, JobState
from zenray.queue_client import SCHEDULER_NAME, SCHEDULER_NAMESPACE

pytestmark = pytest.mark.timeout(600)
Wait = Callable[[Callable[[], bool], float], bool]
CALL_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"model": {"layers": 2, "hidden": 64, "heads": 2}, "batch": 16, "seq": 64, "max_gpus": 2}
"""17 MiB at most in one micro-batch of 16, 4 in sixteen of 1."""


def job(name: str, **keys: Any) -> dict[str, Any]:
    from zenray.job_config import JobConfig, request_of

    return request_of(JobConfig.model_validate({"name": name, "steps": 6, "checkpoint_every": 3, **SMALL, **keys}))


def reference_loss(request: Mapping[str, Any], folder: Path) -> float:
    """The last loss of the same job on one rank in this process, in one piece and with room to spare."""
    from zenray.queue_program import train_rank

    free = Assignment(
        data=1, micro_batch=16, recompute="none", upper_bytes=GIB, capacity_bytes=GIB, fake=True, folder=str(folder)
    )
    context: Any = SimpleNamespace(
        run_id="reference", epoch=1, rank=0, size=1, device=torch.device("cpu"), report=lambda metrics: None
    )
    torch.set_num_threads(1)
    calm = {**request, "retain": None, "checkpoint_every": 10_000}
    return float(train_rank(calm, free, context)["last_loss"])


class Queue:
    """The actor, as tests use it."""

    def __init__(self, folder: Path, name: str = SCHEDULER_NAME, residence_s: float = 600.0):
        from actors.scheduler import JobScheduler

        self.folder = folder
        program = make_program()
        options = {"max_restarts": -1, "max_task_retries": 3, "num_cpus": 0}
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        known_as = {"name": name, "namespace": SCHEDULER_NAMESPACE}
        actor_class = ray.remote(JobScheduler).options(**options, **known_as, scheduling_strategy=here)
        self.actor: Any = actor_class.remote(str(folder), program, "test", 600.0, residence_s)

    def __call__(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments), timeout=CALL_S)

    def state(self, name: str) -> str:
        return str(self("status", name)["state"])

    def pid(self) -> int:
        from ray._private.state import actors

        return int(actors()[self.actor._actor_id.hex()]["Pid"])

    def settle_in(self, wait_until: Wait, state: JobState, name: str) -> bool:
        """Whether the job comes to this state."""
        return wait_until(lambda: self.state(name) == state, 120.0)

    def settle(self, wait_until: Wait, *names: str, timeout_s: float = 240.0) -> dict[str, dict[str, Any]]:
        """Wait until these jobs are over; their rows."""
        ends = OVER | {JobState.INFEASIBLE}
        over = wait_until(lambda: all(self.state(name) in ends for name in names), timeout_s)
        rows = {name: self("status", name) for name in names}
        assert over, {name: row["history"] for name, row in rows.items()}
        return rows


def live_groups() -> list[str]:
    return [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]


def make_program() -> Any:
    """The real program, except that its trace does not see what a model retains: an under-prediction on purpose."""
    from zenray.queue_program import QueueProgram

    class Blind(QueueProgram):
        def profile_key(self, request: Mapping[str, Any]) -> str:
            return super().profile_key({**request, "retain": None, "recompute": ["none", "full"]})

        def profile(self, request: Mapping[str, Any]) -> Any:
            return super().profile({**request, "retain": None, "recompute": ["none", "full"]})

    return Blind()


@pytest.fixture(scope="module")
def cards() -> Iterator[Any]:
    """A cluster: one card of 8 MiB, two of 24 on one node, one of 64."""
    from jobs.nodes import local_nodes

    with local_nodes(0) as nodes:
        for num_gpus, memory_mib in ((1, 8), (2, 24), (1, 64)):
            nodes.add_fake_gpus(num_gpus, memory_mib)
        yield nodes


@pytest.fixture(scope="module")
def jobs(cards: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    made = Queue(tmp_path_factory.mktemp("queue"))
    yield made
    made("close")
    ray.kill(made.actor)


def test_case_01_jobs_without_gpus_end_on_cards_that_hold_them_and_impossible_ones_say_why(
    jobs: Queue, wait_until: Wait
) -> None:
    names = [f"small{i}" for i in range(5)]
    for name in names:
        assert jobs("submit", job(name)) == name
    jobs("submit", job("pair", pin={"data": 2}))
    jobs("submit", job("huge", model={"layers": 6, "hidden": 512, "heads": 8}))
    assert wait_until(lambda: any(jobs.state(name) == JobState.QUEUED for name in names), 120.0)
    waiting = [name for name in names if jobs.state(name) == JobState.QUEUED]
    for name in waiting:
        told = jobs("explain", name)
        assert "are missing (GPUs on one node" in told or not told.startswith("QUEUED"), told  # it may run by now
    names.append("pair")
    rows = jobs.settle(wait_until, *names, "huge")
    assert len(rows["pair"]["nodes"]) == 2
    memory = {node["name"]: node["memory_bytes"] for node in jobs("inventory")}
    for name in names:
        row = rows[name]
        assert row["state"] == JobState.DONE, row["history"]
        assert (row["done_steps"], row["attempts"]) == (6, ())
        assert row["outcome"]["peak_bytes"] <= min(memory[node] for node in row["nodes"])
        assert row["outcome"]["last_loss"] < row["outcome"]["losses"][0]
    assert rows["huge"]["state"] == JobState.INFEASIBLE
    assert "lacks" in rows["huge"]["reason"]
    assert not any("PREDICTED" in line for line in rows["huge"]["history"]), "that is certain without a trace"
    assert "add a node with larger cards" in rows["huge"]["reason"]
    losses = [rows[name]["outcome"]["last_loss"] for name in names]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4), "plans and numbers of ranks change no number"
    lines = [next(line for line in rows[name]["history"] if "RESERVED" in line) for name in names[:5]]
    at = [rows[name]["submit_s"] + float(line.split(" s ")[0]) for name, line in zip(names, lines, strict=False)]
    late = [earlier - later for earlier, later in itertools.pairwise(at)]
    assert max(late) < 0.1, "first come, first served, within a class of jobs"


def test_case_17_a_job_that_grows_is_warned_moved_to_another_plan_and_ends_with_the_same_loss(
    jobs: Queue, wait_until: Wait, tmp_path: Path
) -> None:
    request = job("grows", steps=30, checkpoint_every=15, gpu_types=["fake-24"], recompute=["none"], max_gpus=1,
                  retain={"kib_per_sample": 64, "calls": 24})  # fmt: skip
    jobs("submit", request)
    row = jobs.settle(wait_until, "grows")["grows"]
    assert row["state"] == JobState.DONE, row["history"]
    tried = [attempt["key"] for attempt in row["attempts"]]
    assert len(tried) >= 1
    assert len(set([*tried, row["plan"]])) == len(tried) + 1, "a plan was tried twice"
    assert any("memory warning: rank 0" in line and "pass 25165824 at step" in line for line in row["history"])
    assert not any("card out of memory" in line for line in row["history"]), "the warning came too late"
    assert row["outcome"]["last_loss"] == pytest.approx(reference_loss(request, tmp_path), rel=1e-4)
    assert row["outcome"]["sampling_share"] < 0.005


def test_case_17_out_of_memory_goes_on_from_the_last_checkpoint_with_another_plan(
    jobs: Queue, wait_until: Wait, tmp_path: Path
) -> None:
    request = job("bursts", steps=12, gpu_types=["fake-24"], recompute=["none"], max_gpus=1,
                  retain={"kib_per_sample": 160, "calls": 4})  # fmt: skip
    jobs("submit", request)
    row = jobs.settle(wait_until, "bursts")["bursts"]
    assert row["state"] == JobState.DONE, row["history"]
    keys = [attempt["key"] for attempt in row["attempts"]]
    assert len(set([*keys, row["plan"]])) == len(keys) + 1 > 1
    assert any("card out of memory" in line and "the card is full" in line for line in row["history"])
    assert row["outcome"]["last_loss"] == pytest.approx(reference_loss(request, tmp_path), rel=1e-4)


def test_case_17_a_job_that_no_plan_can_hold_ends_with_a_report(jobs: Queue, wait_until: Wait) -> None:
    jobs("submit", job("hopeless", gpu_types=["fake-8"], recompute=["none"], max_gpus=1,
                       retain={"kib_per_sample": 4096, "calls": 100}))  # fmt: skip
    row = jobs.settle(wait_until, "hopeless")["hopeless"]
    assert row["state"] == JobState.FAILED
    assert "ran out of memory" in row["reason"]
    keys = [attempt["key"] for attempt in row["attempts"]]
    assert len(set(keys)) == len(keys) == row["starts"] <= 4


def test_case_09_a_cancelled_job_frees_its_card_and_only_running_jobs_have_groups(
    jobs: Queue, wait_until: Wait
) -> None:
    jobs("submit", job("endless", steps=100_000, gpu_types=["fake-64"]))
    jobs("submit", job("behind", gpu_types=["fake-64"]))
    assert wait_until(lambda: jobs.state("endless") == JobState.RUNNING, 90.0)
    assert jobs.state("behind") == JobState.QUEUED
    assert "1 of 1 fake-64 are missing" in jobs("explain", "behind")
    assert len(live_groups()) == 1, "the queue is ours, Ray is asked only for what fits now"
    assert jobs("cancel", "endless") == jobs("cancel", "endless") == JobState.CANCELLED
    assert jobs.settle(wait_until, "behind")["behind"]["state"] == JobState.DONE


def test_case_08_20_nothing_is_lost_when_the_scheduler_and_a_node_are_killed(
    jobs: Queue, cards: Any, wait_until: Wait, tmp_path: Path
) -> None:
    extra = cards.add_fake_gpus(1, 64)
    request = job("survivor", steps=150, checkpoint_every=5, gpu_types=["fake-64"])
    other = job("other", steps=150, checkpoint_every=5, gpu_types=["fake-64"])
    for wanted in (request, other):
        jobs("submit", wanted)
    names = ("survivor", "other")
    assert wait_until(lambda: all(jobs("status", name)["done_steps"] >= 5 for name in names), 120.0)
    hit = [name for name in names if extra in jobs("status", name)["nodes"]]
    pid = jobs.pid()
    os.kill(pid, signal.SIGKILL)
    cards.remove(extra)
    assert wait_until(lambda: jobs.pid() not in (0, pid), 60.0)
    rows = jobs.settle(wait_until, *names)
    for name in names:
        row = rows[name]
        assert (row["state"], row["done_steps"], row["attempts"]) == (JobState.DONE, 150, ()), row["history"]
        assert any("the scheduler was restarted" in line for line in row["history"])
        assert row["starts"] >= 2
    assert hit
    assert all(extra not in rows[name]["nodes"] for name in hit)
    expected = reference_loss({**request, "name": "reference"}, tmp_path)
    assert rows["survivor"]["outcome"]["last_loss"] == pytest.approx(expected, rel=1e-4)
    assert wait_until(lambda: not live_groups(), 10.0), live_groups()


def test_case_03_an_impossible_job_starts_when_a_node_joins_that_holds_it(
    jobs: Queue, cards: Any, wait_until: Wait
) -> None:
    jobs("submit", job("patient", gpu_types=["fake-32"]))
    assert wait_until(lambda: jobs.state("patient") == JobState.INFEASIBLE, 30.0)
    assert "the cluster has no card of type fake-32" in jobs("explain", "patient")
    cards.add_fake_gpus(1, 32)
    assert jobs.settle_in(wait_until, JobState.DONE, "patient")


def test_case_21_host_memory_is_part_of_the_plan_and_of_the_reason(jobs: Queue, wait_until: Wait) -> None:
    jobs("submit", job("greedy", host_memory_mib=1 << 24))
    row = jobs.settle(wait_until, "greedy")["greedy"]
    assert row["state"] == JobState.FAILED
    assert "bundle 0 needs CPU 1, memory" in row["reason"]
    assert "Best node" in row["reason"]
    assert row["starts"] == 1, "what can never be placed is not tried again"


def test_case_19_one_job_runs_on_cards_of_three_types_and_starts_as_one_gang(
    jobs: Queue, wait_until: Wait, tmp_path: Path
) -> None:
    memory = {node["name"]: node for node in jobs("inventory")}
    request = job("motley", mixed=True, max_gpus=3, pin={"data": 3}, gpu_types=["fake-24", "fake-64"], batch=18)
    jobs("submit", request)
    row = jobs.settle(wait_until, "motley")["motley"]
    assert row["state"] == JobState.DONE, row["history"]
    assert (len(row["nodes"]), row["starts"]) == (3, 1)
    assert {memory[node]["gpu_type"] for node in row["nodes"]} == {"fake-24", "fake-64"}
    assert row["plan"].startswith("fake-24+fake-64 d=3"), "no type alone has three cards"
    assert row["outcome"]["last_loss"] == pytest.approx(reference_loss(request, tmp_path), rel=1e-4)


def test_the_command_line_reaches_the_queue(jobs: Queue, wait_until: Wait, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: typed\nsteps: 100000\nbatch: 16\nseq: 64\nmodel: {layers: 2, hidden: 64, heads: 2}\nmax_gpus: 2\n"
    )
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def zenray(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zenray", *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)

    submitted = zenray("submit", str(path))
    assert (submitted.returncode, "typed submitted" in submitted.stdout) == (0, True), submitted.stderr
    assert jobs.settle_in(wait_until, JobState.RUNNING, "typed")
    told = zenray("status", "typed")
    assert "typed: RUNNING" in told.stdout
    assert "RESERVED: plan fake-" in told.stdout
    assert "typed CANCELLED" in zenray("cancel", "typed").stdout
    unknown = zenray("status", "nobody")
    assert (unknown.returncode, "no job nobody in this queue" in unknown.stderr) == (1, True)


def test_wrong_requests_are_refused_at_once(jobs: Queue) -> None:
    assert jobs("submit", job("small0")) == "small0", "repeated, as after a lost answer"
    for wrong, why, error in (
        (job("a", workload="mystery"), "unknown workload", ConfigError),
        (job("b", model=None), "needs the section `model`", ConfigError),
        (job("small0", seed=1), "in the queue already", WorkerError),
    ):
        with pytest.raises(Exception, match=why) as caught:
            jobs("submit", wrong)
        assert isinstance(getattr(caught.value, "cause", None), error)


@pytest.mark.slow  # a move must save more than a start of workers takes; tests/placement/test_live.py has the decisions
def test_case_11_a_running_job_grows_into_idle_cards_and_makes_room_with_the_same_loss_curve(
    jobs: Queue, wait_until: Wait, tmp_path: Path
) -> None:
    queue = Queue(tmp_path / "queue", "zenray-resizing", residence_s=1.0)
    try:
        request = job("stretch", steps=700, checkpoint_every=20, gpu_types=["fake-24"])
        queue("submit", request)
        assert wait_until(lambda: len(queue("status", "stretch")["nodes"]) == 2, 120.0), queue("status", "stretch")
        queue("submit", job("guest", gpu_types=["fake-24"], max_gpus=1))
        rows = queue.settle(wait_until, "stretch", "guest")
        row = rows["stretch"]
        plans = [line.split("plan ")[1].split(" on ")[0] for line in row["history"] if "RESERVED: plan" in line]
        assert [plan.split()[1] for plan in plans[:3]] == ["d=1", "d=2", "d=1"], row["history"]
        assert sum("after its next checkpoint" in line for line in row["history"]) >= 2
        for one in rows.values():
            assert (one["state"], one["losses"], one["attempts"]) == (JobState.DONE, 0, ()), one["history"]
        assert row["end_s"] > rows["guest"]["end_s"], "it made room, the guest did not wait for its end"
        assert row["outcome"]["last_loss"] == pytest.approx(reference_loss(request, tmp_path), rel=1e-3)
    finally:
        queue("close")
        ray.kill(queue.actor)
