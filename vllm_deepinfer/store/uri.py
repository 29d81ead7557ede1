"""Opens a store by its address.

    /var/lib/kv                         a folder, the same as directory:/var/lib/kv
    directory:/mnt/3fs/kv?direct=1      options: direct, sync (0 or 1)
    memory:NAME?capacity=8GiB           shared memory under /dev/shm; an absolute path names another tmpfs
    s3://bucket/prefix?endpoint=…       options: endpoint, region, timeout_s; credentials from AWS_… variables
    memory:NAME,/var/lib/kv             tiers, from the fastest to the slowest

Further schemes come by entry point: `vllm_deepinfer.store` maps a scheme to `open(rest: str, options:
dict[str, str]) -> Backend`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import parse_qsl

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.store.base import Backend
from vllm_deepinfer.store.directory import VERSION_FOLDER, DirectoryBackend
from vllm_deepinfer.store.errors import StoreError
from vllm_deepinfer.store.measured import Measured
from vllm_deepinfer.store.memory import DEFAULT_CAPACITY, MemoryBackend
from vllm_deepinfer.store.stats import StoreStats
from vllm_deepinfer.store.tiered import TieredBackend

GROUP = "vllm_deepinfer.store"
Opener = Callable[[str, dict[str, str]], Backend]
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?://)?")
_DIRECTORY_OPTIONS = ("direct", "sync")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def open_store(address: str, stats: StoreStats | None = None) -> Backend:
    """The backend of an address; with `stats`, each tier is measured.

    Raises:
        UserError: an address that names nothing, an unknown option, a store that cannot be opened.
    """
    parts = [part.strip() for part in address.split(",")]
    tiers = [_open_one(part, address) for part in parts]
    if stats is not None:
        tiers = [Measured(tier, stats) for tier in tiers]
    return tiers[0] if len(tiers) == 1 else TieredBackend(tiers)


def absent(address: str) -> str | None:
    """The folder of a store's slowest tier that is not there, or None; opening a store would make it."""
    *_, last = (part.strip() for part in address.split(","))
    scheme, rest, options = _split(last, address)
    if scheme == "memory":
        path = _memory_path(rest, options)
    elif scheme == "directory":
        _known(options, _DIRECTORY_OPTIONS, "directory")
        path = Path(os.path.expanduser(rest))
    else:
        return None
    return None if not path.is_absolute() or (path / VERSION_FOLDER).is_dir() else str(path)


def size(text: str, what: str) -> int:
    """Bytes of a text such as 8GiB or 4096."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise UserError(f"{what} is {text!r}; write a size such as 512MiB or 8GiB.")
    return int(match[1]) * _UNITS[match[2]]


def _open_one(part: str, address: str) -> Backend:
    scheme, rest, options = _split(part, address)
    openers: dict[str, Opener] = {"directory": _directory, "memory": _memory, "s3": _s3}
    if scheme not in openers:
        found = {point.name: point for point in entry_points(group=GROUP)}
        if scheme not in found:
            raise UserError(
                f"The store {part!r} has an unknown scheme{_nearest(scheme, [*openers, *found])}."
            )
        openers[scheme] = found[scheme].load()
    try:
        return openers[scheme](rest, options)
    except StoreError as error:
        text = str(error).rstrip(".")
        raise UserError(f"{text[:1].upper()}{text[1:]}.") from error


def _split(part: str, address: str) -> tuple[str, str, dict[str, str]]:
    place, _, query = part.partition("?")
    match = _SCHEME.match(place)
    scheme, rest = (match[1], place[match.end() :]) if match else ("directory", place)
    if not rest:
        raise UserError(
            f"The store {address!r} names no place; write a folder, or memory:NAME, or s3://BUCKET."
        )
    return scheme, rest, dict(parse_qsl(query, keep_blank_values=True))


def _directory(rest: str, options: dict[str, str]) -> Backend:
    _known(options, _DIRECTORY_OPTIONS, "directory")
    path = Path(os.path.expanduser(rest))
    if not path.is_absolute():
        raise UserError(f"The store {rest!r} is a relative path; write it from / on, engines run anywhere.")
    return DirectoryBackend(path, direct=_flag(options, "direct", False), sync=_flag(options, "sync", True))


def _memory(rest: str, options: dict[str, str]) -> Backend:
    path = _memory_path(rest, options)
    capacity = size(options["capacity"], "capacity") if "capacity" in options else DEFAULT_CAPACITY
    return MemoryBackend(path, capacity)


def _memory_path(rest: str, options: dict[str, str]) -> Path:
    _known(options, ("capacity",), "memory")
    if not rest.startswith("/") and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", rest):
        raise UserError(
            f"The memory store {rest!r} is no name; use letters, digits, dots and dashes, or a path."
        )
    return Path(rest) if rest.startswith("/") else Path("/dev/shm") / f"vllm-deepinfer-{rest}"


def _s3(rest: str, options: dict[str, str]) -> Backend:
    from vllm_deepinfer.store.s3 import S3Backend

    _known(options, ("endpoint", "region", "timeout_s"), "s3")
    bucket, _, prefix = rest.partition("/")
    try:
        timeout_s = float(options.pop("timeout_s", "10"))
    except ValueError:
        raise UserError(f"The s3 store's timeout_s in {rest!r} is no number of seconds.") from None
    return S3Backend(bucket, prefix.strip("/"), options, timeout_s)


def _flag(options: dict[str, str], name: str, default: bool) -> bool:
    text = options.get(name)
    if text not in (None, "0", "1"):
        raise UserError(f"The store's option {name} is {text!r}; write 0 or 1.")
    return default if text is None else text == "1"


def _known(options: Iterable[str], names: tuple[str, ...], scheme: str) -> None:
    for option in options:
        if option not in names:
            raise UserError(f"The {scheme} store has no option {option!r}{_nearest(option, names)}.")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; the nearest is {found[0]!r}" if found else ""
