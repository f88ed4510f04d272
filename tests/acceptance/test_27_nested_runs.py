"""Searching by parent gives exactly the trials. A param that a trial changes becomes a metric and a tag (17)."""

from zenray.recorder import Recorder


def test_search_by_parent(store_uri, runs_of):
    with Recorder() as recorder, recorder.job("other sweep", config={}, params={}) as other, other.child("stranger"):
        pass
    with Recorder() as recorder, recorder.job("sweep", config={}, params={}) as sweep:
        for index in range(5):
            with sweep.child(f"trial {index}", {"lr": index}):
                pass
    client, runs = runs_of(store_uri)
    parent = runs["sweep"].info
    found = client.search_runs([parent.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'")
    assert sorted(run.info.run_name for run in found) == [f"trial {index}" for index in range(5)]


def test_a_changed_param_does_not_end_the_trial(store_uri, runs_of):
    with Recorder() as recorder, recorder.job("pbt", config={}, params={"lr": 0.1}) as job:
        job.params({"lr": 0.2})
    run = runs_of(store_uri)[1]["pbt"]
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.1"
    assert run.data.metrics["hparam/lr"] == 0.2
    assert run.data.tags["hparam.lr"] == "0.2"
