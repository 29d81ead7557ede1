"""Kills a writer or reader by SIGKILL at every line that it executes, and at random moments.

After each kill another process must read nothing or the right bytes under every key, be able to put and read
the key that was being written, and find the leftovers with `collect`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_deepinfer.store.base import Backend
from vllm_deepinfer.store.conformance import item, keys, read, value
from vllm_deepinfer.store.stamp import Stamp

STORE = str(Path(__file__).parents[2] / "store") + os.sep
Open = Callable[[], Backend]
_BYTES = 50_000


@dataclass
class Crashes:
    """What a series of kills found.

    Attributes:
        survived: Kills after which everything was right.
        broken: One line for each after which it was not.
    """

    survived: int = 0
    broken: list[str] = field(default_factory=list)

    def __add__(self, other: Crashes) -> Crashes:
        return Crashes(self.survived + other.survived, self.broken + other.broken)


def every_line(open_backend: Open, limit: int | None = None) -> Crashes:
    """Kill at each line of a put, a second put, a get, a touch and a delete; at most `limit` of each."""
    chain = keys(3, "crash")
    backend = open_backend()
    backend.put(item(chain[0], _BYTES))
    actions: dict[str, Callable[[Backend], Any]] = {
        "put": lambda b: b.put(item(chain[1], _BYTES)),
        "put again": lambda b: b.put(item(chain[0], _BYTES)),
        "get": lambda b: read(b, chain[0], _BYTES),
        "touch": lambda b: b.touch([chain[0]], Stamp.new(time.time(), 60, 1)),
        "delete": lambda b: b.delete([chain[1]]),
    }
    found = Crashes()
    for name, action in actions.items():
        line = 0
        while limit is None or line < limit:
            if name == "delete":
                backend.put(item(chain[1], _BYTES))
            if not _killed_at(line, open_backend, action):
                break
            _judge(backend, f"{name}, line event {line}", found)
            if name == "put":
                backend.delete([chain[1]])
            line += 1
    backend.close()
    return found


def at_random(open_backend: Open, count: int, seed: int = 0) -> Crashes:
    """Kill `count` processes that put, read and delete in a loop, after 0 to 30 ms."""
    rng, found = random.Random(seed), Crashes()
    backend = open_backend()
    for number in range(count):
        child = os.fork()
        if child == 0:
            _work_for_ever(open_backend(), number)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        _judge(backend, f"random kill {number}", found)
    backend.close()
    return found


def _work_for_ever(backend: Backend, seed: int) -> None:
    rng, chain = random.Random(seed), keys(3, "crash")
    while True:
        key = rng.choice(chain)
        rng.choice(
            (
                lambda key=key: backend.put(item(key, _BYTES)),
                lambda key=key: read(backend, key, _BYTES),
                lambda key=key: backend.delete([key]),
            )
        )()


def _killed_at(line: int, open_backend: Open, action: Callable[[Backend], Any]) -> bool:
    """Run an action in a child that kills itself at that line event; False when it ended before."""
    child = os.fork()
    if child == 0:
        backend = open_backend()
        sys.settrace(_tracer(line))
        try:
            action(backend)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _tracer(line: int) -> Callable[[FrameType, str, Any], Any]:
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(STORE):
            return None
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return trace

    return trace


def _judge(backend: Backend, what: str, found: Crashes) -> None:
    """Everything that must hold after a kill."""
    chain = keys(3, "crash")
    try:
        for key in chain:
            assert read(backend, key, _BYTES) in (None, value(key, _BYTES)), "wrong bytes"
        backend.collect(0.0)
        assert backend.collect(0.0).objects == 0, "garbage that is never collected"
        there = set(backend.scan())
        assert all(read(backend, e.key, _BYTES) is not None for e in there), "a key without an object"
        for key in chain[:2]:
            backend.put(item(key, _BYTES))
            assert read(backend, key, _BYTES) == value(key, _BYTES), "a key that cannot be put again"
    except Exception as error:
        found.broken.append(f"{what}: {type(error).__name__} {error}")
    else:
        found.survived += 1
