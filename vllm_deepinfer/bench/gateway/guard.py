"""Ends process groups that their benchmark left behind, as a process: `python guard.py`.

It reads `+ID` and `-ID` lines; when its standard input ends, the groups that are still there are killed.
The kernel closes that pipe however the benchmark ends, also by SIGKILL or for lack of memory. No imports of
ours: it idles for the whole run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def watch(lines: Iterable[str]) -> set[int]:
    """The groups that are left when `lines` end."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    return groups


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in watch(sys.stdin):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
