"""LocalTransport: right results, exact byte counts, and an error on every rank instead of a hang."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout
from collectives.transport import (
    LocalTransport,
    Parcel,
    Traffic,
    all_gather_records,
    all_to_all,
    as_bytes,
    broadcast_bytes,
    others,
    run_local,
)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 6), seed=st.integers(0, 1000))
def test_all_to_all_transposes_and_counts_every_byte(size: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 5, (size, size))

    def body(transport: LocalTransport) -> tuple[list[list[int]], Traffic]:
        rank = transport.rank
        inputs = [torch.full((int(lengths[rank, j]),), rank * size + j, dtype=torch.int32) for j in range(size)]
        outputs = [torch.empty(int(lengths[j, rank]), dtype=torch.int32) for j in range(size)]
        all_to_all(transport, "data", outputs, inputs)
        return [output.tolist() for output in outputs], transport.traffic

    for rank, (outputs, traffic) in enumerate(run_local(size, body)):
        assert outputs == [[j * size + rank] * lengths[j, rank] for j in range(size)]
        peers = [j for j in range(size) if j != rank]
        assert traffic.sent_bytes("data") == traffic.sent_bytes() == 4 * lengths[rank, peers].sum()
        assert traffic.received_bytes("data") == 4 * lengths[peers, rank].sum()
        if peers and lengths[rank, peers].any():
            assert (traffic.sent["data"][peers] == 4 * lengths[rank, peers]).all()
            assert traffic.sent["data"][rank] == 0


def test_traffic_is_kept_by_phase_and_can_be_cleared() -> None:
    traffic = Traffic(3)
    traffic.add(traffic.sent, "push", 1, 10)
    traffic.add(traffic.sent, "pull", 2, 5)
    traffic.add(traffic.received, "push", 2, 7)
    assert (traffic.sent_bytes(), traffic.sent_bytes("push"), traffic.received_bytes("pull")) == (15, 10, 0)
    traffic.clear()
    assert (traffic.sent_bytes(), traffic.received_bytes()) == (0, 0)


def test_peers_are_served_in_a_different_order_on_every_rank() -> None:
    assert run_local(4, others) == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]


def test_all_reduce_sums_in_rank_order_and_costs_what_a_ring_costs() -> None:
    values = [1e8, 1.0, -1e8]

    def body(transport: LocalTransport) -> tuple[list[float], int]:
        data = torch.full((6,), values[transport.rank])
        transport.all_reduce("dense", data)
        return data.tolist(), transport.traffic.sent_bytes("dense")

    expected = float(np.float32(np.float32(np.float32(1e8) + np.float32(1.0)) - np.float32(1e8)))
    assert run_local(3, body) == [([expected] * 6, 2 * 2 * 2 * 4)] * 3


def test_a_failing_rank_ends_the_others_with_its_reason() -> None:
    seen: dict[int, str] = {}

    def body(transport: LocalTransport) -> None:
        if transport.rank == 2:
            with transport.exchange("data", []):
                raise ValueError("bad gradient")
        try:
            all_gather_records(transport, "metadata", [1])
        except CollectiveError as error:
            seen[transport.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="bad gradient"):
        run_local(4, body)
    assert sorted(seen) == [0, 1, 3]
    assert all("bad gradient" in text and "metadata" in text for text in seen.values())


def test_an_aborted_group_refuses_later_calls() -> None:
    def body(transport: LocalTransport) -> None:
        transport.abort()
        transport.abort()
        transport.exchange("late", [])

    with pytest.raises(CollectiveError, match="aborted before phase 'late'"):
        run_local(2, body)


def test_sizes_that_disagree_are_named_on_both_sides() -> None:
    def body(transport: LocalTransport) -> None:
        peer = 1 - transport.rank
        with transport.exchange("data", [Parcel(peer, torch.empty(8))]) as exchange:
            exchange.send(peer, torch.ones(8 + transport.rank))

    with pytest.raises(CollectiveMismatch, match="rank 0: rank 1 sent 36 bytes in phase 'data', 32 expected"):
        run_local(2, body)


def test_a_silent_peer_is_a_time_out_with_its_rank_and_size() -> None:
    done = threading.Event()

    def body(transport: LocalTransport) -> None:
        if transport.rank == 1:
            done.wait(20)
            return
        try:
            with transport.exchange("pull", [Parcel(1, torch.empty(5, dtype=torch.float64))]):
                pass
        finally:
            done.set()

    with pytest.raises(CollectiveTimeout) as caught:
        run_local(2, body, timeout_s=0.2)
    error = caught.value
    assert (error.rank, error.phase, error.missing, error.expected_bytes) == (0, "pull", (1,), 40)
    assert error.timeout_s == 0.2


def test_parcels_between_two_ranks_keep_their_order() -> None:
    def body(transport: LocalTransport) -> list[list[int]]:
        peer = 1 - transport.rank
        recvs = [Parcel(peer, torch.empty(length, dtype=torch.uint8)) for length in (2, 0, 2)]
        with transport.exchange("data", recvs) as exchange:
            for value, length in ((1, 2), (2, 0), (3, 2)):
                exchange.send(peer, torch.full((length,), value, dtype=torch.uint8))
            return [parcel.data.tolist() for parcel in exchange.arrivals()]

    assert run_local(2, body) == [[[1, 1], [], [3, 3]]] * 2


def test_a_sent_buffer_may_be_reused_at_once_by_threads_that_share_it() -> None:
    def body(transport: LocalTransport) -> list[int]:
        mine, theirs = torch.full((3,), transport.rank), torch.empty(3, dtype=torch.int64)
        with transport.exchange("data", [Parcel(1 - transport.rank, theirs)]) as exchange:
            exchange.send(1 - transport.rank, mine)
        mine.fill_(-1)
        return theirs.tolist()

    assert run_local(2, body) == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_hands_bytes_to_all_even_none_at_all(root: int) -> None:
    for payload in (b"", b"plan"):
        received = run_local(3, lambda t, p=payload: broadcast_bytes(t, "plan", p if t.rank == root else None, root))
        assert received == [payload] * 3


@pytest.mark.parametrize("numel", [0, 1])
def test_bytes_of_a_tensor_whose_only_element_has_no_stride(numel: int) -> None:
    data = torch.full((1,), 3.0).as_strided((numel,), (0,))
    assert as_bytes(data).numel() == 4 * numel
