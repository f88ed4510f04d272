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


def test_a_kept_checkpoint_is_a_logged_model_once(store_uri, runs_of, tmp_path):
    with Recorder() as recorder, recorder.job("job", config={}, params={}) as job:
        for _ in range(2):
            job.checkpoint(tmp_path / "checkpoints", 40)
    client, runs = runs_of(store_uri)
    [model] = client.search_logged_models([runs["job"].info.experiment_id])
    assert (model.name, model.source_run_id) == ("checkpoint-step-40", runs["job"].info.run_id)
    assert model.tags["path"] == str(tmp_path / "checkpoints")
    assert str(model.status) == "LoggedModelStatus.READY" or model.status == "READY"


def test_a_run_with_a_key_goes_on_where_an_earlier_process_left_it(store_uri, runs_of):
    for step, status in ((1, "KILLED"), (2, "FINISHED")):
        recorder = Recorder()
        try:
            with recorder, recorder.job("sweep", config={}, params={"a": 1}, key="k" * 32) as job:
                with job.child("trial", key="t" * 32) as trial:
                    trial.metrics({"loss": float(step)}, step)
                if status == "KILLED":
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        client, runs = runs_of(store_uri)
        assert {name: run.info.status for name, run in runs.items()} == {"sweep": status, "trial": "FINISHED"}
    steps = [entry.step for entry in client.get_metric_history(runs["trial"].info.run_id, "loss")]
    assert steps == [1, 2]
