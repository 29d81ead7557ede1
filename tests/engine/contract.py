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
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from vllm_deepinfer.engine import (
    Engine,
    EngineDraining,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    HealthState,
    InvalidRequest,
    KvHandOver,
    Load,
    SamplingParams,
    TokenDelta,
    collect,
    stream,
)

_ids = itertools.count()


class Recorder:
    """A sink that checks, at every delivery, what invariants 1 to 3 promise, and keeps what it got."""

    def __init__(self) -> None:
        self.calls: list[list[TokenDelta]] = []
        self.tokens: dict[str, list[int]] = {}
        self.finals: dict[str, TokenDelta] = {}
        self._ended: dict[str, asyncio.Event] = {}

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        ids = [delta.request_id for delta in deltas]
        assert ids and len(set(ids)) == len(ids), "at least one delta, and at most one per request and step"
        self.calls.append(list(deltas))
        for delta in deltas:
            assert delta.request_id not in self.finals, "nothing comes after the final delta"
            assert delta.token_ids or delta.final, "a delta without tokens is a final one"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.final:
                self.finals[delta.request_id] = delta
                self._event(delta.request_id).set()

    def _event(self, request_id: str) -> asyncio.Event:
        return self._ended.setdefault(request_id, asyncio.Event())

    async def ended(self, *request_ids: str) -> None:
        """Wait for the final deltas of these requests."""
        for request_id in request_ids:
            await asyncio.wait_for(self._event(request_id).wait(), 120)

    async def started(self, request_id: str, tokens: int = 1) -> None:
        """Wait until a request has that many tokens, or has ended."""
        await eventually(lambda: len(self.tokens.get(request_id, ())) >= tokens or request_id in self.finals)


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `condition()` holds; fails when it does not become true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def prompt_of(engine: Engine, length: int, seed: int) -> list[int]:
    """Random ordinary token ids."""
    rng, vocab_size = random.Random(seed), engine.info.vocab_size or 256
    return [rng.randrange(20, vocab_size) for _ in range(length)]


def request_of(
    prompt: Sequence[int], request_id: str = "", salt: str | None = None, **sampling: object
) -> GenerateRequest:
    """A greedy request with a new id that runs to max_tokens (16)."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(
        request_id=request_id or f"r{next(_ids)}", prompt_token_ids=prompt, sampling=params, cache_salt=salt
    )


def keeping(prompt: Sequence[int], salt: str | None = None) -> GenerateRequest:
    """A request whose KV is kept."""
    request = request_of(prompt, salt=salt, max_tokens=1)
    return msgspec.structs.replace(request, hand_over=KvHandOver(keep=True))


def fetching_from(source: dict[str, Any], request: GenerateRequest) -> GenerateRequest:
    """The request, its prompt's KV to be fetched from there."""
    return msgspec.structs.replace(request, hand_over=KvHandOver(source=source))


class EngineContract:
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

    # Hand-over, invariants 7 and 8

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
