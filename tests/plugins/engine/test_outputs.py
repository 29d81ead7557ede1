"""StepOutputProcessor: one delivery per step; strangers go vLLM's way; what it leans on is still there."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_deepinfer.engine import FinishReason, GenerateRequest, TokenDelta

outputs = pytest.importorskip("vllm_deepinfer_plugins.engine.outputs")
Entry = pytest.importorskip("vllm_deepinfer_plugins.engine.entry").Entry
vllm_engine = pytest.importorskip("vllm.v1.engine")
sampling = pytest.importorskip("vllm.sampling_params")


class Book:
    """Records what the processor reports, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def sink(self, deltas: Sequence[TokenDelta]) -> None:
        self.events.append([(d.request_id, list(d.token_ids), d.final) for d in deltas])


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def processor(book: Book) -> Any:
    stock = SimpleNamespace(
        tokenizer=None, log_stats=False, stream_interval=1, tracing_enabled=False, admission_stats=None
    )
    return outputs.StepOutputProcessor(
        stock,
        vllm_stats=False,
        on_step=lambda: book.events.append("step"),
        on_end=lambda entry: book.events.append(f"end {entry.request.request_id}"),
        on_death=lambda reason: book.events.append(reason),
    )


def core_request(name: str) -> Any:
    return vllm_engine.EngineCoreRequest(
        request_id=f"{name}-internal",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=sampling.SamplingParams(detokenize=False),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=name,
    )


def add(processor: Any, book: Book, name: str) -> Any:
    entry = Entry(GenerateRequest(request_id=name, prompt_token_ids=[1, 2]), book.sink, False)
    processor.expect(entry)
    processor.add_request(core_request(name), None)
    return entry


def output(name: str, tokens: list[int], **values: Any) -> Any:
    return vllm_engine.EngineCoreOutput(f"{name}-internal", tokens, **values)


def test_the_slices_of_a_step_make_one_delivery(processor: Any, book: Book) -> None:
    for name in "abc":
        assert add(processor, book, name).internal_id == f"{name}-internal"
    processor.process_outputs([output("a", [5]), output("b", [6])])
    processor.process_outputs([output("c", [7])])
    assert book.events == [], "nothing before the step's end"
    processor.update_scheduler_stats(None)
    assert book.events == ["step", [("a", [5], False), ("b", [6], False), ("c", [7], False)]]


def test_a_step_that_brings_nothing_is_silent(processor: Any, book: Book) -> None:
    add(processor, book, "a")
    processor.process_outputs([output("a", [])])
    processor.update_scheduler_stats(None)
    assert book.events == []


def test_an_end_leaves_nothing_behind(processor: Any, book: Book) -> None:
    add(processor, book, "a")
    stop = vllm_engine.FinishReason.STOP
    processor.process_outputs([output("a", [5], finish_reason=stop)])
    assert book.events == ["end a"], "known as ended before its last delta is delivered"
    processor.update_scheduler_stats(None)
    assert book.events[1:] == ["step", [("a", [5], True)]]
    assert not (processor.request_states or processor._entries or processor._expected)
    processor.process_outputs([output("a", [6])])
    processor.update_scheduler_stats(None)
    assert len(book.events) == 3, "late outputs of an ended request are ignored"


def test_a_forgotten_request_gets_nothing_more(processor: Any, book: Book) -> None:
    entry = add(processor, book, "a")
    processor.forget(entry)
    processor.forget(entry)
    processor.abort_requests(["a-internal"], internal=True)
    processor.process_outputs([output("a", [5])])
    processor.update_scheduler_stats(None)
    assert book.events == []


def test_strangers_go_vllms_own_way(processor: Any, book: Book) -> None:
    add(processor, book, "ours")
    processor.add_request(core_request("theirs"), None)  # nobody told us to expect it
    done = processor.process_outputs([output("theirs", [8]), output("ours", [5])])
    assert [out.request_id for out in done.request_outputs] == ["theirs"]
    processor.update_scheduler_stats(None)
    assert book.events[-1] == [("ours", [5], False)]


def test_the_death_of_the_output_handler_is_told(processor: Any, book: Book) -> None:
    processor.propagate_error(RuntimeError("pipe closed"))
    assert book.events == ["vLLM's engine died: pipe closed; the server has to be started again."]


def test_a_dead_process_is_told_without_vllms_stack_trace(processor: Any, book: Book) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    processor.propagate_error(EngineDeadError())
    (told,) = book.events
    assert "its process has ended" in told and "stack trace" not in told.lower()


def test_ended_requests_end_once_even_if_vllm_ends_them_too(processor: Any, book: Book) -> None:
    entry = add(processor, book, "a")
    final = entry.end(FinishReason.ABORT)
    processor.forget(entry)
    processor.process_outputs([output("a", [], finish_reason=vllm_engine.FinishReason.ABORT)])
    processor.update_scheduler_stats(None)
    assert final.final and book.events == []


def test_the_output_handler_still_ends_every_step_where_we_listen() -> None:
    """The pin: look at AsyncLLM._run_output_handler when this fails."""
    AsyncLLM = pytest.importorskip("vllm.v1.engine.async_llm").AsyncLLM
    source = inspect.getsource(AsyncLLM._run_output_handler)
    order = [
        "output_processor = self.output_processor",
        "self._logger_ref = [self.logger_manager]",
        "engine_core.get_output_async()",
        "output_processor.process_outputs(",
        "output_processor.update_scheduler_stats(outputs.scheduler_stats)",
        "logger_ref[0].record(",
        "output_processor.propagate_error(e)",
    ]
    places = [source.find(text) for text in order]
    assert -1 not in places and places == sorted(places), dict(zip(order, places, strict=True))
    assert source.count("update_scheduler_stats(") == 1


def test_the_handler_starts_only_where_a_loop_runs() -> None:
    """The pin: VllmEngine makes AsyncLLM in a thread so that the handler starts with our processor."""
    AsyncLLM = pytest.importorskip("vllm.v1.engine.async_llm").AsyncLLM
    source = inspect.getsource(AsyncLLM.__init__)
    assert source.index("asyncio.get_running_loop()") < source.index("self._run_output_handler()")
    assert "self._run_output_handler()" in inspect.getsource(AsyncLLM.add_request)


def test_what_we_override_and_call_has_not_changed() -> None:
    base = outputs.OutputProcessor
    signatures = {
        name: list(inspect.signature(getattr(base, name)).parameters)[1:]
        for name in (
            "process_outputs",
            "update_scheduler_stats",
            "propagate_error",
            "abort_requests",
            "_finish_request",
            "_update_stats_from_output",
            "_update_stats_from_finished",
        )
    }
    assert signatures == {
        "process_outputs": [
            "engine_core_outputs",
            "engine_core_timestamp",
            "iteration_stats",
            "weight_version",
        ],
        "update_scheduler_stats": ["scheduler_stats"],
        "propagate_error": ["e"],
        "abort_requests": ["request_ids", "internal"],
        "_finish_request": ["req_state"],
        "_update_stats_from_output": [
            "req_state",
            "engine_core_output",
            "engine_core_timestamp",
            "iteration_stats",
        ],
        "_update_stats_from_finished": ["req_state", "finish_reason", "iteration_stats"],
    }
