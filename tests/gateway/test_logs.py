"""Log lines."""

from __future__ import annotations

import io
import json
import logging

import pytest

from vllm_deepinfer.gateway import logs


@pytest.fixture
def stream(own_logging: None) -> io.StringIO:
    text = io.StringIO()
    logs.configure("info", text)
    return text


def test_a_line_is_one_json_object_with_the_extra_fields(stream: io.StringIO) -> None:
    extra = {"status": 200, "ms": 1.5, "odd": {1, 2}, "text": "é\nb"}
    logging.getLogger("vllm_deepinfer.x").info("said", extra=extra)
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert document["message"] == "said" and document["level"] == "info"
    assert document["logger"] == "vllm_deepinfer.x"
    assert (document["status"], document["ms"], document["text"]) == (200, 1.5, "é\nb")
    assert document["time"].endswith("+00:00")


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("vllm_deepinfer.x").exception("it failed: %s", "why")
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert document["message"] == "it failed: why" and "ValueError: boom" in document["exception"]


def test_below_the_level_nothing_is_written(stream: io.StringIO) -> None:
    logging.getLogger("vllm_deepinfer.x").debug("no")
    assert stream.getvalue() == ""


def test_configuring_twice_writes_once(stream: io.StringIO) -> None:
    logs.configure("info", stream)
    logging.getLogger("vllm_deepinfer.x").info("once")
    logs.access.write({"status": 200})
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    ("level", "requests", "on", "polls"),
    [("debug", True, True, True), ("warning", True, True, False), ("debug", False, False, False)],
)
def test_requests_are_logged_at_every_level_and_polls_at_debug(
    own_logging: None, level: str, requests: bool, on: bool, polls: bool
) -> None:
    logs.configure(level, io.StringIO(), requests=requests)
    assert (logs.access.on, logs.access.polls) == (on, polls)


def test_a_stream_that_is_gone_ends_the_access_log_and_no_request(stream: io.StringIO) -> None:
    gone = io.StringIO()
    gone.close()
    logs.access.open(gone, polls=False)
    logs.access.write({"status": 200})
    assert not logs.access.on
    (line,) = stream.getvalue().splitlines()
    assert "requests are not logged any more" in json.loads(line)["message"]
