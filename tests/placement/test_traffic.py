"""The plan of checkpoint traffic: chunks fit into idle spans, nothing is forgotten, what does not fit is predicted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.errors import ConfigError
from placement.traffic import Link, plan_traffic

LINK = Link(alpha_s=0.001, bytes_per_s=1e6)


def test_chunks_fill_span_after_span() -> None:
    plan = plan_traffic([0.010, 0.050], 20_000, 1, 4_000, LINK, mu=0.5)
    assert plan.spans == (((0, 4_000),), ((0, 4_000),) * 4)  # 5 ms hold one chunk of 5 ms
    assert plan.exposed_s == pytest.approx(0.0)


def test_the_rest_of_a_span_takes_a_smaller_chunk() -> None:
    plan = plan_traffic([0.016, 1.0], 20_000, 1, 4_000, LINK, mu=0.5)
    assert plan.spans[0] == ((0, 4_000), (0, 2_000))


def test_what_does_not_fit_lengthens_the_step_by_what_is_left_of_the_last_span() -> None:
    plan = plan_traffic([0.010], 100_000, 2, 10_000, LINK, mu=0.5)
    assert plan.exposed_s == pytest.approx(20 * 0.011 - 0.005)


def test_nothing_to_send_costs_nothing() -> None:
    assert plan_traffic([0.0, 0.0], 0, 3, 100, LINK).exposed_s == 0
    assert plan_traffic([0.0], 100, 0, 100, LINK).sent_bytes == 0


@given(
    st.lists(st.floats(0, 0.2), min_size=1, max_size=6),
    st.integers(0, 200_000),
    st.integers(0, 3),
    st.integers(500, 50_000),
    st.floats(0.05, 0.95),
)
def test_every_byte_is_planned_once_and_spans_are_kept(
    spans: list[float], shard: int, remote: int, chunk: int, mu: float
) -> None:
    plan = plan_traffic(spans, shard, remote, chunk, LINK, mu)
    for copy in range(remote):
        assert sum(size for span in plan.spans for c, size in span if c == copy) == shard
    for span_s, span in zip(spans[:-1], plan.spans[:-1], strict=True):
        assert sum(LINK.seconds(size) for _, size in span) <= mu * span_s + 1e-9
    assert all(0 < size <= chunk for span in plan.spans for _, size in span)


@pytest.mark.parametrize(("spans", "mu", "chunk"), [([], 0.5, 1), ([-1.0], 0.5, 1), ([1.0], 1.0, 1), ([1.0], 0.5, 0)])
def test_impossible_requests_are_refused(spans: list[float], mu: float, chunk: int) -> None:
    with pytest.raises(ConfigError, match="idle spans"):
        plan_traffic(spans, 10, 1, chunk, LINK, mu)
