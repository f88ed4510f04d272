"""Long, odd and secret params: nothing is cut silently, nothing raises, nothing secret is stored."""

from pathlib import Path

from zenray.recorder import Recorder

LONG = "x" * 9000 + "end"


def test_long_values_become_artifacts_and_the_config_is_complete(store_uri, runs_of, tmp_path):
    params = {"prompt": LONG, "a=b%c": 1, "k" * 300: 2, "../up": 3, "api_token": "hunter2hunter2", "n": 5}
    config = {"prompt": LONG, "password": "hunter2hunter2", "url": "http://user:hunter2hunter2@host/"}
    with Recorder() as recorder, recorder.job("job", config=config, params=params) as job:
        job.tags({"note": LONG})
        job.params({"n": 5})
    client, runs = runs_of(store_uri)
    run = runs["job"]
    assert run.data.params["prompt"] == "9003 characters, see artifact params/prompt.txt"
    assert run.data.params["a_b_c"] == "1"
    assert run.data.params["n"] == "5"
    assert run.data.params["api_token"] == "[redacted]"
    assert len(run.data.params) == 6
    stored = {
        name: Path(client.download_artifacts(run.info.run_id, name)).read_text()
        for name in ("params/prompt.txt", "tags/note.txt", "config.json")
    }
    assert stored["params/prompt.txt"] == stored["tags/note.txt"] == LONG
    assert LONG in stored["config.json"]
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hunter2" not in everything
