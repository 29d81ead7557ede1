"""Exchange: one HTTP request's answer, of one or more choices, as it comes in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from vllm_deepinfer.engine import UNBUILT, FinishReason, TokenDelta
from vllm_deepinfer.gateway.dialects.base import Body, Collector, StreamEncoder
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.lane import CHUNK_HEADS, Lane, chunk_head
from vllm_deepinfer.gateway.streaming.parser import Chunk, OutputParser
from vllm_deepinfer.gateway.streaming.sse import Headers, SlowReader, SseWriter

MOST_HEADS = len(CHUNK_HEADS)


@dataclass(kw_only=True, slots=True)
class Account:
    """What one request has used; read by logs, limits and metrics.

    Attributes: times are monotonic seconds; tokens as in usage; `output_events` counts deltas with chunks.
    """

    received: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_events: int = 0
    first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)


class Exchange:
    """Base of the two ways to answer: as events, or as one document. `done` resolves exactly once.

    Attributes:
        write: takes an event of plain text that needed no encoder, see `form`.
        lane: a cheaper way for the same, if there is one.
    """

    __slots__ = (
        "_choices",
        "_open",
        "abandoned",
        "account",
        "done",
        "error",
        "lane",
        "left",
        "metrics",
        "write",
    )

    def __init__(self, metrics: GatewayMetrics, account: Account, choices: int = 1) -> None:
        self.metrics = metrics
        self.account = account
        self.error: ApiError | None = None
        self.abandoned = False  # the client does not read: there is nobody to tell
        self.left = False  # the client has closed its connection first
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = choices
        self._choices: list[Choice] = []
        self.lane: Lane | None = None
        self.write: Callable[[bytes], None] = _nowhere

    def join(self, choice: Choice) -> None:
        """A choice has been added."""
        self._choices.append(choice)

    def settle(self) -> None:
        """Put what has been generated so far on the account, also when the client has left. Idempotent."""
        self.account.output_tokens = sum(choice.settle() for choice in self._choices)

    @property
    def unfinished(self) -> bool:
        """Whether the engine may still be at work for it."""
        return self.error is not None or self._open > 0

    def emit(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> None:
        """Take chunks of one choice."""
        raise NotImplementedError

    def form(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands around the text in the choice's last event, if the next one may go past the encoder."""
        return None

    def end_choice(self, parser: OutputParser, reason: str) -> None:
        """One choice has ended."""
        self.account.finish_reasons.append(reason)
        self._open -= 1
        if self._open == 0 and not self.done.done():
            self.done.set_result(None)

    def leave(self) -> None:
        """The client has gone."""
        if not self.done.done():
            self.left = True
            self.done.set_result(None)

    def fail(self, error: ApiError, reason: str) -> None:
        """The whole answer has failed; `reason` is a metric label."""
        if self.done.done():
            return
        self.metrics.failures.labels(reason).inc()
        self.error = error
        for choice in self._choices:
            choice.unsteady()
        self.done.set_result(None)


class StreamExchange(Exchange):
    """Events to a socket; the head goes out with the first of them, so an error before it has a status."""

    __slots__ = (
        "_headers",
        "encoder",
        "writer",
    )

    def __init__(
        self,
        metrics: GatewayMetrics,
        account: Account,
        choices: int,
        encoder: StreamEncoder,
        writer: SseWriter,
        headers: Headers,
    ) -> None:
        super().__init__(metrics, account, choices)
        self.encoder = encoder
        self.writer = writer
        self.lane = writer.lane
        self.write = writer.write
        self._headers = headers

    def open(self) -> None:
        """Send the response head unless it is out."""
        if not self.writer.started:
            self.writer.start(200, self._headers)

    def keep_alive(self) -> None:
        """Send a comment, so that nobody on the way takes a long prefill for a dead connection."""
        self.open()
        if not self.writer.pending:
            self.writer.write(b": keep-alive\n\n")

    def emit(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> None:
        """See Exchange."""
        if not self.writer.started:
            self.open()
        self.writer.write(self.encoder.encode(index, chunks, parser))

    def form(self, index: int) -> tuple[bytes, bytes] | None:
        """See Exchange."""
        return self.encoder.forms.get(index)

    def fail(self, error: ApiError, reason: str) -> None:
        """See Exchange. After the head, the error is an event."""
        if not (self.done.done() or self.abandoned) and self.writer.started:
            with suppress(SlowReader):
                self.writer.write(self.encoder.error(error))
        super().fail(error, reason)


class CollectExchange(Exchange):
    """One JSON document at the end."""

    __slots__ = ("_collector",)

    def __init__(self, metrics: GatewayMetrics, account: Account, choices: int, collector: Collector) -> None:
        super().__init__(metrics, account, choices)
        self._collector = collector

    def emit(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> None:
        """See Exchange."""
        self._collector.add(index, chunks, parser)

    def result(self) -> Body:
        """The document, once `done` without an error."""
        return self._collector.result()


class Choice:
    """One engine request of an exchange; a Receiver."""

    __slots__ = (
        "_exchange",
        "_form",
        "_index",
        "_last",
        "_observe",
        "_parser",
        "_past",
        "_plain_of",
        "_prefix",
        "_size",
        "_suffix",
        "_write",
        "lane",
        "request_id",
    )

    def __init__(self, request_id: str, index: int, parser: OutputParser, exchange: Exchange) -> None:
        self.request_id = request_id
        self._index = index
        self._parser = parser
        self._exchange = exchange
        self._last = 0.0
        # What the usual token needs is here, because it is cold in the cache at every step: all else of the
        # exchange and the parser is left alone.
        self.lane = exchange.lane
        self._write = exchange.write
        self._form: tuple[bytes, bytes] | None = None
        self._prefix, self._suffix, self._size = b"", b"", 0  # around the text in a frame; without the head
        self._past = 0  # tokens that the parser has not been told of
        self._plain_of = parser.plain_of
        self._observe = exchange.metrics.itl.observe
        exchange.join(self)

    def quick(self, delta: TokenDelta, now: float) -> bytes | None:
        """See Receiver. Plain text goes out in the form of the event before it, past parser and encoder."""
        lane = self.lane
        if lane is None or not lane.quick:
            return None
        text = self._plain(delta, now)
        if text is None:
            return None
        size = self._size + len(text)
        head = CHUNK_HEADS[size] if size < MOST_HEADS else chunk_head(size)
        return b"".join((head, self._prefix, text, self._suffix))

    def deliver(self, delta: TokenDelta, now: float) -> bool:
        """See Receiver."""
        text = self._plain(delta, now)
        if text is None:
            return self._parse(delta, now)
        assert self._form is not None
        self._write(b"%b%b%b" % (self._form[0], text, self._form[1]))
        return False

    def _plain(self, delta: TokenDelta, now: float) -> bytes | None:
        """The text of a delta that may go past parser and encoder, and then it is counted."""
        ids, plain_of = delta.token_ids, self._plain_of
        if self._form is None or delta.finish_reason is not None or len(ids) != 1:
            return None
        if not 0 <= ids[0] < len(plain_of) or (text := plain_of[ids[0]]) is None:
            return None
        self._past += 1
        self._observe(now - self._last)
        self._last = now
        return text

    def _parse(self, delta: TokenDelta, now: float) -> bool:
        exchange, parser = self._exchange, self._parser
        if exchange.done.done():
            return True
        if delta.token_ids:
            if self._last:
                self._observe(now - self._last)
            else:
                self._begin(delta, now)
            self._last = now
            if delta.accepted_draft_tokens:
                exchange.metrics.draft_tokens.inc(delta.accepted_draft_tokens)
        if self._past:
            self.settle()
        chunks = parser.feed(delta)
        if chunks:
            exchange.account.output_events += 1
            exchange.emit(self._index, chunks, parser)
        if parser.finished:
            exchange.end_choice(parser, "stop" if delta.finish_reason is None else str(delta.finish_reason))
        elif delta.finish_reason is not None:
            exchange.fail(_failure(delta), f"engine_{delta.finish_reason}")
        self._shape(exchange.form(self._index) if parser.steady else None)
        return parser.finished

    def _shape(self, form: tuple[bytes, bytes] | None) -> None:
        """What the next event looks like, if `quick` may take it."""
        if form is not None and form is not self._form:
            self._prefix, self._suffix = form[0], form[1] + b"\r\n"
            self._size = len(form[0]) + len(form[1])
        self._form = form

    def settle(self) -> int:
        """Tell the parser and the account what went past them; tokens so far. Idempotent."""
        self._parser.skip(self._past)
        self._exchange.account.output_events += self._past
        self._past = 0
        return self._parser.tokens

    def unsteady(self) -> None:
        """Nothing may go past the parser any more."""
        self._form = None

    def broken(self, error: Exception) -> None:
        """See Receiver."""
        if isinstance(error, SlowReader):
            self._exchange.abandoned = True
            self._exchange.fail(ApiError(408, "the client did not read its stream."), "slow_reader")
        else:
            self._exchange.fail(ApiError(500, "the answer could not be processed."), "internal")

    def _begin(self, delta: TokenDelta, now: float) -> None:
        account = self._exchange.account
        if account.first_token is None:
            account.first_token = now
            account.cached_tokens = delta.cached_tokens
            self._exchange.metrics.ttft.observe(now - account.received)


def _nowhere(event: bytes) -> None:
    raise AssertionError("a document has no events")


def _unbuilt() -> ApiError:
    return ApiError(
        400,
        "the engine cannot build this answer's constraint (response format, strict tools, tool_choice or "
        "structured_outputs); look for rules or schemas that only refer to themselves, or are empty.",
        code="invalid_constraint",
    )


def _failure(delta: TokenDelta) -> ApiError:
    if delta.stop_reason == UNBUILT:
        return _unbuilt()
    if delta.finish_reason is FinishReason.ABORT:
        return ApiError(503, "the engine stopped working on this request; send it again.", retry_after_s=1.0)
    message = delta.error or "the engine failed on this request; send it again."
    return ApiError(500, message, code="engine_error")
