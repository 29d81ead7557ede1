"""VllmEngine's bookkeeping against a fake AsyncLLM that stops, fails and dies at awkward moments."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.recorder import Recorder, eventually, request_of
from tests.plugins.engine.test_info import llm_of
from vllm_deepinfer.engine import (
    EngineDead,
    EngineUnavailable,
    FinishReason,
    HealthState,
    InvalidRequest,
    Load,
    Overloaded,
)

vllm_engine = pytest.importorskip("vllm_deepinfer_plugins.engine.vllm_engine")
core = pytest.importorskip("vllm.v1.engine")
errors = pytest.importorskip("vllm.exceptions")
dead = pytest.importorskip("vllm.v1.engine.exceptions")
stats = pytest.importorskip("vllm.v1.metrics.stats")


class FakeLLM:
    """What VllmEngine uses of AsyncLLM. `gate` holds `add_request` where a full pipe would."""

    def __init__(self) -> None:
        parts = llm_of()
        self.vllm_config, self.model_config, self.tokenizer = (
            parts.vllm_config,
            parts.model_config,
            parts.tokenizer,
        )
        self.logger_manager: Any = None
        self.output_processor: Any = SimpleNamespace(
            tokenizer=None, log_stats=False, stream_interval=1, tracing_enabled=False, admission_stats=None
        )
        self.output_handler = None
        self.errored = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: BaseException | None = None
        self.abort_fault: BaseException | None = None
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.shut_down = 0

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> None:
        if self.fault is not None:
            raise self.fault
        request = core.EngineCoreRequest(
            request_id=f"{request_id}-internal",
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=prompt.get("cache_salt"),
            data_parallel_rank=None,
            external_req_id=request_id,
        )
        self.output_processor.add_request(request, None, queue=SimpleNamespace(put=lambda output: None))
        self.added.append((request, options))
        await self.gate.wait()

    async def abort(self, request_ids: list[str], internal: bool) -> None:
        assert internal
        if self.abort_fault is not None:
            raise self.abort_fault
        self.aborted += self.output_processor.abort_requests(request_ids, internal=True)

    def shutdown(self) -> None:
        self.shut_down += 1

    def step(self, **tokens: list[int]) -> None:
        """One engine step, ended by its scheduler statistics."""
        outputs = [core.EngineCoreOutput(f"{name}-internal", ids) for name, ids in tokens.items()]
        self.output_processor.process_outputs(outputs)
        self.output_processor.update_scheduler_stats(None)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    maker = SimpleNamespace(from_engine_args=lambda args, stat_loggers: fake)
    monkeypatch.setattr(vllm_engine, "AsyncLLM", maker)
    return fake


@pytest.fixture
async def engine(llm: FakeLLM) -> AsyncIterator[Any]:
    engine = vllm_engine.VllmEngine(SimpleNamespace(model="m"), wedge_after_s=1e6)
    await engine.start()
    yield engine
    await engine.close()


def is_clean(engine: Any) -> bool:
    processor = engine._processor
    return not (
        engine._alive
        or engine._tasks
        or processor._entries
        or processor._expected
        or processor.request_states
    )


async def test_a_request_arrives_whole_and_its_steps_come_back(engine: Any, llm: FakeLLM) -> None:
    sink = Recorder()
    await engine.submit(request_of([5, 6], "a", salt="tenant", max_tokens=9), sink)
    request, options = llm.added[0]
    assert (request.prompt_token_ids, request.cache_salt) == ([5, 6], "tenant")
    assert (request.sampling_params.max_tokens, request.sampling_params.detokenize) == (9, False)
    assert options == {"priority": 0, "reasoning_ended": None}
    llm.step(a=[7])
    llm.step(a=[8])
    assert sink.tokens["a"] == [7, 8]
    assert engine.health().steps == 2


async def test_a_tuple_prompt_becomes_a_list(engine: Any, llm: FakeLLM) -> None:
    await engine.submit(request_of((5, 6), "a"), Recorder())
    assert llm.added[0][0].prompt_token_ids == [5, 6]


async def test_an_abort_while_vllm_takes_the_request_in(engine: Any, llm: FakeLLM) -> None:
    sink = Recorder()
    llm.gate.clear()
    submitting = asyncio.ensure_future(engine.submit(request_of([5], "a"), sink))
    await asyncio.sleep(0)
    await engine.abort(["a"])
    assert sink.finals["a"].finish_reason is FinishReason.ABORT
    llm.gate.set()
    await submitting
    await eventually(lambda: llm.aborted == ["a-internal"])
    llm.step(a=[7])
    assert sink.tokens["a"] == []
    await eventually(lambda: is_clean(engine))


async def test_a_submit_that_is_cancelled_half_way_is_taken_back(engine: Any, llm: FakeLLM) -> None:
    sink = Recorder()
    llm.gate.clear()
    submitting = asyncio.ensure_future(engine.submit(request_of([5], "a"), sink))
    await asyncio.sleep(0)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    await eventually(lambda: llm.aborted == ["a-internal"])
    llm.step(a=[7])
    assert not sink.calls
    await eventually(lambda: is_clean(engine))
    llm.gate.set()
    await engine.submit(request_of([5], "a"), sink)  # its id is free again
    assert engine.load().active_requests == 1


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (errors.VLLMValidationError("bad regex\nat line 3"), InvalidRequest, "^bad regex$"),
        (ValueError("no such thing"), InvalidRequest, "no such thing"),
        (errors.QueueOverflowError(), Overloaded, "busy"),
        (dead.EngineDeadError(), EngineDead, "process has died"),
        (TypeError("a bug"), TypeError, "a bug"),
    ],
)
async def test_what_vllm_raises_is_told_in_our_words(
    engine: Any, llm: FakeLLM, fault: Exception, error: type[Exception], words: str
) -> None:
    sink = Recorder()
    llm.fault = fault
    with pytest.raises(error, match=words):
        await engine.submit(request_of([5], "a"), sink)
    assert not sink.calls and is_clean(engine)
    llm.fault = None
    await engine.submit(request_of([5], "a"), sink)


async def test_the_death_of_vllm_ends_every_request_and_refuses_the_rest(engine: Any, llm: FakeLLM) -> None:
    sink = Recorder()
    for name in "ab":
        await engine.submit(request_of([5], name), sink)
    llm.step(a=[7])
    llm.output_processor.propagate_error(RuntimeError("pipe closed"))
    assert {final.error for final in sink.finals.values()} == {
        "vLLM's engine died: pipe closed; the server has to be started again."
    }
    assert len(sink.finals) == 2 and engine.health().state is HealthState.DEAD
    await engine.drain()
    with pytest.raises(EngineDead, match="pipe closed"):
        await engine.submit(request_of([5], "c"), sink)


async def test_a_dead_process_is_seen_before_its_handler_tells(engine: Any, llm: FakeLLM) -> None:
    llm.errored = True
    assert engine.health().state is HealthState.DEAD
    with pytest.raises(EngineDead):
        await engine.submit(request_of([5], "a"), Recorder())


async def test_an_abort_that_vllm_cannot_take_has_still_ended_the_request(
    engine: Any, llm: FakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Recorder()
    await engine.submit(request_of([5], "a"), sink)
    llm.abort_fault = dead.EngineDeadError()
    await engine.abort(["a"])
    assert sink.finals["a"].finish_reason is FinishReason.ABORT
    assert "could not abort 1 requests" in caplog.text


async def test_load_follows_the_scheduler_within_what_is_alive(engine: Any, llm: FakeLLM) -> None:
    assert engine.load() == Load(kv_tokens_free=4_096)
    for name, length in (("a", 3), ("b", 4), ("c", 5)):
        await engine.submit(request_of([5] * length, name), Recorder())
    llm.logger_manager.record(stats.SchedulerStats(num_running_reqs=2, kv_cache_usage=0.25), None)
    llm.step(a=[7])
    assert engine.load() == Load(
        running_requests=2,
        waiting_requests=1,
        queued_prompt_tokens=9,
        kv_tokens_used=1_024,
        kv_tokens_free=3_072,
    )
    await engine.abort("abc")
    assert engine.load() == Load(kv_tokens_free=4_096), "the scheduler's last word is older than the abort"


async def test_work_without_steps_is_wedged(llm: FakeLLM) -> None:
    seconds = 100.0
    time: Any = SimpleNamespace(now=lambda: seconds)
    engine = vllm_engine.VllmEngine(SimpleNamespace(model="m"), wedge_after_s=5.0, clock=time)
    await engine.start()
    seconds = 1_000.0
    assert engine.health().state is HealthState.READY, "idle"
    await engine.submit(request_of([5], "a"), Recorder())
    seconds += 4.9
    assert engine.health().state is HealthState.READY
    seconds += 0.2
    assert engine.health().state is HealthState.WEDGED and "with 1 requests" in engine.health().detail
    llm.step(a=[7])
    assert engine.health().state is HealthState.READY
    await engine.close()


async def test_before_and_after_a_start_that_fails(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: Any, stat_loggers: Any) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(vllm_engine.AsyncLLM, "from_engine_args", fail)
    engine = vllm_engine.VllmEngine(SimpleNamespace(model="m"))
    assert engine.health().state is HealthState.STARTING and engine.load() == Load()
    with pytest.raises(EngineUnavailable):
        await engine.submit(request_of([5]), Recorder())
    with pytest.raises(EngineDead, match="could not start: no such model"):
        await engine.start()
    assert engine.health().state is HealthState.DEAD
    with pytest.raises(EngineDead):
        await engine.start()
    await engine.close()


async def test_a_cancelled_start_leaves_no_process(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(args: Any, stat_loggers: Any) -> FakeLLM:
        release.wait(30)
        return llm

    monkeypatch.setattr(vllm_engine.AsyncLLM, "from_engine_args", slow)
    engine = vllm_engine.VllmEngine(SimpleNamespace(model="m"))
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    assert engine.health().state is HealthState.DEAD
    release.set()
    await eventually(lambda: llm.shut_down == 1)


async def test_close_ends_what_runs_and_shuts_vllm_down(engine: Any, llm: FakeLLM) -> None:
    sink = Recorder()
    await engine.submit(request_of([5], "a"), sink)
    await engine.close()
    assert (sink.finals["a"].finish_reason, sink.finals["a"].error) == (
        FinishReason.ERROR,
        "the engine was closed.",
    )
    assert llm.shut_down == 1
