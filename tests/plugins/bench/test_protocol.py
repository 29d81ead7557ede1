"""Messages survive the pipe, and a failing command is an answer and not the end."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from vllm_deepinfer_plugins.bench import protocol


def talk(commands: dict[str, protocol.Command], *requests: dict[str, Any]) -> list[dict[str, Any]]:
    replies = io.StringIO()
    protocol.serve(commands, io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def test_send_and_receive_are_inverse() -> None:
    stream = io.StringIO()
    messages: list[dict[str, Any]] = [
        {"do": "decode", "batch": 8},
        {"ok": {"text": "Zeilen\numbruch …", "list": [1.5, None]}},
    ]
    for message in messages:
        protocol.send(stream, message)
    stream.seek(0)
    assert [protocol.receive(stream), protocol.receive(stream)] == messages
    assert protocol.receive(stream) is None


def test_a_message_is_one_line() -> None:
    stream = io.StringIO()
    protocol.send(stream, {"ok": "a\nb"})
    assert stream.getvalue().count("\n") == 1


def test_not_a_number_is_never_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        protocol.send(io.StringIO(), {"ok": float("nan")})


@pytest.mark.parametrize("line", ["INFO vLLM says hello\n", "[1, 2]\n"])
def test_a_line_that_is_no_object_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        protocol.receive(io.StringIO(line))


def test_serve_passes_arguments_and_results() -> None:
    def decode(batch: int, context: int) -> dict[str, int]:
        return {"tokens": batch * context}

    assert talk({"decode": decode}, {"do": "decode", "batch": 2, "context": 5}) == [{"ok": {"tokens": 10}}]


def test_serve_answers_errors_and_goes_on() -> None:
    def fail() -> None:
        raise RuntimeError("no such luck")

    replies = talk({"fail": fail, "fine": lambda: 1}, {"do": "fail"}, {"do": "fine", "x": 1}, {"do": "fine"})
    assert replies[0] == {"error": "RuntimeError: no such luck"}
    assert replies[1]["error"].startswith("TypeError")
    assert replies[2] == {"ok": 1}


@pytest.mark.parametrize("request_", [{"do": "destroy"}, {"do": 3}, {}])
def test_serve_names_its_commands(request_: dict[str, Any]) -> None:
    (reply,) = talk({"prefill": int, "decode": int}, request_)
    assert "there are decode, prefill" in reply["error"]
