"""The byte-level transformer, the variants of its run, and what the job says about loss and bounds; no Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.errors import ConfigError
from jobs.job import Run
from jobs.train import plan_of, show_ceiling, show_spread, workload_of
from jobs.train_config import TrainConfig
from jobs.workloads.gpt import EVALUATION_BYTES, Gpt, GptConfig, byte_corpus
from zenray.config import load
from zenray.engine import HOOKS, TrainPlan, Variant
from zenray.engine_state import HookState

ROOT = Path(__file__).resolve().parents[2]
SMALL = GptConfig(layers=1, width=32, heads=2, context=16)


def test_batches_are_pure_and_targets_are_the_next_bytes() -> None:
    work = Gpt(SMALL, batch=3, seed=5)
    ids, targets = work.batch(7, 1)
    assert ids.shape == targets.shape == (3, 16)
    assert ids[:, 1:].equal(targets[:, :-1])
    assert all(a.equal(b) for a, b in zip(work.batch(7, 1), Gpt(SMALL, 3, 5).batch(7, 1), strict=True))
    others = [work.batch(8, 1), work.batch(7, 2), Gpt(SMALL, 3, 6).batch(7, 1)]
    assert not any(ids.equal(other[0]) for other in others)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 256


def test_the_model_is_the_same_for_every_call_looks_only_back_and_learns() -> None:
    work = Gpt(SMALL, batch=16, seed=1)
    model, other = work.model(sparse=True), work.model(sparse=False)
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    ids, targets = work.batch(0, 0)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    early = [float(model(x[:, :8], targets[:, :8]).detach()) for x in (ids, changed)]
    assert early[0] == early[1]
    before = work.evaluate(model)
    assert before == pytest.approx(5.5, abs=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(40):
        optimizer.zero_grad()
        model(*work.batch(step, 0)).backward()
        optimizer.step()
    assert work.evaluate(model) < 0.8 * before


def test_facts_name_the_data_and_splits_do_not_overlap() -> None:
    facts, corpus = Gpt(SMALL, 1, 0).facts(), byte_corpus()
    assert facts["train_bytes"] == len(corpus.train) > 10 * len(corpus.held_out) > 10 * EVALUATION_BYTES
    with pytest.raises(ConfigError, match="width = 30 is no multiple of"):
        Gpt(replace_config(width=30, heads=4), 1, 0)


def replace_config(**changes: Any) -> GptConfig:
    return SMALL.model_copy(update=changes)


def test_the_shipped_configuration_compares_with_every_rival() -> None:
    config = load(TrainConfig, ROOT / "jobs" / "configs" / "gpt_compressed.yaml")
    assert isinstance(workload_of(config), Gpt)
    plan = plan_of(config, Path("out"))
    names = [variant.name for variant in plan.variants]
    assert names == [
        *("zenray", "ddp_dense", "zenray_auto", "ddp_fp16", "ddp_bf16", "ddp_powersgd"),
        *("ddp_dense_seed1", "ddp_dense_seed2"),
    ]
    ours = plan.variants[0].policy
    assert ours is not None
    assert dict(ours.codecs) == {"dp_grad": ("int8b", "int4b", "sq")}
    assert (ours.optimizer, ours.dense_steps) == ("adamw", 100)
    assert plan.variants[2].policy == replace(ours, codecs=())
    assert [variant.seed_offset for variant in plan.variants[-2:]] == [1, 2]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer=adamw takes no sparse gradients, which stdlib_lm has"):
        plan_of(TrainConfig(optimizer="adamw"), Path("out"))
    with pytest.raises(ConfigError, match="role tp_act does not take codec 'sign'"):
        plan_of(TrainConfig(workload="gpt", policy={"tp_act": "sign"}), Path("out"))
    with pytest.raises(ConfigError, match="unknown hook 'fp9'; choose one of fp16, bf16, powersgd"):
        TrainPlan((Variant("x", False, None, hook="fp9"),), 4, 1, 1, "sgd", 0.1, "")
    assert set(HOOKS) == {"fp16", "bf16", "powersgd"}


class Synchroniser:
    """Stands for a hook whose state is known."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "planner": {"size": 2, "digest": 0, "tensors": {}, "shapes": {}},
            "loss_scale": 2.0,
            "plan": {"size": 2, "stretches": {}},
            "feedback": {
                "residuals": {"a/b.w": [(0, 6, torch.ones(6))]},
                "owner_residuals": {"w": [(3, 9, torch.ones(2))]},
            },
            "rows": {"t.w": torch.eye(2)},
            "powersgd": {"rank": 4, "seed": 0, "factors": {"w": torch.zeros(3, 4)}},
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_a_checkpoint_holds_the_synchronisers_state_as_tensors_and_json() -> None:
    hook = Synchroniser()
    provider = HookState(hook, "s")  # type: ignore[arg-type]
    flat = provider.state_dict()
    tensors = {key for key, value in flat.items() if isinstance(value, torch.Tensor)}
    assert tensors == {"residuals/0/6/a/b.w", "owner_residuals/3/9/w", "rows/t.w", "factor/w"}
    provider.load_state_dict(flat)
    feedback = hook.loaded["feedback"]
    assert feedback["residuals"]["a/b.w"][0][:2] == (0, 6)
    assert feedback["owner_residuals"]["w"][0][2].tolist() == [1, 1]
    assert hook.loaded["rows"]["t.w"].equal(torch.eye(2))
    assert hook.loaded["powersgd"]["factors"]["w"].shape == (3, 4)
    assert hook.loaded["loss_scale"] == 2.0


def test_bound_and_spread_are_computed_from_the_run(tmp_path: Path) -> None:
    run = Run("train", tmp_path, {})
    assert show_ceiling(0.9, 7.0, run) == pytest.approx(1 / (0.1 + 0.9 / 7))
    assert show_ceiling(0.0, 7.0, run) is None
    losses = {"zenray": 2.1, "ddp_dense": 2.0, "ddp_dense_seed1": 2.2}
    figures = {name: {"held_out_loss": loss} for name, loss in losses.items()}
    spread = show_spread(figures, run)
    assert spread == {"low": 2.0, "high": 2.2, "subject": 2.1, "inside": True}
    assert show_spread({name: figures[name] for name in ("zenray", "ddp_dense")}, run) is None
