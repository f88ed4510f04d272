"""What the user may ask for: roles, their codecs, presets, names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives.codec_cost import CodecSpeed, DenseLoad, configured, predict
from collectives.codecs import CODECS
from collectives.cost import Link
from collectives.errors import ConfigError
from collectives.policy import PRESETS, ROLES, Role, SyncPolicy

BIG = torch.Size([512, 512])


def gradient_codecs(
    policy: Any, name: str = "layer.weight", shape: torch.Size = BIG, **options: Any
) -> tuple[str, ...]:
    settings = {"dtype": torch.float32, "between_nodes": True} | options
    return SyncPolicy.of(policy).codecs_of_gradient(name, shape, **settings)


def test_every_role_has_a_rule_and_every_codec_of_a_rule_exists() -> None:
    assert set(ROLES) == set(Role)
    assert {codec for rule in ROLES.values() for codec in rule.allowed} <= set(CODECS)


def test_data_movement_and_optimizer_state_carry_no_residual_and_reductions_nothing_lossless() -> None:
    assert {role for role, rule in ROLES.items() if rule.feedback} == {"dp_grad", "fsdp_grad", "outer_delta"}
    assert ROLES[Role.OPT_STATE].allowed == ("lossless",)
    assert "lossless" not in ROLES[Role.DP_GRAD].allowed
    assert not {"topk", "sq", "sign"} & set(ROLES[Role.FSDP_PARAM].allowed)


@pytest.mark.parametrize(
    ("policy", "sparse", "dense"),
    [
        ("auto", None, None),
        ("column", "column", None),
        ("off", "dense", None),
        ({"emb.*": "agsparse"}, "agsparse", "agsparse"),
        ({"emb.*": "off"}, "dense", "dense"),
        ({"emb.w*": "auto", "*": "column"}, None, None),
        ({"emb.*": "int8b"}, None, "dense"),
        ({"emb.*": "column+int8b"}, "column+int8b", "column+int8b"),
    ],
)
def test_the_policy_speaks_per_name(policy: Any, sparse: str | None, dense: str | None) -> None:
    made = SyncPolicy.of(policy)
    assert made.scheme_for("emb.weight", is_dense=False) == sparse
    assert made.scheme_for("emb.weight", is_dense=True) == dense
    assert SyncPolicy.of(made) is made


def test_by_default_links_between_nodes_take_int8_and_links_inside_take_bf16() -> None:
    assert gradient_codecs("auto") == ("bf16", "int8b")
    assert gradient_codecs("auto", between_nodes=False) == ("bf16",)
    assert gradient_codecs("auto", dtype=torch.bfloat16) == ("int8b",)
    assert gradient_codecs("auto", dtype=torch.float64) == ()
    assert gradient_codecs("column") == gradient_codecs("off") == ()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("norm.weight", (4096,)), ("linear.bias", (99999,)), ("moe.router.weight", (512, 512)), ("small", (64, 255))],
)
def test_exempt_parameters_stay_exact_unless_they_are_named(name: str, shape: tuple[int, ...]) -> None:
    assert gradient_codecs("auto", name, torch.Size(shape)) == ()
    assert gradient_codecs("int4b", name, torch.Size(shape)) == ()
    assert gradient_codecs({name: "int8b"}, name, torch.Size(shape)) == ("int8b",)
    assert gradient_codecs({name: "off"}, name) == ()


def test_users_name_codecs_per_role_and_a_single_one_is_fixed() -> None:
    policy = SyncPolicy.of({"dp_grad": "int8b, int4b, sq", "head.*": "off"})
    assert policy.codecs_for(Role.DP_GRAD, between_nodes=False) == ("int8b", "int4b", "sq")
    assert policy.codecs_for(Role.FSDP_PARAM, between_nodes=True) == ("lossless",)
    assert not policy.fixed
    assert policy.codecs_of_gradient("head.weight", BIG, torch.float32, between_nodes=True) == ()
    assert SyncPolicy.of("int4b").fixed
    assert gradient_codecs({"dp_grad": "off"}) == ()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_fixed_and_allowed(name: str) -> None:
    policy = SyncPolicy.of(name)
    assert policy.fixed
    for role, codecs in policy.codecs:
        assert set(codecs) <= set(ROLES[Role(role)].allowed)


def test_presets_repeat_the_schemes_of_the_paper_in_kind() -> None:
    naive = dict(PRESETS["naive"])
    assert {role for role, codecs in naive.items() if codecs == ("int8b",)} >= {
        "dp_grad",
        "tp_act",
        "pp_act",
        "fsdp_param",
    }
    assert naive["opt_state"] == ("lossless",)
    assert dict(PRESETS["mz"])["pp_act"] == ("lossless",)
    assert dict(PRESETS["z"])["pp_act"] == ("bf16",)
    assert dict(PRESETS["zeropp"])["fsdp_param"] == ("int8b",)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"emb.*": "colum"}, "unknown policy 'colum' for 'emb.*'; choose one of auto, off, column"),
        ("zip", "unknown policy 'zip'; choose one of auto, off, column"),
        ({"emb.*": "zen+int8b"}, "unknown policy 'zen\\+int8b'"),
        ({"tp_act": "sign"}, "role tp_act does not take codec 'sign'; it takes off, fp8b"),
        ({"opt_state": "int8b"}, "role opt_state does not take codec 'int8b'; it takes off, lossless"),
        ({"dp_grad": "lossless"}, "role dp_grad does not take codec 'lossless'"),
        ({"moe_combine": "fp8b"}, "role moe_combine does not take codec 'fp8b'"),
    ],
)
def test_what_is_unknown_or_forbidden_says_what_there_is(policy: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("*", r"\*")):
        SyncPolicy.of(policy)


def test_numbers_are_checked() -> None:
    with pytest.raises(ConfigError, match="check_replicas_every = -1"):
        SyncPolicy(check_replicas_every=-1)
    with pytest.raises(ConfigError, match="unknown role 'dp'"):
        SyncPolicy(codecs=(("dp", ("int8b",)),))


def test_the_density_is_that_of_the_codecs_that_keep_a_share_and_changes_their_bytes() -> None:
    load = {d: DenseLoad(numel=1 << 20, itemsize=4, size=2, density=d) for d in (None, 0.01, 0.1)}
    link = Link(2, 1e-4, 1e-4, 1e-4, 1e8, 1e8, 4e9, 1e10)
    speed = CodecSpeed(encode=1e-9, feedback=1e-9, reduce=1e-9, decode=1e-9, bits=0.6)
    for codec, pattern in (("topk", "one_shot"), ("sq", "one_shot"), ("randomk", "native")):
        bytes_of = {d: predict(codec, pattern, load[d], link, speed).wire_bytes for d in load}
        assert bytes_of[None] == bytes_of[0.01]
        assert 6 < bytes_of[0.1] / bytes_of[0.01] < 11, codec  # topk turns to a bitmap of indices on the way
    assert configured("int8b", 0.1) is CODECS["int8b"]
    for density in (0.0, 1.5):
        with pytest.raises(ConfigError, match="share of the elements"):
            SyncPolicy(density=density)
