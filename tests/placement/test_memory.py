import csv
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.data import data_path
from placement.activations import in_flight, score_bytes
from placement.calibrate import Evidence, cross_validate, fit, headroom_of, predict_case
from placement.catalogue import MIB, gpu_type
from placement.marp import marp, megatron_formula
from placement.megatron import Case, Unsupported, is_dense_gpt, read_case
from placement.memory import SHIPPED, Calibration, predict, static_bytes
from placement.shapes import Experts, Latent, Layout, ModelShape, Setup, ShapeError, padded_vocab, stage_parameters

ROWS = data_path("memory/megatron_dev.csv")
A100 = gpu_type("A100-80")
SMALL = ModelShape(layers=12, hidden=512, heads=8, seq=1024, vocab=50257, learned_positions=1024)
LARGE = ModelShape(
    layers=32, hidden=4096, heads=32, groups=8, seq=8192, vocab=131073, learned_positions=8192, tied=False
)
DROPOUT = Setup(global_batch=32, hidden_dropout=0.1, attention_dropout=0.1)


def parts(shape: ModelShape, setup: Setup, layout: Layout) -> list[float]:
    stage = predict(shape, setup, layout, A100).last
    return [float(x[0]) / MIB for x in (stage.static, stage.activations, stage.logits)]


@pytest.mark.parametrize(
    ("shape", "setup", "layout", "expected"),
    [
        (SMALL, DROPOUT, Layout.of(micro_batch=4, data=8, sharding=1), (459, 818, 1179, 2520)),
        (
            SMALL,
            replace(DROPOUT, attention="unfused"),
            Layout.of(micro_batch=4, data=8, sharding=1),
            (459, 2738, 1179, 4440),
        ),
        (SMALL, DROPOUT, Layout.of(micro_batch=4, data=2, tensor=4), (284, 386, 297, 1031)),
        (
            SMALL,
            Setup(global_batch=32),
            Layout.of(micro_batch=4, pipeline=2, context=4, num_micro=8),
            (767, 96, 295, 1222),
        ),
        (
            LARGE,
            DROPOUT,
            Layout.of(micro_batch=1, data=2, pipeline=4, virtual=8, num_micro=4, sharding=1),
            (22283, 28768, 6150, 57265),
        ),
        (
            LARGE,
            DROPOUT,
            Layout.of(micro_batch=2, data=2, tensor=4, num_micro=2, sharding=1),
            (19616, 31296, 3084, 54060),
        ),
    ],
)
def test_the_closed_form_gives_the_published_components(shape, setup, layout, expected):
    """Hand-computed components of six layouts in MiB, and their sum with 64 for all else.

    Biases are split by t here and counted whole there.
    """
    found = parts(shape, setup, layout)
    assert found[0] == pytest.approx(expected[0], rel=4e-3)
    assert found[1:] == pytest.approx(expected[1:3], abs=1.0)
    assert sum(found) + 64 == pytest.approx(expected[3], rel=2e-3)


def test_two_published_7b_peaks_lie_within_three_percent():
    """57716 and 55493 MiB: medians over three images of Megatron-LM's memory tests."""
    setup = replace(DROPOUT, global_batch=8, dense_mask=True, fused_wgrad=False)
    pipelined = Layout.of(micro_batch=1, data=2, pipeline=4, virtual=8, num_micro=4, sharding=1)
    tensor = Layout.of(micro_batch=2, data=2, tensor=4, num_micro=2, sharding=1)
    for layout, measured in ((pipelined, 57716), (tensor, 55493)):
        assert float(predict(LARGE, setup, layout, A100).last.allocated[0]) / MIB == pytest.approx(measured, rel=0.03)


def test_parameters_are_those_of_a_gpt2_small():
    gpt2 = ModelShape(layers=12, hidden=768, heads=12, seq=1024, vocab=50257, learned_positions=1024, vocab_multiple=1)
    held = stage_parameters(gpt2, Layout.of(micro_batch=1), first=False)
    assert held.total[0] == 124_439_808


def test_parameters_are_those_of_llama_3_8b():
    llama = ModelShape(
        layers=32, hidden=4096, heads=32, groups=8, seq=8192, vocab=128256, ffn=14336, gated=True, bias=False,
        norm="rms", tied=False, rotary=True,
    )  # fmt: skip
    assert stage_parameters(llama, Layout.of(micro_batch=1), first=False).total[0] == 8_030_261_248


def test_parameters_are_those_of_mixtral_8x7b():
    mixtral = ModelShape(
        layers=32, hidden=4096, heads=32, groups=8, seq=4096, vocab=32000, gated=True, bias=False, norm="rms",
        tied=False, rotary=True, experts=Experts(num_experts=8, top_k=2, ffn=14336),
    )  # fmt: skip
    assert stage_parameters(mixtral, Layout.of(micro_batch=1), first=False).total[0] == 46_702_792_704


def test_stages_hold_the_model_between_them():
    """First and last stage of two hold every parameter once, the tied matrix twice."""
    whole = stage_parameters(SMALL, Layout.of(micro_batch=1), first=False).total[0]
    halves = Layout.of(micro_batch=1, pipeline=2)
    first, last = (stage_parameters(SMALL, halves, first=which) for which in (True, False))
    assert first.total[0] + last.total[0] == whole + padded_vocab(SMALL, halves.tensor)[0] * 512


@pytest.mark.parametrize(
    ("optimizer", "sharding", "expected"),
    [
        ("adam", 0, 18), ("adam", 1, 6 + 12 / 8), ("adam_low_grads", 1, 4 + 12 / 8), ("adam_low_grads", 2, 2 + 14 / 8),
        ("adam_low_grads", 3, 16 / 8), ("adam_fp32", 0, 16), ("adam_bf16", 0, 8), ("adam_fp16", 0, 16),
    ],
)  # fmt: skip
def test_bytes_per_parameter(optimizer, sharding, expected):
    layout = Layout.of(micro_batch=1, data=8, sharding=sharding)
    held = stage_parameters(SMALL, layout, first=False)
    static, _ = static_bytes(held, Setup(optimizer=optimizer), layout)
    assert static[0] / held.total[0] == pytest.approx(expected)


def test_half_precision_peaks_in_the_step_where_main_gradients_outweigh_activations():
    tiny_batch = ModelShape(layers=24, hidden=1024, heads=16, seq=16, vocab=1024)
    table = predict(tiny_batch, Setup(optimizer="adam_fp16"), Layout.of(micro_batch=1), A100)
    assert table.prediction(0).peak_phase == "optimizer"
    assert table.prediction(0).activations == 0


def test_routed_experts_are_sharded_over_their_own_group():
    shape = replace(SMALL, experts=Experts(num_experts=8, top_k=2, ffn=1024))
    spread = Layout.of(micro_batch=1, data=8, expert=8, expert_tensor=1, sharding=1)
    held = stage_parameters(shape, spread, first=False)
    static, _ = static_bytes(held, Setup(), spread)
    assert held.routed[0] == 12 * 2 * 512 * 1024
    assert static[0] == pytest.approx(18 * held.routed[0] + 7.5 * (held.matrices[0] + held.rest[0]))


def test_microbatches_in_flight_follow_the_schedules():
    layout = Layout.of(micro_batch=1, pipeline=[4, 4, 4, 1], virtual=[1, 1, 8, 1], num_micro=[8, 2, 4, 8])
    assert in_flight(layout, first=True).tolist() == [4, 2, 4, 1]
    assert in_flight(layout, first=False).tolist() == [1, 1, 29 / 8, 1]


def test_recomputation_trades_activations_level_by_level():
    setup = replace(DROPOUT, attention="unfused")
    levels = Layout.of(micro_batch=4, recompute=np.arange(3))
    allocated = predict(SMALL, setup, levels, A100).allocated
    assert allocated[0] > allocated[1] > allocated[2]


def test_flash_attention_leaves_selective_recomputation_nothing():
    levels = Layout.of(micro_batch=4, recompute=np.arange(2))
    allocated = predict(SMALL, replace(DROPOUT, attention="flash"), levels, A100).allocated
    assert allocated[0] == allocated[1]


def test_a_chunked_loss_divides_the_logits():
    layout = Layout.of(micro_batch=4)
    plain = predict(SMALL, replace(DROPOUT, loss="plain"), layout, A100).last.logits[0]
    chunked = predict(SMALL, replace(DROPOUT, loss="chunked", loss_chunks=8), layout, A100).last.logits[0]
    assert chunked * 8 == pytest.approx(plain)


def test_the_three_truths_are_ordered_and_the_breakdown_adds_up():
    for prediction in predict(LARGE, DROPOUT, Layout.of(micro_batch=[1, 2, 4], pipeline=4, num_micro=8), A100):
        whole = prediction.static + prediction.activations + prediction.logits + prediction.workspace
        assert whole == pytest.approx(prediction.allocated)
        assert prediction.allocated < prediction.reserved < prediction.nvml < prediction.nvml_upper
        assert prediction.allocated_upper == pytest.approx(prediction.allocated * SHIPPED.headroom)


def test_a_large_pipeline_is_limited_by_its_first_stage_and_a_small_one_by_its_logits():
    layout = Layout.of(micro_batch=1, pipeline=4, num_micro=8)
    assert predict(LARGE, DROPOUT, layout, A100).prediction(0).limiting_stage == "first"
    assert predict(SMALL, DROPOUT, layout, A100).prediction(0).limiting_stage == "last"


def test_other_parts_add_their_buffers():
    layout = Layout.of(micro_batch=1)
    plain = predict(SMALL, Setup(), layout, A100)
    loaded = predict(SMALL, Setup(extra_bytes=123), layout, A100)
    assert loaded.allocated[0] - plain.allocated[0] == 123


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    batch=st.integers(1, 8),
    recompute=st.integers(0, 2),
    sharding=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_is_predicted_alike_alone_and_among_others(tensor, pipeline, context, batch, recompute, sharding):
    """Vectorised equals single, and more tokens never need less."""
    degrees = {"tensor": tensor, "pipeline": pipeline, "context": context, "recompute": recompute, "num_micro": 8}
    table = predict(LARGE, DROPOUT, Layout.of(micro_batch=[batch, batch + 1], sharding=sharding, **degrees), A100)
    alone = predict(LARGE, DROPOUT, Layout.of(micro_batch=batch, sharding=sharding, **degrees), A100)
    assert table.allocated[0] == alone.allocated[0]
    assert table.allocated[1] > table.allocated[0] > 0


def test_latent_attention_needs_scores_of_all_heads():
    latent = Latent(q_rank=192, kv_rank=64, qk_dim=16, rope_dim=8, v_dim=16)
    shape = replace(SMALL, latent=latent)
    layout = Layout.of(micro_batch=4, tensor=2)
    fused = predict(shape, replace(DROPOUT, attention="flash"), layout, A100)
    unfused = predict(shape, replace(DROPOUT, attention="unfused"), layout, A100)
    scores = 12 * 5 * 4 * 8 * 1024 * 1024 / 2
    assert unfused.last.activations[0] - fused.last.activations[0] == pytest.approx(scores)


def test_dropout_masks_count_with_the_scores():
    assert score_bytes(replace(DROPOUT, attention="unfused")) == 5
    assert score_bytes(Setup(attention="unfused")) == 4
    assert score_bytes(DROPOUT) == 0


def test_impossible_shapes_say_what_is_wrong():
    with pytest.raises(ShapeError, match="512 is not a multiple of heads 7"):
        replace(SMALL, heads=7)
    with pytest.raises(ShapeError, match="8 heads cannot share 3"):
        replace(SMALL, groups=3)
    with pytest.raises(ShapeError, match="degrees"):
        Layout.of(micro_batch=1, tensor=0)


def test_an_empty_layout_gives_an_empty_table():
    empty = Layout.of(micro_batch=np.zeros(0, np.int64))
    assert len(predict(SMALL, DROPOUT, empty, A100)) == 0


def test_marp_is_its_formula():
    layout = Layout.of(micro_batch=2, tensor=4)
    weights = 50257 * 512 + 12 * (12 * 512**2 + 13 * 512)
    activations = 1024 * 2 * 512 * 12 * (10 + 24 / 4 + 5 * 8 * 1024 / (512 * 4))
    assert marp(SMALL, layout)[0] == pytest.approx(20 * weights / 4 + activations)


def test_megatron_formula_is_near_its_published_errors_on_the_7b_runs():
    layout = Layout.of(micro_batch=[1, 2], data=2, tensor=[1, 4], pipeline=[4, 1], virtual=[8, 1], sharding=1)
    guess = megatron_formula(LARGE, DROPOUT, layout) / MIB
    assert guess / [57716, 55493] - 1 == pytest.approx([0.046, -0.053], abs=0.01)


def row(**flags: str) -> dict[str, str]:
    base = {
        "family": "gpt", "test_case": "x", "gpu": "A100", "software_env": "dev_dgx_a100", "world_size_assumed": "8",
        "num_layers": "12", "hidden_size": "512", "num_attention_heads": "8", "seq_length": "1024", "bf16": "true",
        "micro_batch_size": "4", "global_batch_size": "32",
    }  # fmt: skip
    return base | flags


def test_rows_are_read_alike_whatever_the_spelling():
    plain = read_case(row(tensor_model_parallel_size="2", swiglu="true", num_layers="12"))
    other = read_case(row(tensor_model_parallel_size="2.0", swiglu="TRUE", num_layers="12.0"))
    assert isinstance(plain, Case)
    assert isinstance(other, Case)
    assert (plain.shape, plain.setup) == (other.shape, other.setup)
    assert plain.layout.data[0] == 4


def test_a_missing_column_is_the_launchers_default():
    case = read_case(row())
    assert isinstance(case, Case)
    assert (case.shape.vocab, case.shape.ffn_width, case.setup.hidden_dropout) == (50257, 2048, 0.1)
    assert case.shape.learned_positions == 1024


def test_virtual_stages_come_from_layers_per_chunk():
    case = read_case(row(pipeline_model_parallel_size="4", num_layers_per_virtual_pipeline_stage="1"))
    assert isinstance(case, Case)
    assert case.layout.virtual[0] == 3


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [
        ({"attention_backend": "unfused"}, "unfused"), ({"transformer_impl": "local"}, "unfused"), ({}, "fused"),
        ({"attention_backend": "flash"}, "flash"), ({"software_env": "lts_dgxa100_dracooci"}, "unfused"),
        ({"software_env": "lts_dgxa100_dracooci", "attention_backend": "flash"}, "flash"),
    ],
)  # fmt: skip
def test_the_attention_kernel_is_resolved_from_flags_and_image(flags, kernel):
    case = read_case(row(**flags))
    assert isinstance(case, Case)
    assert case.setup.attention == kernel


def test_what_is_not_known_is_named():
    assert read_case(row(world_size_assumed="")) == Unsupported("world size not stated")
    assert read_case(row(family="hybrid")) == Unsupported("family hybrid")
    assert read_case(row(use_megatron_fsdp="True")) == Unsupported("Megatron FSDP")
    assert not is_dense_gpt(row(num_experts="8"))


def test_layer_patterns():
    case = read_case(
        row(num_layers="16", num_experts="8", moe_layer_freq="([0]*1+[1]*15)", pipeline_model_parallel_size="2")
    )
    assert isinstance(case, Case)
    assert case.shape.moe_before[[1, 8, 16]].tolist() == [0, 7, 15]


def generated(num_classes: int = 6, per_class: int = 8, slack_mib: float = 40.0) -> Evidence:
    """Rows that the predictor itself would measure with another slack, and 1 % noise."""
    rng = np.random.default_rng(0)
    truth = Calibration(slack_bytes=slack_mib * MIB)
    cases, measured, classes = [], [], []
    for index in range(num_classes):
        case = read_case(row(num_layers=str(4 * (index + 1))))
        assert isinstance(case, Case)
        for _ in range(per_class):
            cases.append(case)
            measured.append(predict_case(case, truth)[0] * (1 + 0.005 * rng.standard_normal()))
            classes.append(str(index))
    return Evidence(tuple(cases), np.array(measured), tuple(classes))


def test_the_fit_goes_most_of_the_way_to_a_constant_that_the_data_show():
    """The prior is 12 MiB, the truth 40; what the data cannot show stays at its prior."""
    found = fit(generated())
    assert 22 < found.slack_bytes / MIB < 42
    assert found.boundary_tensors == Calibration().boundary_tensors
    assert 1.0 < found.headroom < 1.03


def test_one_wild_row_does_not_pull_the_fit():
    evidence = generated()
    wild = replace(evidence, measured=np.concatenate([evidence.measured[:-1], evidence.measured[-1:] * 1.6]))
    assert fit(wild).slack_bytes == pytest.approx(fit(evidence).slack_bytes, rel=0.3)


def test_each_class_is_judged_by_constants_that_never_saw_it():
    evidence = generated(num_classes=4, per_class=3)
    own = np.array([name == "3" for name in evidence.classes])
    strange = replace(evidence, measured=np.where(own, evidence.measured * 1.5, evidence.measured))
    folds = cross_validate(strange)
    assert folds[-1] == fit(evidence.take(~own))
    assert folds[0].headroom > 1.3 > folds[-1].headroom


def test_headroom_is_the_conformal_quantile():
    assert headroom_of(np.linspace(0.5, 1.5, 1000)) == pytest.approx(np.linspace(0.5, 1.5, 1000)[990])
    assert headroom_of(np.array([0.7, 0.8])) == 1.0
    assert headroom_of(np.array([])) == 1.0


def test_a_class_of_plans_is_predicted_in_about_a_millisecond():
    """A generous bound: the target of 1 ms is reported by the benchmark, this guards against a loop over plans."""
    layout = Layout.of(micro_batch=1 + np.arange(400) % 8, tensor=2, pipeline=4, num_micro=8)
    samples = []
    for _ in range(20):
        started = time.perf_counter()
        predict(LARGE, DROPOUT, layout, A100)
        samples.append(time.perf_counter() - started)
    assert min(samples) < 0.02


def test_measured_rows_are_met(tmp_path):
    """The acceptance figures on the development rows, with the shipped constants."""
    if not ROWS.exists():
        pytest.skip(f"no measured rows at {ROWS}")
    from jobs.bench.memory import Config, run
    from jobs.job import Run

    metrics = run(Config(), Run("bench-memory", tmp_path, {"truth": ROWS}))
    assert metrics["rows"] > 200
    assert metrics["accuracy_mean"] >= 0.985
    assert metrics["under_predicted_at_headroom"] <= 0.01
    assert metrics["upper_over_true_mean"] <= 1.15
    assert metrics["by_family"]["moe"]["accuracy_mean"] >= 0.95
    assert metrics["baselines"]["marp"]["accuracy_mean"] < metrics["accuracy_mean"]
    assert metrics["unsupported"]["world size not stated"] == 14
    assert metrics["supported_rows"] + metrics["unsupported_rows"] == 360
    assert {path.name for path in tmp_path.iterdir()} >= {"predicted_vs_measured.png", "breakdown.png"}


def test_the_shipped_constants_are_the_fit_of_the_rows():
    if not ROWS.exists():
        pytest.skip(f"no measured rows at {ROWS}")
    from jobs.bench.memory import read_truth

    found = fit(read_truth(ROWS)[0])
    for name in ("slack_bytes", "boundary_tensors", "moe_slack_bytes", "expert_copies", "headroom", "mixture_headroom"):
        assert getattr(found, name) == pytest.approx(getattr(SHIPPED, name), rel=0.01), name


def test_a_truth_file_may_lack_columns_and_hold_rubbish(tmp_path):
    from jobs.bench.memory import Config, run
    from jobs.job import Run

    case = read_case(row())
    assert isinstance(case, Case)
    rows = [row(), row(num_layers="many"), row(gpu="Z9"), row(family="rnn"), row(num_layers="12.0", bf16="TRUE")]
    for entry in rows:
        entry["mem_max_allocated_bytes"] = str(predict_case(case)[0])
    rows.append(row(mem_max_allocated_bytes=""))
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    metrics = run(Config(), Run("bench-memory", tmp_path, {"truth": path}))
    assert metrics["rows"] == 2
    assert metrics["accuracy_mean"] == pytest.approx(1.0)
    assert metrics["unsupported_rows"] == 4
    json.dumps(metrics)
