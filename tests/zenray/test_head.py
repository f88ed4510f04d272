"""What a user reads when a cluster does not answer, or is called by the wrong address."""

import sys

import pytest

from zenray import head
from zenray.__main__ import main
from zenray.head import HeadUnreachable, connect_head


@pytest.mark.parametrize("command", [["status"], ["cancel", "job"]])
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://head:10001", "is Ray Client"),
        ("http://10.0.0.9:8265", "usually 10.0.0.9:6379"),
        ("head:port", "set RAY_ADDRESS to HOST:PORT"),
    ],
)
def test_the_queue_is_not_reached_by_ray_client_nor_the_jobs_api(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], address: str, words: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(sys, "argv", ["zenray", *command])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("Failed to connect\nto http://h:1.", "Failed to connect to http://h:1. Start one"),
        ("word " * 100, "word word [...]. Start one"),
    ],
)
def test_the_words_of_ray_end_between_words_and_in_one_full_stop(
    monkeypatch: pytest.MonkeyPatch, told: str, shown: str
) -> None:
    def refuse(_address: str | None) -> None:
        raise ConnectionError(told)

    monkeypatch.setattr(head, "JobSubmissionClient", refuse)
    with pytest.raises(HeadUnreachable) as caught:
        connect_head("http://h:1")
    assert shown in str(caught.value)
    assert len(str(caught.value)) < 500
