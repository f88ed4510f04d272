import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import ConfigError
from placement.allocator import AllocatorSettings, Replay, replay
from placement.errors import PlacementError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB), (10 * MIB + 1, 10 * MIB + 1 + MIB * 2 - 1, 12 * MIB),
        (19 * MIB + MIB // 2, 20 * MIB, 20 * MIB),
    ],
)  # fmt: skip
def test_one_tensor(size, allocated, reserved):
    """Rounded to 512 bytes and cut from its segment, unless the rest is too small to split off."""
    found = replay([(0, size)])
    assert found.reserved == reserved
    assert found.requested == size
    assert found.allocated in (allocated, -(-size // 512) * 512)


def test_a_remainder_of_at_most_one_mebibyte_stays_with_its_block():
    assert replay([(0, 11 * MIB)]).allocated == 12 * MIB
    assert replay([(0, 11 * MIB), (1, MIB // 2)]).reserved == 14 * MIB


def test_freed_neighbours_merge_and_serve_a_larger_tensor():
    events = [(0, 4 * MIB), (1, 4 * MIB), (2, 4 * MIB), (0, -1), (1, -1), (3, 8 * MIB)]
    assert replay(events) == Replay(12 * MIB, 12 * MIB, 20 * MIB)


def test_the_best_fit_is_the_smallest_that_is_large_enough():
    events = [(0, 40 * MIB), (1, 30 * MIB), (0, -1), (1, -1), (2, 30 * MIB), (3, 40 * MIB)]
    assert replay(events).reserved == 70 * MIB


def test_small_and_large_do_not_share_segments():
    assert replay([(0, 512), (1, 5 * MIB)]).reserved == 22 * MIB


def test_fragmentation_is_what_expandable_segments_avoid():
    growing = [event for i in range(8) for event in ((i, (20 + 4 * i) * MIB), (i, -1))]
    assert replay(growing).reserved > 2 * replay(growing, AllocatorSettings(expandable_segments=True)).reserved


def test_unsplittable_blocks_are_kept_for_large_tensors():
    events = [(0, 200 * MIB), (0, -1), (1, 30 * MIB)]
    assert replay(events).reserved == 200 * MIB
    assert replay(events, AllocatorSettings(max_split_bytes=100 * MIB)).reserved == 230 * MIB


def test_power_of_two_rounding():
    assert replay([(0, 1200)], AllocatorSettings(roundup_power2_divisions=4)).allocated == 1280 + 256


def test_cached_segments_are_given_back_at_the_limit():
    events = [(0, 40 * MIB), (0, -1), (1, 60 * MIB)]
    assert replay(events, AllocatorSettings(capacity_bytes=64 * MIB)).allocated == 60 * MIB
    with pytest.raises(PlacementError, match="out of memory"):
        replay(events, AllocatorSettings(capacity_bytes=50 * MIB))


def test_misuse_is_an_error():
    with pytest.raises(PlacementError, match="not allocated"):
        replay([(0, -1)])
    with pytest.raises(PlacementError, match="twice"):
        replay([(0, 8), (0, 8)])
    with pytest.raises(ConfigError, match="power of two"):
        AllocatorSettings(roundup_power2_divisions=3)
    with pytest.raises(ConfigError, match="20 MiB"):
        AllocatorSettings(max_split_bytes=1)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 60 * MIB)), max_size=60),
    st.booleans(),
    st.sampled_from([None, 20 * MIB]),
)
@settings(deadline=None)
def test_what_is_live_is_within_blocks_and_blocks_within_segments(steps, expandable, max_split):
    events, live = [], []
    for index, (frees, size) in enumerate(steps):
        if frees and live:
            events.append((live.pop(size % len(live)), -1))
        else:
            events.append((index, size))
            live.append(index)
    config = AllocatorSettings(expandable_segments=expandable, max_split_bytes=max_split)
    found = replay(events, config)
    assert found.requested <= found.allocated <= found.reserved
    again = replay([*events, *((identity, -1) for identity in live)], config)
    assert again.reserved == found.reserved


@given(st.integers(1, 30 * MIB), st.integers(1, 20), st.booleans())
@settings(deadline=None)
def test_a_repeated_step_of_equal_tensors_reserves_nothing_more(size, count, expandable):
    config = AllocatorSettings(expandable_segments=expandable)
    step = [(i, size) for i in range(count)] + [(i, -1) for i in range(count)]
    assert replay(step + step, config).reserved == replay(step, config).reserved
