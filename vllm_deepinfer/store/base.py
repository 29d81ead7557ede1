"""The store backend: immutable values under 256-bit keys, with a stamp beside each.

A backend knows nothing of tokens, codecs or policies. `conformance.py` is the executable form of what this
page promises; a backend of another distribution runs it too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from vllm_deepinfer.store.errors import StoreError
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp

Buffer = bytes | bytearray | memoryview


class Blob:
    """The bytes of one object, pinned: they stay what they are until `close`, whatever is evicted meanwhile.

    A context manager. `data` may be longer than what was put, by padding that the codec ignores.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def close(self) -> None:
        """Give the pin back; `data` is not to be touched afterwards. Harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Entry:
    """One object as a scan finds it.

    Attributes:
        key: Its name.
        nbytes: What it takes, padding included.
        stamp: Retention data.
    """

    key: Key
    nbytes: int
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Item:
    """One object to put: the parts are stored one behind the other."""

    key: Key
    parts: Sequence[Buffer]
    stamp: Stamp

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Garbage:
    """Leftovers of writers that died."""

    objects: int = 0
    nbytes: int = 0

    def __add__(self, other: Garbage) -> Garbage:
        return Garbage(self.objects + other.objects, self.nbytes + other.nbytes)


class Backend(ABC):
    """A place for objects. Every method may be called from any thread, and from several processes at once.

    Methods raise `StoreError` when the place does not work, and `OSError` from below; the caller takes both
    for a miss. They may block on I/O: the caller brings the threads.
    """

    name: str = "backend"

    @abstractmethod
    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is there now. True promises nothing: `get` may still find nothing."""

    @abstractmethod
    def get(self, key: Key) -> Blob | None:
        """The object, pinned, or None. It was published whole; whether its bytes are right the codec says."""

    @abstractmethod
    def put(self, item: Item) -> bool:
        """Publish an object at once and for good. False if the key is there already: it is refreshed then.

        Raises:
            StoreFull: no room, or read-only. Nothing of the object is visible.
        """

    def put_many(self, items: Sequence[Item]) -> list[bool | StoreError]:
        """`put` of each, with the error in place of one that failed. A backend may batch what it can."""
        return [self.try_put(item) for item in items]

    def try_put(self, item: Item) -> bool | StoreError:
        """`put` with its error as the result."""
        try:
            return self.put(item)
        except StoreError as error:
            return error
        except OSError as error:
            return StoreError(str(error))

    @abstractmethod
    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        """`Stamp.refreshed` for each key that is there. One hit of two racing ones may be lost."""

    @abstractmethod
    def delete(self, keys: Sequence[Key]) -> list[bool]:
        """Remove keys; False for one that was not there. A reader's blob stays readable."""

    @abstractmethod
    def scan(self) -> Iterator[Entry]:
        """All objects, in any order. What is put or deleted meanwhile may or may not appear."""

    @abstractmethod
    def collect(self, older_than_s: float) -> Garbage:
        """Remove what crashed writers left behind, if it is older than that."""

    def free_bytes(self) -> int | None:
        """Room that is left in the medium, or None where nobody can tell."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of files, maps and connections. Blobs that are open stay valid."""
