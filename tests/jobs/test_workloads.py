"""The workloads: deterministic data, equal models in both layouts, row-sparse gradients, losses that fall."""

import pickle

import numpy as np
import pytest
import torch

from collectives.errors import ConfigError
from jobs.workloads.click_log import CRITEO_CARDINALITIES, ClickLog, ClickLogConfig
from jobs.workloads.stdlib_lm import Corpus, StdlibLm, StdlibLmConfig, stdlib_corpus

SMALL_LM = StdlibLmConfig(rows=4096, width=8, negatives=64)
SMALL_CLICKS = ClickLogConfig(cap=100, width=4, hidden=8)
WORKLOADS = [StdlibLm(SMALL_LM, 32, 0), ClickLog(SMALL_CLICKS, 64, 0)]
each_workload = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: type(w).__name__)


@each_workload
def test_batches_depend_on_seed_rank_and_step_only(workload):
    again = pickle.loads(pickle.dumps(workload))
    for step, rank in ((0, 0), (5, 1)):
        for a, b in zip(workload.batch(step, rank), again.batch(step, rank), strict=True):
            assert torch.equal(a, b)
    other_seed = type(workload)(workload.config, workload.batch_size, 1)
    batches = [workload.batch(0, 0), workload.batch(0, 1), workload.batch(1, 0), other_seed.batch(0, 0)]
    assert len({batch[0].numpy().tobytes() for batch in batches}) == 4
    assert again.facts() == workload.facts()


@each_workload
def test_both_layouts_are_the_same_model_with_the_same_gradients(workload):
    state = torch.random.get_rng_state()
    sparse, dense = workload.model(True), workload.model(False)
    assert torch.equal(torch.random.get_rng_state(), state)
    losses = []
    for model in (sparse, dense):
        losses.append(model(*workload.batch(0, 0)))
        losses[-1].backward()
    assert losses[0].item() == losses[1].item()
    for (name, ours), theirs in zip(sparse.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        is_table = name.startswith(("embed", "output"))
        assert ours.grad.is_sparse == is_table
        assert not theirs.grad.is_sparse
        gradient = ours.grad.to_dense() if is_table else ours.grad
        torch.testing.assert_close(gradient, theirs.grad)
        if is_table:
            assert 0 < ours.grad.coalesce()._nnz() < len(ours)


@each_workload
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_and_dense_updates_coincide(workload, optimizer):
    models = [workload.model(True), workload.model(False)]
    for model in models:
        steps = optimizer(model.parameters(), lr=0.05)
        for step in range(5):
            steps.zero_grad()
            model(*workload.batch(step, 0)).backward()
            steps.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@each_workload
def test_the_held_out_loss_falls(workload):
    model = workload.model(True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    before = workload.evaluate(model)
    for step in range(40):
        optimizer.zero_grad()
        model(*workload.batch(step, 0)).backward()
        optimizer.step()
    assert workload.evaluate(model) < 0.99 * before


def test_negatives_are_shared_by_ranks_and_targets_are_not():
    ours, theirs = WORKLOADS[0].batch(3, 0), WORKLOADS[0].batch(3, 1)
    assert torch.equal(ours[2], theirs[2])
    assert not torch.equal(ours[1], theirs[1])


def test_corpus_splits_files_and_never_mixes_them(tmp_path):
    for index in range(60):
        (tmp_path / f"module{index}.py").write_text(f"alpha{index} = beta(gamma, {index})\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("never = seen\n")
    corpus = Corpus(tmp_path)
    assert corpus.num_files == 60
    assert len(corpus.train) + len(corpus.held_out) == 60 * 8
    assert len(corpus.held_out) % 8 == 0
    assert corpus.frequency.sum() == len(corpus.train)
    again = Corpus(tmp_path)
    assert again.sha256 == corpus.sha256
    assert np.array_equal(again.train, corpus.train)


def test_a_library_without_sources_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="standard library"):
        Corpus(tmp_path)


def test_the_real_corpus_is_large_enough_to_be_sparse():
    corpus = stdlib_corpus()
    assert len(corpus.train) > 500_000
    assert len(corpus.word_hash) > 10_000
    full = StdlibLm(StdlibLmConfig(), 512, 0)
    inputs, targets, negatives, _ = full.batch(0, 0)
    assert len(inputs.unique()) < 0.05 * 131_072
    assert len(torch.cat([targets, negatives]).unique()) < 0.05 * 131_072


def test_click_fields_have_the_published_sizes_and_a_power_law():
    assert len(CRITEO_CARDINALITIES) == 26
    workload = ClickLog(ClickLogConfig(), 4096, 0)
    assert workload.facts()["num_rows"] == 367_398
    rows, clicks = workload.batch(0, 0)
    assert rows.shape == (4096, 26)
    assert ((rows.numpy() >= workload.offsets[:-1]) & (rows.numpy() < workload.offsets[1:])).all()
    field = 2  # capped at 40,000 values
    values = (
        np.concatenate([workload.batch(step, 0)[0][:, field].numpy() for step in range(8)]) - workload.offsets[field]
    )
    expected = (1 / np.arange(1, 40_001) ** 0.93) / (1 / np.arange(1, 40_001) ** 0.93).sum()
    share = (values == 0).mean()
    assert abs(share - expected[0]) < 4 * np.sqrt(expected[0] / len(values))
    assert 0.3 < clicks.mean() < 0.7


@pytest.mark.parametrize(
    "make", [lambda: StdlibLm(StdlibLmConfig(context=1), 8, 0), lambda: ClickLog(ClickLogConfig(cap=0), 8, 0)]
)
def test_senseless_sizes_are_refused(make):
    with pytest.raises(ConfigError):
        make()
