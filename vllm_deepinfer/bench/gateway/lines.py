"""Commands for a child process: one word per line on its stdin, one line of answer on its stdout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping

Answer = Callable[[], str]


async def serve_lines(commands: Mapping[str, Answer]) -> None:
    """Answer commands until stdin ends. Says `ready` first."""
    print("ready", flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(commands[line.decode().strip()](), flush=True)
