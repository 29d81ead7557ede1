"""What the benchmark and its engine processes say to each other: one JSON object per line, on pipes.

A request is `{"do": NAME, ...}` with the keyword arguments of that command, the reply `{"ok": RESULT}` or
`{"error": SENTENCE}`. The first reply, unasked, says that the engine is up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import IO, Any

Command = Callable[..., Any]


def send(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Write one message and flush it."""
    stream.write(json.dumps(message, allow_nan=False) + "\n")
    stream.flush()


def receive(stream: IO[str]) -> dict[str, Any] | None:
    """The next message; None when the other side has closed. ValueError for a line that is no JSON object."""
    line = stream.readline()
    if not line:
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {line.strip()!r}")
    return message


def serve(commands: Mapping[str, Command], requests: IO[str], replies: IO[str]) -> None:
    """Answer requests until the other side closes; a command that raises is answered with its error."""
    while (request := receive(requests)) is not None:
        name = request.pop("do", None)
        command = commands.get(name) if isinstance(name, str) else None
        if command is None:
            send(replies, {"error": f"no command is named {name!r}; there are {', '.join(sorted(commands))}"})
            continue
        try:
            send(replies, {"ok": command(**request)})
        except Exception as error:
            send(replies, {"error": f"{type(error).__name__}: {error}"})
