"""LedgerEngine: counts, for every request that an engine accepted, how often it ended and what came after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm_deepinfer.engine import Engine, EngineInfo, GenerateRequest, Health, Load, Sink, TokenDelta


class LedgerEngine:
    """An engine that keeps a ledger of the one it wraps.

    Attributes:
        accepted: requests that `submit` took. ended: final deltas in all.
        open: accepted and not ended. faults: what must not happen, by kind.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sinks: dict[Sink, Sink] = {}
        self.open: set[str] = set()
        self.accepted = 0
        self.ended = 0
        self.faults: Counter[str] = Counter()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def start(self) -> None:
        await self._engine.start()

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if request.request_id in self.open:
            self.faults["submitted twice"] += 1
        self.open.add(request.request_id)
        try:
            await self._engine.submit(request, self._noting(sink))
        except BaseException:
            self.open.discard(request.request_id)
            raise
        self.accepted += 1

    def _noting(self, sink: Sink) -> Sink:
        if sink not in self._sinks:

            def note(deltas: Sequence[TokenDelta]) -> None:
                for delta in deltas:
                    self._note(delta)
                sink(deltas)

            self._sinks[sink] = note
        return self._sinks[sink]

    def _note(self, delta: TokenDelta) -> None:
        if delta.request_id not in self.open:
            self.faults["delta after the end"] += 1
        if delta.finish_reason is not None:
            self.ended += 1
            self.open.discard(delta.request_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self._engine.abort(request_ids)

    def load(self) -> Load:
        return self._engine.load()

    def health(self) -> Health:
        return self._engine.health()

    async def drain(self) -> None:
        await self._engine.drain()

    async def close(self) -> None:
        await self._engine.close()
