"""Where each request's window KV begins, from its admission to its end, and what all of them added up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_deepinfer.policy.replay import Way, trimmed_rows

from .counts import ReplayCounts
from .message import Start
from .prompt import start_behind


@dataclass(slots=True)
class Entry:
    """One request since it was admitted last.

    Attributes:
        hit: H, tokens that it adopted; 0 for none.
        floor: the first position that has window KV.
        behind: the same behind the last KV source.
        way: how the hit was taken; None where a connector brought window KV along.
        saved: seconds, predicted.
        begun: it has been scheduled.
    """

    hit: int = 0
    floor: int = 0
    behind: int = 0
    way: Way | None = Way.RECOMPUTE
    saved: float = 0.0
    begun: bool = False


class Ledger:
    """Holds what was decided for a hit until the request is scheduled, and counts it then.

    Args:
        window: W; 0 where nothing is replayed.
        rows: Rows of a prompt that go behind the last KV source; None for all.

    Attributes:
        counts: totals since the start.
        declined: ids of requests whose hit was too short to pay.
    """

    def __init__(self, window: int, rows: int | None) -> None:
        self.window, self.rows = window, rows
        self.counts, self.declined = ReplayCounts(), set[str]()
        self._entries: dict[str, Entry] = {}
        self._reached: list[tuple[str, int]] = []

    @property
    def active(self) -> bool:
        """Whether there is anything to count."""
        return bool(self.window or self.rows)

    def find(self, key: str) -> Entry | None:
        """The entry of a request that was admitted."""
        return self._entries.get(key)

    def cold(self, key: str) -> None:
        """It adopts no hit."""
        self._entries[key] = Entry()

    def loaded(self, key: str, hit: int) -> None:
        """A connector brings window KV along."""
        self._entries[key] = Entry(hit, max(hit - self.window, 0), way=None)

    def replayed(self, key: str, hit: int, saved: float) -> None:
        """The last window of its hit is computed again."""
        self._entries[key] = Entry(hit, max(hit - self.window, 0), way=Way.REPLAY, saved=saved)

    def restored(self, key: str, hit: int, behind: int, saved: float) -> None:
        """Window KV of its hit comes from host memory; behind the last KV source it begins at ``behind``."""
        self._entries[key] = Entry(hit, hit - self.window, behind, Way.RESTORE, saved)

    def begin(self, request: Any) -> Start:
        """It is scheduled for the first time since it was admitted; what its worker must know."""
        entry = self._entries.setdefault(request.request_id, Entry())
        start = self.start_behind(request)
        if entry.way is not Way.RESTORE or start >= entry.hit:
            entry.behind = max(entry.floor, start)
        entry.begun = True
        self.counts.saved += round(max(entry.saved, 0.0) * 1e6)
        self.counts.restored_windows += entry.way is Way.RESTORE
        if request.request_id in self.declined:
            self.declined.discard(request.request_id)
            self.counts.declined_hits += 1
        return Start(entry.floor, entry.hit) if entry.way is Way.REPLAY else Start()

    def advance(self, request: Any, count: int) -> None:
        """Its next ``count`` tokens are scheduled; vLLM has added them to what is computed already."""
        end, key = request.num_computed_tokens, request.request_id
        begin, entry = end - count, self._entries.get(request.request_id)
        if entry is not None and entry.way is Way.REPLAY and begin < entry.hit:
            self.counts.replayed_tokens += min(end, entry.hit) - begin
            if end >= entry.hit:
                self._reached.append((key, entry.hit))
        if begin >= request.num_prompt_tokens:
            return
        if self.rows is not None:
            self.counts.trimmed_rows += trimmed_rows(begin, count, self.start_behind(request))
        if end >= request.num_prompt_tokens:
            self._reached.append((key, request.num_prompt_tokens - 1))

    def take_reached(self) -> list[tuple[str, int]]:
        """Requests that the last step took to a position where later hits are likely to end, and that one."""
        reached, self._reached = self._reached, []
        return reached

    def end(self, key: str) -> None:
        """It is finished."""
        self._entries.pop(key, None)
        self.declined.discard(key)

    def start_behind(self, request: Any) -> int:
        """The first position of its prompt that goes behind the last KV source."""
        return start_behind(request.num_prompt_tokens, self.rows, request.sampling_params)
