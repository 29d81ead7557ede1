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

_MISSING = re.compile(r"No matching distribution found for ([^\s;]+)")


def known_cause(log: str) -> str | None:
    """What the machine lacks, if this output of pip shows that: the network, disk space, a right."""
    return next((text for pattern, text in _CAUSES if re.search(pattern, log)), None)


def sentence(log: str, log_path: str) -> str:
    """What to tell the user after pip failed with this output."""
    missing = _MISSING.findall(log)
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    if cause := known_cause(log):
        reason = cause
    elif missing:
        reason = f"pip finds no {missing[-1]} for this Python and machine in its package index."
    else:
        reason = f"pip stopped: {errors[0] if errors else 'it gave no reason'}"
    return f"{reason} (log: {log_path})"
