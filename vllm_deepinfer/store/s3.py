"""Objects in an S3-compatible store, through obstore (the Rust object_store client; extra `s3`).

    PREFIX/v1/objects/3f7/<key name>                                     the object
    PREFIX/v1/stamps/3f7/<key name>/<expires>.<class>.<hit>.<used>.<id>  empty; its name is the stamp

S3 cannot change an object's metadata without rewriting it, so stamps lie beside it, in names: a listing reads
them all at no request each. A refresh adds one; a scan adds them up (the longest expiry wins, hits are
summed), so writers on many machines need not agree; `collect` folds many into one. Refreshes are bounded: one
per key, process and hour unless the expiry moves by a tenth of what is left.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.store.base import Backend, Blob, Entry, Garbage, Item
from vllm_deepinfer.store.errors import StoreError, StoreFull
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import MAX_HITS, Stamp

_PARALLEL = 32  # requests in flight; a HEAD takes 10 to 30 ms on a remote store
_REFRESH_S = 3_600.0
_DEFAULT_TTL_S = 86_400.0  # an object whose stamp was lost
_REMEMBERED = 200_000
T = TypeVar("T")


class S3Backend(Backend):
    """A bucket as a store.

    Args:
        bucket: Its name; it must exist.
        prefix: Folder in it, may be empty.
        options: obstore's own, such as `endpoint`, `region`; credentials come from the environment (`AWS_…`).
        timeout_s: For each request; it is tried twice.

    Raises:
        UserError: the extra is not installed.
        StoreError: the bucket cannot be reached.
    """

    name = "s3"

    def __init__(
        self, bucket: str, prefix: str = "", options: Mapping[str, Any] | None = None, timeout_s: float = 10.0
    ) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError:
            raise UserError(
                "The s3 store needs the package obstore; install 'vllm-deepinfer[s3]', or name a folder."
            ) from None
        self._obs, self._errors = obstore, exceptions
        settings = dict(options or {})
        plain = str(settings.get("endpoint", "")).startswith("http://")
        from datetime import timedelta

        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options={"timeout": timedelta(seconds=timeout_s), "allow_http": plain},
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=2 * timeout_s)},
            **settings,
        )
        self._pool = ThreadPoolExecutor(_PARALLEL, "store-s3")
        self._refreshed: dict[bytes, tuple[int, float]] = {}
        self._lock = threading.Lock()
        next(iter(self._list("v1/objects/000/")), None)  # a wrong bucket or key is said now

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return list(self._pool.map(self._exists, keys))

    def _exists(self, key: Key) -> bool:
        return self._call(lambda: self._obs.head(self._store, _object(key)), missing=None) is not None

    def get(self, key: Key) -> Blob | None:
        data = self._call(lambda: self._obs.get(self._store, _object(key)).bytes(), missing=None)
        return None if data is None else Blob(memoryview(data))

    def put(self, item: Item) -> bool:
        self._add_stamp(item.key, item.stamp, hit=False)
        data = b"".join(memoryview(part).cast("B") for part in item.parts)
        try:
            self._call(lambda: self._obs.put(self._store, _object(item.key), data, mode="create"))
        except _There:
            return False
        return True

    def put_many(self, items: Sequence[Item]) -> list[bool | StoreError]:
        return list(self._pool.map(self.try_put, items))

    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        list(self._pool.map(lambda key: self._refresh(key, stamp, hit), keys))

    def _refresh(self, key: Key, stamp: Stamp, hit: bool) -> None:
        expires, used = self._refreshed.get(key.digest, (0, 0.0))
        slack = (stamp.expires - stamp.last_use) / 10
        if (stamp.expires - expires > slack or stamp.last_use - used > _REFRESH_S) and self._exists(key):
            self._add_stamp(key, stamp, hit)

    def _add_stamp(self, key: Key, stamp: Stamp, hit: bool) -> None:
        path = f"{_stamps(key)}{_stamp_name(stamp, int(hit))}"
        self._call(lambda: self._obs.put(self._store, path, b""))
        with self._lock:
            if len(self._refreshed) >= _REMEMBERED:
                self._refreshed.clear()
            self._refreshed[key.digest] = (stamp.expires, stamp.last_use if hit else 0.0)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        there = self.contains(keys)
        paths = [_object(key) for key, found in zip(keys, there, strict=True) if found]
        for listed in self._pool.map(lambda key: self._list(_stamps(key)), keys):
            paths += [path for path, _, _ in listed]
        self._delete_paths(paths)
        with self._lock:
            for key in keys:
                self._refreshed.pop(key.digest, None)
        return there

    def _delete_paths(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), 1_000):
            self._call(
                partial(self._obs.delete, self._store, list(paths[start : start + 1_000])), missing=None
            )

    def scan(self) -> Iterator[Entry]:
        stamps = self._all_stamps()
        for path, size, modified in self._list("v1/objects/"):
            key = Key.parse(path.rpartition("/")[2])
            if key is not None:
                found = [stamp for _, stamp, _ in stamps.get(key.name, [])]
                yield Entry(key, size, _sum(found) or Stamp.new(modified, _DEFAULT_TTL_S, 0))

    def collect(self, older_than_s: float) -> Garbage:
        """Stamps without an object go; several stamps of one object become one."""
        garbage, now = Garbage(), time.time()
        stamps = self._all_stamps()
        objects = {path.rpartition("/")[2] for path, _, _ in self._list("v1/objects/")}
        for name, found in stamps.items():
            old = [path for path, _, modified in found if now - modified >= older_than_s]
            if name not in objects:
                self._delete_paths(old)
                garbage += Garbage(len(old), 0)
            elif len(old) > 1 and len(old) == len(found):
                self._fold(found)
        return garbage

    def _fold(self, found: Sequence[tuple[str, Stamp, float]]) -> None:
        total = _sum([stamp for _, stamp, _ in found])
        assert total is not None
        folder = found[0][0].rpartition("/")[0]
        self._call(lambda: self._obs.put(self._store, f"{folder}/{_stamp_name(total, total.hits)}", b""))
        self._delete_paths([path for path, _, _ in found])

    def _all_stamps(self) -> dict[str, list[tuple[str, Stamp, float]]]:
        stamps: dict[str, list[tuple[str, Stamp, float]]] = defaultdict(list)
        for path, _, modified in self._list("v1/stamps/"):
            *_, name, text = path.split("/")
            stamp = _parse_stamp(text)
            if stamp is not None:
                stamps[name].append((path, stamp, modified))
        return stamps

    def _list(self, folder: str) -> list[tuple[str, int, float]]:
        """Path, size and time of change of everything below a folder."""

        def listing() -> list[tuple[str, int, float]]:
            chunks = self._obs.list(self._store, prefix=folder.rstrip("/"))
            return [(m["path"], m["size"], m["last_modified"].timestamp()) for chunk in chunks for m in chunk]

        return self._call(listing)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, request: Callable[[], T], **missing: Any) -> T:
        """A request with its errors as this package's; `missing=X` gives X for what is not there."""
        try:
            return request()
        except (self._errors.NotFoundError, FileNotFoundError) as error:
            if "missing" in missing:
                value: T = missing["missing"]
                return value
            raise StoreError(f"the s3 store has no {_first_line(error)}") from error
        except self._errors.AlreadyExistsError as error:
            raise _There from error
        except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
            raise StoreFull(f"the s3 store refuses the credentials: {_first_line(error)}") from error
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise StoreError(f"the s3 store does not answer: {_first_line(error)}") from error


class _There(Exception):
    """The key is there already."""


def _object(key: Key) -> str:
    return f"v1/objects/{key.name[:3]}/{key.name}"


def _stamps(key: Key) -> str:
    return f"v1/stamps/{key.name[:3]}/{key.name}/"


def _stamp_name(stamp: Stamp, hits: int) -> str:
    return f"{stamp.expires}.{stamp.traffic_class}.{hits}.{int(stamp.last_use)}.{secrets.token_hex(4)}"


def _parse_stamp(text: str) -> Stamp | None:
    with suppress(ValueError):
        expires, traffic_class, hits, used, _ = text.split(".")
        return Stamp(int(expires), int(traffic_class), int(hits), float(used))
    return None


def _sum(stamps: Sequence[Stamp]) -> Stamp | None:
    if not stamps:
        return None
    longest = max(stamps, key=lambda stamp: stamp.expires)
    hits = min(sum(stamp.hits for stamp in stamps), MAX_HITS)
    return Stamp(longest.expires, longest.traffic_class, hits, max(stamp.last_use for stamp in stamps))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
