"""VllmEngine: the Engine protocol on vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Iterable

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_deepinfer.engine import (
    EngineDead,
    EngineDraining,
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
)
from vllm_deepinfer.engine.clock import Clock, LoopClock
from vllm_deepinfer.engine.validation import check_request
from vllm_deepinfer_plugins.engine.entry import Entry
from vllm_deepinfer_plugins.engine.holds import Holds
from vllm_deepinfer_plugins.engine.info import info_of, refuse_unsupported
from vllm_deepinfer_plugins.engine.load import LoadRecorder, NoMetrics
from vllm_deepinfer_plugins.engine.outputs import StepOutputProcessor
from vllm_deepinfer_plugins.engine.params import reasoning_ended, sampling_params_of
from vllm_deepinfer_plugins.engine.reasons import reason_of, refusal_of
from vllm_deepinfer_plugins.hand_over.messages import RELEASE

logger = logging.getLogger(__name__)


class VllmEngine:
    """One vLLM engine: its core in processes of its own, its outputs delivered by step (see `outputs`).

    Attributes:
        holds: requests whose KV waits for another engine, and what hand-overs came to.
    """

    def __init__(
        self,
        args: AsyncEngineArgs,
        *,
        vllm_metrics: bool = False,
        wedge_after_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            args: what `vllm serve` would be given.
            vllm_metrics: keep vLLM's own `vllm:` metrics; they cost more per token than everything else here.
            wedge_after_s: work without a step for this long is reported as WEDGED.
            clock: time for that; the event loop's by default.
        """
        self._args = args
        self._vllm_metrics = vllm_metrics
        self._wedge_after_s = wedge_after_s
        self._clock = clock or LoopClock()
        self._state, self._detail = HealthState.STARTING, "not started"
        self._info = EngineInfo(model=args.model, max_model_len=0)  # all that is known before `start`
        self._alive: dict[str, Entry] = {}
        self._recorder = LoadRecorder(None, forward=False)
        self.holds = Holds(self._stuck)
        self._releases = itertools.count(1)
        self._steps = 0
        self._progress_at = 0.0
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        """Start vLLM; takes seconds to minutes, in a thread.

        Raises: EngineDead with vLLM's reason. `close` is due also after a start that failed or was cancelled.
        """
        if self._state is HealthState.DEAD:
            raise EngineDead(self._detail)
        if self._state is not HealthState.STARTING:
            return
        try:
            # in a thread, where no loop runs, AsyncLLM does not start its output handler: it must be ours
            await asyncio.to_thread(self._make_llm)
            await self._llm.get_supported_tasks()
        except asyncio.CancelledError:
            self._die("the engine was closed while it started.")  # its thread sees that, or `close` does
            raise
        except Exception as error:
            self._die(f"vLLM could not start: {reason_of(error, self._args.model)}")
            raise EngineDead(self._detail) from error
        if self.health().state is HealthState.DEAD:  # closed meanwhile
            raise EngineDead(self._detail)
        self._info = info_of(self._llm)
        self._state, self._detail = HealthState.READY, ""

    async def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self._check_open()
        check_request(request, self._info)
        refuse_unsupported(request, self._llm)
        if request.request_id in self._alive or request.request_id in self.holds:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use by a request that has not ended."
            )
        request = self.holds.usable(request, self._info.kv_layout)
        params = sampling_params_of(request)
        prompt = request.prompt_token_ids
        entry = Entry(request, sink, bool(self._info.draft_tokens), self._info.kv_layout)
        self._accept(entry)
        try:
            await self._llm.add_request(
                request.request_id,
                tokens_input(
                    prompt if isinstance(prompt, list) else list(prompt), cache_salt=request.cache_salt
                ),
                params,
                priority=request.priority,
                reasoning_ended=reasoning_ended(request),
            )
        except BaseException as error:
            was_ended = entry.ended
            entry.ended = True
            self._forget([entry])
            if was_ended and isinstance(error, Exception):
                return  # it had been accepted and has had its final delta: aborted, or the engine died
            raise self._translated(error) from error
        if entry.ended:  # aborted while vLLM took it in
            self._forget([entry])

    async def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(dict.fromkeys(request_ids))  # each id once
        entries = [self._alive[request_id] for request_id in ids if request_id in self._alive]
        released = self._release(self.holds.take(ids))
        finals = [(entry.sink, entry.end(FinishReason.ABORT)) for entry in entries]
        sent = self._forget(entries)
        if finals:
            self._processor.deliveries.send(finals)
        await asyncio.gather(*(asyncio.shield(task) for task in (sent, released) if task is not None))

    def load(self) -> Load:
        alive = len(self._alive)
        running = min(self._recorder.running, alive)  # the scheduler's view is one step old
        capacity = self._info.kv_capacity_tokens
        used = round(self._recorder.kv_usage * capacity) if alive or self.holds else 0
        return Load(
            running_requests=running,
            waiting_requests=alive - running,
            queued_prompt_tokens=sum(
                len(entry.request.prompt_token_ids) for entry in self._alive.values() if not entry.started
            ),
            kv_tokens_used=used,
            kv_tokens_free=capacity - used,
            held_requests=len(self.holds),
        )

    def health(self) -> Health:
        idle = self._clock.now() - self._progress_at if self._alive else 0.0
        state, detail = self._state, self._detail
        if state in (HealthState.READY, HealthState.DRAINING):
            if self._llm.errored:
                state, detail = HealthState.DEAD, "vLLM's engine process has died."
            elif idle > self._wedge_after_s:
                state = HealthState.WEDGED
                detail = f"no step has ended for {idle:.1f} s with {len(self._alive)} requests."
        processor = getattr(self, "_processor", None)  # None before the start
        failures = processor.deliveries.failures if processor is not None else 0
        return Health(state=state, detail=detail, steps=self._steps, idle_s=idle, sink_failures=failures)

    async def drain(self) -> None:
        if self._state is HealthState.READY:
            self._state, self._detail = HealthState.DRAINING, "draining"
        await self._empty.wait()

    async def close(self) -> None:
        if self._state is not HealthState.DEAD:
            self._die("the engine was closed.")
        llm = getattr(self, "_llm", None)
        if llm is not None:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # before the core goes: it would log the core's end as a failure
            await asyncio.to_thread(llm.shutdown)

    def _make_llm(self) -> None:
        self._args.disable_log_stats = not self._vllm_metrics
        llm = AsyncLLM.from_engine_args(self._args, stat_loggers=None if self._vllm_metrics else [NoMetrics])
        self._recorder = LoadRecorder(llm.logger_manager, self._vllm_metrics, self.holds.hear)
        self._processor = StepOutputProcessor(
            llm.output_processor,
            vllm_stats=self._vllm_metrics,
            on_step=self._stepped,
            on_end=self._ended,
            on_death=self._die,
        )
        llm.output_processor = self._processor
        llm.logger_manager = self._recorder
        self._llm = llm
        if self._state is HealthState.DEAD:  # closed while it started
            llm.shutdown()

    def _check_open(self) -> None:
        if self._state is HealthState.DEAD:
            raise EngineDead(self._detail)
        if self._state is HealthState.DRAINING:
            raise EngineDraining("the engine is draining.")
        if self._state is HealthState.STARTING:
            raise EngineUnavailable("the engine has not been started.")
        if self._llm.errored:
            raise EngineDead("vLLM's engine process has died.")

    def _accept(self, entry: Entry) -> None:
        if not self._alive:
            self._progress_at = self._clock.now()
            self._empty.clear()
        self._alive[entry.request.request_id] = entry
        self._processor.expect(entry)

    def _stepped(self) -> None:
        self._steps += 1
        self._progress_at = self._clock.now()

    def _ended(self, entry: Entry) -> None:
        if entry.held:
            self.holds.add(entry)
        if self._alive.get(entry.request.request_id) is entry:
            del self._alive[entry.request.request_id]
        if not self._alive:
            self._empty.set()

    def _forget(self, entries: list[Entry]) -> asyncio.Future[None] | None:
        """Take ended requests out of the books and out of vLLM, in a task that outlives its caller."""
        for entry in entries:
            self._processor.forget(entry)
            self._ended(entry)
        ids = [entry.internal_id for entry in entries if entry.internal_id is not None]
        return self._spawn(self._abort_in_vllm(ids)) if ids else None

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _abort_in_vllm(self, internal_ids: list[str]) -> None:
        try:
            await self._llm.abort(internal_ids, internal=True)
        except Exception as error:  # its requests have ended for our callers all the same
            logger.warning("vLLM could not abort %d requests: %s", len(internal_ids), error)

    def _release(self, internal_ids: list[str]) -> asyncio.Future[None] | None:
        """Give up holds."""
        if not internal_ids or self._state is HealthState.DEAD:
            return None
        return self._spawn(self._release_in_vllm(internal_ids))

    async def _release_in_vllm(self, internal_ids: list[str]) -> None:
        """By a request that vLLM aborts as soon as its KV connector has seen it: the way to get there."""
        ranks = self._llm.vllm_config.parallel_config.data_parallel_size
        try:
            for rank in range(ranks):
                await self._llm.notify_kv_transfer_request_rejected(
                    f"release-{next(self._releases)}",
                    {RELEASE: internal_ids},
                    data_parallel_rank=rank if ranks > 1 else None,
                )
        except Exception as error:  # the lease ends them
            logger.warning("vLLM could not release the KV of %d requests: %s", len(internal_ids), error)

    def _stuck(self, internal_id: str) -> None:
        """A fetch that cannot be stopped: the request ends, its blocks are vLLM's until the fetch does."""
        entry = next((one for one in self._alive.values() if one.internal_id == internal_id), None)
        if entry is not None and not entry.ended:
            final = entry.end(FinishReason.ERROR, "the KV of its prompt could not be fetched in time.")
            self._forget([entry])
            self._processor.deliveries.send([(entry.sink, final)])

    def _die(self, reason: str) -> None:
        if self._state is HealthState.DEAD:
            return
        self._state, self._detail = HealthState.DEAD, reason
        entries = list(self._alive.values())
        finals = [(entry.sink, entry.end(FinishReason.ERROR, reason)) for entry in entries]
        for entry in entries:
            self._processor.forget(entry)
            self._ended(entry)
        if finals:
            self._processor.deliveries.send(finals)

    @staticmethod
    def _translated(error: BaseException) -> BaseException:
        if isinstance(error, EngineDeadError):
            return EngineDead("vLLM's engine process has died.")
        if isinstance(error, GracefulHTTPError):
            return Overloaded(str(error))
        if isinstance(error, VLLMClientError | ValueError):
            return InvalidRequest(refusal_of(error))
        return error
