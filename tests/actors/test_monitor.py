"""Memory of one rank: a pretended card that counts exactly, and out-of-memory errors told apart."""

import pytest
import torch
from torch import nn

from actors.monitor import CardOutOfMemory, FakeCard, HostOutOfMemory, MemoryMonitor, Sample, read_cards, told_apart
from placement.catalogue import MIB
from placement.traced import predict_module
from placement.watch import Alarm, Limits

LIMITS = Limits(upper_bytes=10 * MIB, capacity_bytes=12 * MIB)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


def test_live_bytes_are_counted_and_given_back() -> None:
    with FakeCard(16 * MIB) as card:
        kept = torch.zeros(MIB // 4)
        view = kept.view(2, -1)[0]
        temporary = torch.ones(2 * MIB // 4)
        assert card.sample() == Sample(3 * MIB, 3 * MIB, 3 * MIB, 3 * MIB)
        del temporary
        kept += 1
        assert card.sample() == Sample(MIB, MIB, MIB, 3 * MIB)
        assert card.sample().peak == MIB
        del kept
        assert card.allocated_bytes == MIB, "a view keeps its storage alive"
        del view
    assert card.allocated_bytes == 0


def test_two_steps_peak_where_the_trace_says() -> None:
    predicted = predict_module(model(), (torch.zeros(64, 256),), device="cpu").allocated
    with FakeCard(64 * MIB) as card:
        module, data = model(), torch.ones(64, 256)
        optimizer = torch.optim.Adam(module.parameters())
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            module(data).mean().backward()
            optimizer.step()
        assert card.sample().peak == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_case_13_a_full_card_raises_what_a_real_one_raises_and_we_say_more(where: str) -> None:
    def overfill() -> None:
        with told_apart(3, LIMITS, [7, where]), FakeCard(2 * MIB):
            weight = torch.zeros(256, 1024, requires_grad=True)
            product = weight * 2 if where == "backward" else torch.zeros(3 * MIB)
            product.sum().backward()  # 1 MiB each: weight, product, and the product's gradient

    with pytest.raises(CardOutOfMemory) as caught:
        overfill()
    error = caught.value
    assert (error.rank, error.step, error.phase, error.limit_bytes, error.planned_bytes) == (
        3, 7, where, LIMITS.capacity_bytes, LIMITS.upper_bytes,
    )  # fmt: skip
    assert error.used_bytes > 2 * MIB
    assert isinstance(error.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")])
def test_a_full_host_is_another_error(error: Exception) -> None:
    with pytest.raises(HostOutOfMemory, match="another card does not help"), told_apart(0, LIMITS, [0, "start"]):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), told_apart(0, LIMITS, [0, "start"]):
        raise RuntimeError("shapes differ")


def test_growth_is_noticed_before_the_card_is_full() -> None:
    kept = []
    with FakeCard(LIMITS.capacity_bytes) as card:
        monitor = MemoryMonitor(card, LIMITS, first_step=0)
        for step in range(100):
            kept.append(torch.zeros(MIB // 4))
            verdict = monitor.step_end(step, checkpoint_step=20)
            if verdict.alarm is Alarm.CROSSING:
                break
    assert verdict.crossing_step == 12
    assert monitor.peak_bytes <= LIMITS.capacity_bytes
    assert len(kept) < 12


def test_growth_of_what_is_only_cached_is_given_back_once_before_anything_else() -> None:
    class Caching:
        allocated, cached, released = 4 * MIB, 0, 0

        def sample(self) -> Sample:
            self.cached += MIB
            total = self.allocated + self.cached
            return Sample(self.allocated, total, total, total)

        def release_cache(self) -> None:
            self.cached, self.released = 0, self.released + 1

    card = Caching()
    monitor = MemoryMonitor(card, LIMITS, first_step=0)
    alarms = [monitor.step_end(step, checkpoint_step=50).alarm for step in range(12)]
    first = alarms.index(Alarm.ABOVE_UPPER)
    assert card.released == 1
    assert Alarm.CROSSING not in alarms[: first + 1]
    assert Alarm.CROSSING in alarms[first + 1 :], "it grows again: another plan is needed"


def test_a_machine_without_cards_reports_none() -> None:
    if torch.cuda.is_available():
        assert all(report.total_bytes > 0 for report in read_cards("n"))
    else:
        assert read_cards("n") == []
