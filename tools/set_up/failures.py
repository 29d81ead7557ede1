"""From a failed step to the one sentence that says what is missing."""

from __future__ import annotations

import re

DISK_GB = 7  # .venv takes 3.6 GB, pip's cache and its temporary files the rest


class SetUpError(Exception):
    """A failure whose message is one sentence for the user."""


# Most telling first: an unreachable index also ends in "No matching distribution".
_CAUSES = (
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        f"the disk is full: the set-up needs about {DISK_GB} GB in the checkout.",
    ),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|ConnectTimeout"
        r"|ReadTimeout"
        r"|ProxyError|Connection refused|Network is unreachable|Max retries exceeded|HTTP error 5\d\d",
        "pip cannot reach its package index: check the network, the proxy and `pip config list`.",
    ),
    (
        r"SSLError|CERTIFICATE_VERIFY_FAILED",
        "pip does not trust its package index's certificate: set PIP_CERT to your organisation's bundle.",
    ),
    (
        r"Permission denied|Errno 13|Read-only file system",
        "a file of the checkout cannot be written: check the owner of .venv and .cache.",
    ),
    (
        r"command '[^']*(?:gcc|cc|clang|c\+\+|g\+\+)[^']*' failed|fatal error: Python\.h",
        "a package has no wheel for this machine and its C extension does not compile.",
    ),
)

_MISSING = re.compile(r"No matching distribution found for (\S+)")


def missing_requirement(log: str) -> str | None:
    """The requirement that pip found nowhere, such as `torch==2.13.0+cpu`, if that is how it ended."""
    found = _MISSING.findall(log)
    return found[-1] if found else None


def sentence(log: str, log_path: str) -> str:
    """What to tell the user after pip failed with this output."""
    for pattern, text in _CAUSES:
        if re.search(pattern, log):
            return f"{text} (log: {log_path})"
    requirement = missing_requirement(log)
    if requirement:
        return (
            f"pip finds no {requirement} for this Python and machine in its package index. (log: {log_path})"
        )
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[0].removeprefix("ERROR:").strip() if errors else "it gave no reason"
    return f"pip stopped: {reason} (log: {log_path})"
