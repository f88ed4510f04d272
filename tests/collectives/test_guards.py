"""Guards of the roles beside dp_grad: a codec that loses too much is taken back on all ranks in the same call."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import channel as channel_module
from collectives.channel import LOOK_CALLS, Channel, Movement, RoleRecord
from collectives.codecs import CODECS
from collectives.fsdp import gather
from collectives.guards import COARSENESS, MAX_NONFINITE, WORST, Look, coarser, look, violation
from collectives.policy import Role, SyncPolicy
from collectives.tensor_parallel import all_reduce
from collectives.transport import LocalTransport, run_local
from collectives.transport import all_gather as plain_all_gather
from jobs.ranks import run_ranks

RANKS = Path(__file__).with_name("guard_ranks.py")
NUMEL = 1 << 15
"""Of fp32: what every rank gives to an all-reduce; 64 KiB and more are compressed."""


def values(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def with_outliers(x: Tensor, every: int) -> Tensor:
    x = x.clone()
    x[::every] = 1e6
    return x


# --- one look ---


def test_outliers_are_seen_by_what_vanishes_not_by_the_relative_error() -> None:
    x = with_outliers(values(1), 32)
    before = x.clone()
    seen = look(CODECS["int4b"], x)
    assert torch.equal(x, before)
    assert seen.relative_error < 0.01
    assert seen.vanished == pytest.approx(31 / 32, abs=1e-6)
    assert seen.violation("int4b", 0) == "97% of the values became zero, at most 80% expected"
    assert seen.violation("sq", 0) == "", "selection drops values by intent"
    ordinary = look(CODECS["int4b"], values(1))
    assert 0.09 < ordinary.relative_error < 0.11
    assert ordinary.violation("int4b", 0) == ""


@pytest.mark.parametrize(("codec", "spreads"), [("int8b", True), ("fp8b", True), ("bf16", False), ("lossless", False)])
def test_a_value_that_is_not_finite_takes_its_block_with_it_only_in_block_codecs(codec: str, spreads: bool) -> None:
    x = values(2)
    x[5] = math.nan
    seen = look(CODECS[codec], x)
    assert seen.spreads == spreads
    assert seen.relative_error < 0.05
    assert seen.violation(codec, MAX_NONFINITE - 1) == ""


def test_values_whose_squares_overflow_are_measured_like_others() -> None:
    x = values(5)
    assert look(CODECS["int8b"], x * 1e30).relative_error == pytest.approx(
        look(CODECS["int8b"], x).relative_error, rel=1e-3
    )


def test_a_finite_tensor_that_comes_back_infinite_is_the_worst_error() -> None:
    x = values(3)
    x[7] = torch.finfo(torch.float32).max  # rounds up to infinity in bf16
    assert look(CODECS["bf16"], x) == Look(WORST)
    assert "relative error" in Look(WORST).violation("bf16", 0)
    assert "relative error" in violation("topk", WORST, 0), "codecs without a limit must stay finite, too"
    assert violation("topk", 1.0, 0) == ""


def test_pieces_of_a_tensor_and_of_ranks_are_taken_together() -> None:
    x = values(4, 5 << 16)
    decoded = torch.empty_like(x)
    CODECS["int8b"].decode(CODECS["int8b"].encode(x), decoded)
    seen = look(CODECS["int8b"], x)
    assert seen.relative_error == pytest.approx(float((decoded - x).norm() / x.norm()), rel=1e-5)
    assert look(CODECS["int8b"], torch.empty(0)) == look(CODECS["int8b"], torch.zeros(99)) == Look()
    records = [Look(0.25, 0.0, True).record(), Look(0.5, 0.125, False).record()]
    assert Look.worst(records) == Look(0.5, 0.125, True)
    assert Look.worst([Look(math.nan).record()]) == Look(WORST)


def test_a_ban_takes_all_that_is_coarser_and_nothing_that_is_exact() -> None:
    assert coarser("int4b") == COARSENESS[4:]
    assert coarser("bf16") == COARSENESS
    assert coarser("lossless") == ()


# --- calls that all ranks make ---


def moved(made: Channel, x: Tensor, movement: Movement) -> Tensor:
    """The sum over ranks, or everybody's part, one row a rank."""
    if movement == "all_reduce":
        return all_reduce(x, made)
    out = torch.empty(made.transport.size, x.numel())
    decision = made.agree(x, "once", out.numel())
    with made.counted((made.transport.size - 1) * x.nbytes, decision):
        if decision.codec is not None:
            gather(out, x, decision.codec, made)
        else:
            out[made.transport.rank] = x
            plain_all_gather(made.transport, "test", list(out))
    return out


def exact(parts: list[Tensor], movement: Movement) -> Tensor:
    return torch.stack(parts).sum(0) if movement == "all_reduce" else torch.stack(parts)


def channel_of(movement: Movement, transport: LocalTransport, *codecs: str) -> Channel:
    role = Role.TP_ACT if movement == "all_reduce" else Role.FSDP_PARAM
    return Channel(role, SyncPolicy(codecs=((role, codecs),), fixed=True), transport)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("movement", ["all_reduce", "once"])
def test_one_ranks_outliers_end_the_codec_on_all_ranks_at_the_next_look(size: int, movement: Movement) -> None:
    """They come at call 40 on the last rank; the looks are at calls 1 and 98."""
    bad_from, look_at = 40, LOOK_CALLS + 1
    good = [values(rank) for rank in range(size)]
    bad = [*good[:-1], with_outliers(good[-1], 64)]

    def body(transport: LocalTransport) -> tuple[list[tuple[Tensor, bool]], RoleRecord, list[str]]:
        made, results = channel_of(movement, transport, "int8b"), []
        for call in range(1, look_at + 3):
            x = (bad if call >= bad_from else good)[transport.rank]
            results.append((moved(made, x, movement), bool(made.events)))
        return results, made.record(), made.events

    ranks = run_local(size, body)
    for results, record, events in ranks:
        small = torch.arange(NUMEL) % 64 != 0
        for call, (result, taken_back) in enumerate(results, 1):
            want = exact(bad if call >= bad_from else good, movement)
            off = float((result - want)[..., small].norm() / want[..., small].norm())
            is_plain = size == 1 or call >= look_at
            assert taken_back == (call >= look_at and size > 1), call
            assert off < 1e-6 if is_plain else off > 1e-3, (call, off)
            assert torch.equal(result, ranks[0][0][call - 1][0])
        assert record.fallbacks == (size > 1)
        assert record.nonfinite_calls == 0
        assert record.relative_error > 0 or size == 1
        text = f"{record.role}: int8b taken back at call {look_at - 1}: 98% of the values became zero, at most 80% expected"
        assert events == ([text] if size > 1 else [])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("movement", ["all_reduce", "once"])
def test_nan_that_spreads_at_many_looks_ends_the_codec_and_then_stays_alone(size: int, movement: Movement) -> None:
    parts = [values(rank) for rank in range(size)]
    parts[0][5] = math.nan
    last_look = (MAX_NONFINITE - 1) * LOOK_CALLS + 1

    def body(transport: LocalTransport) -> tuple[list[int], RoleRecord]:
        made, counts = channel_of(movement, transport, "int8b"), []
        for _ in range(last_look):
            counts.append(int(moved(made, parts[transport.rank], movement).isnan().sum()))
        return counts, made.record()

    for counts, record in run_local(size, body):
        compressed = last_look - 1 if size > 1 else 0
        assert counts == [256] * compressed + [1] * (last_look - compressed)
        assert record.nonfinite_calls == compressed
        assert record.fallbacks == (size > 1)


def test_a_few_steps_of_nan_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scaler looks for its scale, finds it, and loses it again."""
    monkeypatch.setattr(channel_module, "LOOK_CALLS", 1)

    def body(transport: LocalTransport) -> RoleRecord:
        made = channel_of("all_reduce", transport, "int8b")
        for is_nan in ([True] * (MAX_NONFINITE - 1) + [False]) * 2:
            x = values(transport.rank)
            x[0] = math.nan if is_nan else 1.0
            moved(made, x, "all_reduce")
        return made.record()

    for record in run_local(2, body):
        assert record.fallbacks == 0
        assert record.nonfinite_calls == 2 * (MAX_NONFINITE - 1)


def test_a_finer_codec_of_the_policy_takes_over_in_the_same_call() -> None:
    def body(transport: LocalTransport) -> tuple[Tensor, str, str, int]:
        made = channel_of("all_reduce", transport, "int8b", "bf16")
        result = moved(made, with_outliers(values(transport.rank), 64), "all_reduce")
        decision = made.decide(NUMEL, 4, "all_reduce")
        other = made.decide(NUMEL, 4, "once")
        assert decision.codec is not None
        assert other.codec is not None
        return result, decision.codec.name, other.codec.name, made.record().fallbacks

    want = with_outliers(values(0), 64) + with_outliers(values(1), 64)
    for result, name, other, fallbacks in run_local(2, body):
        assert (name, other, fallbacks) == ("bf16", "int8b", 1)
        assert float((result - want).norm() / want.norm()) < 0.01
        small = torch.arange(NUMEL) % 64 != 0
        assert float((result - want)[small].norm() / want[small].norm()) < 0.01


def test_plain_calls_and_calls_between_looks_exchange_nothing_more() -> None:
    def body(transport: LocalTransport) -> list[int]:
        x, sent = values(transport.rank), []
        for codecs in ((), ("int8b",)):
            made = channel_of("all_reduce", transport, *(codecs or ("off",)))
            for _ in range(LOOK_CALLS + 1):
                moved(made, x, "all_reduce")
            sent.append(transport.traffic.sent_bytes("guard"))
        return sent

    assert run_local(3, body) == [[0, 2 * 2 * 3 * 8]] * 3  # two looks, two peers, three int64


# --- through the entry points ---


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fsdp_and_pipelines_go_on_with_the_right_values(size: int) -> None:
    ranks = run_ranks(size, f"{RANKS}:run", {}, timeout_s=120)
    for rank, found in enumerate(ranks):
        sharded = found["sharded"]["int4b"]
        assert sharded["gradients"] == found["sharded"]["torch"]["gradients"]
        assert sharded["fallbacks"] == (size > 1)
        assert all("fsdp_grad: int4b taken back at call 0: 97% of the values" in event for event in sharded["events"])
        check_pipeline(found["pipelined"], rank == size - 1, size)
    assert ranks[0]["pipelined"]["num_events"] == ([0, 1, 1] if size > 1 else [0, 0, 0])
    if size > 1:  # the receiver follows in the same step; who neither sends nor receives such messages goes on
        assert ranks[1]["pipelined"]["num_events"] == [0, 1, 1]
        assert "its sender found" in ranks[1]["pipelined"]["act"]["events"][0]
        assert "100% of the values became zero" in ranks[0]["pipelined"]["act"]["events"][0]
        assert ranks[-1]["pipelined"]["num_events"][-1] == (size == 2)
    if size == 2:  # sent by the last rank's first stage, received by the first rank's second
        check_pipeline(ranks[1]["interleaved"], True, 4)
        assert [rank["interleaved"]["num_events"] for rank in ranks] == [[0, 1, 1]] * 2
        assert "its sender found" in ranks[0]["interleaved"]["act"]["events"][0]
        assert ranks[0]["interleaved"]["act"]["ratios"][0] > 3.5, "other messages of the role stay compressed"


def check_pipeline(found: dict[str, Any], is_last: bool, num_stages: int) -> None:
    """The first step loses all but the outlier; later ones are right, up to int8 between good stages."""
    if not is_last:
        assert found["losses"] == [[]] * len(found["losses"])
        return
    first, *later = found["losses"]
    if num_stages > 1:
        assert first != pytest.approx(found["exact"], rel=5e-3)
    for losses in later:
        assert losses == pytest.approx(found["exact"], rel=1e-6 if num_stages <= 2 else 1e-3)
