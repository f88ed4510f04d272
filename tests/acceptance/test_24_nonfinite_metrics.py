"""NaN and infinity never reach the store; a counter and a tag say what happened, and where first."""

import math

from zenray.recorder import Recorder


def test_only_finite_numbers_are_sent(store_uri, runs_of):
    with Recorder() as recorder, recorder.job("job", config={}, params={}) as job:
        for step in range(20):
            job.metrics({"loss": math.nan if step in (17, 19) else 1.0, "norm": math.inf if step == 18 else 2.0}, step)
    client, runs = runs_of(store_uri)
    run = runs["job"]
    assert run.data.tags["nonfinite"] == "loss@17, norm@18"
    assert run.data.metrics["nonfinite_values"] == 3
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert len(losses) == 18
    assert all(math.isfinite(metric.value) and metric.value < 1e300 for metric in losses)
