"""Commands for a child process: one word per line on its stdin, one line of answer on its stdout."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

Answer = Callable[[], str]


async def serve_lines(commands: Mapping[str, Answer]) -> None:
    """Answer commands until stdin ends. Says `ready` first."""
    print("ready", flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(commands[line.decode().strip()](), flush=True)


def go_first(priority: int) -> None:
    """Let this process run whenever it has work, before those that share its core.

    What a benchmark has on one core stands for several machines. Without the right to it nothing changes, for
    any of the doors that are compared.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
