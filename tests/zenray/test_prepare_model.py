"""The one line a user adds: in this process with one rank, on two real ranks, and without a process group."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zenray
from collectives.channel import RoleRecord
from collectives.ddp import hook_of
from collectives.errors import ConfigError
from collectives.policy import Role
from jobs.ranks import run_ranks

RANKS = Path(__file__).with_name("prepare_ranks.py")


def test_importing_zenray_loads_no_heavy_library() -> None:
    code = "import sys, zenray; print(*sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "ray", "mlflow", "numpy", "numba", "pyarrow", "pydantic"} & set(loaded.split())


def test_every_public_name_exists_and_a_wrong_one_is_an_attribute_error() -> None:
    for name in zenray.__all__:
        assert getattr(zenray, name) is not None
    assert set(zenray.__all__) <= set(dir(zenray))
    assert set(zenray.__all__) == set(zenray._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'prepare'; public names are "):
        _ = zenray.prepare


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(zenray.ConfigError, match=r"inside a Ray Train loop, or after torch\.distributed\.init"):
        zenray.prepare_model(nn.Linear(2, 2))
    with pytest.raises(zenray.ConfigError, match="init_process_group"):
        zenray.sparse_all_reduce(torch.tensor([0]), torch.ones(1, 2), (4, 2))


# --- a group of one, in this process ----------------------------------------------------------------------------------


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("policy", "hint"), [({"dp_grd": "int8b"}, "did you mean 'dp_grad'"), ({"weights": "off"}, "did you mean 'weight'")]
)
def test_a_name_that_matches_nothing_is_refused(group_of_one: None, policy: dict[str, str], hint: str) -> None:
    with pytest.raises(zenray.ConfigError, match=hint):
        zenray.prepare_model(nn.Linear(2, 2), policy)
    zenray.prepare_model(nn.Linear(2, 2), {"wei*": "off", "dp_grad": "off"})


class Model(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(200, 8, sparse=sparse)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).square().mean()


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([step, 5, 5])).backward()
        optimizer.step()
    return model


@pytest.mark.usefixtures("group_of_one")
def test_one_rank_trains_as_without_zenray() -> None:
    model = zenray.prepare_model(Model(), timeout_s=10)
    trained(model)
    expected = trained(Model(sparse=False)).state_dict()
    for name, value in model.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    hook = hook_of(model)
    assert hook is not None
    assert [r.observed_bytes for r in hook.records()] == [0, 0, 0]
    hook.close()


@pytest.mark.usefixtures("group_of_one")
def test_a_model_that_is_dropped_ends_its_thread() -> None:
    model = zenray.prepare_model(Model(), timeout_s=10)
    trained(model)
    assert "zenray-sync" in {thread.name for thread in threading.enumerate()}
    del model
    gc.collect()
    assert "zenray-sync" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("group_of_one")
def test_off_leaves_plain_ddp() -> None:
    model = zenray.prepare_model(Model(), policy="off")
    assert isinstance(model, DistributedDataParallel)
    assert hook_of(model) is None
    assert {row.scheme for row in zenray.explain(model).rows} == {"plain DDP"}
    with pytest.raises(ConfigError, match="Linear is not prepared: train what prepare_model returns"):
        zenray.explain(nn.Linear(2, 2))


@pytest.mark.usefixtures("group_of_one")
def test_a_wrapped_model_is_kept_and_options_reach_ddp() -> None:
    wrapped = DistributedDataParallel(Model())
    with pytest.raises(zenray.ConfigError, match="static_graph would have no effect"):
        zenray.prepare_model(wrapped, static_graph=True)
    assert zenray.prepare_model(wrapped, {"table.*": "column"}, timeout_s=10) is wrapped
    with pytest.raises(zenray.ConfigError, match="has a synchroniser already"):
        zenray.prepare_model(wrapped)
    other = zenray.prepare_model(Model(), gradient_as_bucket_view=True, timeout_s=10)
    assert other.gradient_as_bucket_view
    for model in (wrapped, other):
        hook = hook_of(model)
        assert hook is not None
        hook.close()


@pytest.mark.usefixtures("group_of_one")
def test_an_unknown_policy_is_refused_before_anything_is_made() -> None:
    with pytest.raises(zenray.ConfigError, match="unknown policy 'zip'"):
        zenray.prepare_model(Model(), policy="zip")


def test_a_hook_nobody_closes_does_not_keep_the_process() -> None:
    code = (
        "import tempfile, torch, torch.distributed as dist, zenray\n"
        "if __name__ == '__main__':\n"
        "    file = tempfile.mktemp()\n"
        "    dist.init_process_group('gloo', init_method=f'file://{file}', rank=0, world_size=1)\n"
        "    model = zenray.prepare_model(torch.nn.Embedding(9, 2, sparse=True), timeout_s=10)\n"
        "    model(torch.tensor([1])).sum().backward()\n"
        "    print(model.module.weight.grad._nnz())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


# --- two real ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, f"{RANKS}:loop", {}, timeout_s=120)


def test_explain_shows_every_parameter_with_predicted_and_observed_cost(results: list[dict[str, Any]]) -> None:
    for result in results:
        table, weight, bias = result["rows"]
        assert table[0] == "table.weight"
        assert table[1] in ("agsparse", "sparcml"), "the same exchange between two ranks"
        assert table[2] == table[3] == 2 * (8 * 4 + 4)
        assert table[4] > 0
        assert weight == ["head.weight", "dense", 0, 0, 0.0]
        assert bias == ["head.bias", "dense", 0, 0, 0.0]
        lines = result["text"].splitlines()
        assert lines[0].split()[:2] == ["tensor", "scheme"]
        assert [line.split()[0] for line in lines[1:]] == ["table.weight", "head.weight", "head.bias"]
        assert "72 (72)" in lines[1]


def test_sparse_all_reduce_of_the_default_group(results: list[dict[str, Any]]) -> None:
    total = torch.zeros(9, 2)
    total[0], total[1], total[7] = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([8.0, 0.0])
    for result in results:
        assert torch.equal(torch.tensor(result["total"]), total)
        assert torch.equal(torch.tensor(result["mean"]), total / 2)
        assert result["ids"] == [0, 1, 7]
        assert result["empty_nnz"] == 0
        assert "ranks disagree about num_rows" in result["mismatch"]
        assert result["default_group_still_works"]


class Stage:
    def records(self) -> list[RoleRecord]:
        act = RoleRecord(Role.PP_ACT, 400.0, 100.0, 4.0, observed_ms=2.0, relative_error=0.25, fallbacks=1)
        return [act, RoleRecord(Role.PP_GRAD, 8.0, 8.0, observed_ms=1.0, nonfinite_calls=3), RoleRecord(Role.TP_ACT)]


@pytest.mark.usefixtures("group_of_one")
def test_explain_adds_the_roles_of_other_parts() -> None:
    told = zenray.explain(Stage())
    assert [role.role for role in told.roles] == ["pp_act", "pp_grad", "tp_act"]
    assert str(told).splitlines() == [
        "pp_act: 400 raw, 100 wire bytes a call (4.00x), 2 ms (0 predicted, 0 of it the codec), relative error 0.25, "
        "1 fallbacks",
        "pp_grad: 8 raw, 8 wire bytes a call (1.00x), 1 ms (0 predicted, 0 of it the codec), relative error 0, "
        "3 calls not finite, 0 fallbacks",
    ]
    both = zenray.explain(zenray.prepare_model(Model(), policy="off"), Stage())
    assert both.roles == told.roles
    assert {row.scheme for row in both.rows} == {"plain DDP"}
