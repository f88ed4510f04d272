"""YAML and overrides: what users mistype, and what the message must say."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from collectives.errors import ConfigError
from jobs.bench.net import Config as NetConfig
from jobs.train_config import TrainConfig
from jobs.workloads.zipf import WORKLOADS
from zenray.config import Rate, Section, _known_keys, load

ROOT = Path(__file__).parents[2]


class Inner(Section):
    ratio: float = 0.01
    sizes: list[int] = Field(default_factory=list)


class Outer(Section):
    name: str = "x"
    search: Literal["optuna", "random", "grid"] = "grid"
    link: Rate | None = None
    on: bool = False
    inner: Inner = Inner()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path):
    path = write(tmp_path, "name: a\nlink: 200mbit\ninner:\n  ratio: 1e-3\n  sizes: [3, 4]\n")
    assert load(Outer, path) == Outer(name="a", link=2e8, inner=Inner(ratio=0.001, sizes=[3, 4]))
    changed = load(Outer, path, ["inner.sizes=5,6,7", "on=on", "link=1gbit"])
    assert (changed.inner.sizes, changed.on, changed.link) == ([5, 6, 7], True, 1e9)
    assert changed.inner.ratio == 0.001
    assert load(Outer, None, ["inner.sizes=5"]).inner.sizes == [5]
    assert load(Outer, None) == Outer()


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        ("name: a\ninner:\n  ration: 1.0\n", [], ["job.yaml:3", "inner.ration", "did you mean 'inner.ratio'"]),
        ("", ["iner.ratio=1"], ["unknown key", "'inner'"]),
        ("link: 5 parsec\n", [], ["job.yaml:1", "gbit"]),
        ("link: 5\n", ["link=fast"], ["'fast' is not a rate"]),
        ("inner:\n  ratio: often\n", [], ["job.yaml:2", "'often'"]),
        ("search: optna\n", [], ["job.yaml:1", "'optna'", "'optuna', 'random' or 'grid'", "did you mean 'optuna'"]),
        ("colour: red\n", [], ["unknown key 'colour'; known keys: name, search"]),
        ("name: 5\n", [], ["'name'", "string"]),
        ("name: a\nname: b\n", [], ["'name' given twice", "line 2"]),
        ("name: [a\n", [], ["not valid YAML", "line"]),
        ("- a\n", [], ["key: value"]),
        ("name: !!python/object/apply:os.system ['true']\n", [], ["not valid YAML"]),
        ("", ["name"], ["key=value"]),
        ("", ["name.x=1"], ["name"]),
    ],
)
def test_messages_name_the_place_and_the_way_out(tmp_path, text, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        load(Outer, write(tmp_path, text), overrides)
    for part in parts:
        assert part in str(caught.value)


def test_a_value_unlike_all_others_gets_their_list_and_no_guess():
    with pytest.raises(ConfigError) as caught:
        load(NetConfig, None, ["workload=xyz"])
    assert all(name in str(caught.value) for name in WORKLOADS)
    assert "did you mean" not in str(caught.value)


def test_missing_oversized_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load(Outer, tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="may have"):
        load(Outer, write(tmp_path, "#" * (1 << 20) + "\n"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        load(Outer, tmp_path / "binary.yaml")


@pytest.mark.parametrize("path", sorted(ROOT.glob("jobs/configs/*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_of_the_train_job_load(path):
    if path.stem in ("demo", "embedding_lm", "click_log"):
        load(TrainConfig, path)


def test_off_is_a_policy_and_none_is_no_link(tmp_path):
    config = load(TrainConfig, write(tmp_path, "policy: off\nlink: none\nbaseline: off\n"))
    assert (config.policy, config.link, config.baseline) == ("off", None, False)
    assert load(TrainConfig, None, ["link=1gbit", "policy=off"]).link == 1e9


def test_every_key_of_the_train_job_is_a_decision():
    """Add a key here only with its docstring, its test and its line in a shipped file or in the manual."""
    assert _known_keys(TrainConfig) == [
        *("workload", "stdlib_lm", "stdlib_lm.rows", "stdlib_lm.width", "stdlib_lm.context", "stdlib_lm.negatives"),
        *("click_log", "click_log.cap", "click_log.width", "click_log.hidden", "click_log.exponent", "click_log.shift"),
        *("gpt", "gpt.layers", "gpt.width", "gpt.heads", "gpt.context"),
        *("ranks", "steps", "warmup_steps", "block_steps", "batch", "optimizer", "lr", "schedule", "seed", "policy"),
        *("dense_steps", "scheme", "density", "error_feedback", "bucket_mib"),
        *("link", "link_required", "baseline", "baseline_seeds", "rivals"),
        *("checkpoint", "checkpoint.folder", "checkpoint.every_steps", "checkpoint.keep", "checkpoint.resume"),
        *("recovery", "recovery.copies", "recovery.spares", "recovery.heartbeat_s", "recovery.max_recoveries"),
        *("recovery.memory_mib", "recovery.min_ranks"),
        *("tracking", "tracking.uri", "tracking.project", "timeout_s"),
    ]


def test_every_key_has_a_docstring():
    def missing(model: type[Section]) -> list[str]:
        found = []
        for name, info in model.model_fields.items():
            if not info.description:
                found.append(f"{model.__name__}.{name}")
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                found += missing(info.annotation)
        return found

    assert missing(TrainConfig) == []
