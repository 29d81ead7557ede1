"""What every engine must do with KV that it keeps and fetches: a part of `contract.EngineContract`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.engine.recorder import Recorder, eventually, fetching_from, keeping, prompt_of, request_of
from vllm_deepinfer.engine import (
    Engine,
    FinishReason,
    InvalidRequest,
    KvHandOver,
    Load,
    SamplingParams,
    collect,
)


class HandOverContract:
    """Invariants 7 and 8."""

    hands_over_to_itself = True
    """Whether what it keeps can be fetched by itself; if not, it has tests of its own with two of them."""

    async def test_kept_kv_is_held_until_it_is_released(self, engine: Engine) -> None:
        if not engine.info.hands_over:
            with pytest.raises(InvalidRequest, match="hands no KV over"):
                await engine.submit(keeping(prompt_of(engine, 40, 20)), Recorder())
            return
        sink, prompt = Recorder(), prompt_of(engine, 40, 20)
        await eventually(lambda: engine.load().kv_tokens_used == 0)
        request = keeping(prompt)
        await engine.submit(request, sink)
        await sink.ended(request.request_id)
        final = sink.finals[request.request_id]
        assert final.finish_reason is FinishReason.LENGTH and final.kv_source
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(final.kv_source))
        await eventually(lambda: engine.load().held_requests == 1)
        load = engine.load()
        assert load.active_requests == 0 and load.kv_tokens_used >= 39
        assert load.kv_tokens_used + load.kv_tokens_free == engine.info.kv_capacity_tokens
        await collect(engine, request_of(prompt_of(engine, 9, 21)))  # others are served beside it
        await engine.abort([request.request_id, request.request_id])
        await engine.abort([request.request_id])
        await eventually(lambda: engine.load() == Load(kv_tokens_free=engine.info.kv_capacity_tokens))

    async def test_a_plain_request_keeps_nothing(self, engine: Engine) -> None:
        sink, request = Recorder(), request_of(prompt_of(engine, 9, 22))
        await engine.submit(request, sink)
        await sink.ended(request.request_id)
        assert sink.finals[request.request_id].kv_source is None and engine.load().held_requests == 0

    async def test_an_aborted_request_keeps_nothing(self, engine: Engine) -> None:
        if not engine.info.hands_over:
            return
        sink, request = Recorder(), keeping(prompt_of(engine, 60, 23))
        await engine.submit(request, sink)
        await engine.abort([request.request_id])
        assert sink.finals[request.request_id].finish_reason is FinishReason.ABORT
        assert sink.finals[request.request_id].kv_source is None
        await eventually(lambda: engine.load() == Load(kv_tokens_free=engine.info.kv_capacity_tokens))

    async def test_hand_overs_that_contradict_themselves_are_refused(self, engine: Engine) -> None:
        if not engine.info.hands_over:
            return
        prompt = prompt_of(engine, 9, 24)
        both = KvHandOver(keep=True, source={"layout": "x"})
        long = msgspec.structs.replace(keeping(prompt), sampling=SamplingParams(max_tokens=2))
        for request, words in (
            (msgspec.structs.replace(keeping(prompt), hand_over=both), "not both"),
            (long, "max_tokens 1, got 2"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await engine.submit(request, Recorder())

    @pytest.mark.parametrize("length", [1, 2, 17, 60])
    async def test_a_fetched_prompt_gives_the_same_answer(self, engine: Engine, length: int) -> None:
        if not (engine.info.hands_over and self.hands_over_to_itself):
            return
        prompt = prompt_of(engine, length, 25)
        wanted = (await collect(engine, request_of(prompt))).token_ids
        for salt in ("here", "there"):  # the second finds nothing in its prefix cache
            kept, source = await self._kept(engine, prompt, salt)
            fetching = fetching_from(source, request_of(prompt, salt=salt + "!"))
            assert (await collect(engine, fetching)).token_ids == wanted
            await engine.abort([kept])
            await eventually(lambda: engine.load() == Load(kv_tokens_free=engine.info.kv_capacity_tokens))

    @pytest.mark.parametrize("case", ["released", "nonsense", "used"])
    async def test_a_source_that_gives_nothing_changes_no_answer(self, engine: Engine, case: str) -> None:
        if not engine.info.hands_over:
            return
        prompt = prompt_of(engine, 60, 26)
        wanted = (await collect(engine, request_of(prompt))).token_ids
        kept, source = await self._kept(engine, prompt, "a")
        if case == "used" and self.hands_over_to_itself:
            done = await collect(engine, fetching_from(source, request_of(prompt, salt="b")))
            assert done.token_ids == wanted
        await engine.abort([kept])
        if case == "nonsense":
            source = {"from": "nowhere", "blocks": [[1, 2]]}
        if case == "nonsense" or self.hands_over_to_itself:
            done = await collect(engine, fetching_from(source, request_of(prompt, salt="c")))
            assert done.token_ids == wanted
        await eventually(lambda: engine.load() == Load(kv_tokens_free=engine.info.kv_capacity_tokens))

    async def test_an_aborted_fetch_leaves_nothing(self, engine: Engine) -> None:
        if not (engine.info.hands_over and self.hands_over_to_itself):
            return
        sink, prompt = Recorder(), prompt_of(engine, 60, 27)
        for ticks in (0, 1, 2, 5):
            kept, source = await self._kept(engine, prompt, f"x{ticks}")
            fetching = fetching_from(source, request_of(prompt, salt=f"y{ticks}"))
            await engine.submit(fetching, sink)
            for _ in range(ticks):
                await asyncio.sleep(0.0005)
            await engine.abort([fetching.request_id])
            assert fetching.request_id in sink.finals
            await engine.abort([kept])
            await eventually(lambda: engine.load() == Load(kv_tokens_free=engine.info.kv_capacity_tokens))

    async def _kept(self, engine: Engine, prompt: Sequence[int], salt: str) -> tuple[str, dict[str, Any]]:
        """Prefill and keep; the request's id and its source."""
        sink, request = Recorder(), keeping(prompt, salt)
        await engine.submit(request, sink)
        await sink.ended(request.request_id)
        source = sink.finals[request.request_id].kv_source
        assert source is not None
        return request.request_id, source
