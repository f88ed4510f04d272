"""MLflow's retired file store is recognised and explained; an old `mlruns` folder changes nothing."""

import pytest

from zenray.recorder import Recorder
from zenray.tracking import TrackingError


@pytest.mark.parametrize("uri", ["file:./mlruns", "file:///tmp/mlruns", "mlruns", "./mlruns"])
def test_file_store_is_refused_with_the_way_out(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(TrackingError, match=r"sqlite:///mlflow\.db"):
        Recorder()
    assert not list(tmp_path.iterdir())


def test_old_mlruns_is_mentioned_and_left_alone(store_uri, runs_of, tmp_path):
    experiment = tmp_path / "mlruns" / "0" / "meta.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("name: Default\n")
    lines = []
    with Recorder(warn=lines.append) as recorder, recorder.job("job", config={}, params={}):
        pass
    assert len(lines) == 1
    assert "migrate-filestore" in lines[0]
    assert runs_of(store_uri)[1]["job"].info.status == "FINISHED"
    assert experiment.read_text() == "name: Default\n"
