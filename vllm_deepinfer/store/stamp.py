"""What a store remembers beside an object: its traffic class, expiry, hits. It fits into one mtime.

The seconds of an object's modification time are its expiry, the nanoseconds hold class and hits:

    CC HHHH 000     class 0..99, hits 0..9999; microseconds suffice

so one `utime` refreshes an object, one `stat` tells a sweeper all, and nothing can contradict anything. A
file system that keeps whole seconds only (some network mounts) loses class and hits, never the expiry. The
access time is the last hit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

MAX_CLASS = 99
MAX_HITS = 9_999
_NS = 1_000_000_000
_FAR = 253_402_300_799  # end of the year 9999: what file systems and clocks still agree on


@dataclass(frozen=True, slots=True)
class Stamp:
    """Retention data of one object.

    Attributes:
        expires: Unix seconds, whole; from then on the object may go.
        traffic_class: code of the class whose expiry it is, 0..99.
        hits: times that it was loaded, at most 9,999.
        last_use: Unix seconds of the last hit or of the put.
    """

    expires: int
    traffic_class: int = 0
    hits: int = 0
    last_use: float = 0.0

    @classmethod
    def new(cls, now: float, ttl_s: float, traffic_class: int) -> Self:
        """The stamp of an object that is put now."""
        if not 0 <= traffic_class <= MAX_CLASS:
            raise ValueError(f"traffic class {traffic_class} is not in 0..{MAX_CLASS}")
        return cls(expires=min(math.ceil(now + ttl_s), _FAR), traffic_class=traffic_class, last_use=now)

    @property
    def mtime_ns(self) -> int:
        """For `os.utime`."""
        return self.expires * _NS + self.traffic_class * 10_000_000 + min(self.hits, MAX_HITS) * 1_000

    @property
    def atime_ns(self) -> int:
        """For `os.utime`."""
        return int(self.last_use * _NS)

    @classmethod
    def from_times(cls, mtime_ns: int, atime_ns: int) -> Self:
        """Reads what `mtime_ns` and `atime_ns` of a stat result say."""
        expires, rest = divmod(mtime_ns, _NS)
        return cls(expires, rest // 10_000_000, rest // 1_000 % 10_000, atime_ns / _NS)

    def refreshed(self, other: Stamp, hit: bool) -> Stamp:
        """This object's stamp after a use by another request: the longest expiry wins, with its class."""
        longer = other if other.expires > self.expires else self
        hits = min(self.hits + hit, MAX_HITS)
        return Stamp(longer.expires, longer.traffic_class, hits, max(self.last_use, other.last_use))
