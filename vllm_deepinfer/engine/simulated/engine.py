"""SimulatedEngine: the Engine protocol without a model, in virtual or in real time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from random import Random

import msgspec

from vllm_deepinfer.engine.base import Sink
from vllm_deepinfer.engine.clock import Clock, LoopClock
from vllm_deepinfer.engine.delivery import Deliveries
from vllm_deepinfer.engine.errors import (
    EngineDead,
    EngineDraining,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from vllm_deepinfer.engine.messages import (
    LOST,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Health,
    HealthState,
    Load,
    TokenDelta,
)
from vllm_deepinfer.engine.simulated.config import SimulatedConfig
from vllm_deepinfer.engine.simulated.core import SimulatedCore, Step
from vllm_deepinfer.engine.simulated.faults import Faults
from vllm_deepinfer.engine.simulated.holds import Holds, KvSource
from vllm_deepinfer.engine.simulated.output import deltas_of
from vllm_deepinfer.engine.simulated.sequence import SimulatedSequence
from vllm_deepinfer.engine.simulated.tokens import TokenSource, hashed_tokens
from vllm_deepinfer.engine.validation import check_request

logger = logging.getLogger(__name__)


class SimulatedEngine:
    """An engine whose steps take the time that StepCost predicts and whose tokens are a function of the
    request.

    Honours KV capacity with preemption, chunked prefill, prefix hits, speculation, priorities, stop tokens,
    minimum and maximum lengths, logprobs. A structured-output constraint is accepted and *not* applied:
    script an answer that fits. Temperature, penalties and the like change nothing.

    The engine's time is its own: a step starts when the one before it ended, also when the event loop was
    late to notice, just as a real engine in another process would not wait for a busy gateway.

    Attributes:
        faults: failures on command.
        counts: of hand-overs: KV ``fetched``, prompts ``recomputed`` because it could not be, sources of a
            ``foreign`` layout, holds ``released`` by abort, holds ``expired``.
    """

    def __init__(
        self,
        config: SimulatedConfig | None = None,
        *,
        tokens: TokenSource | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """
        Args:
            config: sizes and speed. tokens: what it answers; by default pseudo-random ids without end.
            clock: time to live in; the event loop's by default. rng: draws accepted drafts; seeded with 0
                by default.
        """
        self.config = config or SimulatedConfig()
        self.faults = Faults()
        self.deliveries = Deliveries()
        self.core = SimulatedCore(self.config, rng or Random(0))
        self.counts: Counter[str] = Counter()
        self.holds = Holds(self.config.layout, self._free_held)
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._tokens = tokens or hashed_tokens(self.config.vocab_size)
        self._clock = clock or LoopClock()
        self._alive: dict[str, SimulatedSequence] = {}
        self._state = HealthState.STARTING
        self._detail = "not started"
        self._accepted = 0
        self._steps = 0
        self._progress_at = 0.0
        self._hung = False
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        return self.config.info()

    async def start(self) -> None:
        if self._state is HealthState.DEAD:
            raise EngineDead(self._detail)
        if self.faults.fail_start is not None:
            self._state, self._detail = HealthState.DEAD, str(self.faults.fail_start)
            raise self.faults.fail_start
        if self._task is None:
            self._state, self._detail = HealthState.READY, ""
            self._task = asyncio.create_task(self._run(), name="simulated engine")

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self._check_open()
        check_request(request, self.info)
        if request.request_id in self._alive or request.request_id in self.holds:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use by a request that has not ended."
            )
        waiting, limit = len(self._alive) - self.config.max_num_seqs, self.config.max_waiting
        if limit is not None and waiting >= limit:
            raise Overloaded(f"the engine is full: {self.config.max_num_seqs} requests and {limit} waiting.")
        self._accepted += 1
        limit = self.config.max_model_len - len(request.prompt_token_ids)
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        sequence = SimulatedSequence(
            request, sink, self._tokens(request), self._accepted, limit, self.config.eos_token_id
        )
        sequence.source = self._source_of(request)
        sequence.fail_after = self.faults.fail_requests.get(self._accepted)
        if not self._alive:
            self._progress_at = self._clock.now()
            self._empty.clear()
        self._alive[request.request_id] = sequence
        self.core.add(sequence)
        self._wake.set()

    async def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(dict.fromkeys(request_ids))  # each id once
        for request_id in ids:
            self.counts["released"] += self.holds.release_request(request_id)
        found = (self._alive.get(request_id) for request_id in ids)
        self._end([sequence for sequence in found if sequence], FinishReason.ABORT)

    def load(self) -> Load:
        core, size = self.core, self.config.block_size
        return Load(
            running_requests=len(core.running) + core.fetching,
            waiting_requests=core.waiting,
            queued_prompt_tokens=core.queued_prompt_tokens,
            kv_tokens_used=core.pool.used * size,
            kv_tokens_free=core.pool.free * size,
            held_requests=len(self.holds),
        )

    def health(self) -> Health:
        idle = self._clock.now() - self._progress_at if self._alive else 0.0
        state, detail = self._state, self._detail
        if state in (HealthState.READY, HealthState.DRAINING) and idle > self.config.wedge_after_s:
            state = HealthState.WEDGED
            detail = f"no step has ended for {idle:.1f} s with {len(self._alive)} requests."
        failures = self.deliveries.failures
        return Health(state=state, detail=detail, steps=self._steps, idle_s=idle, sink_failures=failures)

    async def drain(self) -> None:
        if self._state is HealthState.READY:
            self._state, self._detail = HealthState.DRAINING, "draining"
        await self._empty.wait()

    async def close(self) -> None:
        task, self._task = self._task, None
        if self._state is not HealthState.DEAD:
            self._die("the engine was closed.")
        tasks = [*self._fetches, *self._leases.values()] + ([task] if task is not None else [])
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def crash(self, reason: str = "the engine crashed.") -> None:
        """Die: every request ends with FinishReason.ERROR, nothing is accepted any more."""
        self._die(reason)

    def hang(self) -> None:
        """Stop stepping without a word, until `resume`; submit, abort and health still answer."""
        self._hung = True

    def resume(self) -> None:
        """Go on after `hang`."""
        self._hung = False
        self._wake.set()

    def _check_open(self) -> None:
        if self.faults.refuse is not None:
            raise self.faults.refuse
        if self._state is HealthState.DEAD:
            raise EngineDead(self._detail)
        if self._state is HealthState.DRAINING:
            raise EngineDraining("the engine is draining.")
        if self._state is HealthState.STARTING:
            raise EngineUnavailable("the engine has not been started.")

    def _die(self, reason: str) -> None:
        self._state, self._detail = HealthState.DEAD, reason
        self.holds.alive = False
        self._end(list(self._alive.values()), FinishReason.ERROR, reason)
        self._wake.set()

    def _end(
        self, sequences: list[SimulatedSequence], reason: FinishReason, error: str | None = None
    ) -> None:
        """End requests outside a step."""
        for sequence in sequences:
            self._forget(sequence)
        lost = LOST if reason is FinishReason.ERROR else None
        self.deliveries.send(
            (
                s.sink,
                TokenDelta(s.request.request_id, (), reason, lost, cached_tokens=s.cached or 0, error=error),
            )
            for s in sequences
        )

    def _forget(self, sequence: SimulatedSequence) -> None:
        self.core.remove(sequence)
        self._alive.pop(sequence.request.request_id, None)
        if not self._alive:
            self._empty.set()

    async def _run(self) -> None:
        try:
            time = self._clock.now()
            while self._state is not HealthState.DEAD:
                if self._hung or not self._alive:
                    self._wake.clear()
                    await self._wake.wait()
                    time = self._clock.now()
                    continue
                step = self.core.schedule()
                self._start_fetches()
                if not step.batch:  # all KV is on its way, or held for others
                    self._wake.clear()
                    await self._wake.wait()
                    time = self._clock.now()
                    continue
                time += self.faults.stretch(self.config.cost.seconds(step.features))
                await self._clock.sleep(max(time - self._clock.now(), 0.0))
                while self._hung and self._state is not HealthState.DEAD:
                    self._wake.clear()
                    await self._wake.wait()
                    time = self._clock.now()
                self._finish(step)
        except Exception as error:
            logger.exception("The simulated engine failed.")
            self._die(f"the simulated engine failed: {error}")

    def _finish(self, step: Step) -> None:
        self._steps += 1
        self._progress_at = self._clock.now()
        deltas: list[tuple[Sink, TokenDelta]] = []
        try:
            for sequence, delta in deltas_of(self.core, step):
                if sequence.keeps and delta.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                    delta = msgspec.structs.replace(delta, kv_source=self._hold(sequence))
                if delta.finish_reason is not None:
                    self._forget(sequence)
                deltas.append((sequence.sink, delta))
        finally:  # also when the token source fails half-way: what has ended must be told
            self.deliveries.send(deltas)

    # Hand-over

    def _source_of(self, request: GenerateRequest) -> KvSource | None:
        hand_over = request.hand_over
        if hand_over is None or hand_over.source is None:
            return None
        source = KvSource.of(hand_over.source)
        if self.holds.fits(source):
            return source
        self.counts["foreign"] += 1
        return None

    def _hold(self, sequence: SimulatedSequence) -> dict[str, object]:
        request_id = sequence.request.request_id
        source = self.holds.add(request_id, self.core.hold(sequence))
        self._leases[request_id] = asyncio.ensure_future(self._expire(request_id))
        return msgspec.structs.asdict(source)

    async def _expire(self, request_id: str) -> None:
        await self._clock.sleep(self.config.hold_lease_s)
        if self._leases.get(request_id) is asyncio.current_task():
            self.counts["expired"] += self.holds.release_request(request_id)

    def _free_held(self, request_id: str, blocks: list[int]) -> None:
        lease = self._leases.pop(request_id, None)
        if lease is not None and lease is not asyncio.current_task():
            lease.cancel()
        self.core.release(blocks)
        self._wake.set()

    def _start_fetches(self) -> None:
        fetches, self.core.fetches = self.core.fetches, []
        for sequence, tokens in fetches:
            task = asyncio.ensure_future(self._fetch(sequence, tokens))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)

    async def _fetch(self, sequence: SimulatedSequence, tokens: int) -> None:
        config, source = self.config, sequence.source
        assert source is not None
        seconds = config.transfer_latency_s + tokens * config.transfer_s_per_token
        seconds += self.faults.stall_fetches_s
        await self._clock.sleep(min(seconds, config.fetch_timeout_s))
        in_time = seconds <= config.fetch_timeout_s and not self.faults.fetch_fails()
        fetched = in_time and self.holds.fetched(source)
        if sequence.alive:
            self.counts["fetched" if fetched else "recomputed"] += 1
        self.core.end_fetch(sequence, fetched)
        self._wake.set()
