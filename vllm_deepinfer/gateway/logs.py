"""Structured logs: one JSON object a line. A request's line has its numbers, never its text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

access = logging.getLogger("vllm_deepinfer.gateway.access")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record and its `extra` fields as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send everything of this package to `stream` (stderr) as JSON lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("vllm_deepinfer")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
