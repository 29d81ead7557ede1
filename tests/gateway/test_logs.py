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
    logs.access.info("request", extra={"status": 200, "ms": 1.5, "odd": {1, 2}, "text": "é\nb"})
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert document["message"] == "request" and document["level"] == "info"
    assert document["logger"] == "vllm_deepinfer.gateway.access"
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
    logs.access.info("once")
    assert len(stream.getvalue().splitlines()) == 1
