"""Which cards the queue's jobs get, with a planner whose answers are written down here; no Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from actors.placer import JobPlacer
from placement.data_plans import ModuleProfile, data_plans
from placement.inventory import FAKE_RESOURCE, GpuNode, fake_card
from placement.jobs import NodeSpec
from placement.mixed import mixed_plan
from placement.peaks import Peak
from placement.plans import Knowledge, PlanList
from placement.queue import JobEntry

MIB = 1 << 20
PEAK = Peak(parameters=float(MIB), gradients=float(MIB), activations=float(MIB), optimizer=2.0 * MIB)
PROFILE = ModuleProfile(
    family="f", variant="v", smallest={"none": PEAK}, largest={"none": PEAK}, most=8, step=PEAK,
    gradient_bytes=float(MIB), largest_gradient_bytes=float(MIB), reserved_over_allocated=1.0,
    flops_per_sample=1e9, tokens_per_sample=64,
)  # fmt: skip


class Planner:
    """Data-parallel plans of `num_gpus` cards, mixed or not, for any entry."""

    program = SimpleNamespace(class_key=lambda request: str(request["gpus"]))

    def needs(self, entry: JobEntry) -> Any:
        return SimpleNamespace(mixed=entry.request.get("mixed", False), steps=10, boost_s=0.0)

    def plans(self, entry: JobEntry, nodes: Any) -> PlanList:
        wanted = {"data": int(entry.request["gpus"])}
        return data_plans(PROFILE, 8, [n.gpu for n in nodes], max_gpus=8, recompute=("none",), pinned=wanted)

    def mix(self, entry: JobEntry, nodes: Any, cards: Any) -> Any:
        if not self.needs(entry).mixed:
            return None
        offered = {name: (nodes[name].gpu, count) for name, count in cards.items()}
        gpus = int(entry.request["gpus"])
        return mixed_plan(PROFILE, 8, offered, num_gpus=gpus, recompute=("none",), knowledge=Knowledge())


def node(name: str, num_gpus: int, memory_mib: int) -> GpuNode:
    gpu = fake_card(memory_mib, num_gpus)
    return GpuNode(NodeSpec(name, gpu.name, num_gpus, gpu.memory_bytes), gpu, FAKE_RESOURCE)


NODES = {n.spec.name: n for n in (node("a", 1, 16), node("b", 2, 32), node("c", 2, 64))}


def entry(name: str, gpus: int, **keys: Any) -> JobEntry:
    return JobEntry(job_id=name, request={"gpus": gpus, **keys}, submit_s=0.0)


@pytest.fixture
def placer() -> JobPlacer:
    made = JobPlacer(Planner(), 600.0, 600.0)  # type: ignore[arg-type]
    assert not made.ready
    assert made.adopt(NODES, ()) == []
    return made


def test_a_job_too_wide_for_every_type_is_refused_and_a_mixed_one_runs_over_several(placer: JobPlacer) -> None:
    assert "at once, more than the cluster has" in placer.plan(entry("wide", 4)).refused
    job = entry("mixed", 4, mixed=True)
    assert placer.plan(job).waits == "waits for idle cards of several types, at most 4"
    [grant] = placer.mix(job)
    assert len(grant.nodes) == 4
    assert set(grant.shares) == set(grant.nodes)
    assert "+" in grant.plan.gpu_type
    assert placer.knows("mixed")
    assert len(placer.plan(entry("small", 1)).grants) == 1
    assert placer.mix(entry("more", 2, mixed=True)) == [], "no two cards are idle"


def test_a_mixed_gang_that_lost_a_node_gives_back_all_its_cards_and_is_planned_anew(placer: JobPlacer) -> None:
    [grant] = placer.mix(entry("mixed", 4, mixed=True))
    assert placer.plan(entry("pair", 2)).grants == []
    lost = next(name for name in grant.nodes if grant.nodes.count(name) == 2)
    jobs, grants = placer.lose(lost)
    assert jobs == ["mixed"]
    assert [(g.job_id, len(set(g.nodes))) for g in grants] == [("pair", 1)], "one type has two cards again"
    assert not placer.knows("mixed"), "so that the next turn plans it"


def test_running_jobs_keep_their_cards_when_a_new_kind_of_node_comes(placer: JobPlacer) -> None:
    mixed, whole = entry("mixed", 3, mixed=True), entry("whole", 2)
    [first], [second] = placer.plan(whole).grants, placer.mix(mixed)
    more = {**NODES, "d": node("d", 1, 128)}
    assert placer.adopt(more, [(whole, first, 5.0), (mixed, second, 5.0)]) == []
    assert placer.plan(entry("one", 1)).grants[0].nodes == ("d",), "all other cards are held"
    assert [grant.job_id for grant in placer.drop("mixed")] == []
    assert placer.plan(entry("three", 2)).grants[0].nodes[0] in set(second.nodes)
