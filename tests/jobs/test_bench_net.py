"""The `net` benchmark: its arithmetic, and one small run without shaped links."""

from pathlib import Path

import pytest

from collectives.errors import CollectiveMismatch, ConfigError
from jobs.bench.net import Config, combine, exchange_metrics, run, sparse_metrics
from jobs.job import Run
from zenray.config import load


def entry(seconds: list[float], wire_bytes: int | None = 100, digest: str = "a") -> dict[str, object]:
    return {
        "seconds": seconds,
        "wire_bytes": wire_bytes,
        "counted_bytes": 90,
        "digest": digest,
        "replicated": True,
        "relative_error": 1e-7,
    }


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    figures = combine("x", [entry([1.0, 5.0, 3.0], 100), entry([2.0, 4.0, 3.0], 120)])
    expected = {"median_s": 3.0, "spread": 1.0, "wire_bytes": 120, "counted_bytes": 90, "relative_error": 1e-7}
    assert {key: figures[key] for key in expected} == expected
    assert combine("x", [entry([1.0], None)])["wire_bytes"] is None


def test_replicas_that_differ_end_the_run() -> None:
    with pytest.raises(CollectiveMismatch, match="zen: the ranks ended up with different bytes"):
        combine("zen", [entry([1.0]), entry([1.0], digest="b")])


def test_ratios_are_taken_within_one_run() -> None:
    medians = {"dense": 8.0, "gloo_sparse": 2.0, "zen": 1.0, "auto": 1.25, "auto_on_dense": 8.2}
    figures = {name: {"median_s": s, "relative_error": None} for name, s in medians.items()}
    metrics = sparse_metrics({**figures, "column+int4b": {"median_s": 0.5, "relative_error": 0.1}})
    assert metrics["speedup_over_dense"] == 6.4
    assert metrics["speedup_over_gloo_sparse"] == 1.6
    assert metrics["auto_over_best"] == 1.25
    assert metrics["auto_on_dense"] == {"median_s": 8.2, "relative_error": None, "over_dense": 1.025}
    assert metrics["schemes"]["zen"] == figures["zen"] | {"speedup_over_dense": 8.0, "speedup_over_gloo_sparse": 2.0}


def test_line_rate_share_counts_what_must_cross_a_port() -> None:
    """4 ranks, 956 bytes, 1000 bit/s: an all-to-all moves 717 bytes a port in 6 s at best, an all-reduce takes 12 s."""
    figures = {
        "all_reduce": {"median_s": 12.0},
        "torch_all_to_all": {"median_s": 12.0},
        "all_to_all": {"median_s": 7.5},
    }
    metrics = exchange_metrics(figures, 1000.0, 4, 956)
    assert metrics["all_reduce"]["line_rate_share"] == pytest.approx(1.0)
    assert metrics["all_to_all"]["line_rate_share"] == pytest.approx(0.8)
    assert metrics["all_to_all"]["speedup_over_torch"] == pytest.approx(1.6)


@pytest.mark.parametrize("override", ["link=fast", "repeats=4", "ranks=1", "workload=unknown", "suite=none"])
def test_settings_that_make_no_sense_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        load(Config, None, [override])
    assert load(Config, None, ["link=200mbit"]).link == 2e8


def test_ray_nodes_without_links_are_refused(tmp_path: Path) -> None:
    config = load(Config, None, ["link=none", "ranks=2", "engine=ray", "size_mib=1"])
    with pytest.raises(ConfigError, match="engine=ray needs a node per rank"):
        run(config, Run("bench-net", tmp_path, {}))


def test_a_small_run_without_shaped_links(tmp_path: Path) -> None:
    config = load(Config, None, ["link=none", "ranks=2", "suite=exchange", "size_mib=1"])
    metrics = run(config, Run("bench-net", tmp_path, {}))
    assert metrics["self_check"]["verdict"] == "not judged"
    assert metrics["all_to_all"]["counted_bytes"] == 1 << 19
    assert metrics["all_reduce"]["counted_bytes"] == 1 << 20
    assert metrics["all_to_all"]["wire_bytes"] is None
    assert metrics["all_to_all"]["median_s"] > 0
