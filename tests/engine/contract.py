"""What every engine must do: subclass `EngineContract` with an `engine` fixture and every invariant is
tested.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def engine(self): ...   # started and idle; may be shared by all tests of the class

`test_zz_lifecycle` drains and closes the engine; it is the last one. Answers must be deterministic when
greedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest

from tests.engine.hand_over_contract import HandOverContract
from tests.engine.recorder import Recorder, eventually, prompt_of, request_of
from vllm_deepinfer.engine import (
    Engine,
    EngineDraining,
    EngineUnavailable,
    FinishReason,
    HealthState,
    InvalidRequest,
    TokenDelta,
    collect,
    stream,
)


class EngineContract(HandOverContract):
    """The tests. None of them assumes how fast an engine is."""

    storm_requests = 200
    queues_elsewhere = False
    """Whether a prompt may be computed before the caller has seen anything of it."""

    async def test_info_is_plausible(self, engine: Engine) -> None:
        info = engine.info
        assert isinstance(engine, Engine)
        assert info.model and info.max_model_len > 64 and info.block_size >= 1
        assert info.kv_capacity_tokens >= info.max_model_len

    async def test_a_request_runs_to_its_length(self, engine: Engine) -> None:
        sink, request = Recorder(), request_of(prompt_of(engine, 10, 1))
        await engine.submit(request, sink)
        await sink.ended(request.request_id)
        final = sink.finals[request.request_id]
        assert len(sink.tokens[request.request_id]) == 16
        assert (final.finish_reason, final.stop_reason, final.error) == (FinishReason.LENGTH, None, None)

    @pytest.mark.parametrize("max_tokens", [1, 2])
    async def test_short_answers(self, engine: Engine, max_tokens: int) -> None:
        done = await collect(engine, request_of(prompt_of(engine, 5, 2), max_tokens=max_tokens))
        assert (len(done.token_ids), done.finish_reason) == (max_tokens, FinishReason.LENGTH)

    async def test_without_a_limit_the_context_is_filled(self, engine: Engine) -> None:
        length = engine.info.max_model_len - 5
        done = await collect(engine, request_of(prompt_of(engine, length, 3), max_tokens=None))
        assert (len(done.token_ids), done.finish_reason) == (5, FinishReason.LENGTH)

    async def test_answers_do_not_depend_on_company(self, engine: Engine) -> None:
        prompts = [prompt_of(engine, 3 + 7 * i, 100 + i) for i in range(8)]
        alone = [(await collect(engine, request_of(prompt))).token_ids for prompt in prompts]
        together = await asyncio.gather(*(collect(engine, request_of(prompt)) for prompt in prompts))
        assert [done.token_ids for done in together] == alone
        assert len({tuple(ids) for ids in alone}) == len(prompts), "the prompt matters"

    async def test_a_stop_token_ends_the_answer_and_is_named(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 12, 4)
        answer = (await collect(engine, request_of(prompt))).token_ids
        stop = answer[7]
        end = answer.index(stop) + 1
        done = await collect(engine, request_of(prompt, stop_token_ids=[stop]))
        assert (done.token_ids, done.finish_reason, done.stop_reason) == (
            answer[:end],
            FinishReason.STOP,
            stop,
        )

    async def test_min_tokens_hold_back_a_stop_token(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 12, 4)
        answer = (await collect(engine, request_of(prompt))).token_ids
        done = await collect(engine, request_of(prompt, stop_token_ids=[answer[2]], min_tokens=6))
        assert len(done.token_ids) > 6
        assert answer[2] not in done.token_ids[:6]

    @pytest.mark.parametrize("count", [0, 3])
    async def test_logprobs_come_one_per_token(self, engine: Engine, count: int) -> None:
        done = await collect(engine, request_of(prompt_of(engine, 9, 5), logprobs=count))
        assert done.logprobs is not None and [lp.token_id for lp in done.logprobs] == done.token_ids
        for entry in done.logprobs:
            values = [value for _, value in entry.top]
            assert entry.logprob <= 0 and entry.rank >= 1
            assert len(values) == count and values == sorted(values, reverse=True)
            if count:
                assert entry.top[0] == (entry.token_id, entry.logprob), "greedy takes the most likely token"

    async def test_no_logprobs_unless_asked_for(self, engine: Engine) -> None:
        assert (await collect(engine, request_of(prompt_of(engine, 9, 5)))).logprobs is None

    async def test_prompt_logprobs_come_once_and_first(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 3 * engine.info.block_size, 6)
        for _ in range(2):  # the second time the prefix is cached, and every position must still be there
            deltas = [delta async for delta in stream(engine, request_of(prompt, prompt_logprobs=1))]
            got = deltas[0].prompt_logprobs
            assert got is not None and got[0] is None
            assert [entry.token_id for entry in got[1:] if entry] == prompt[1:]
            assert all(delta.prompt_logprobs is None for delta in deltas[1:])

    async def test_a_prefix_is_found_again_within_its_salt_only(self, engine: Engine) -> None:
        size = engine.info.block_size
        prompt = prompt_of(engine, 3 * size + 1, 7)
        cold = await collect(engine, request_of(prompt, salt="a"))
        warm = await collect(engine, request_of(prompt, salt="a"))
        foreign = await collect(engine, request_of(prompt, salt="b"))
        assert (cold.cached_tokens, warm.cached_tokens, foreign.cached_tokens) == (0, 3 * size, 0)
        assert cold.token_ids == warm.token_ids == foreign.token_ids

    async def test_a_seed_reproduces_a_sampled_answer(self, engine: Engine) -> None:
        prompt = prompt_of(engine, 9, 8)
        first, again, other = [
            (await collect(engine, request_of(prompt, temperature=1.0, seed=seed))).token_ids
            for seed in (1, 1, 2)
        ]
        assert first == again != other

    async def test_an_id_in_use_is_refused_and_free_after_its_end(self, engine: Engine) -> None:
        sink, prompt = Recorder(), prompt_of(engine, 9, 9)
        await engine.submit(request_of(prompt, "same"), sink)
        other = Recorder()
        with pytest.raises(InvalidRequest, match="same"):
            await engine.submit(request_of(prompt, "same"), other)
        await sink.ended("same")
        await engine.submit(request_of(prompt, "same"), other)
        await other.ended("same")
        assert sink.tokens["same"] == other.tokens["same"]

    async def test_what_cannot_be_served_is_refused_in_one_sentence(self, engine: Engine) -> None:
        info, sink = engine.info, Recorder()
        prompt = prompt_of(engine, 9, 10)
        bad = [
            (request_of(prompt_of(engine, info.max_model_len, 10)), "context"),
            (request_of(prompt, logprobs=info.max_logprobs + 1), "logprobs must be at most"),
        ]
        if info.vocab_size is not None:
            bad.append((request_of([5, info.vocab_size]), f"token id {info.vocab_size}"))
            bad.append((request_of(prompt, stop_token_ids=[info.vocab_size]), "stop_token_ids"))
        for request, words in bad:
            with pytest.raises(InvalidRequest, match=words):
                await engine.submit(request, sink)
        assert not sink.calls
        await collect(engine, request_of(prompt))  # it still serves

    async def test_abort_ends_a_request_before_it_returns(self, engine: Engine) -> None:
        sink, request = Recorder(), request_of(prompt_of(engine, 9, 11), max_tokens=150)
        await engine.submit(request, sink)
        await sink.started(request.request_id, 2)
        await engine.abort([request.request_id])
        final = sink.finals[request.request_id]
        assert (final.finish_reason, final.error) == (FinishReason.ABORT, None)
        await collect(
            engine, request_of(prompt_of(engine, 9, 11))
        )  # its steps bring nothing for the other one

    async def test_abort_is_idempotent_in_any_order_with_finish(self, engine: Engine) -> None:
        sink, prompt = Recorder(), prompt_of(engine, 9, 12)
        await engine.abort(["never seen"])
        finished, fresh, twice = request_of(prompt), request_of(prompt), request_of(prompt, max_tokens=150)
        await engine.submit(finished, sink)
        await sink.ended(finished.request_id)
        await engine.abort([finished.request_id])
        await engine.submit(fresh, sink)
        await engine.abort([fresh.request_id])  # in the same tick
        await engine.submit(twice, sink)
        both = [twice.request_id, twice.request_id, "never seen", finished.request_id]
        await asyncio.gather(engine.abort(both), engine.abort(both))
        reasons = [sink.finals[r.request_id].finish_reason for r in (finished, fresh, twice)]
        assert reasons == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ABORT]
        assert not sink.tokens[fresh.request_id]

    async def test_a_cancelled_abort_has_still_aborted(self, engine: Engine) -> None:
        sink, request = Recorder(), request_of(prompt_of(engine, 9, 13), max_tokens=150)
        await engine.submit(request, sink)
        await sink.started(request.request_id)
        task = asyncio.ensure_future(engine.abort([request.request_id]))
        await asyncio.sleep(0)
        task.cancel()
        assert sink.finals[request.request_id].finish_reason is FinishReason.ABORT
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await eventually(lambda: engine.load().kv_tokens_used == 0)

    @pytest.mark.parametrize("ticks", [0, 1, 2, 3])
    async def test_a_cancelled_submit_is_not_accepted(self, engine: Engine, ticks: int) -> None:
        sink, request = Recorder(), request_of(prompt_of(engine, 9, 14), max_tokens=4)
        task = asyncio.ensure_future(engine.submit(request, sink))
        for _ in range(ticks):
            await asyncio.sleep(0)
        accepted = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if accepted:
            await sink.ended(request.request_id)
        else:
            await collect(engine, request_of(prompt_of(engine, 9, 14), max_tokens=8))
            assert not sink.calls
        await eventually(lambda: engine.load().active_requests == 0)

    async def test_one_call_serves_all_streams_of_a_step(self, engine: Engine) -> None:
        sink = Recorder()
        requests = [request_of(prompt_of(engine, 6, 200 + i), max_tokens=24) for i in range(12)]
        await asyncio.gather(*(engine.submit(request, sink) for request in requests))
        await sink.ended(*(request.request_id for request in requests))
        deltas = sum(map(len, sink.calls))
        assert deltas / len(sink.calls) > 6, "twelve streams in lockstep share calls"

    async def test_a_sink_that_raises_harms_nobody_else(self, engine: Engine) -> None:
        def broken(deltas: Sequence[TokenDelta]) -> None:
            raise RuntimeError("this sink is broken on purpose")

        good, prompt = Recorder(), prompt_of(engine, 9, 15)
        victim, healthy = request_of(prompt), request_of(prompt)
        await engine.submit(victim, broken)
        await engine.submit(healthy, good)
        await good.ended(healthy.request_id)
        assert len(good.tokens[healthy.request_id]) == 16
        await eventually(lambda: engine.load().active_requests == 0)
        assert engine.health().state is HealthState.READY

    async def test_load_counts_what_is_there(self, engine: Engine) -> None:
        sink, info = Recorder(), engine.info
        await eventually(lambda: engine.load().kv_tokens_used == 0)
        before = engine.load()
        assert (before.active_requests, before.queued_prompt_tokens) == (0, 0)
        assert before.kv_tokens_free == info.kv_capacity_tokens
        requests = [request_of(prompt_of(engine, 20, 300 + i), max_tokens=150) for i in range(3)]
        for request in requests:
            await engine.submit(request, sink)
        assert engine.load().active_requests == 3
        # Those that a step has not reached yet; an engine in another process may have begun meanwhile.
        queued = engine.load().queued_prompt_tokens
        assert queued in (0, 20, 40, 60) and (queued == 60 or sink.calls or self.queues_elsewhere)
        for request in requests:
            await sink.started(request.request_id, 3)
        during = engine.load()
        assert (during.active_requests, during.queued_prompt_tokens) == (3, 0)
        assert during.kv_tokens_used >= 3 * 20
        assert during.kv_tokens_used + during.kv_tokens_free == info.kv_capacity_tokens
        await engine.abort(request.request_id for request in requests)
        await eventually(lambda: engine.load() == before)

    async def test_health_shows_progress(self, engine: Engine) -> None:
        before = engine.health()
        await collect(engine, request_of(prompt_of(engine, 9, 16)))
        after = engine.health()
        assert (after.state, after.detail, after.serving) == (HealthState.READY, "", True)
        assert after.steps > before.steps

    async def test_leaving_a_stream_aborts_it(self, engine: Engine) -> None:
        request = request_of(prompt_of(engine, 9, 17), max_tokens=150)
        async with contextlib.aclosing(stream(engine, request)) as deltas:
            async for _ in deltas:
                break
        assert engine.load().active_requests == 0

    async def test_a_storm_of_requests_and_aborts_ends_each_exactly_once(self, engine: Engine) -> None:
        rng, sink = random.Random(18), Recorder()
        requests = [
            request_of(
                prompt_of(engine, rng.choice([1, 5, 40, 60]), rng.randrange(40)),
                max_tokens=rng.randint(1, 30),
                logprobs=rng.choice([None, None, 1]),
            )
            for _ in range(self.storm_requests)
        ]
        aborted: set[str] = set()
        for request in requests:
            await engine.submit(request, sink)
            if rng.random() < 0.4:
                victim = rng.choice(requests).request_id  # accepted, ended or still to come
                if victim in sink.tokens and victim not in sink.finals:
                    aborted.add(victim)
                await engine.abort([victim])
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.02)
        await sink.ended(*(request.request_id for request in requests))
        for request in requests:
            final, tokens = sink.finals[request.request_id], sink.tokens[request.request_id]
            if request.request_id in aborted:
                assert final.finish_reason is FinishReason.ABORT
            if final.finish_reason is FinishReason.LENGTH:
                assert len(tokens) == request.sampling.max_tokens
        await eventually(lambda: engine.load().kv_tokens_used == 0)
        assert engine.load().active_requests == 0

    async def test_zz_lifecycle(self, engine: Engine) -> None:
        await engine.start()  # already started: nothing happens
        sink, prompt = Recorder(), prompt_of(engine, 9, 19)
        running = [request_of(prompt, max_tokens=20) for _ in range(4)]
        for request in running:
            await engine.submit(request, sink)
        draining = asyncio.ensure_future(engine.drain())
        await asyncio.sleep(0)
        assert engine.health().state is HealthState.DRAINING
        with pytest.raises(EngineDraining):
            await engine.submit(request_of(prompt), sink)
        await asyncio.wait_for(draining, 60)
        assert [len(sink.tokens[r.request_id]) for r in running] == [20] * 4, "what was accepted has ended"
        await engine.drain()
        await engine.close()
        await engine.close()
        assert engine.health().state is HealthState.DEAD
        with pytest.raises(EngineUnavailable):
            await engine.submit(request_of(prompt), sink)
        await engine.abort([running[0].request_id])
        assert len(sink.finals) == 4
