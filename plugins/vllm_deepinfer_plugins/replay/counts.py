"""What replays did, and how it gets from the engine's process to `/metrics`.

As `scheduler.report` does it: integers under a prefix in the one open table of SchedulerStats.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

PREFIX = "deepinfer-replay:"


@dataclass(slots=True)
class ReplayCounts:
    """Since the start; the scheduler counts up.

    Attributes:
        replayed_tokens: computed again behind prefix hits.
        declined_hits: hits that were too short to pay.
        restored_windows: hits whose window KV came from host memory.
        kept_windows: window KV that went to host memory.
        trimmed_rows: prompt rows that ended at the last KV source.
        saved: microseconds that adopted hits saved, by the cost model's own estimate; 0 while there is none.
    """

    replayed_tokens: int = 0
    declined_hits: int = 0
    restored_windows: int = 0
    kept_windows: int = 0
    trimmed_rows: int = 0
    saved: int = 0

    def put_into(self, stats: Any) -> None:
        """Write it into vLLM's SchedulerStats."""
        table = stats.num_kv_fetch_reqs_by_stage
        for name, value in asdict(self).items():
            table[PREFIX + name] = value

    @classmethod
    def take_from(cls, stats: Any) -> Self | None:
        """Take it out of vLLM's SchedulerStats, which is then as stock vLLM made it. None: there is none."""
        table = stats.num_kv_fetch_reqs_by_stage
        ours = {key[len(PREFIX) :]: table.pop(key) for key in list(table) if key.startswith(PREFIX)}
        return cls(**ours) if ours else None
