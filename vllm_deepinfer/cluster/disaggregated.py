"""Prefill in one pool, decode in another, behind the Engine protocol.

A request is prefilled and its KV kept there; the decode pool fetches it and gives the answer, from the last
position of the prompt on, so that one engine samples all of it. What is lost on the way is done again: before
the first token the caller sees nothing of it, and after k tokens the rest is asked for as a continuation of
prompt and answer, through the prefill pool like any other prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

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
    KvHandOver,
    Load,
    Sink,
    TokenDelta,
)
from vllm_deepinfer.engine.delivery import Deliveries
from vllm_deepinfer.engine.validation import check_request

from .continuation import why_not
from .relay import Relayed

logger = logging.getLogger(__name__)


class DisaggregatedEngine:
    """Two pools as one engine. Both are started and closed by their owner.

    Args:
        prefill, decode: engines that hand KV over, with one layout.
        shortest: prompts of fewer tokens go to the decode pool at once: a transfer would cost more than it
            saves.
        recompute_up_to: a continuation of at most so many tokens of prompt and answer is computed by the
            decode pool; longer ones go through the prefill pool again.
        losses: engines that a request may lose before it ends with an error.
        patience_s: how long a request that has been accepted waits for a pool that takes it.
        retry_s: between two tries.

    Attributes:
        counts: ``handed_over`` requests; ``direct`` to decode, by length or for their prompt's logprobs;
            ``prefill_down``: direct because no prefill engine served; ``lost_prefill``; ``lost_decode``
            before the first token; ``continued``; ``not_continued``; ``waited`` for room.
    """

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        *,
        shortest: int = 0,
        recompute_up_to: int = 0,
        losses: int = 5,
        patience_s: float = 60.0,
        retry_s: float = 0.05,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._prefill, self._decode = prefill, decode
        self._shortest, self._recompute_up_to = shortest, recompute_up_to
        self._losses, self._patience_s, self._retry_s = losses, patience_s, retry_s
        self._live: dict[str, Relayed] = {}
        self._by_attempt: dict[str, Relayed] = {}
        self._deliveries = Deliveries()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._started = self._draining = self._closed = False

    # Engine

    @property
    def info(self) -> EngineInfo:
        """The decode pool's, with the capacity of both; prefix hits are in the prefill pool's blocks."""
        prefill, decode = self._prefill.info, self._decode.info
        known = [one.max_model_len for one in (prefill, decode) if one.max_model_len]
        return msgspec.structs.replace(
            decode,
            max_model_len=min(known, default=0),
            block_size=prefill.block_size if prefill.max_model_len else decode.block_size,
            kv_capacity_tokens=prefill.kv_capacity_tokens + decode.kv_capacity_tokens,
            kv_layout="",
            hands_over=False,
        )

    async def start(self) -> None:
        """Raises: EngineUnavailable when the pools cannot hand KV over to each other."""
        infos = {"prefill": self._prefill.info, "decode": self._decode.info}
        known = {name: info for name, info in infos.items() if info.max_model_len}
        for name, info in known.items():
            if not info.hands_over:
                raise EngineUnavailable(f"the engines of the {name} pool hand no KV over.")
        layouts = {info.kv_layout for info in known.values()}
        if len(layouts) > 1:
            raise EngineUnavailable("the prefill pool's KV layout is not the decode pool's.")
        self._started = True

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """See `Engine.submit`: accepted when the first pool that it goes to has accepted it."""
        self._check_open()
        info = self.info
        if info.max_model_len:
            check_request(request, info)
        if request.request_id in self._live:
            raise InvalidRequest(f"a request with the id {request.request_id} is alive.")
        live = self._live[request.request_id] = Relayed(request, sink)
        self._idle.clear()
        try:
            await self._begin(live)
        except BaseException:
            if self._is_alive(live):
                self._forget(live)
            raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`."""
        lives = [self._live[one] for one in dict.fromkeys(request_ids) if one in self._live]
        await self._stop(lives, FinishReason.ABORT)

    def load(self) -> Load:
        """The sum over both pools; a request between the two is waiting."""
        loads = (self._prefill.load(), self._decode.load())
        both = Load(**{field: sum(getattr(one, field) for one in loads) for field in Load.__struct_fields__})
        between = len(self._live) - both.active_requests
        if between <= 0:
            return both
        return msgspec.structs.replace(both, waiting_requests=both.waiting_requests + between)

    def health(self) -> Health:
        """The decode pool's. Without prefill engines it goes on: it computes prompts itself."""
        prefill, decode = self._prefill.health(), self._decode.health()
        steps = prefill.steps + decode.steps
        failures = self._deliveries.failures
        if self._closed:
            return Health(state=HealthState.DEAD, detail="the engine was closed.", steps=steps)
        state, detail = decode.state, decode.detail
        if state is HealthState.READY and not prefill.serving:
            detail = f"the decode pool computes prompts itself: {prefill.detail}"
        if self._draining and state is HealthState.READY:
            state, detail = HealthState.DRAINING, "draining"
        return Health(state=state, detail=detail, steps=steps, idle_s=decode.idle_s, sink_failures=failures)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End what is alive here; the pools are closed by their owner."""
        if self._closed:
            return
        self._closed = True
        await self._stop(list(self._live.values()), FinishReason.ERROR, "the engine was closed.")
        # Releases are short; waits for room are not.
        done, late = await asyncio.wait(self._tasks, timeout=1.0) if self._tasks else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*done, *late, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise EngineUnavailable(
                "the engine is closed." if self._closed else "the engine has not been started."
            )
        if self._draining:
            raise EngineDraining("the engine is draining.")

    # Where a request goes

    async def _begin(self, live: Relayed) -> None:
        """Hand a request to the pool that has to have it first. Raises: EngineError when that refuses."""
        tokens = len(live.request.prompt_token_ids) + len(live.emitted)
        again = bool(live.emitted) and tokens <= self._recompute_up_to
        if again or tokens < self._shortest or live.request.sampling.prompt_logprobs is not None:
            self.counts["direct"] += 1
            await self._submit(live, self._decode, None)
            return
        try:
            await self._submit(live, self._prefill, KvHandOver(keep=True))
        except EngineUnavailable as error:
            if isinstance(error, EngineDraining) and not live.losses:
                raise
            if not self.counts["prefill_down"]:
                logger.warning(
                    "The decode pool computes prompts itself, as no prefill engine serves: %s", error
                )
            self.counts["prefill_down"] += 1
            await self._submit(live, self._decode, None)

    async def _submit(self, live: Relayed, engine: Engine, hand_over: KvHandOver | None) -> None:
        """One attempt. Raises: EngineError when it was refused and the request is alive."""
        request = live.next(engine, hand_over)
        self._by_attempt[request.request_id] = live
        try:
            await engine.submit(request, self._deliver)
        except BaseException as error:
            self._by_attempt.pop(request.request_id, None)
            if live.attempt == request.request_id:
                live.leave()
            if isinstance(error, EngineError) and not self._is_alive(live):
                return
            raise
        if not self._is_alive(live):  # ended while the engine considered it
            await engine.abort([request.request_id])

    async def _go_on(self, live: Relayed, why: str, *, decode: bool) -> None:
        """Take an accepted request to the pool that it needs next, as long as patience lasts.

        Args:
            why: what happened to it, for the error that it ends with if nobody takes it; "": nothing.
            decode: to the decode pool with what was prefilled; else from the beginning.
        """
        loop = asyncio.get_running_loop()
        deadline, waited = loop.time() + self._patience_s, False
        while self._is_alive(live):
            try:
                if decode:
                    await self._submit(live, self._decode, KvHandOver(source=live.source))
                else:
                    await self._begin(live)
                return
            except EngineError as error:
                if isinstance(error, InvalidRequest) or loop.time() > deadline:
                    text = f"{why.rstrip('.')}, and no other took the request: {error}" if why else str(error)
                    self._end(live, FinishReason.ERROR, text)
                    return
            self.counts["waited"] += not waited
            waited = True
            await asyncio.sleep(self._retry_s)

    # Deltas

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        sends: list[tuple[Sink, TokenDelta]] = []
        for delta in deltas:
            live = self._by_attempt.get(delta.request_id)
            if live is None or live.attempt != delta.request_id:
                self._release_late(delta)
            elif live.prefilling:
                self._prefilled(live, delta)
            else:
                self._decoded(live, delta, sends)
        self._deliveries.send(sends)

    def _prefilled(self, live: Relayed, delta: TokenDelta) -> None:
        if not delta.final:
            return
        self._leave(live)
        if delta.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            if live.cached is None:
                live.cached = delta.cached_tokens
            live.hold, live.source = delta.request_id, delta.kv_source
            self.counts["handed_over"] += not live.emitted
            self._spawn(self._go_on(live, "", decode=True))
        elif delta.stop_reason == LOST:
            self.counts["lost_prefill"] += 1
            self._again(live, delta.error or "its prefill engine was lost")
        else:
            self._spawn(self._fail(live, delta.error or "the prefill pool gave the request up."))

    def _decoded(self, live: Relayed, delta: TokenDelta, sends: list[tuple[Sink, TokenDelta]]) -> None:
        if live.hold:
            self._release(live)  # it has been fetched, or never will be
        try:
            cut = live.repeats.cut(delta)
        except ValueError as error:
            self._spawn(self._fail(live, f"its engine did not repeat what had been answered: {error}."))
            return
        if cut is None:
            return
        delta = cut
        live.emitted.extend(delta.token_ids)
        lost = delta.finish_reason is FinishReason.ERROR and delta.stop_reason == LOST
        if delta.token_ids or not lost:
            sends.append((live.sink, live.renamed(delta, last=not lost)))
        if lost:
            self._leave(live)
            self.counts["lost_decode"] += not live.emitted
            self._again(live, delta.error or "its decode engine was lost")
        elif delta.final:
            self._forget(live)

    def _again(self, live: Relayed, why: str) -> None:
        """What a request had is lost: from the beginning, or from what was emitted; or it ends."""
        live.source = None
        live.losses += 1
        limit = live.request.sampling.max_tokens
        tokens = len(live.request.prompt_token_ids) + len(live.emitted)
        full = 0 < self.info.max_model_len <= tokens
        if (limit is not None and len(live.emitted) >= limit) or full:  # only the news of its end was lost
            self._spawn(self._finish(live))
            return
        reason = why_not(live.request, live.emitted, self._decode.info.forces_tokens)
        if reason is None and live.losses > self._losses:
            reason = f"{live.losses} engines were lost under it"
        if reason is None:
            self.counts["continued"] += bool(live.emitted)
            self._spawn(self._go_on(live, why, decode=False))
        else:
            self.counts["not_continued"] += 1
            text = f"{why.rstrip('.')}, and the answer cannot go on elsewhere: {reason}."
            self._spawn(self._fail(live, text))

    async def _fail(self, live: Relayed, why: str) -> None:
        self._end(live, FinishReason.ERROR, why)

    async def _finish(self, live: Relayed) -> None:
        self._end(live, FinishReason.LENGTH)

    # Ends

    async def _stop(self, lives: Sequence[Relayed], reason: FinishReason, why: str | None = None) -> None:
        """End requests from outside, wherever they are."""
        at: dict[int, tuple[Engine, list[str]]] = {}
        finals: list[tuple[Sink, TokenDelta]] = []
        for live in lives:
            for engine, request_id in ((live.engine, live.attempt), (self._prefill, live.hold)):
                if engine is not None and request_id:
                    at.setdefault(id(engine), (engine, []))[1].append(request_id)
            live.hold = ""
            finals.append((live.sink, live.final(reason, why)))
            self._forget(live)
        self._deliveries.send(finals)
        # In a task: a caller that is cancelled here has still aborted.
        aborts = [self._spawn(engine.abort(ids)) for engine, ids in at.values()]
        if aborts:
            await asyncio.wait(aborts)

    def _end(self, live: Relayed, reason: FinishReason, why: str | None = None) -> None:
        if self._is_alive(live):
            self._forget(live)
            self._deliveries.send([(live.sink, live.final(reason, why))])

    def _release(self, live: Relayed) -> None:
        """Give up what the prefill pool holds of a request. Idempotent there."""
        hold, live.hold = live.hold, ""
        self._spawn(self._prefill.abort([hold]))

    def _release_late(self, delta: TokenDelta) -> None:
        """A hold of an attempt that is over: nobody else would give it up."""
        if delta.kv_source is not None:
            self._spawn(self._prefill.abort([delta.request_id]))

    def _leave(self, live: Relayed) -> None:
        """Its attempt is over."""
        self._by_attempt.pop(live.attempt, None)
        live.leave()

    def _forget(self, live: Relayed) -> None:
        self._leave(live)
        if live.hold:
            self._release(live)
        if self._is_alive(live):
            del self._live[live.request.request_id]
        if not self._live:
            self._idle.set()

    def _is_alive(self, live: Relayed) -> bool:
        return self._live.get(live.request.request_id) is live

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
