"""Whether a store's address leads anywhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import unquote, urlsplit

_REMOTE = ("tcp", "http", "https")


def unreachable(url: str, timeout_s: float) -> str | None:
    """None when something is there, else a clause that says what is not. One attempt, at most `timeout_s`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"this is no address ({error}), write file:///folder or tcp://host:port"
    if parts.scheme == "file":
        return _folder(Path(unquote(parts.path)))
    if parts.scheme not in _REMOTE or not parts.hostname:
        return "write file:///folder or tcp://host:port"
    if port is None:
        return "it names no port, write tcp://host:port"
    try:
        socket.create_connection((parts.hostname, port), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        return (
            f"{parts.hostname} port {port} cannot be reached ({reason.lower()}), start the store or "
            "correct it"
        )
    return None


def _folder(path: Path) -> str | None:
    try:
        if not path.is_dir():
            return f"there is no folder {path}, make it first"
        if not os.access(path, os.W_OK | os.X_OK):
            return f"the folder {path} cannot be written to, choose another"
    except (OSError, ValueError):
        return "this is no folder's name"
    return None
