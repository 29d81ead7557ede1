"""Whether the address of a prefix store leads anywhere; the addresses are those of `store/uri.py`.

A store is looked at and not opened: opening one makes folders, or reserves shared memory.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

FORM = "write a folder such as /var/lib/kv, memory:NAME, or s3://BUCKET?endpoint=URL"
SHARED_MEMORY = Path("/dev/shm")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?://)?")


def unreachable(address: str, timeout_s: float) -> str | None:
    """None when every tier is there, else a clause about the first that is not.

    One attempt per tier, each at most `timeout_s` long.
    """
    for tier in address.split(","):
        problem = _tier(tier.strip(), timeout_s)
        if problem:
            return problem
    return None


def _tier(tier: str, timeout_s: float) -> str | None:
    place, _, query = tier.partition("?")
    match = _SCHEME.match(place)
    scheme, rest = (match[1], place[match.end() :]) if match else ("directory", place)
    if not rest or scheme not in ("directory", "memory", "s3"):
        return FORM
    if scheme == "s3":
        endpoint = dict(parse_qsl(query)).get("endpoint")
        return None if endpoint is None else _server(endpoint, timeout_s)
    if scheme == "memory":
        return (
            None if rest[0] == "/" or SHARED_MEMORY.is_dir() else f"there is no {SHARED_MEMORY}, name a path"
        )
    return _folder(Path(os.path.expanduser(rest)))


def _server(endpoint: str, timeout_s: float) -> str | None:
    try:
        parts = urlsplit(endpoint)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        return f"the endpoint is no address ({error}), {FORM}"
    if not parts.hostname or port is None:
        return f"the endpoint is no http or https address, {FORM}"
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
    if not path.is_absolute():
        return "a relative folder is another one on each node, write it from / on"
    try:
        if not path.is_dir():
            return f"there is no folder {path}, make it first"
        if not os.access(path, os.W_OK | os.X_OK):
            return f"the folder {path} cannot be written to, choose another"
    except (OSError, ValueError):
        return "this is no folder's name"
    return None
