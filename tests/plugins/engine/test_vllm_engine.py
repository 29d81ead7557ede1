"""VllmEngine on a real vLLM with a tiny model: the contract, and what is vLLM's own. Two engine starts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.contract import EngineContract
from tests.engine.recorder import Recorder, eventually, prompt_of, request_of
from tests.plugins.engine.starting import started
from tests.plugins.tiny_qwen3 import FIRST_BYTE, MAX_MODEL_LEN, text_of, write_tiny_qwen3
from vllm_deepinfer.engine import (
    ConstraintKind,
    EngineDead,
    FinishReason,
    HealthState,
    InvalidRequest,
    StructuredOutput,
    collect,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Any]:
    engine = await started(model)
    yield engine
    await engine.close()


class TestVllmsOwn:
    """What the contract does not know of; before the contract, whose last test closes the engine."""

    async def test_info_comes_from_the_model(self, engine: Any) -> None:
        info = engine.info
        assert (info.max_model_len, info.vocab_size, list(info.eos_token_ids)) == (MAX_MODEL_LEN, 512, [1])
        assert info.kv_capacity_tokens > 100_000 and info.block_size >= 16

    async def test_the_tokens_are_those_of_generate(self, engine: Any) -> None:
        """The stock path and ours side by side in one engine, also while both are at work."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        async def stock(prompt: list[int], name: str) -> list[int]:
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
            outputs = [out async for out in engine._llm.generate(tokens_input(prompt), params, name)]
            return list(outputs[-1].outputs[0].token_ids)

        prompts = [prompt_of(engine, 11 + i, i) for i in range(4)]
        theirs = asyncio.gather(*(stock(prompt, f"stock{i}") for i, prompt in enumerate(prompts)))
        ours = asyncio.gather(*(collect(engine, request_of(prompt)) for prompt in prompts))
        assert [done.token_ids for done in await ours] == await theirs

    async def test_end_of_sequence_stops_without_a_stop_reason(self, engine: Any) -> None:
        bias = {1: 100.0}
        done = await collect(engine, request_of([30, 31], ignore_eos=False, logit_bias=bias))
        assert (done.token_ids, done.finish_reason, done.stop_reason) == ([1], FinishReason.STOP, None)
        done = await collect(engine, request_of([30, 31], ignore_eos=False, logit_bias=bias, min_tokens=3))
        assert len(done.token_ids) == 4 and done.token_ids[-1] == 1

    async def test_logit_bias_and_penalties_arrive(self, engine: Any) -> None:
        favoured = request_of([30, 31], logit_bias={77: 100.0}, max_tokens=4)
        assert (await collect(engine, favoured)).token_ids == [77] * 4
        penalised = request_of([30, 31], logit_bias={77: 4.0}, max_tokens=8, repetition_penalty=50.0)
        assert (await collect(engine, penalised)).token_ids.count(77) <= 1

    @pytest.mark.parametrize(
        ("kind", "value", "expected"),
        [
            (ConstraintKind.REGEX, "(yes|no){2}!", {"yesyes!", "yesno!", "noyes!", "nono!"}),
            (ConstraintKind.CHOICE, '["left", "right"]', {"left", "right"}),
            (ConstraintKind.GRAMMAR, 'root ::= "a" | "bc"', {"a", "bc"}),
        ],
    )
    async def test_a_constraint_shapes_the_answer(
        self, engine: Any, kind: ConstraintKind, value: str, expected: set[str]
    ) -> None:
        constraint = StructuredOutput(kind=kind, value=value)
        request = request_of([30, 31, 32], structured=constraint, ignore_eos=False, max_tokens=20)
        done = await collect(engine, request)
        assert done.finish_reason is FinishReason.STOP
        assert text_of(done.token_ids) in expected

    async def test_a_schema_shapes_the_answer(self, engine: Any) -> None:
        schema = {
            "type": "object",
            "properties": {"unit": {"enum": ["km", "mi"]}, "ok": {"type": "boolean"}},
            "required": ["unit", "ok"],
            "additionalProperties": False,
        }
        for prompt in ([40], [50, 51], [60, 61, 62]):
            constraint = StructuredOutput(kind=ConstraintKind.JSON_SCHEMA, value=json.dumps(schema))
            request = request_of(prompt, structured=constraint, ignore_eos=False, max_tokens=200)
            done = await collect(engine, request)
            if done.finish_reason is FinishReason.STOP:  # a random model may fill the length with white space
                answer = json.loads(text_of(done.token_ids))
                assert answer["unit"] in ("km", "mi") and isinstance(answer["ok"], bool)

    @pytest.mark.parametrize(
        ("kind", "value", "words"),
        [
            (ConstraintKind.JSON_SCHEMA, "{", "not valid JSON"),
            (ConstraintKind.CHOICE, "[1]", "array of strings"),
            (ConstraintKind.GRAMMAR, "root ::= (", "(?i)grammar"),
            (ConstraintKind.REGEX, "(", "(?i)regex"),
        ],
    )
    async def test_a_malformed_constraint_is_the_users_mistake(
        self, engine: Any, kind: ConstraintKind, value: str, words: str
    ) -> None:
        sink = Recorder()
        request = request_of([30], structured=StructuredOutput(kind=kind, value=value))
        with pytest.raises(InvalidRequest, match=words):
            await engine.submit(request, sink)
        assert not sink.calls and engine.load().active_requests == 0

    async def test_a_constraint_after_reasoning_needs_a_reasoning_parser(self, engine: Any) -> None:
        late = StructuredOutput(kind=ConstraintKind.JSON_OBJECT, after_reasoning=True)
        with pytest.raises(InvalidRequest, match="--reasoning-parser"):
            await engine.submit(request_of([30], structured=late), Recorder())

    async def test_nothing_is_left_behind_in_vllm(self, engine: Any) -> None:
        sink = Recorder()
        requests = [request_of([FIRST_BYTE + i], max_tokens=30) for i in range(20)]
        for request in requests:
            await engine.submit(request, sink)
        await engine.abort(request.request_id for request in requests[::2])
        await sink.ended(*(request.request_id for request in requests))
        processor = engine._llm.output_processor
        await eventually(lambda: not processor.request_states)
        assert not (processor._entries or processor._expected or processor.external_req_ids)
        assert not engine._alive and not engine._tasks


class TestVllmEngine(EngineContract):
    storm_requests = 80


async def test_a_killed_engine_process_ends_every_request(model: Path) -> None:
    """With vLLM's own metrics on, so that both forms of the engine have run."""
    engine = await started(model, vllm_metrics=True)
    try:
        await collect(engine, request_of([40, 41]))
        sink = Recorder()
        requests = [request_of(prompt_of(engine, 9, i), max_tokens=400) for i in range(3)]
        for request in requests:
            await engine.submit(request, sink)
        await sink.started(requests[0].request_id)
        for process in engine._llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        await sink.ended(*(request.request_id for request in requests))
        assert {final.finish_reason for final in sink.finals.values()} == {FinishReason.ERROR}
        assert all(final.error for final in sink.finals.values())
        assert engine.health().state is HealthState.DEAD and engine.load().active_requests == 0
        with pytest.raises(EngineDead):
            await engine.submit(request_of([40]), sink)
        await engine.abort([requests[0].request_id])
    finally:
        await engine.close()
