"""What fits where, and who becomes which rank: pure, without Ray."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import GangDoesNotFit, PlacementError
from placement.inventory import (
    FAKE_RESOURCE,
    NODE_ID_LABEL,
    CardReport,
    Gang,
    Inventory,
    Node,
    Seat,
    find_obstacle,
    gpu_nodes,
    number_ranks,
    selects,
)


def node(name: str, cpus: float, free: float | None = None, gpus: float = 0, **labels: str) -> Node:
    total = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    left = {**total, "CPU": cpus if free is None else free}
    return Node(name, f"10.0.0.{ord(name) - 96}", total, left, {NODE_ID_LABEL: name, **labels})


TWO = Inventory((node("a", 4), node("b", 2)))


@pytest.mark.parametrize(
    ("condition", "label", "holds"),
    [
        ("A100", "A100", True),
        ("A100", "H100", False),
        ("!A100", "H100", True),
        ("!A100", "A100", False),
        ("in(A100, H100)", "H100", True),
        ("in(A100, H100)", "T4", False),
        ("!in(A100, H100)", "T4", True),
        ("!in(A100, H100)", "A100", False),
    ],
)
def test_label_conditions(condition: str, label: str, holds: bool) -> None:
    assert selects({"gpu": condition}, {"gpu": label}) is holds
    assert selects({"gpu": condition}, {}) is condition.startswith("!")


def test_a_bundle_larger_than_every_node_names_itself_its_need_and_the_nearest_node() -> None:
    obstacle = find_obstacle(Gang(({"CPU": 1}, {"CPU": 5})), TWO, "total")
    assert obstacle is not None
    assert (obstacle.bundle, obstacle.need) == (1, {"CPU": 5})
    assert obstacle.best is not None
    assert obstacle.best.node_id == "a"


def test_equal_bundles_are_counted_node_by_node() -> None:
    """Two nodes of one CPU hold no bundle of two, although the cluster has two (ray#47792)."""
    ones = Inventory((node("a", 1), node("b", 1)))
    assert find_obstacle(Gang(({"CPU": 2},)), ones, "total") is not None
    assert find_obstacle(Gang(({"CPU": 2},) * 3), TWO, "total") is None
    obstacle = find_obstacle(Gang(({"CPU": 2},) * 4), TWO, "total")
    assert obstacle is not None
    assert (obstacle.bundle, "4 such bundles are wanted, the nodes hold 3" in obstacle.why) == (3, True)


def test_strict_pack_needs_one_node_for_the_sum() -> None:
    assert find_obstacle(Gang(({"CPU": 2}, {"CPU": 2}), "STRICT_PACK"), TWO, "total") is None
    obstacle = find_obstacle(Gang(({"CPU": 2}, {"CPU": 3}), "STRICT_PACK"), TWO, "total")
    assert obstacle is not None
    assert obstacle.need == {"CPU": 5}


def test_strict_spread_needs_a_node_for_each_bundle() -> None:
    assert find_obstacle(Gang(({"CPU": 2}, {"CPU": 4}), "STRICT_SPREAD"), TWO, "total") is None
    assert find_obstacle(Gang(({"CPU": 4}, {"CPU": 4}), "STRICT_SPREAD"), TWO, "total") is not None
    three = find_obstacle(Gang(({"CPU": 1},) * 3, "STRICT_SPREAD"), TWO, "total")
    assert three is not None
    assert "2 fit" in three.why


def test_a_pin_is_a_selector_and_a_label_that_nobody_has_is_said() -> None:
    assert find_obstacle(Gang(({"CPU": 2},), selectors=({NODE_ID_LABEL: "b"},)), TWO, "total") is None
    pinned = find_obstacle(Gang(({"CPU": 3},), selectors=({NODE_ID_LABEL: "b"},)), TWO, "total")
    assert pinned is not None
    assert pinned.best is not None
    assert pinned.best.node_id == "b"
    lost = find_obstacle(Gang(({"CPU": 1},), selectors=({"gpu": "H100"},)), TWO, "total")
    assert lost is not None
    assert "H100" in lost.why


def test_busy_is_not_impossible() -> None:
    busy = Inventory((node("a", 4, free=1),))
    assert find_obstacle(Gang(({"CPU": 2},)), busy, "total") is None
    assert find_obstacle(Gang(({"CPU": 2},)), busy, "free") is not None


def test_an_empty_cluster_has_no_best_node() -> None:
    obstacle = find_obstacle(Gang(({"CPU": 1},)), Inventory(()), "total")
    assert obstacle is not None
    assert obstacle.best is None


@pytest.mark.parametrize("bundles", [(), ({},), ({"CPU": 0},), ({"CPU": -1},)])
def test_a_gang_without_bundles_or_amounts_is_refused(bundles: tuple[dict[str, float], ...]) -> None:
    with pytest.raises(PlacementError):
        Gang(bundles)


def test_one_selector_a_bundle() -> None:
    with pytest.raises(PlacementError, match="1 selectors for 2 bundles"):
        Gang(({"CPU": 1}, {"CPU": 1}), selectors=({},))


def test_the_error_names_bundle_need_and_best_node() -> None:
    error = GangDoesNotFit(
        bundle=2, need={"GPU": 8}, best_node="10.0.0.1", has={"GPU": 4}, reason="never", why="no node has all of it"
    )
    assert isinstance(error, PlacementError)
    for part in ("bundle 2", "GPU 8", "10.0.0.1", "GPU 4", "add a node"):
        assert part in str(error)


@given(
    caps=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    needs=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
)
def test_what_can_be_placed_is_never_refused(caps: list[int], needs: list[int], strategy: str) -> None:
    """Against exhaustive search; for equal bundles and the strict strategies also the converse."""
    inventory = Inventory(tuple(node(chr(97 + i), cap) for i, cap in enumerate(caps)))
    gang = Gang(tuple({"CPU": float(n)} for n in needs), strategy)  # type: ignore[arg-type]
    possible = placeable(caps, needs, strategy)
    obstacle = find_obstacle(gang, inventory, "total")
    if possible:
        assert obstacle is None
    elif strategy.startswith("STRICT") or len(set(needs)) == 1:
        assert obstacle is not None


def placeable(caps: list[int], needs: list[int], strategy: str) -> bool:
    if strategy == "STRICT_PACK":
        return any(sum(needs) <= cap for cap in caps)
    if not needs:
        return True
    for i, cap in enumerate(caps):
        if needs[0] <= cap:
            rest = [0 if strategy == "STRICT_SPREAD" else cap - needs[0] if j == i else c for j, c in enumerate(caps)]
            if strategy == "STRICT_SPREAD":
                rest = [c for j, c in enumerate(caps) if j != i]
            if placeable(rest, needs[1:], strategy):
                return True
    return False


def test_ranks_follow_nodes_and_gpus_and_not_bundles() -> None:
    seats = [
        Seat(0, "n2", "10.0.0.10", ("1",)),
        Seat(1, "n1", "10.0.0.9", ("10",)),
        Seat(2, "n2", "10.0.0.10", ("0",)),
        Seat(3, "n1", "10.0.0.9", ("9",)),
    ]
    places = number_ranks(seats)
    assert [p.seat.bundle for p in places] == [3, 1, 2, 0]
    assert [p.rank for p in places] == [0, 1, 2, 3]
    assert [(p.node_rank, p.local_rank, p.local_size) for p in places] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=12, unique=True))
def test_ranks_are_a_permutation_and_the_same_for_every_order_of_the_seats(spots: list[tuple[int, int]]) -> None:
    seats = [Seat(b, f"n{n}", f"10.0.0.{n}", (str(g),)) for b, (n, g) in enumerate(spots)]
    places = number_ranks(seats)
    assert sorted(p.seat.bundle for p in places) == list(range(len(spots)))
    assert number_ranks(seats[::-1]) == places
    assert all(p.size == len(spots) for p in places)


# --- cards ------------------------------------------------------------------------------------------------------------


def card_node(resources: dict[str, float], **labels: str) -> Node:
    return Node(
        "id", "10.0.0.1", resources, resources, {f"zenray.io/{k.replace('_', '-')}": v for k, v in labels.items()}
    )


def reports(name: str, gib: float, count: int) -> list[CardReport]:
    return [CardReport("id", index, name, int(gib * 2**30), 0) for index in range(count)]


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.6, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 79.6, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA L40S", 44.7, "L40S"),
        ("NVIDIA A10", 22.5, "A10"),
    ],
)
def test_nvml_tells_card_types_apart(name: str, gib: float, expected: str) -> None:
    [node] = gpu_nodes(Inventory((card_node({"GPU": 4}),)), reports(name, gib, 4))
    assert (node.gpu.name, node.spec.num_gpus, node.resource) == (expected, 4, "GPU")
    assert node.spec.memory_bytes == int(gib * 2**30), "NVML's total is the truth"
    assert node.disagreements == ()


def test_disagreements_are_flagged_and_nvml_wins() -> None:
    node = card_node({"GPU": 8}, gpu="H100", gpu_mem_gib="80")
    [found] = gpu_nodes(Inventory((node,)), reports("NVIDIA A100-SXM4-40GB", 39.6, 4))
    assert found.gpu.name == "A100-40"
    assert len(found.disagreements) == 3
    assert any("Ray counts 8 GPUs" in flag and "NVML 4" in flag for flag in found.disagreements)


def test_labels_serve_without_nvml_and_unknown_cards_are_left_out() -> None:
    labelled = card_node({"GPU": 2}, gpu="A100", gpu_mem_gib="40")
    assert gpu_nodes(Inventory((labelled,)))[0].gpu.name == "A100-40"
    assert gpu_nodes(Inventory((card_node({"GPU": 2}),))) == ()
    assert gpu_nodes(Inventory((card_node({"CPU": 2}, gpu="H100"),))) == ()
    strange = card_node({"GPU": 2}, gpu="Zeta9", gpu_mem_gib="24")
    assert gpu_nodes(Inventory((strange,)))[0].spec.memory_bytes == 24 * 2**30
    with pytest.raises(PlacementError, match="not a whole number"):
        gpu_nodes(Inventory((card_node({"GPU": 1}, gpu="A100", gpu_mem_gib="lots"),)))


def test_pretended_cards_are_a_resource_of_their_own() -> None:
    [node] = gpu_nodes(Inventory((card_node({FAKE_RESOURCE: 2}, fake_gpu_mib="48"),)))
    assert (node.gpu.name, node.spec.memory_bytes, node.resource) == ("fake-48", 48 << 20, FAKE_RESOURCE)
    assert node.gpu.context_bytes == node.gpu.nccl_bytes == 0
