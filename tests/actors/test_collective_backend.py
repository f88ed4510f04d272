"""`ray.util.collective` on the ZENRAY backend, in real actors, against dense oracles."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.util.collective import collective
from ray.util.collective.types import ReduceOp

from actors.collective_backend import BACKEND, register
from collectives.errors import CollectiveMismatch, CollectiveTimeout, ConfigError

NUM_ROWS, WIDTH, TOUCHED = 4000, 16, 40


def gradient(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A dense [NUM_ROWS, WIDTH] gradient with few non-zero rows, some of them shared by the ranks."""
    generator = torch.Generator().manual_seed(rank)
    dense = torch.zeros(NUM_ROWS, WIDTH)
    rows = torch.cat([torch.arange(5), torch.randperm(NUM_ROWS, generator=generator)[: TOUCHED - 5]])
    dense[rows] = torch.randint(-8, 8, (TOUCHED, WIDTH), generator=generator).float()
    return dense.to(dtype)


class Peer:
    """One rank; `call` runs a function with (rank, size, collective module) on it."""

    def __init__(self, rank: int, size: int, name: str):
        torch.set_num_threads(1)
        register(timeout_s=30.0)
        register(timeout_s=30.0)
        collective.init_collective_group(size, rank, BACKEND, name)
        self.rank, self.size, self.name = rank, size, name

    def call(self, function: Any) -> Any:
        return function(self.rank, self.size, self.name)


def sent_bytes(name: str) -> int:
    return int(collective.get_group_handle(name).transport.traffic.sent_bytes())


@pytest.fixture(scope="module")
def peers(ray_cluster: Mapping[str, str]) -> Iterator[list[Any]]:
    register()
    actors = [ray.remote(num_cpus=1)(Peer).remote(rank, 2, "grads") for rank in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def on_all(peers: list[Any], function: Any) -> list[Any]:
    shared = ray.put(function)
    return list(ray.get([peer.call.remote(shared) for peer in peers], timeout=90))


@pytest.mark.parametrize("form", ["coo", "dense", "numpy", "one of each"])
def test_allreduce_of_a_sparse_gradient_sends_rows_and_equals_the_dense_sum(peers: list[Any], form: str) -> None:
    def body(rank: int, size: int, name: str) -> tuple[Any, int]:
        dense = gradient(rank)
        as_coo = form == "coo" or (form == "one of each" and rank == 0)
        value: Any = dense.to_sparse(1) if as_coo else dense.numpy() if form == "numpy" else dense
        before = sent_bytes(name)
        collective.allreduce(value, name)
        cost = sent_bytes(name) - before
        return value.to_dense() if as_coo else torch.as_tensor(value), cost

    oracle = gradient(0) + gradient(1)
    results = on_all(peers, body)
    row_bytes = WIDTH * 4
    for value, cost in results:
        assert torch.equal(value, oracle)
        assert TOUCHED * row_bytes <= cost < 2 * TOUCHED * (row_bytes + 8), "rows, ids and a few records"
        assert cost < NUM_ROWS * row_bytes / 20, "a dense ring sends the whole tensor at two ranks"


def test_a_dense_tensor_runs_dense_in_every_dtype(peers: list[Any]) -> None:
    def body(rank: int, size: int, name: str) -> list[Any]:
        results = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8):
            data = (torch.arange(100).view(10, 10) % 7 + rank).to(dtype)
            collective.allreduce(data, name)
            results.append(data)
        return results

    for tensors in on_all(peers, body):
        for data in tensors:
            assert torch.equal(data.double(), ((torch.arange(100).view(10, 10) % 7) * 2 + 1).double()), data.dtype


def test_all_other_calls(peers: list[Any]) -> None:
    def body(rank: int, size: int, name: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        ops = {"max": ReduceOp.MAX, "min": ReduceOp.MIN, "product": ReduceOp.PRODUCT}
        for word, op in ops.items():
            data = torch.tensor([1.0, 2.0, 3.0]) + rank
            collective.allreduce(data, name, op=op)
            out[word] = data.tolist()
        strided = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        collective.allreduce(strided, name)
        out["strided"] = strided.tolist()
        empty = torch.empty(0)
        collective.allreduce(empty, name)
        scalar = torch.tensor(rank + 1.0)
        collective.allreduce(scalar, name)
        out["scalar"] = float(scalar)
        data = np.array([rank + 1, 5], dtype=np.int32)
        collective.reduce(data, 1, name)
        out["reduce"] = data.tolist()
        data = torch.tensor([rank + 1.0])
        collective.broadcast(data, 1, name)
        out["broadcast"] = data.tolist()
        gathered = [torch.zeros(2) for _ in range(size)]
        collective.allgather(gathered, torch.tensor([rank, 7.0]), name)
        out["allgather"] = [part.tolist() for part in gathered]
        scattered = torch.zeros(2)
        collective.reducescatter(scattered, [torch.full((2,), 10.0 * r + rank) for r in range(size)], name)
        out["reducescatter"] = scattered.tolist()
        if rank == 0:
            collective.send(torch.arange(4.0), 1, name)
        else:
            received = torch.zeros(4)
            collective.recv(received, 0, name)
            out["recv"] = received.tolist()
        collective.barrier(name)
        return out

    first, second = on_all(peers, body)
    for out in (first, second):
        assert (out["max"], out["min"], out["product"]) == ([2.0, 3.0, 4.0], [1.0, 2.0, 3.0], [2.0, 6.0, 12.0])
        assert out["strided"] == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
        assert (out["scalar"], out["broadcast"], out["allgather"]) == (3.0, [2.0], [[0.0, 7.0], [1.0, 7.0]])
    assert (first["reduce"], second["reduce"]) == ([1, 5], [3, 10])
    assert (first["reducescatter"], second["reducescatter"]) == ([1.0, 1.0], [21.0, 21.0])
    assert second["recv"] == [0.0, 1.0, 2.0, 3.0]


def test_a_second_group_and_a_second_life_of_the_first(peers: list[Any]) -> None:
    def body(rank: int, size: int, name: str) -> list[float]:
        results = []
        collective.init_collective_group(size, rank, BACKEND, "second")
        for group in ("second", name):
            data = torch.ones(1)
            collective.allreduce(data, group)
            results.append(float(data))
        collective.destroy_collective_group("second")
        collective.destroy_collective_group(name)
        collective.init_collective_group(size, rank, BACKEND, name)
        data = torch.ones(1)
        collective.allreduce(data, name)
        return [*results, float(data)]

    assert on_all(peers, body) == [[2.0, 2.0, 2.0]] * 2


def test_a_group_that_the_driver_declares(peers: list[Any]) -> None:
    def body(rank: int, size: int, name: str) -> float:
        data = torch.tensor([rank + 1.0])
        collective.allreduce(data, "declared")
        collective.destroy_collective_group("declared")
        return float(data)

    collective.create_collective_group(peers, 2, [0, 1], BACKEND, "declared")
    assert on_all(peers, body) == [3.0, 3.0]


def test_what_cannot_be_done_is_said(peers: list[Any]) -> None:
    def body(rank: int, size: int, name: str) -> list[str]:
        said = []
        for call in (
            lambda: collective.broadcast(gradient(rank).to_sparse(1), 0, name),
            lambda: collective.allgather([torch.zeros(3), torch.zeros(2)], torch.zeros(2), name),
            lambda: collective.allreduce(gradient(rank).to_sparse(1), name, op=ReduceOp.MAX),
        ):
            try:
                call()
            except ConfigError as error:
                said.append(str(error))
        return said

    for said in on_all(peers, body):
        assert len(said) == 3
        for text, part in zip(
            said, ("summed by allreduce only", "(3,) torch.float32", "not reduced by MAX"), strict=True
        ):
            assert part in text


def test_ranks_that_disagree_learn_it_before_data_moves(peers: list[Any]) -> None:
    def body(rank: int, size: int, name: str) -> tuple[str, float]:
        try:
            collective.allreduce(torch.zeros(3 + rank), name)
        except CollectiveMismatch as error:
            said = str(error)
        after = torch.ones(1)
        collective.allreduce(after, name)
        return said, float(after)

    for rank, (said, after) in enumerate(on_all(peers, body)):
        assert "rank(s) 1 ask for something else than rank 0" in said
        assert f"rank {rank} asks for the SUM of ({3 + rank},) torch.float32" in said
        assert after == 2.0


def test_a_rank_that_never_comes_is_named(ray_cluster: Mapping[str, str]) -> None:
    class Alone:
        def wait(self) -> None:
            register(timeout_s=0.5)
            collective.init_collective_group(2, 0, BACKEND, "alone")

    actor = ray.remote(num_cpus=1)(Alone).remote()
    try:
        with pytest.raises(CollectiveTimeout) as caught:
            ray.get(actor.wait.remote(), timeout=60)
        assert (caught.value.phase, caught.value.missing) == ("rendezvous", (1,))
    finally:
        ray.kill(actor)
