"""How long one lookup takes among a million keys: half are there, half are not."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from vllm_deepinfer.store.base import Backend
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.memory import MemoryBackend

Maker = Callable[[Path, int], Backend]
_LINKS = 30_000  # names per file: file systems bound them, ext4 at 65,000


def directory(folder: Path, count: int) -> DirectoryBackend:
    """A backend whose index has `count` keys: names of a few small files, for a lookup opens none."""
    backend = DirectoryBackend(folder)
    targets: list[str] = []
    for i, key in enumerate(_keys(count)):
        if i % _LINKS == 0:
            targets.append(str(folder / f"target{i}"))
            Path(targets[-1]).write_bytes(b"x" * 512)
        _into(backend._path(key), partial(os.link, targets[-1]))
    return backend


def memory(folder: Path, count: int) -> MemoryBackend:
    """A backend whose index has `count` keys; the links name no segment: a lookup follows none."""
    backend = MemoryBackend(folder)
    for key in _keys(count):
        _into(backend._path(key), partial(os.symlink, "0.0.0.512"))
    return backend


def times(backend: Backend, count: int, lookups: int, seed: int) -> list[float]:
    """Seconds of single lookups, of random keys."""
    rng = random.Random(seed)
    there = [_key(rng.randrange(count)) for _ in range(lookups // 2)]
    absent = [_key(count + rng.randrange(count)) for _ in range(lookups // 2)]
    found = []
    for key, expected in [
        pair for a, b in zip(there, absent, strict=True) for pair in ((a, True), (b, False))
    ]:
        start = time.perf_counter()
        answer = backend.contains([key])
        found.append(time.perf_counter() - start)
        if answer != [expected]:
            raise RuntimeError("a lookup gave the wrong answer")
    return found


def remove(folder: Path) -> None:
    """Delete an index of a million names."""
    shutil.rmtree(folder, ignore_errors=True)


def _keys(count: int) -> Iterator[Key]:
    return (_key(i) for i in range(count))


def _key(i: int) -> Key:
    digest = hashlib.blake2b(i.to_bytes(8, "big"), digest_size=32).digest()
    return Key(digest, digest[:8], 512 * (i % 256), 512)


def _into(path: str, make: Callable[[str], None]) -> None:
    try:
        make(path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        make(path)
