"""Engines of one model as one engine: requests are routed, and survive the loss of an engine.

Before its first token a request is simply routed again. After it, the rest of the answer is asked of another
engine as a continuation of prompt and emitted tokens; the caller sees neither a missing token nor one twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from vllm_deepinfer.engine import (
    LOST,
    Engine,
    EngineDraining,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    Health,
    HealthState,
    InvalidRequest,
    Load,
    Overloaded,
    Sink,
    TokenDelta,
)
from vllm_deepinfer.engine.delivery import Deliveries
from vllm_deepinfer.policy.routing import Choice

from .continuation import Repeats, resumed, why_not

logger = logging.getLogger(__name__)
Router = Callable[[GenerateRequest, Mapping[str, Load], frozenset[str]], Choice | None]
"""Chooses among the workers that serve, by their loads and by who has just refused. None: no room."""
GONE = frozenset({HealthState.DEAD, HealthState.WEDGED})
replaced = msgspec.structs.replace
MOST_HELD = 65_536
"""Requests that are remembered as perhaps held; older ones are left to their lease."""


class _Live:
    """A request that has not ended, and where it is."""

    def __init__(self, request: GenerateRequest, sink: Sink) -> None:
        self.request, self.sink = request, sink
        self.emitted: list[int] = []
        self.attempts = 0
        self.losses = 0  # engines that died under it
        self.worker, self.attempt = "", ""  # "" while it is routed
        self.placing = False  # whether the worker has yet to answer
        self.repeats = Repeats()

    def next_attempt(self) -> GenerateRequest:
        self.attempts += 1
        self.attempt = f"{self.request.request_id}#{self.attempts}"
        request, self.repeats = resumed(self.request, self.emitted, self.attempt)
        return request


class PooledEngine:
    """Several engines behind the Engine protocol.

    Args:
        workers: Started engines of one model, by name; more come and go by `add` and `remove`.
        router: Picks one for each request.
        attempts: Engines that one request may lose before it ends with an error.
        patience_s: How long a request whose engine was lost waits for another that takes it.
        watch_s: Interval at which wedged engines are looked for.

    Attributes:
        counts: ``rerouted`` (no token yet), ``continued``, ``not_continued``, ``refusals``, ``stale``,
            ``marked``.
    """

    def __init__(
        self,
        workers: Mapping[str, Engine],
        router: Router,
        *,
        attempts: int = 5,
        patience_s: float = 30.0,
        watch_s: float = 0.25,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._workers: dict[str, Engine] = {}
        self._router, self._attempts, self._patience_s, self._watch_s = router, attempts, patience_s, watch_s
        self._live: dict[str, _Live] = {}
        self._by_attempt: dict[str, _Live] = {}
        self._held: OrderedDict[str, tuple[str, str]] = OrderedDict()  # worker and attempt; perhaps no longer
        self._deliveries = Deliveries()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._started = self._draining = self._closed = self._forces = False
        for name, engine in workers.items():
            self.add(name, engine)

    # Workers

    def add(self, name: str, engine: Engine) -> None:
        """Take in a started engine.

        Raises:
            EngineUnavailable: Its model, context or vocabulary is not the pool's.
        """
        if self._workers:
            ours = self.info
            for field in ("model", "max_model_len", "vocab_size"):
                theirs, wanted = getattr(engine.info, field), getattr(ours, field)
                if theirs != wanted:
                    raise EngineUnavailable(f"worker {name} has {field} {theirs}, but its pool has {wanted}.")
        self._workers[name] = engine
        self._forces = engine.info.forces_tokens

    def remove(self, name: str) -> None:
        """Forget an engine; what it still has is lost to it and goes on elsewhere."""
        if self._workers.pop(name, None) is not None:
            self._lose(name)

    # Engine

    @property
    def info(self) -> EngineInfo:
        """The first worker's, with the capacity of all."""
        infos = [engine.info for engine in self._workers.values()]
        if not infos:
            return EngineInfo(model="", max_model_len=0)
        return msgspec.structs.replace(
            infos[0], kv_capacity_tokens=sum(one.kv_capacity_tokens for one in infos)
        )

    async def start(self) -> None:
        """The workers are started by their owner; only watching begins here."""
        if not self._started:
            self._started = True
            self._spawn(self._watch())

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """See `Engine.submit`."""
        if self._closed or not self._started:
            raise EngineUnavailable(
                "the pool is closed." if self._closed else "the pool has not been started."
            )
        if self._draining:
            raise EngineDraining("the pool takes nothing more.")
        if request.request_id in self._live:
            raise InvalidRequest(f"a request with the id {request.request_id} is alive.")
        live = self._live[request.request_id] = _Live(request, sink)
        self._idle.clear()
        try:
            await self._place(live)
        except BaseException:
            self._forget(live)
            raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`."""
        ids = list(dict.fromkeys(request_ids))
        lives = [self._live[one] for one in ids if one in self._live]
        by_worker: dict[str, list[str]] = {}
        for worker, attempt in [self._held.pop(one) for one in ids if one in self._held]:
            by_worker.setdefault(worker, []).append(attempt)
        for live in lives:
            if live.worker:
                by_worker.setdefault(live.worker, []).append(live.attempt)
            # Its engine's own final delta comes to nobody: the caller has had the pool's.
            self._end(live, FinishReason.ABORT)
        for worker, attempts in by_worker.items():
            if worker in self._workers:
                await self._workers[worker].abort(attempts)

    def load(self) -> Load:
        """The sum over the workers."""
        loads = [engine.load() for engine in self._workers.values()]
        return Load(**{field: sum(getattr(one, field) for one in loads) for field in Load.__struct_fields__})

    def health(self) -> Health:
        """READY while one worker is; else the first worker's."""
        healths = [engine.health() for engine in self._workers.values()]
        steps = sum(one.steps for one in healths)
        if self._closed:
            return Health(state=HealthState.DEAD, detail="The pool is closed.", steps=steps)
        if self._draining:
            return Health(state=HealthState.DRAINING, detail="The pool is draining.", steps=steps)
        ready = next((one for one in healths if one.state is HealthState.READY), None)
        best = ready or next(iter(healths), None)
        if best is None:
            return Health(state=HealthState.DEAD, detail="The pool has no workers.")
        return msgspec.structs.replace(best, steps=steps)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End what is alive here; the workers are closed by their owner."""
        if self._closed:
            return
        self._closed = True
        by_worker: dict[str, list[str]] = {}
        for live in list(self._live.values()):
            by_worker.setdefault(live.worker, []).append(live.attempt)
            self._end(live, FinishReason.ERROR, "the pool was closed.")
        for worker, attempts in by_worker.items():
            if worker in self._workers:
                await self._workers[worker].abort(attempts)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Placing

    async def _place(self, live: _Live) -> None:
        """Hand a request to a worker. Raises: what the last worker that was asked raised."""
        refused: dict[str, EngineError] = {}
        while True:
            serving = {name: engine for name, engine in self._workers.items() if engine.health().serving}
            loads = {name: engine.load() for name, engine in serving.items() if name not in refused}
            choice = self._router(live.request, loads, frozenset(refused)) if loads else None
            if choice is None:
                raise self._nowhere(refused, bool(serving))
            self.counts["stale"] += choice.stale
            self.counts["marked"] += choice.marked
            request = live.next_attempt()
            live.worker, live.placing = choice.worker, True
            self._by_attempt[live.attempt] = live
            try:
                await serving[choice.worker].submit(request, self._deliver)
                self._placed(live, request)
                if self._live.get(live.request.request_id) is not live:  # aborted meanwhile
                    await serving[choice.worker].abort([request.request_id])
                return
            except InvalidRequest:
                raise
            except EngineError as error:
                self.counts["refusals"] += 1
                refused[choice.worker] = error
                self._by_attempt.pop(request.request_id, None)
                if live.request.request_id not in self._live:
                    return  # aborted meanwhile
                live.worker = ""
            finally:
                live.placing = False

    def _placed(self, live: _Live, request: GenerateRequest) -> None:
        """The worker has accepted; if it was lost to the pool meanwhile, the request goes on elsewhere."""
        live.placing = False
        if live.attempt == request.request_id and live.worker and live.worker not in self._workers:
            self._move(live, f"worker {live.worker} was lost")

    @staticmethod
    def _nowhere(refused: Mapping[str, EngineError], any_serving: bool) -> EngineError:
        overloaded = [error for error in refused.values() if isinstance(error, Overloaded)]
        if overloaded:
            return Overloaded(str(overloaded[0]), min(error.retry_after_s for error in overloaded))
        if refused:
            return next(iter(refused.values()))
        if any_serving:
            return Overloaded("no worker of the pool has room for the request.")
        return EngineUnavailable("no worker of the pool is serving.")

    # Deltas

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        sends: list[tuple[Sink, TokenDelta]] = []
        for delta in deltas:
            live = self._by_attempt.get(delta.request_id)
            if live is None or live.attempt != delta.request_id:
                continue  # of an attempt that is over
            if delta.finish_reason is None and live.repeats.spent:  # all but the first and last of an answer
                live.emitted += delta.token_ids
                sends.append((live.sink, replaced(delta, request_id=live.request.request_id)))
                continue
            cut = self._new(live, delta)
            if cut is None:
                continue
            delta = cut
            # By its own word, which comes before its health does, or by its health.
            if delta.finish_reason is FinishReason.ERROR and (
                delta.stop_reason == LOST or self._lost(live.worker)
            ):
                live.emitted.extend(delta.token_ids)
                self._move(live, delta.error or "its engine was lost")
                if delta.token_ids:
                    sends.append((live.sink, self._renamed(live, delta, finish=False)))
                continue
            live.emitted.extend(delta.token_ids)
            sends.append((live.sink, self._renamed(live, delta)))
            if delta.kv_source is not None:
                self._note_hold(live)
            if delta.final:
                self._forget(live)
        self._deliveries.send(sends)

    def _new(self, live: _Live, delta: TokenDelta) -> TokenDelta | None:
        """What of a delta the caller has not had; None: nothing."""
        try:
            return live.repeats.cut(delta)
        except ValueError as error:
            self._spawn(self._fail(live, f"its engine did not repeat what had been answered: {error}."))
            return None

    def _note_hold(self, live: _Live) -> None:
        """Its KV may be held by its worker: `abort` has to reach it."""
        self._held[live.request.request_id] = (live.worker, live.attempt)
        if len(self._held) > MOST_HELD:
            self._held.popitem(last=False)

    @staticmethod
    def _renamed(live: _Live, delta: TokenDelta, *, finish: bool = True) -> TokenDelta:
        changes: dict[str, object] = {"request_id": live.request.request_id}
        if not finish:
            changes |= {"finish_reason": None, "stop_reason": None, "error": None}
        return msgspec.structs.replace(delta, **changes)

    def _lost(self, worker: str) -> bool:
        engine = self._workers.get(worker)
        return engine is None or engine.health().state in GONE

    def _lose(self, worker: str) -> None:
        # One that is being placed there is not moved: its `submit` raises, or `_placed` sees to it.
        for live in [one for one in self._live.values() if one.worker == worker and not one.placing]:
            self._move(live, f"worker {worker} was lost")

    def _move(self, live: _Live, why: str) -> None:
        """The attempt is over; go on elsewhere, or end with the reason."""
        self._by_attempt.pop(live.attempt, None)
        live.worker, live.attempt = "", ""
        if live.request.hand_over is not None and live.request.hand_over.source is not None:
            # Where its KV comes from is for the caller to say anew.
            self._spawn(self._fail(live, why, LOST))
            return
        reason = why_not(live.request, live.emitted, self._forces)
        limit = live.request.sampling.max_tokens
        live.losses += 1
        if reason is None and live.losses >= self._attempts:
            reason = f"{live.losses} engines were lost under it"
        if reason is not None:
            self.counts["not_continued"] += 1
            self._spawn(
                self._fail(live, f"{why.rstrip('.')}, and the answer cannot go on elsewhere: {reason}.")
            )
        elif limit is not None and len(live.emitted) >= limit:  # only the news of its end was lost
            self._spawn(self._fail(live, None))
        else:
            self.counts["continued" if live.emitted else "rerouted"] += 1
            self._spawn(self._replace(live, why))

    async def _fail(self, live: _Live, why: str | None, lost: str | None = None) -> None:
        self._end(live, FinishReason.LENGTH if why is None else FinishReason.ERROR, why, lost)

    async def _replace(self, live: _Live, why: str) -> None:
        """Route again, for as long as patience lasts."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while live.request.request_id in self._live:
            try:
                await self._place(live)
                return
            except EngineError as error:
                invalid = isinstance(error, InvalidRequest)
                if invalid or asyncio.get_running_loop().time() > deadline:
                    why = f"{why.rstrip('.')}, and no other took the request: {error}"
                    self._end(live, FinishReason.ERROR, why, None if invalid else LOST)
                    return
            await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        """A wedged engine ends nothing by itself: its health says so, and its requests move."""
        while True:
            await asyncio.sleep(self._watch_s)
            for name, engine in list(self._workers.items()):
                if engine.health().state is HealthState.WEDGED:
                    attempts = [live.attempt for live in self._live.values() if live.worker == name]
                    if attempts:
                        logger.warning("Worker %s is wedged: its %d requests move.", name, len(attempts))
                        self._lose(name)
                        self._spawn(self._workers[name].abort(attempts))

    def _end(
        self, live: _Live, reason: FinishReason, why: str | None = None, lost: str | None = None
    ) -> None:
        if self._live.get(live.request.request_id) is live:
            self._forget(live)
            delta = TokenDelta(live.request.request_id, (), reason, lost, error=why)
            self._deliveries.send([(live.sink, delta)])

    def _forget(self, live: _Live) -> None:
        self._by_attempt.pop(live.attempt, None)
        if self._live.get(live.request.request_id) is live:
            del self._live[live.request.request_id]
        if not self._live:
            self._idle.set()

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
