"""The simulator's rules, one by one, on applications simple enough to compute by hand; and the policies on a short trace."""

import itertools

import numpy as np
import pytest

from collectives.errors import ConfigError
from jobs.job import run_job
from jobs.simulate import Config, body, read_trace
from placement.elastic import Elastic, config_values, rank_weights
from placement.errors import PlacementError
from placement.goodput import Configs, Estimator, Throughput, gain, step_times
from placement.jobs import NodeSpec
from placement.ledger import Ledger
from placement.policies import Allocation, Cluster, Fifo, FixedBatch, Frenzy, Gavel, Sia
from placement.profiles import AppProfile, Curve, synthetic_profiles
from placement.simulator import NodeEvent, simulate
from placement.traces import NEW_TRACE, TraceJob, generate, named_cluster


def one_app(name="simple", epochs=4, step_s=1.0, fits=8):
    """100 steps an epoch at batch 8; a step takes step_s whatever the batch; noise so large that batches add up fully."""
    local = np.array([1.0, fits])
    curves = {(g,): Curve(local, np.full(2, step_s), np.zeros(2)) for g in (1, 2)}
    return AppProfile(
        name=name,
        epoch_progress=100.0 * np.arange(1, epochs + 1),
        grad_batch=np.array([8.0, 16.0]),
        grad_sqr=np.full((2, epochs), 1e-9),
        grad_var=np.ones((2, epochs)),
        placements={"card": curves},
        scalability={},
    )


class Fixed:
    """Places every job on one GPU of node `node` as soon as it is seen, and moves it at the given times."""

    name, shares_profiles = "fixed", False

    def __init__(self, batch=8, moves=(), node=0):
        self.batch, self.moves, self.node, self.seen = batch, moves, node, []

    def decide(self, now_s, jobs, cluster):
        self.seen.append((now_s, [(j.index, j.progress_left, j.allocation) for j in jobs]))
        node = self.node + sum(now_s >= t for t in self.moves)
        return {j.index: (Allocation(0, (node,), (1,)), FixedBatch(self.batch, 0)) for j in jobs}


NODES = [NodeSpec(f"n{i}", "card", 2, 1) for i in range(2)]
JOB = TraceJob("a", 30.0, "simple", 1, 8)


def play(policy, app=None, jobs=(JOB,), **options):
    return simulate(list(jobs), NODES, {"simple": app or one_app()}, policy, **options)


def test_rounds_an_arrival_waits_for_the_tick_and_the_first_start_is_charged():
    (job,) = play(Fixed()).jobs
    assert job.start_s == 60
    assert job.finish_s == pytest.approx(60 + 30 + 400 * 1.2), (
        "30 s restart, 400 steps at 1.2 s: goodput is divided by 1.2"
    )
    assert job.wait_s == 0
    assert job.num_restarts == 0
    assert job.gpu_seconds == pytest.approx(510)


def test_events_start_at_once_and_end_between_ticks():
    (job,) = play(Fixed(), mode="events").jobs
    assert (job.start_s, job.finish_s) == (30, pytest.approx(30 + 30 + 480))


def test_every_move_costs_one_restart():
    (job,) = play(Fixed(moves=(180,))).jobs
    assert job.num_restarts == 1
    assert job.finish_s == pytest.approx(60 + 30 + 480 + 30)


def test_charged_restarts_follow_the_application():
    cifar = one_app("cifar10")
    outcome = simulate([TraceJob("c", 0, "cifar10", 1, 8)], NODES, {"cifar10": cifar}, Fixed())
    assert outcome.jobs[0].finish_s == pytest.approx(60 + 50 + 400 * 1.8)


def test_a_batch_beyond_memory_costs_the_restart_and_is_told():
    class Learns(Fixed):
        def decide(self, now_s, jobs, cluster):
            for job in jobs:
                self.batch = 4 if (0, 16) in job.excluded else 16
            return super().decide(now_s, jobs, cluster)

    outcome = play(Learns())
    assert outcome.jobs[0].num_oom == 1
    assert outcome.metrics()["oom"] == 1
    assert outcome.jobs[0].start_s == 60
    assert outcome.jobs[0].finish_s == pytest.approx(120 + 30 + 800 * 1.2), "half the batch, twice the steps"


class Tuned(Fixed):
    """One GPU, and the job tunes its own batch."""

    def decide(self, now_s, jobs, cluster):
        self.seen.append([job.estimator.grad for job in jobs])
        return {job.index: (Allocation(0, (job.index,), (1,)), None) for job in jobs}


def test_a_batch_is_tuned_every_round_and_classes_may_share_what_the_first_job_saw():
    app = one_app(epochs=1, fits=16)
    (job,) = play(Tuned(), app).jobs
    # 30 s restart, 30 s at batch 8 before the noise is known, then batch 16 counts twice: within the same epoch.
    assert job.finish_s == pytest.approx(60 + 30 + 30 + (100 - 30 / 1.2) / 2 * 1.2)
    later = TraceJob("b", 70.0, "simple", 1, 8)
    for shares in (False, True):
        policy = Tuned()
        policy.shares_profiles = shares
        play(policy, app, jobs=(JOB, later))
        first_seen = next(grads for grads in policy.seen if len(grads) == 2)
        assert (first_seen[1] is not None) == shares


def test_a_lost_node_throws_back_to_the_last_epoch():
    events = [NodeEvent(250.0, 0, False), NodeEvent(260.0, 0, True)]
    (job,) = play(Fixed(), node_events=events).jobs
    # 90 s: work starts; 210 s: epoch 1 ends; 300 s, at the tick: lost, and placed again; 330 s: epoch 2 begins anew.
    assert job.finish_s == pytest.approx(330 + 3 * 120)


def test_a_policy_that_gives_cards_away_twice_is_caught():
    jobs = [TraceJob(f"j{i}", 0, "simple", 1, 8) for i in range(3)]
    with pytest.raises(PlacementError, match="3 of 2 GPUs of node 0"):
        play(Fixed(), jobs=jobs)


def test_bad_traces_are_refused():
    with pytest.raises(PlacementError, match="no job"):
        play(Fixed(), jobs=())
    with pytest.raises(PlacementError, match="no profile for application\\(s\\) other"):
        play(Fixed(), jobs=(TraceJob("a", 0, "other", 1, 8),))
    with pytest.raises(PlacementError, match="unknown mode"):
        play(Fixed(), mode="hours")


def test_metrics_by_hand():
    jobs = [TraceJob(f"j{i}", 3600.0 * i, "simple", 1, 8) for i in range(4)]
    metrics = play(Fixed(), jobs=jobs).metrics()
    assert metrics["jct_mean_h"] == pytest.approx((570 + 3 * 510) / 4 / 3600), "only the first job misses its tick"
    assert metrics["jct_p99_h"] >= metrics["jct_median_h"]
    assert metrics["utilisation"] == pytest.approx(4 * 510 / (4 * (3 * 3600 + 570)), rel=0.01)
    assert metrics["fairness_worst"] > 0


def test_goodput_formulas():
    params = np.array([0.1, 0.01, 0.5, 0.02, 0.2, 0.01, 2.0])
    assert step_times(params, 1, 1, 10) == pytest.approx((0.2, 0.2))
    assert step_times(params, 1, 4, 10) == pytest.approx((0.2, np.hypot(0.2, 0.22)))
    assert step_times(params, 2, 4, 10) == pytest.approx((0.2, np.hypot(0.2, 0.54)))
    assert gain(1.0, 3.0, 1.0) == 1.0
    assert gain(1.0, 3.0, 4.0) == pytest.approx(4 / 1.75)
    assert gain(0.0, 3.0, 4.0) == pytest.approx(4.0)


def configs(*rows):
    return Configs(*(np.array(column, np.int32) for column in zip(*rows, strict=True)))


def test_the_fit_recovers_what_ran_and_borrows_scaling():
    batches = np.array([1.0, 4.0, 16.0, 64.0])
    truth = np.array([[0.1, 0.01, 0.3, 0.02, 0.15, 0.01, 1.6], [0.05, 0.005, 0, 0, 0, 0, 1.6]])
    model = Throughput([np.column_stack([batches, t[0] + t[1] * batches]) for t in truth])
    for nodes, replicas, batch in itertools.product((1, 2), (2, 4, 8), (4, 16, 64)):
        model.observe(0, nodes, replicas, batch, *step_times(truth[0], nodes, replicas, batch))
    for nodes, replicas in ((1, 2), (1, 6), (2, 12)):
        expected = step_times(truth[0], nodes, replicas, 32)
        assert step_times(model.params[0], nodes, replicas, 32) == pytest.approx(expected, rel=0.05)
    assert model.borrowed().tolist() == [-1, 0]
    estimator = Estimator(model, (64, 512))
    estimator.grad = (1.0, 100.0)
    goodput, local, accumulation = estimator.table(configs((0, 1, 4), (1, 1, 4)), np.array([64, 64]))
    assert goodput[1] / goodput[0] == pytest.approx(2.0, rel=0.06), "half the time alone, the same scaling"
    assert np.all(local * (accumulation + 1) * 4 >= 64)


def test_batches_respect_memory_and_limits():
    model = Throughput([np.array([[8.0, 0.1], [64.0, 0.5]])])
    estimator = Estimator(model, (64, 256))
    estimator.grad = (1.0, 1e6)
    goodput, local, accumulation = estimator.table(configs((0, 1, 1), (0, 1, 4), (0, 8, 64)), np.array([20, 64, 64]))
    assert local[0] <= 20
    assert local[0] * (accumulation[0] + 1) >= 64
    assert local[1] == 64
    assert accumulation[1] == 0
    assert goodput[2] == 0, "8 samples on each of 64 GPUs exceed the largest batch"


def test_configurations_are_powers_of_two_then_whole_nodes():
    cluster = Cluster(Ledger(named_cluster("sia64")))
    by_type = {cluster.types[p]: cluster.configs.num_gpus[cluster.of_pool(p)].tolist() for p in range(3)}
    assert by_type == {"rtx": [1, 2, 4, 8, 16, 24], "aws": [1, 2, 4, 8, 12, 16, 20, 24], "dgx-ext": [1, 2, 4, 8, 16]}


def test_values_prefer_staying_when_a_move_does_not_pay():
    goodput, allowed = np.array([1.0, 1.1, 4.0]), np.ones(3, bool)
    stay = config_values(goodput, allowed, 1000.0, 0, 200.0)
    assert stay[0] > stay[1]
    assert stay[2] > stay[0]
    assert config_values(goodput, allowed, 1000.0, -1, 200.0)[1] > config_values(goodput, allowed, 1000.0, -1, 200.0)[0]
    almost_done = config_values(goodput, allowed, 20.0, 0, 200.0)
    assert np.argmax(almost_done) == 0
    assert not config_values(np.zeros(3), allowed, 10.0, -1, 1.0).any()


def test_weights_give_the_shares_that_are_optimal_for_the_mean():
    left_s = np.array([50.0, 900.0, 10.0, 300.0])
    weights = rank_weights(left_s)
    assert np.argsort(weights).tolist() == [1, 3, 0, 2], "the longest counts least"
    # Split so that sum(weight * sqrt(share)) is largest, a pool goes by squared weights: heSRPT for speed-ups k^0.5.
    ranks = np.arange(5) / 4
    assert np.sort(weights**2 / (weights**2).sum()) == pytest.approx(np.diff(ranks**2))


def test_pushing_a_job_aside_costs_its_restart():
    goodput, allowed = np.array([1.0, 2.0, 4.0]), np.ones(3, bool)
    cheap, dear = (config_values(goodput, allowed, 1e6, 1, s, weight=1.0) for s in (1.0, 250.0))
    assert dear[1] - dear[0] > cheap[1] - cheap[0] + 0.1
    assert dear[2] > dear[1], "it may still grow"


@pytest.mark.parametrize("mode", ["rounds", "events"])
def test_policies_finish_a_short_trace_deterministically(mode):
    profiles, cluster = synthetic_profiles(), named_cluster("sia64")
    trace = [job for job in generate(NEW_TRACE, 5) if job.application != "imagenet"][:10]
    for make in (Elastic, Sia, Frenzy, Fifo, Gavel):
        outcome = simulate(trace, cluster, profiles, make(), mode=mode)
        assert sorted(job.name for job in outcome.jobs) == sorted(job.name for job in trace)
        assert max(used for _, used in outcome.used_gpus) <= 64
        metrics = outcome.metrics()
        if make is not Fifo:
            assert metrics["oom"] == 0, f"{make.name} knows the memory limits"
        if make is Elastic:
            assert simulate(trace, cluster, profiles, make(), mode=mode).jobs == outcome.jobs


def test_rigid_requests_run_out_of_memory_on_smaller_cards():
    profiles, cluster = synthetic_profiles(), named_cluster("sia64")
    trace = [TraceJob(f"bert-{i}", 0.0, "bert", 8, 384) for i in range(4)]
    assert simulate(trace, cluster, profiles, Fifo()).metrics()["oom"] > 0


def test_the_job_writes_metrics_by_policy(tmp_path):
    words = ["--trace", "newtrace:2", "--cluster", "sia64", "policies=ours,fifo", "profiles=synthetic", "max_jobs=8"]
    assert run_job("simulate", Config, body, [*words, "--out", str(tmp_path)], ("trace", "cluster")) == 0
    text = (tmp_path / "result.json").read_text()
    assert '"jct_mean_h"' in text
    assert (tmp_path / "jct.png").stat().st_size > 0
    assert (tmp_path / "utilisation.png").stat().st_size > 0


def test_the_job_refuses_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="newtrace:SEED"):
        read_trace("weekly:1", 0)
    files = ("trace", "cluster")
    assert run_job("simulate", Config, body, ["policies=best", "--out", str(tmp_path)], files) == 2
    monkeypatch.setenv("ZENRAY_DATA", str(tmp_path / "nowhere"))
    assert run_job("simulate", Config, body, ["--out", str(tmp_path)], files) == 1
    assert "nowhere/traces/sia/profiles" in capsys.readouterr().err
