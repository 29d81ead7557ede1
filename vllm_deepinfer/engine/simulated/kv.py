"""KV blocks of a simulated engine: reference counts, prefix hits, eviction of the least recently released."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block: a chained digest, so equal keys mean equal prefixes and equal salts."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """`blocks` KV blocks. A block that nobody refers to is free, and may still hold a prefix until it is
    taken.

    Invariants: `used` is the number of blocks with a reference; a published key names exactly one block.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._references = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # oldest first
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken, those that hold a reusable prefix included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that a request refers to."""
        return self.blocks - len(self._free)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `keys`; takes no reference."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Refer to blocks that `lookup` found."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Refer to `count` free blocks; what they held is forgotten. The caller has checked `free`."""
        assert count <= len(self._free), "the caller takes no more blocks than are free"
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            key = self._keys.pop(block, None)
            if key is not None:
                del self._by_key[key]
            self._references[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, key: bytes) -> None:
        """Make a full block findable, unless another block already holds the same prefix."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference each, from the back: the end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block is released as often as it was taken"
            if not self._references[block]:
                self._free[block] = None
