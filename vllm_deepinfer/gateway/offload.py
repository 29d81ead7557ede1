"""Keeps work on large bodies off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

OFFLOAD_BYTES = 256 << 10  # above this, decoding and converting would hold the event loop for milliseconds


async def offload(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` here, or in a thread when the body it works on is large."""
    if size <= OFFLOAD_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
