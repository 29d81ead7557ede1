"""Ids of text tokenised before: the unchanged part of a conversation costs a hash instead of BPE."""

import hashlib
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

Ids: TypeAlias = "array[int] | tuple[int, ...]"

_ENTRY_BYTES = 256  # an entry without its ids: digest, list node, object headers


class PieceCache:
    """Least recently used map from a piece of text to its ids, bounded by memory, for use by several threads.

    The key is the first half of a SHA-256 digest that begins with a random key of this process: nobody can
    construct two texts with the same one, so nobody can make the cache answer with the ids of another text.
    Texts themselves are not kept. (Processors have instructions for SHA-256: 1.8 GB/s, BLAKE2b 1.0 GB/s.)

    An entry starts as an array, 4 bytes per id, and becomes a tuple of shared integers, 8 bytes per id, when
    it is used: joining tuples copies references (2 ns per id) where an array has to make integers (30 ns).
    """

    def __init__(self, max_bytes: int, vocabulary_size: int) -> None:
        self._max_bytes = max_bytes
        self._integers = list(range(vocabulary_size))
        self._entries: OrderedDict[bytes, Ids] = OrderedDict()
        self._hash = hashlib.sha256(secrets.token_bytes(64))  # one whole block
        self._lock = threading.Lock()
        self.size_bytes = 0

    def digest(self, piece: str) -> bytes:
        """The key of a piece. Raises UnicodeEncodeError on a lone surrogate."""
        started = self._hash.copy()
        started.update(piece.encode())
        return started.digest()[:16]

    def get(self, digest: bytes) -> Sequence[int] | None:
        """The ids stored under `digest`, which become the last to be dropped."""
        with self._lock:
            ids = self._entries.get(digest)
            if ids is None:
                return None
            self._entries.move_to_end(digest)
        if isinstance(ids, array):
            ids = tuple([self._integers[token] for token in ids])
            self.put(digest, ids)
        return ids

    def put(self, digest: bytes, ids: Ids) -> None:
        """Stores the ids of a piece and drops the longest unused ones beyond the bound."""
        with self._lock:
            old = self._entries.pop(digest, None)
            self.size_bytes += _size(ids) - (_size(old) if old is not None else 0)
            self._entries[digest] = ids
            while self.size_bytes > self._max_bytes:
                self.size_bytes -= _size(self._entries.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)


def _size(ids: Ids) -> int:
    return _ENTRY_BYTES + len(ids) * (4 if isinstance(ids, array) else 8)
