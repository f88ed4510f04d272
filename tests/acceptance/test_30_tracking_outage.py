"""The tracking server dies in the middle, or was never there: training goes on, and nothing is lost in the end."""

from mlflow import MlflowClient

from zenray.recorder import Recorder


def history(address, name):
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("outage")
    run = next(r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == name)
    return run, sorted(metric.step for metric in client.get_metric_history(run.info.run_id, "loss"))


def test_outage_in_the_middle_and_at_the_start(tmp_path, monkeypatch, tracking_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address, stop = tracking_server()
    lines, late_lines = [], []
    with (
        Recorder("outage", address, warn=lines.append) as recorder,
        recorder.job("middle", config={}, params={}) as job,
    ):
        for step in range(10):
            job.metrics({"loss": 1.0}, step)
        assert recorder.flush(30.0)
        stop()
        for step in range(10, 20):
            job.metrics({"loss": 1.0}, step)
        assert not recorder.flush(1.0)

        # Another job starts, trains and ends while the server is away.
        late = Recorder("outage", address, warn=late_lines.append)
        with late, late.job("start", config={}, params={}) as late_job:
            late_job.metrics({"loss": 1.0}, 0)
        assert "training goes on" in late_lines[0]
        assert "next start" in late_lines[-1]

        tracking_server()
        for step in range(20, 30):
            job.metrics({"loss": 1.0}, step)
        assert recorder.flush(60.0)
    assert len(lines) == 1, lines
    assert "training goes on" in lines[0]
    run, steps = history(address, "middle")
    assert run.info.status == "FINISHED"
    assert steps == list(range(30))

    with Recorder("outage", address) as recorder, recorder.job("next", config={}, params={}):
        pass
    run, steps = history(address, "start")
    assert (run.info.status, steps) == ("FINISHED", [0])
    assert not list((tmp_path / "runs" / ".spool").glob("*.jsonl"))
