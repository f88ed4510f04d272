"""An artifact folder that cannot be written is found before training starts, with a message that says what to do."""

import pytest

from zenray.recorder import Recorder
from zenray.tracking import TrackingError


def test_the_round_trip_fails_before_the_block_is_entered(store_uri, runs_of, tmp_path):
    (tmp_path / "mlartifacts").write_text("a file where the folder should be")
    trained = False
    with (
        pytest.raises(TrackingError, match="artifacts cannot be stored at"),
        Recorder() as recorder,
        recorder.job("job", config={}, params={}),
    ):
        trained = True
    assert not trained
    assert runs_of(store_uri)[1]["job"].info.status == "FAILED"
