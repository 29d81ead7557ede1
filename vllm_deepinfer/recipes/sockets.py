"""Who listens on a port of this machine, from /proc."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"


def holder(port: int, proc: Path = PROC) -> str | None:
    """Name and pid of a process that listens on a TCP port, such as "python (4711)"; None: nobody does.

    Sockets of other users' processes belong to "another user's process".
    """
    inodes = set(_inodes(port, proc))
    if not inodes:
        return None
    for process in proc.iterdir():
        if process.name.isdigit() and inodes & set(_sockets(process)):
            return f"{_name(process)} ({process.name})"
    return "another user's process"


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _sockets(process: Path) -> Iterator[str]:
    try:
        for link in (process / "fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:  # it ended, or is another user's
        return


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip() or "a process"
    except OSError:
        return "a process"


def is_local_address(host: str) -> bool:
    """Whether a host is an address that this machine can listen on without asking a resolver."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return found.is_loopback or found.is_unspecified
