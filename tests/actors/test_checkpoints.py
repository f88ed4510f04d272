"""Frames, slots, shards and the journal: what a holder keeps, what it refuses, and that a restored state is the same."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.checkpoints import CheckpointStore, Slots
from actors.errors import CheckpointError, MemoryExhausted, StaleEpoch
from actors.folder import ShardFolder, Stamp
from actors.frames import HEADER_BYTES, Frame, parts, read, seal
from actors.journal import Journal, read_journal
from actors.shards import Image, Snapshot, restore, share, snapshot
from actors.state import DataPosition, ExpertShards, ModelState, OptimizerState, RandomState, ResidualState
from actors.storage import Storage, StorageTier
from collectives.errors import WireFormatError
from collectives.expert_state import ExpertState
from collectives.feedback import ErrorFeedback
from collectives.transport import Transport
from placement.recovery import EpochStart, Held

LIMIT = 1 << 20


def frame(
    step: int, *, rank: int = 0, epoch: int = 1, base: tuple[int, int] = (0, 0), num_bytes: int = 64
) -> np.ndarray:
    data = np.zeros(HEADER_BYTES + 8 + num_bytes, np.uint8)
    data[HEADER_BYTES : HEADER_BYTES + 8] = np.frombuffer(b"{}      ", np.uint8)
    data[HEADER_BYTES + 8 :] = step
    seal(data, Frame("r", epoch, rank, 2, step, base, 8, num_bytes, ""))
    return data


def put(slots: Slots, data: np.ndarray) -> str:
    """A frame arrives whole."""
    return slots.receive(data[:HEADER_BYTES], lambda out: np.copyto(out, data[HEADER_BYTES:]))


def steps(slots: Slots, epoch: int) -> list[tuple[int, int]]:
    return sorted((held.rank, held.step) for held in slots.fence(epoch))


def test_two_slots_hold_the_committed_step_and_the_next() -> None:
    slots = Slots("r", "h", LIMIT)
    for step in range(1, 6):
        put(slots, frame(step, base=(step - 1, 2)))
        assert steps(slots, 1) == [(0, s) for s in (step - 1, step) if s]
    assert read(slots.get(0, (4, 2)), "r", LIMIT).step == 4
    with pytest.raises(CheckpointError, match="does not keep shard 0 of step 3"):
        slots.get(0, (3, 2))


def test_the_committed_step_survives_frames_that_came_to_nothing() -> None:
    slots = Slots("r", "h", LIMIT)
    put(slots, frame(4, base=(3, 2)))
    put(slots, frame(5, base=(4, 2)))
    slots.discard(2, above=4)
    slots.fence(2)
    put(slots, frame(5, epoch=2, base=(4, 2), num_bytes=80))
    put(slots, frame(5, epoch=3, base=(4, 2), num_bytes=96))
    assert steps(slots, 3) == [(0, 4), (0, 5)]
    assert slots.get(0, (5, 2)).size == HEADER_BYTES + 8 + 96


def test_the_same_bytes_in_a_new_epoch_are_kept_once_and_take_the_epoch() -> None:
    slots = Slots("r", "h", LIMIT)
    put(slots, frame(4))
    put(slots, frame(4, epoch=2, base=(4, 2)))
    assert [(held.step, held.epoch) for held in slots.fence(2)] == [(4, 2)]
    used = slots.used_bytes
    put(slots, frame(5, epoch=2, base=(4, 2)))
    assert slots.used_bytes == used
    assert steps(slots, 2) == [(0, 4), (0, 5)]


def test_a_fence_refuses_everything_older() -> None:
    slots = Slots("r", "h", LIMIT)
    put(slots, frame(1))
    assert slots.fence(3) == [Held(0, 2, 1, 1, read(frame(1), "r", LIMIT).digest)]
    for call in (
        lambda: put(slots, frame(2, epoch=2)),
        lambda: slots.fence(2),
        lambda: slots.discard(2, 0),
        lambda: slots.clear(2),
        lambda: slots.retain(2, frozenset(), 2),
    ):
        with pytest.raises(StaleEpoch, match="epoch 2 is over"):
            call()
    assert steps(slots, 3) == [(0, 1)]


def test_the_memory_limit_is_held_and_what_was_kept_stays() -> None:
    slots = Slots("r", "h", 2_000)
    put(slots, frame(1, num_bytes=1_000))
    with pytest.raises(MemoryExhausted, match="its limit is 2000"):
        put(slots, frame(2, base=(1, 2), num_bytes=1_000))
    with pytest.raises(WireFormatError, match="2000 are allowed"):
        put(slots, frame(2, base=(1, 2), num_bytes=3_000))
    assert steps(slots, 1) == [(0, 1)]
    assert slots.used_bytes <= 2_000


def test_shards_that_moved_elsewhere_are_forgotten() -> None:
    slots = Slots("r", "h", LIMIT)
    put(slots, frame(1))
    put(slots, frame(1, rank=1))
    slots.retain(1, frozenset({1}), 2)
    assert steps(slots, 1) == [(1, 1)]
    slots.retain(1, frozenset({1}), 3)
    assert steps(slots, 1) == []
    put(slots, frame(2))
    slots.clear(2)
    assert steps(slots, 2) == []


@given(st.integers(0, HEADER_BYTES + 8 + 64 - 1), st.integers(0, 7))
def test_any_flipped_bit_is_refused(position: int, bit: int) -> None:
    data = frame(3)
    data[position] ^= 1 << bit
    with pytest.raises(WireFormatError):
        read(data, "r", LIMIT)


@given(st.binary(max_size=400))
def test_any_bytes_give_a_wire_format_error(noise: bytes) -> None:
    with pytest.raises(WireFormatError):
        read(np.frombuffer(noise, np.uint8), "r", LIMIT)


def test_frames_of_another_run_and_cut_frames_are_refused() -> None:
    with pytest.raises(WireFormatError, match="another run than other"):
        read(frame(1), "other", LIMIT)
    with pytest.raises(WireFormatError, match="claims"):
        read(frame(1)[:-1], "r", LIMIT)


TENSORS = {
    "a": torch.arange(10, dtype=torch.float32).reshape(2, 5).t(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "none": torch.empty(0, 4, dtype=torch.bfloat16),
    "bits": torch.tensor([True, False, True]),
}


def test_an_image_is_what_safetensors_reads() -> None:
    from safetensors.torch import load

    image = Image(TENSORS)
    whole = np.empty(image.num_bytes, np.uint8)
    image.write(whole, 0, image.num_bytes)
    loaded = load(whole.tobytes())
    assert set(loaded) == set(TENSORS)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@given(st.integers(1, 9))
def test_the_ranges_of_all_ranks_make_up_the_image(num_shards: int) -> None:
    image = Image(TENSORS)
    whole = np.empty(image.num_bytes, np.uint8)
    image.write(whole, 0, image.num_bytes)
    pieces = []
    for rank in range(num_shards):
        start, stop = share(image.num_bytes, rank, num_shards)
        piece = np.empty(stop - start, np.uint8)
        image.write(piece, start, stop)
        pieces.append(piece)
    assert np.array_equal(np.concatenate(pieces), whole)


def test_a_tensor_that_safetensors_cannot_hold_is_named() -> None:
    with pytest.raises(CheckpointError, match="complex64, which safetensors cannot hold"):
        Image({"z": torch.zeros(1, dtype=torch.complex64)})


class Training:
    """A model, its optimizer and everything that is one rank's own."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(6, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.feedback, self.position = ErrorFeedback(), DataPosition()
        self.own = [RandomState({}), ResidualState(self.feedback), self.position]
        self.replicated = [ModelState(self.model), OptimizerState(self.optimizer, self.model)]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().sum().backward()
        residual = self.feedback.residual([("weight", 18)])
        assert self.model.weight.grad is not None
        residual.update.copy_(residual.value + self.model.weight.grad.reshape(-1))
        self.feedback.commit()
        self.optimizer.step()
        self.position.consumed += 1


def shard_of(training: Training, header: Frame) -> tuple[np.ndarray, Frame]:
    return sealed(snapshot(header, training.own, training.replicated))


def sealed(taken: Snapshot) -> tuple[np.ndarray, Frame]:
    taken.complete()
    return taken.data, seal(taken.data, taken.frame)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_a_restored_training_goes_on_bit_identically(num_shards: int) -> None:
    first = Training(1)
    first.step()
    first.step()
    shards = []
    for rank in reversed(range(num_shards)):
        data, frame_ = shard_of(first, Frame("r", 1, rank, num_shards, 2, (0, 0), 0, 0, ""))
        snapshot_of_first = data
        assert read(data, "r", LIMIT) == frame_
        shards.insert(0, parts(data, frame_))
    for _ in range(3):
        first.step()
    second = Training(2)
    second.step()
    restore(shards, num_shards - 1, num_shards, second.own, second.replicated)
    again = shard_of(second, Frame("r", 2, 0, num_shards, 2, (2, 1), 0, 0, ""))[1]
    assert again.digest == read(snapshot_of_first, "r", LIMIT).digest  # so ranks may restore at different times
    for _ in range(3):
        second.step()
    assert second.position.consumed == 5
    assert torch.equal(first.model.weight, second.model.weight)
    residuals = [t.feedback.residual([("weight", 18)]).value for t in (first, second)]
    assert torch.equal(*residuals)


def test_what_the_next_step_changes_before_its_update_is_copied_at_once() -> None:
    """Own states, random ones and residuals among them, and buffers; only then is the rest copied."""
    training = Training(1)
    training.step()
    model = torch.nn.Sequential(training.model, torch.nn.BatchNorm1d(3))
    replicated = [ModelState(model), OptimizerState(training.optimizer, training.model)]
    taken = snapshot(Frame("r", 1, 0, 1, 1, (0, 0), 0, 0, ""), training.own, replicated)
    state, draw = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    residual = training.feedback.residual([("weight", 18)])
    owed = residual.value.clone()
    model(torch.randn(4, 6)).sum().backward()
    residual.update.fill_(9.0)
    training.feedback.commit()
    training.position.consumed += 1
    assert not torch.equal(model.state_dict()["1.running_mean"], state["1.running_mean"])
    shard = parts(*sealed(taken))
    training.optimizer.step()
    restore([shard], 0, 1, training.own, replicated)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draw)
    assert torch.equal(training.feedback.residual([("weight", 18)]).value, owed)
    assert training.position.consumed == 1


@pytest.mark.parametrize("new_size", [1, 3])
def test_a_group_of_another_size_shares_out_residuals_experts_and_position(new_size: int) -> None:
    old = [Training(1) for _ in range(2)]
    layers = [expert_shards(rank, 2) for rank in range(2)]
    whole = torch.arange(7, dtype=torch.float32)
    shards = []
    for rank, (training, experts) in enumerate(zip(old, layers, strict=True)):
        torch.manual_seed(5)  # replicas
        training.step()
        training.feedback.residual([("weight", 18)]).update.fill_(rank + 1.0)
        training.feedback.commit()
        experts.experts.fill(0, whole)
        header = Frame("r", 1, rank, 2, 1, (0, 0), 0, 0, "")
        shards.append(parts(*sealed(snapshot(header, [*training.own, experts], training.replicated))))
    for rank in range(new_size):
        new, experts = Training(rank), expert_shards(rank, new_size)
        restore(shards, rank if rank < 2 else None, new_size, [*new.own, experts], new.replicated)
        assert torch.equal(new.model.weight, old[0].model.weight)
        assert new.position.consumed == 1
        assert new.feedback.residual([("weight", 18)]).value.tolist() == [1.5] * 18
        cuts = experts.experts.cuts
        assert experts.experts.master[0].tolist() == whole[cuts[rank] : cuts[rank + 1]].tolist()


def expert_shards(rank: int, size: int) -> ExpertShards:
    """Two experts of 7 values each."""
    alone = SimpleNamespace(rank=rank, size=size)
    return ExpertShards(ExpertState([torch.nn.Parameter(torch.zeros(1, 7))], 2, cast(Transport, alone), lr=0.1))


def test_shards_that_do_not_fit_together_change_nothing() -> None:
    training = Training(1)
    data, frame_ = shard_of(training, Frame("r", 1, 0, 2, 2, (0, 0), 0, 0, ""))
    before = training.model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="1 shards do not make up one state"):
        restore([parts(data, frame_)], 0, 2, training.own, training.replicated)
    assert torch.equal(training.model.weight, before)


def test_the_journal_is_read_up_to_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "journal.jsonl")
    journal.fence(1)
    journal.start(1, 0, 2)
    journal.commit(1, 1)
    journal.event("something")
    journal.close()
    assert (journal.committed, journal.history) == (1, [EpochStart(1, 0)])
    whole = journal.path.read_bytes()
    lines = [{k: v for k, v in entry.items() if k != "time_s"} for entry in read_journal(journal.path)]
    assert lines == [
        {"epoch": 1},
        {"epoch": 1, "start": 0, "num_ranks": 2},
        {"epoch": 1, "commit": 1},
        {"event": "something"},
    ]
    for cut in range(len(whole)):
        journal.path.write_bytes(whole[:cut])
        assert len(list(read_journal(journal.path))) == whole[:cut].count(b"\n")


def test_a_shard_on_disk_verifies_and_carries_its_stamp(tmp_path: Path) -> None:
    training = Training(1)
    data, frame_ = shard_of(training, Frame("r", 3, 0, 1, 7, (0, 0), 0, 0, ""))
    values, tensors = parts(data, frame_)
    folder = ShardFolder(tmp_path, 0, 1)
    folder.write(Stamp("r", 7, 3, 0, 1, ""), tensors, values)
    assert folder.latest() == 7
    manifest, read_back = folder.read(7, 0)
    assert (manifest["stamp"]["epoch"], manifest["values"], read_back) == (3, values, tensors)
    before = training.model.weight.detach().clone()
    training.step()
    restore([(manifest["values"], read_back)], 0, 1, training.own, training.replicated)
    assert torch.equal(training.model.weight, before)


def test_a_shard_is_written_as_it_was_when_the_write_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copied = CheckpointStore.__new__(CheckpointStore), threading.Event()  # without its door
    store.slots, store._writing = Slots("r", "h", LIMIT), threading.Lock()
    find = store.slots.find

    def noted(rank: int, key: tuple[int, int]) -> np.ndarray | None:
        found = find(rank, key)
        copied.set()
        return found

    monkeypatch.setattr(store.slots, "find", noted)
    write = partial(store.write, str(tmp_path), [0], keep=2, identity={"run_id": "r", "config_sha256": ""})
    put(store.slots, frame(4, base=(3, 2)))
    with ThreadPoolExecutor(1) as pool:
        with store._writing:  # the disk is busy with an earlier step
            late = pool.submit(write, (4, 2))
            assert copied.wait(10)
            for step in (5, 6, 7):
                put(store.slots, frame(step, base=(step - 1, 2)))
        assert late.result(timeout=10)
    assert ShardFolder(tmp_path, 0, 2).read(4, 0)[1] == bytes([4]) * 64
    assert not write((5, 2))  # training went on so far that nobody keeps it


def test_one_checkpoint_may_wait_for_the_disk_and_a_further_one_is_left_out(tmp_path: Path) -> None:
    asked: list[tuple[list[int], tuple[int, int]]] = []
    said: list[str] = []

    def ask(folder: str, ranks: list[int], key: tuple[int, int], keep: int, identity: dict[str, str]) -> object:
        asked.append((ranks, key))
        return object()

    class Holder:
        write = SimpleNamespace(remote=ask)

    first, second = Holder(), Holder()
    tier = StorageTier(Storage(tmp_path, every_steps=2), "r", said.append)
    for step in range(9):
        tier.write_if_due(step, [first, second, first, None])
    assert asked == [([0, 2], (2, 4)), ([1], (2, 4)), ([0, 2], (4, 4)), ([1], (4, 4))]
    assert len(said) == 1  # not once a step
    assert "step 6 is not written" in said[0]
    assert tier.is_on
