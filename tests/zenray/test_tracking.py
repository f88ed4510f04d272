"""The spool, redaction, key rules and endings, without a store; the store itself is proved by the acceptance cases."""

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param_name, _validate_tag_name

from zenray.recorder import ending, owner_is_gone, owner_of_this_process
from zenray.redact import REDACTED, redact, redact_text
from zenray.spool import Spool, SpoolBusy, orphans
from zenray.tracking import MAX_KEY_LENGTH, Store, TrackingError, _groups, check_uri, connect, entity_key


def test_spool_gives_back_what_was_appended_in_order(tmp_path):
    spool = Spool(tmp_path / "a.jsonl")
    records = [{"op": "metrics", "n": n, "text": "line\nbreak \u00e9"} for n in range(100)]
    for record in records:
        spool.append(record)
    batch = spool.peek(limit_bytes=1000)
    assert [record for record, _ in batch] == records[: len(batch)]
    assert 0 < len(batch) < 100
    assert spool.peek(limit_bytes=1000) == batch
    read = []
    while batch := spool.peek():
        read += [record for record, _ in batch]
        spool.advance(sum(size for _, size in batch))
    assert read == records
    assert spool.pending_bytes == 0
    spool.close()
    assert not (tmp_path / "a.jsonl").exists()


def test_a_record_larger_than_the_read_limit_comes_whole(tmp_path):
    spool = Spool(tmp_path / "a.jsonl")
    spool.append({"text": "x" * 5000})
    assert spool.peek(limit_bytes=100)[0][0] == {"text": "x" * 5000}
    spool.close()


def test_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"n": 1}) + "\n" + '{"n": 2')
    spool = Spool(path)
    assert [record for record, _ in spool.peek()] == [{"n": 1}]
    spool.append({"n": 3})
    assert [record for record, _ in spool.peek()] == [{"n": 1}, {"n": 3}]
    spool.close()


def test_a_living_spool_is_no_orphan_and_a_drained_one_is_compacted(tmp_path, monkeypatch):
    alive = Spool(tmp_path / "alive.jsonl")
    alive.append({"n": 1})
    (tmp_path / "dead.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SpoolBusy):
        Spool(tmp_path / "alive.jsonl")
    found = list(orphans(tmp_path))
    assert [spool.path.name for spool in found] == ["dead.jsonl"]
    for spool in found:
        spool.close()
    assert (tmp_path / "dead.jsonl").exists()  # its record was not taken
    monkeypatch.setattr("zenray.spool.COMPACT_BYTES", 1)
    alive.advance(alive.pending_bytes)
    assert (tmp_path / "alive.jsonl").stat().st_size == 0
    alive.append({"n": 3})
    assert [record for record, _ in alive.peek()] == [{"n": 3}]
    alive.close()


@pytest.mark.parametrize(
    ("error", "stopped", "status"),
    [
        (None, False, "FINISHED"),
        (None, True, "KILLED"),
        (RuntimeError(), False, "FAILED"),
        (RuntimeError(), True, "KILLED"),
        (KeyboardInterrupt(), False, "KILLED"),
        (SystemExit(0), False, "FINISHED"),
        (SystemExit(1), False, "FAILED"),
        (SystemExit(2), False, "FAILED"),
        (SystemExit(128 + signal.SIGINT), False, "KILLED"),
        (SystemExit(128 + signal.SIGTERM), False, "KILLED"),
    ],
)
def test_ending(error, stopped, status):
    assert ending(error, stopped) == status


def test_this_process_is_not_gone_but_another_start_with_its_pid_is():
    owner = owner_of_this_process()
    assert not owner_is_gone(owner, 0.0, 1e9)
    host, pid, started = owner.rsplit(":", 2)
    assert owner_is_gone(f"{host}:{pid}:{float(started) - 100}", 1e9, 1e9)
    assert owner_is_gone(f"{host}:{2**22 + 1}:{started}", 1e9, 1e9)


@given(st.text(max_size=600))
def test_every_name_becomes_a_key_that_mlflow_accepts(name):
    key = entity_key(name)
    assert 0 < len(key) <= MAX_KEY_LENGTH
    for validate in (_validate_metric_name, _validate_param_name, _validate_tag_name):
        validate(key)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"api_key": "a", "n": 1}, {"api_key": REDACTED, "n": 1}),
        ({"auth": {"token": "abc"}, "tokens": 5}, {"auth": {"token": REDACTED}, "tokens": 5}),
        ({"password": ""}, {"password": ""}),
        ({"urls": ["http://u:p@h/x"]}, {"urls": [f"http://u:{REDACTED}@h/x"]}),
        ({"max_tokens": 5, "tokenizer": "bpe"}, {"max_tokens": 5, "tokenizer": "bpe"}),
        ({"secret": None}, {"secret": None}),
    ],
)
def test_redaction_of_settings(value, expected):
    assert redact(value) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abc.def-ghi",
        "postgresql://me:abc.def-ghi@host:5432/db",
        "run --password=abc.def-ghi now",
        "https://host/?token=abc.def-ghi&x=1",
    ],
)
def test_redaction_of_text(text):
    clean = redact_text(text)
    assert "abc.def-ghi" not in clean
    assert REDACTED in clean
    assert redact_text("step 17: loss 0.5, see http://host:5000/#/experiments/1") == (
        "step 17: loss 0.5, see http://host:5000/#/experiments/1"
    )


def test_neighbouring_metrics_of_one_run_travel_together():
    def metric(run, count=1):
        return {"op": "metrics", "run": run, "values": dict.fromkeys(map(str, range(count)), 1.0)}, 10

    batch = [metric("a"), metric("a"), ({"op": "tags", "run": "a", "values": {}}, 10), metric("a"), metric("b")]
    assert [len(group) for group in _groups(batch)] == [2, 1, 1, 1]
    assert [len(group) for group in _groups([metric("a", 600)] * 3)] == [1, 1, 1]
    assert list(_groups([])) == []


def test_a_relative_sqlite_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_uri("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert check_uri("http://127.0.0.1:5000") == "http://127.0.0.1:5000"


def test_an_unusable_database_is_an_error_at_the_start(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, it is a text that is long enough to be read as a header")
    with pytest.raises(TrackingError, match="cannot be used"):
        Store(f"sqlite:///{tmp_path}/mlflow.db", "p").open()


def test_a_store_in_a_folder_that_cannot_be_written_is_refused_in_one_line() -> None:
    with pytest.raises(TrackingError, match="cannot write /proc/nowhere"):
        connect("sqlite:////proc/nowhere/mlflow.db")
