"""One role's channel: its codec by the measured link, its counts, and what stays plain."""

from __future__ import annotations

import pytest
import torch

from collectives import channel as channel_module
from collectives.channel import Channel
from collectives.cost import Link
from collectives.policy import Role, SyncPolicy
from collectives.reduce import two_shot
from collectives.topology import Topology, probe_topology
from collectives.transport import LocalTransport, run_local


def link(rate: float) -> Link:
    return Link(2, 1e-4, 1e-4, 1e-4, rate, rate, 4e9, 1e10)


def decisions(role: Role, policy: SyncPolicy, rate: float, *, nodes: int = 2, sized_only: bool = False) -> list[str]:
    """For 16 MiB, and for 8 KiB."""

    def body(transport: LocalTransport) -> list[str]:
        made = Channel(role, policy, transport, sized_only=sized_only)
        found = [made.decide(numel, 4, "once") for numel in (1 << 22, 1 << 11)]
        return [f"{d.codec.name if d.codec else 'off'}: {d.reason}" for d in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_module, "probe_link", lambda _: link(rate))
        patch.setattr(channel_module, "probe_topology", lambda _: Topology(tuple(r % nodes for r in range(2))))
        results = run_local(2, body)
    assert results[0] == results[1]
    return results[0]


def test_slow_links_between_nodes_take_what_the_role_allows() -> None:
    large, small = decisions(Role.FSDP_GRAD, SyncPolicy(), 1e8)
    assert large.startswith("int8b: ")
    assert small == "off: under 64 KiB"
    assert decisions(Role.PP_ACT, SyncPolicy(), 1e8, sized_only=True)[0].startswith("bf16: ")


def test_fast_links_and_links_inside_a_node_stay_plain_with_a_reason() -> None:
    assert "would take" in decisions(Role.FSDP_GRAD, SyncPolicy(), 1e12)[0]
    assert decisions(Role.TP_ACT, SyncPolicy(), 1e8) == ["off: no codec is allowed"] * 2
    assert decisions(Role.PP_ACT, SyncPolicy(), 1e8, nodes=1) == ["off: no codec is allowed"] * 2


def test_a_fixed_codec_asks_nobody_and_gradients_of_activations_get_the_wider_fp8() -> None:
    policy = SyncPolicy(codecs=(("tp_act", ("fp8b",)), ("tp_grad", ("fp8b",))), fixed=True)

    def body(transport: LocalTransport) -> list[str]:
        made = [
            Channel(role, policy, transport).decide(1 << 20, 4, "all_reduce") for role in (Role.TP_ACT, Role.TP_GRAD)
        ]
        return [d.codec.form for d in made]  # type: ignore[union-attr]

    assert run_local(2, body) == [["e4m3", "e5m2"]] * 2


def test_calls_are_counted_with_raw_and_wire_bytes() -> None:
    policy = SyncPolicy(codecs=(("fsdp_grad", ("int8b",)),), fixed=True)

    def body(transport: LocalTransport) -> tuple[float, float, int]:
        made, x = Channel(Role.FSDP_GRAD, policy, transport), torch.ones(1 << 18)
        decision = made.decide(x.numel(), 4, "all_reduce")
        seeds = set()
        for _ in range(3):
            seeds.add(made.seed())
            with made.counted(x.nbytes, decision):
                assert decision.codec is not None
                two_shot(x, decision.codec, transport, workspace=made.space)
        record = made.record()
        assert record.buffer_bytes > 0
        return record.raw_bytes, record.ratio, len(seeds)

    for raw_bytes, ratio, num_seeds in run_local(2, body):
        assert raw_bytes == 1 << 20
        assert ratio == pytest.approx(3.93, rel=0.01)
        assert num_seeds == 3


def test_threads_of_one_process_are_on_one_node_and_irregular_nodes_have_no_levels() -> None:
    found = run_local(3, probe_topology)
    assert found == [Topology((0, 0, 0))] * 3
    assert not found[0].spans_nodes
    assert Topology((0, 0, 1, 1)).ranks_per_node == 2
    assert Topology((0, 1, 0, 1)).ranks_per_node == 1
    assert Topology((0, 0, 1)).ranks_per_node == 1
    assert Topology((0, 1, 2)).spans_nodes
