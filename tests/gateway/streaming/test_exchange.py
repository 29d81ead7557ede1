"""Exchanges: several choices end once; errors before and after the head; accounts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from vllm_deepinfer.engine import LOST, UNBUILT, FinishReason, TokenDelta
from vllm_deepinfer.gateway.dialects.base import StreamEncoder
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.exchange import Account, Choice, CollectExchange, StreamExchange
from vllm_deepinfer.gateway.streaming.parser import OutputParser
from vllm_deepinfer.gateway.streaming.sse import SlowReader, SseWriter


class FakeParser:
    """Turns every token into a chunk; ends with the delta that ends."""

    steady = False
    plain_of = (None, b"one", b"two", None)

    def __init__(self) -> None:
        self.tokens = 0
        self.finished = False

    def skip(self, count: int) -> None:
        self.tokens += count

    def feed(self, delta: TokenDelta) -> list[int]:
        self.tokens += len(delta.token_ids)
        self.finished = delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return list(delta.token_ids)


class Letters:
    """An encoder whose events are letters."""

    def __init__(self) -> None:
        self.forms: dict[int, tuple[bytes, bytes]] = {}

    def encode(self, index: int, chunks: Any, parser: Any) -> bytes:
        return "".join(f"{index}:{chunk} " for chunk in chunks).encode()

    def error(self, error: ApiError) -> bytes:
        return f"!{error.status}".encode()


class Sent:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> str:
        return b"".join(m.get("body", b"") for m in self.messages).decode()


def make(choices: int = 1) -> tuple[StreamExchange, list[Choice], Sent, GatewayMetrics]:
    metrics, sent = GatewayMetrics(), Sent()
    encoder = cast(StreamEncoder, Letters())
    exchange = StreamExchange(
        metrics, Account(received=10.0), choices, encoder, SseWriter(sent.send), [(b"a", b"b")]
    )
    parsers = [cast(OutputParser, FakeParser()) for _ in range(choices)]
    return exchange, [Choice(f"r{i}", i, parser, exchange) for i, parser in enumerate(parsers)], sent, metrics


async def test_the_head_goes_out_with_the_first_chunk() -> None:
    exchange, (choice,), sent, metrics = make()
    assert choice.deliver(TokenDelta("r0", (), cached_tokens=3), 11.0) is False
    assert sent.messages == []
    choice.deliver(TokenDelta("r0", (7,), cached_tokens=3), 12.0)
    assert sent.messages[0]["headers"] == [(b"a", b"b")] and sent.body == "0:7 "
    account = exchange.account
    assert (account.first_token, account.cached_tokens, account.output_events) == (12.0, 3, 1)
    assert metrics.ttft.count == 1 and metrics.ttft.sum == 2.0
    choice.deliver(TokenDelta("r0", (8,)), 12.5)
    assert metrics.itl.count == 1 and metrics.itl.sum == 0.5


async def test_all_choices_have_to_end() -> None:
    exchange, choices, sent, metrics = make(2)
    choices[0].deliver(TokenDelta("r0", (1,), FinishReason.STOP), 11.0)
    assert not exchange.done.done() and exchange.unfinished
    choices[1].deliver(TokenDelta("r1", (2, 3), FinishReason.LENGTH), 11.0)
    assert exchange.done.done() and not exchange.unfinished
    assert exchange.account.finish_reasons == ["stop", "length"]
    exchange.settle()
    exchange.settle()
    assert exchange.account.output_tokens == 3
    assert sent.body == "0:1 1:2 1:3 "
    assert metrics.ttft.count == 1  # of the request, not of each choice


async def test_a_failure_ends_the_whole_answer_once() -> None:
    exchange, choices, sent, metrics = make(2)
    choices[0].deliver(TokenDelta("r0", (1,)), 11.0)
    choices[0].deliver(TokenDelta("r0", (), FinishReason.ERROR, error="it broke."), 11.0)
    assert exchange.error is not None and exchange.error.message == "it broke." and sent.body == "0:1 !500"
    assert choices[1].deliver(TokenDelta("r1", (5,)), 11.0) is True  # the engine may stop the other one
    choices[1].broken(ValueError("late"))
    assert sent.body == "0:1 !500"
    value = metrics.registry.get_sample_value("deepinfer_gateway_failures_total", {"reason": "engine_error"})
    assert value == 1


async def test_a_failure_before_the_head_writes_nothing() -> None:
    exchange, (choice,), sent, _ = make()
    choice.deliver(TokenDelta("r0", (), FinishReason.ABORT), 11.0)
    assert exchange.error is not None and exchange.error.status == 503 and sent.messages == []


async def test_a_slow_reader_is_not_told() -> None:
    exchange, (choice,), sent, metrics = make()
    choice.deliver(TokenDelta("r0", (1,)), 11.0)
    choice.broken(SlowReader("too much"))
    assert exchange.abandoned and exchange.done.done() and sent.body == "0:1 "
    value = metrics.registry.get_sample_value("deepinfer_gateway_failures_total", {"reason": "slow_reader"})
    assert value == 1


async def test_keep_alive_is_a_comment() -> None:
    exchange, _, sent, _ = make()
    exchange.keep_alive()
    exchange.keep_alive()
    assert sent.body == ": keep-alive\n\n: keep-alive\n\n" and len(sent.messages) == 3


async def test_accepted_drafts_are_counted() -> None:
    _, (choice,), _, metrics = make()
    choice.deliver(TokenDelta("r0", (1, 2, 3), accepted_draft_tokens=2), 11.0)
    found = metrics.registry.get_sample_value("deepinfer_gateway_tokens_total", {"kind": "accepted_draft"})
    assert found == 2


@pytest.mark.parametrize(("reason", "status"), [(UNBUILT, 400), (LOST, 500), (None, 500)])
async def test_a_constraint_that_cannot_be_built_is_the_clients_mistake(
    reason: str | None, status: int
) -> None:
    exchange, (choice,), _, _ = make()
    choice.deliver(TokenDelta("r0", (), FinishReason.ERROR, reason, error="its log says why."), 12.0)
    await exchange.done
    assert exchange.error is not None and exchange.error.status == status
    assert ("constraint" in exchange.error.message) == (status == 400)


async def test_collecting() -> None:
    class Collector:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def add(self, index: int, chunks: Any, parser: Any) -> None:
            self.seen.append((index, chunks))

        def result(self) -> dict[str, Any]:
            return {"seen": self.seen}

    exchange = CollectExchange(GatewayMetrics(), Account(received=0.0), 1, Collector())
    choice = Choice("r", 0, cast(OutputParser, FakeParser()), exchange)
    choice.deliver(TokenDelta("r", (1, 2)), 1.0)
    choice.deliver(TokenDelta("r", (3,), FinishReason.STOP), 2.0)
    await exchange.done
    assert exchange.result() == {"seen": [(0, [1, 2]), (0, [3])]}


async def steady() -> tuple[StreamExchange, Choice, FakeParser, Sent, GatewayMetrics]:
    """A choice whose next plain token needs neither parser nor encoder."""
    exchange, (choice,), sent, metrics = make()
    parser = cast(FakeParser, choice._parser)
    exchange.encoder.forms[0] = (b"<", b">")
    parser.steady = True
    choice.deliver(TokenDelta("r0", (7,)), 11.0)
    parser.steady = False
    return exchange, choice, parser, sent, metrics


async def test_plain_text_goes_past_parser_and_encoder() -> None:
    exchange, choice, parser, sent, metrics = await steady()
    assert choice.deliver(TokenDelta("r0", (1,)), 11.5) is False
    assert choice.deliver(TokenDelta("r0", (2,)), 12.5) is False
    assert sent.body == "0:7 <one><two>" and parser.tokens == 1
    assert metrics.itl.count == 2 and metrics.itl.sum == 1.5
    exchange.settle()
    exchange.settle()
    assert parser.tokens == 3 and exchange.account.output_tokens == 3 and exchange.account.output_events == 3


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta("r0", (3,)),  # no plain text
        TokenDelta("r0", (1, 2)),
        TokenDelta("r0", (4,)),  # beyond the table
        TokenDelta("r0", (-1,)),
        TokenDelta("r0", (1,), FinishReason.STOP),
    ],
)
async def test_the_rest_goes_through_the_parser_which_is_told_what_it_missed(delta: TokenDelta) -> None:
    _, choice, parser, sent, _ = await steady()
    choice.deliver(TokenDelta("r0", (1,)), 11.5)
    choice.deliver(delta, 12.0)
    assert parser.tokens == 2 + len(delta.token_ids)
    assert sent.body == "0:7 <one>" + "".join(f"0:{token} " for token in delta.token_ids)
    choice.deliver(TokenDelta("r0", (1,)), 13.0)  # not steady any more
    assert not sent.body.endswith(">")


async def test_after_a_failure_nothing_goes_past() -> None:
    exchange, choice, _, sent, _ = await steady()
    exchange.fail(ApiError(500, "another choice failed."), "internal")
    assert choice.deliver(TokenDelta("r0", (1,)), 12.0) is True
    assert sent.body == "0:7 !500"


async def test_a_client_that_leaves_ends_the_wait_and_leaves_the_engine_at_work() -> None:
    exchange, (choice,), _, _ = make()
    choice.deliver(TokenDelta("r0", (1,)), 11.0)
    exchange.leave()
    assert exchange.done.done() and exchange.left and exchange.unfinished
    assert choice.deliver(TokenDelta("r0", (1,)), 12.0) is True


async def test_leaving_after_the_end_changes_nothing() -> None:
    exchange, (choice,), _, _ = make()
    choice.deliver(TokenDelta("r0", (1,), FinishReason.STOP), 11.0)
    exchange.leave()
    assert not exchange.left and not exchange.unfinished


async def test_an_answer_whose_waiter_was_cancelled_is_unfinished() -> None:
    """Cancelling a task cancels the future it waits for; the engine is still at work."""
    exchange, _, _, _ = make()
    exchange.done.cancel()
    assert exchange.unfinished
