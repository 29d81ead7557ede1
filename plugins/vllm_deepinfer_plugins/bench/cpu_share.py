"""How much of the machine something else used while a measurement ran (Linux; None elsewhere).

Two cores and OpenMP threads that spin at barriers: a neighbour that takes a quarter of one core can make an
engine step ten times slower. A round that was disturbed is measured again instead of being averaged in.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

STAT = Path("/proc/stat")


def busy_ticks(stat: str) -> int:
    """Clock ticks of all cores that were neither idle nor waiting for I/O, from the text of `/proc/stat`."""
    fields = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
    _user, _nice, _system, idle, iowait, *_rest = fields
    return sum(fields) - idle - iowait


class ForeignCpu:
    """Context manager; afterwards `share` is the part of all cores that other processes used, 0 … 1."""

    share: float | None = None

    def __enter__(self) -> ForeignCpu:
        self._before = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = self._read()
        if self._before is None or after is None or after[2] <= self._before[2]:
            return
        busy, own, elapsed = (b - a for a, b in zip(self._before, after, strict=True))
        self.share = min(1.0, max(0.0, (busy - own) / (elapsed * (os.cpu_count() or 1))))

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds that all processes, this process, and the clock have counted."""
        try:
            busy = busy_ticks(STAT.read_text()) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
        times = os.times()
        return busy, times.user + times.system, times.elapsed
