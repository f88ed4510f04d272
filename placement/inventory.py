"""Our model of a cluster's nodes, and the two questions a gang asks it: does it fit, and who becomes which rank?

Ray answers an impossible placement group with silence, so the answer is computed here first. The check never refuses
what Ray could place; where packing is hard (bundles of several kinds that may share nodes) it checks what is necessary
and leaves the rest to Ray. What this file does not do: talk to Ray (see groups.py) or choose GPUs for a job.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from placement.catalogue import CATALOGUE, GIB, MIB, GpuType
from placement.errors import PlacementError
from placement.jobs import NodeSpec

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
NODE_ID_LABEL = "ray.io/node-id"
GPU_LABEL = "zenray.io/gpu"
"""Type of the node's cards, by a name of the catalogue or any other."""
MEMORY_LABEL = "zenray.io/gpu-mem-gib"
"""Memory of each card, a whole number of GiB."""
FAKE_LABEL = "zenray.io/fake-gpu-mib"
"""Memory of each pretended card in MiB; the node declares them as FAKE_RESOURCE and a guard in the worker enforces it."""
FAKE_RESOURCE = "zenray_fake_gpu"
MEMORY_TOLERANCE = 0.08
"""Labels and data sheets may differ from what NVML counts by this share: NVML leaves out what the driver keeps."""
_RESOLUTION = 1e-4
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class Node:
    """One live node. `total` and `free` are resource amounts by Ray's names: CPU, GPU, memory in bytes, custom ones."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """The live nodes at one moment."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Gang:
    """Bundles that are placed together or not at all.

    selectors: empty, or one label selector a bundle, in Ray's words: `v`, `!v`, `in(a, b)`, `!in(a, b)`. Pin a bundle
    to a node with `{NODE_ID_LABEL: node_id}`.
    """

    bundles: tuple[Mapping[str, float], ...]
    strategy: Strategy = "PACK"
    selectors: tuple[Mapping[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.bundles or not all(bundle and min(bundle.values()) > 0 for bundle in self.bundles):
            raise PlacementError(f"a gang needs bundles, and a bundle positive amounts; got {self.bundles}")
        if self.selectors and len(self.selectors) != len(self.bundles):
            raise PlacementError(f"{len(self.selectors)} selectors for {len(self.bundles)} bundles; give one each")

    def selector(self, bundle: int) -> Mapping[str, str]:
        """The label selector of one bundle; empty matches every node."""
        return self.selectors[bundle] if self.selectors else {}


@dataclass(frozen=True)
class Obstacle:
    """Why a gang does not fit: the first bundle without a place, what it needs, and the node that comes closest."""

    bundle: int
    need: Mapping[str, float]
    best: Node | None
    why: str


def read_inventory(nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> Inventory:
    """Build the model from `ray.nodes()` and the free resources by node id; dead nodes are left out."""
    return Inventory(
        tuple(
            Node(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                total=dict(node["Resources"]),
                free=dict(free.get(node["NodeID"], {})),
                labels={**node.get("Labels", {}), NODE_ID_LABEL: node["NodeID"]},
            )
            for node in nodes
            if node["Alive"]
        )
    )


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with `labels` meets every condition of `selector`. A missing label meets only negations."""
    return all(_condition_holds(condition, labels.get(key)) for key, condition in selector.items())


def _condition_holds(condition: str, value: str | None) -> bool:
    negated = condition.startswith("!")
    body = condition.removeprefix("!")
    listed = re.fullmatch(r"in\((.*)\)", body)
    allowed = [item.strip() for item in listed[1].split(",")] if listed else [body]
    return (value in allowed) != negated


def find_obstacle(gang: Gang, inventory: Inventory, amounts: Literal["total", "free"]) -> Obstacle | None:
    """Why `gang` does not fit into what nodes have in all or have free; None if nothing speaks against it."""

    def holdings(node: Node) -> Mapping[str, float]:
        return node.total if amounts == "total" else node.free

    if gang.strategy == "STRICT_PACK":
        return _pack_obstacle(gang, inventory, holdings)
    for bundle, need in enumerate(gang.bundles):
        if not any(_fits(need, holdings(node)) for node in _eligible(gang, bundle, inventory)):
            return _obstacle(gang, bundle, inventory, holdings, "no node has all of it")
    if gang.strategy == "STRICT_SPREAD":
        return _spread_obstacle(gang, inventory, holdings)
    return _capacity_obstacle(gang, inventory, holdings)


def _pack_obstacle(
    gang: Gang, inventory: Inventory, holdings: Callable[[Node], Mapping[str, float]]
) -> Obstacle | None:
    whole: Counter[str] = Counter()
    for bundle in gang.bundles:
        whole.update(bundle)
    nodes = [n for n in inventory.nodes if all(selects(gang.selector(b), n.labels) for b in range(len(gang.bundles)))]
    if any(_fits(whole, holdings(node)) for node in nodes):
        return None
    return Obstacle(0, dict(whole), _closest(whole, nodes, holdings), "all bundles must share one node (STRICT_PACK)")


def _spread_obstacle(
    gang: Gang, inventory: Inventory, holdings: Callable[[Node], Mapping[str, float]]
) -> Obstacle | None:
    table = np.array(
        [
            [selects(gang.selector(b), n.labels) and _fits(need, holdings(n)) for n in inventory.nodes]
            for b, need in enumerate(gang.bundles)
        ]
    )
    partner = maximum_bipartite_matching(csr_array(table), perm_type="column")
    unplaced = np.flatnonzero(partner < 0)
    if not len(unplaced):
        return None
    why = (
        f"{len(gang.bundles)} bundles need as many nodes of their own (STRICT_SPREAD), {int((partner >= 0).sum())} fit"
    )
    return _obstacle(gang, int(unplaced[0]), inventory, holdings, why)


def _capacity_obstacle(
    gang: Gang, inventory: Inventory, holdings: Callable[[Node], Mapping[str, float]]
) -> Obstacle | None:
    """Count the bundles of each kind that the nodes can hold: exact for one kind, necessary for several."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for bundle, need in enumerate(gang.bundles):
        key = (tuple(sorted(need.items())), tuple(sorted(gang.selector(bundle).items())))
        kinds.setdefault(key, []).append(bundle)
    for members in kinds.values():
        need = gang.bundles[members[0]]
        room = sum(_copies(need, holdings(node)) for node in _eligible(gang, members[0], inventory))
        if room < len(members):
            why = f"{len(members)} such bundles are wanted, the nodes hold {room}"
            return _obstacle(gang, members[room], inventory, holdings, why)
    return None


def _eligible(gang: Gang, bundle: int, inventory: Inventory) -> list[Node]:
    return [node for node in inventory.nodes if selects(gang.selector(bundle), node.labels)]


def _obstacle(
    gang: Gang, bundle: int, inventory: Inventory, holdings: Callable[[Node], Mapping[str, float]], why: str
) -> Obstacle:
    need, eligible = gang.bundles[bundle], _eligible(gang, bundle, inventory)
    if not eligible:
        why = f"no node matches its labels {dict(gang.selector(bundle))}"
    return Obstacle(bundle, need, _closest(need, eligible or inventory.nodes, holdings), why)


def _fits(need: Mapping[str, float], has: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) + _RESOLUTION / 2 >= amount for name, amount in need.items())


def _copies(need: Mapping[str, float], has: Mapping[str, float]) -> int:
    return min(int((has.get(name, 0.0) + _RESOLUTION / 2) / amount) for name, amount in need.items())


def _closest(
    need: Mapping[str, float], nodes: Sequence[Node], holdings: Callable[[Node], Mapping[str, float]]
) -> Node | None:
    """The node whose scarcest wanted resource covers the largest share of the need."""

    def coverage(node: Node) -> tuple[float, float]:
        shares = [min(1.0, holdings(node).get(name, 0.0) / amount) for name, amount in need.items()]
        return (min(shares), sum(shares))

    return max(nodes, key=coverage, default=None)


@dataclass(frozen=True)
class Seat:
    """Where one bundle came to lie: known only after its worker runs. gpu_ids are the ids visible to that worker."""

    bundle: int
    node_id: str
    address: str
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """The numbers of one worker within its gang; ranks of one node are consecutive."""

    rank: int
    size: int
    node_rank: int
    local_rank: int
    local_size: int
    seat: Seat


def number_ranks(seats: Sequence[Seat]) -> tuple[Place, ...]:
    """Give ranks by (node address, GPU id), since bundle order says nothing about nodes; result[r].rank == r."""

    def order(seat: Seat) -> tuple[object, ...]:
        gpus = tuple((int(g), "") if g.isdigit() else (0, g) for g in seat.gpu_ids)
        return (_address_key(seat.address), seat.node_id, gpus, seat.bundle)

    ordered = sorted(seats, key=order)
    nodes = list(dict.fromkeys(seat.node_id for seat in ordered))
    local_size = Counter(seat.node_id for seat in ordered)
    seen: Counter[str] = Counter()
    places = []
    for rank, seat in enumerate(ordered):
        local_rank = seen[seat.node_id]
        seen[seat.node_id] += 1
        places.append(Place(rank, len(ordered), nodes.index(seat.node_id), local_rank, local_size[seat.node_id], seat))
    return tuple(places)


def _address_key(address: str) -> tuple[int, int, str]:
    """Addresses in numeric order (10.0.0.2 before 10.0.0.10), names after them."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (9, 0, address)
    return (parsed.version, int(parsed), "")


# --- cards ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardReport:
    """What NVML says of one card; bytes."""

    node_id: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class GpuNode:
    """A node with equal cards, as the scheduler sees it. `resource` is Ray's name for one card.

    disagreements: where labels, Ray and NVML contradict each other; NVML is believed.
    """

    spec: NodeSpec
    gpu: GpuType
    resource: str
    disagreements: tuple[str, ...] = ()


def gpu_nodes(inventory: Inventory, reports: Sequence[CardReport] = ()) -> tuple[GpuNode, ...]:
    """The nodes with cards of a known type and memory: from NVML where it reported, else from the labels.

    Cards without a label and without a report are left out: their memory is unknown.
    """
    by_node: dict[str, list[CardReport]] = {}
    for report in reports:
        by_node.setdefault(report.node_id, []).append(report)
    found = (_gpu_node(node, by_node.get(node.node_id, [])) for node in inventory.nodes)
    return tuple(node for node in found if node is not None)


def card_type(name: str, total_bytes: int) -> GpuType:
    """The card of the catalogue with this name, or a part of it, and about this memory; else one made of both.

    Tells an A100 of 40 GiB from one of 80, which share their name.
    """
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    close = [
        gpu
        for gpu in CATALOGUE.values()
        if gpu.name.split("-")[0].lower() in words
        and abs(total_bytes - gpu.memory_bytes) <= MEMORY_TOLERANCE * gpu.memory_bytes
    ]
    if close:
        longest = max(close, key=lambda gpu: len(gpu.name.split("-")[0]))
        return replace(longest, memory_bytes=total_bytes)
    plain = CATALOGUE["A10"]
    return replace(plain, name=f"{name}-{round(total_bytes / GIB)}", memory_bytes=total_bytes)


def fake_card(memory_mib: int, gpus_per_node: int) -> GpuType:
    """A pretended card: a share of this host's memory and one thread of its processor, nothing outside torch."""
    return GpuType(
        name=f"fake-{memory_mib}",
        memory_bytes=memory_mib * MIB,
        memory_rate=1e10,
        flops=3e10,
        link_rate=1e9,
        network_rate=1e9,
        gpus_per_node=gpus_per_node,
        price=memory_mib / 1024,
        context_bytes=0,
        nccl_bytes=0,
        blas_workspace_bytes=0,
        layer_library_workspace_bytes=0,
    )


def _gpu_node(node: Node, reports: Sequence[CardReport]) -> GpuNode | None:
    fakes = int(node.total.get(FAKE_RESOURCE, 0))
    if fakes and FAKE_LABEL in node.labels:
        gpu = fake_card(_number(node, FAKE_LABEL), fakes)
        return GpuNode(NodeSpec(node.node_id, gpu.name, fakes, gpu.memory_bytes), gpu, FAKE_RESOURCE)
    count = int(node.total.get("GPU", 0))
    label, labelled = node.labels.get(GPU_LABEL), node.labels.get(MEMORY_LABEL)
    if reports:
        least = min(reports, key=lambda report: report.total_bytes)
        gpu = card_type(least.name, least.total_bytes)
    elif count and label and (label in CATALOGUE or labelled):
        memory = _number(node, MEMORY_LABEL) * GIB if labelled else CATALOGUE[label].memory_bytes
        known = CATALOGUE.get(label)
        gpu = card_type(label, memory) if known is None or labelled else known
    else:
        return None
    gpu = replace(gpu, gpus_per_node=count or len(reports))
    flags = _disagreements(node, gpu, count, reports)
    if not count:
        return None
    return GpuNode(NodeSpec(node.node_id, gpu.name, count, gpu.memory_bytes), gpu, "GPU", flags)


def _disagreements(node: Node, gpu: GpuType, count: int, reports: Sequence[CardReport]) -> tuple[str, ...]:
    if not reports:
        return ()
    label, labelled = node.labels.get(GPU_LABEL), node.labels.get(MEMORY_LABEL)
    flags = []
    if count != len(reports):
        flags.append(f"Ray counts {count} GPUs on {node.address}, NVML {len(reports)}")
    if len({(report.name, report.total_bytes) for report in reports}) > 1:
        flags.append(f"cards of {node.address} differ: {', '.join(sorted({report.name for report in reports}))}")
    if label and label.split("-")[0] != gpu.name.split("-")[0]:
        flags.append(f"{node.address} is labelled {label}, NVML says {reports[0].name}")
    if labelled:
        claimed = _number(node, MEMORY_LABEL) * GIB
        if abs(claimed - gpu.memory_bytes) > MEMORY_TOLERANCE * claimed:
            flags.append(f"{node.address} is labelled {labelled} GiB a card, NVML counts {gpu.memory_bytes / GIB:.1f}")
    return tuple(flags)


def _number(node: Node, label: str) -> int:
    text = node.labels[label]
    if not text.isdigit() or int(text) < 1:
        raise PlacementError(f"node {node.address}: label {label}={text} is not a whole number above 0")
    return int(text)
