"""GenerationEndpoint: the raw ASGI path of the three generation APIs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

from vllm_deepinfer.gateway.calls import CLIENT_LEFT, Call
from vllm_deepinfer.gateway.core import Core
from vllm_deepinfer.gateway.dialects.base import Body, Prepared
from vllm_deepinfer.gateway.errors import ApiError, error_body, internal_error
from vllm_deepinfer.gateway.generation import begin, collect
from vllm_deepinfer.gateway.http_io import Disconnected, Scope, header, parse_object, read_body, send_json
from vllm_deepinfer.gateway.latency import targets_from_headers
from vllm_deepinfer.gateway.offload import offload
from vllm_deepinfer.gateway.retention import NOTHING, from_headers
from vllm_deepinfer.gateway.steps import within
from vllm_deepinfer.gateway.streaming.exchange import CollectExchange, Exchange, StreamExchange
from vllm_deepinfer.gateway.streaming.keepalive import KeepAlive
from vllm_deepinfer.gateway.streaming.lane import Lane
from vllm_deepinfer.gateway.streaming.sse import Receive, Send, SlowReader, SseWriter

logger = logging.getLogger(__name__)

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@contextmanager
def departure(exchange: Exchange, receive: Receive, lane: Lane | None) -> Iterator[None]:
    """Tell the exchange when the client goes: from the connection where there is a lane, else from ASGI.

    ASGI's way takes a task that waits for a message, which is a twentieth of what a short request costs.
    """
    if lane is not None:
        lane.watch(exchange.leave)
        try:
            yield
        finally:
            lane.unwatch()
        return
    left = asyncio.ensure_future(receive())
    left.add_done_callback(lambda _: exchange.leave())
    try:
        yield
    finally:
        left.cancel()


class Api(Protocol):
    """A dialect as the endpoint drives it."""

    route: str

    async def prepare(self, body: Body, size: int, call: Call) -> Prepared:
        """Convert a request whose body had `size` bytes. Raises: ApiError."""
        ...

    async def detach(self, prepared: Prepared, body: Body, call: Call, places: ExitStack) -> Body:
        """Answer at once and work on; `places` is closed when that ends."""
        ...

    async def completed(self, prepared: Prepared, body: Body, document: Body | None, call: Call) -> None:
        """The answer is complete; `document` is its JSON where the API keeps it."""
        ...


class GenerationEndpoint:
    """Serves POST on one API's path."""

    def __init__(self, api: Api, core: Core) -> None:
        self._api = api
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        call = Call.begin(scope, self._api.route)
        try:
            await self._serve(scope, receive, send, call)
        except Disconnected:
            call.status = CLIENT_LEFT
        except ApiError as error:
            await self._refuse(send, call, error)
        except asyncio.CancelledError:
            call.status = call.status or CLIENT_LEFT
            raise
        except Exception as error:
            logger.exception("request failed", exc_info=error, extra={"request_id": call.request_id})
            self._core.metrics.failures.labels("internal").inc()
            if not call.status:  # else the head is out, and the server closes the connection
                await self._refuse(send, call, internal_error())
        finally:
            call.end(self._core.metrics)

    async def _refuse(self, send: Send, call: Call, error: ApiError) -> None:
        call.status = error.status
        if error.status in (429, 503):
            self._core.metrics.refusals.labels(error.code or str(error.status)).inc()
        document = error_body(call.route, error, call.request_id)
        await send_json(send, error.status, document, [*call.headers(), *error.headers()])

    async def _serve(self, scope: Scope, receive: Receive, send: Send, call: Call) -> None:
        core, settings = self._core, self._core.settings
        call.key = core.keys.authenticate(header(scope, b"authorization"), header(scope, b"x-api-key"))
        asked, targets = from_headers(scope, core.card.classes), targets_from_headers(scope)
        raw = await read_body(scope, receive, settings.max_body_bytes, settings.body_timeout_s)
        with ExitStack() as places:
            places.enter_context(core.admission.admit())
            places.enter_context(core.hold_rate(call))
            body = await offload(len(raw), parse_object, raw)
            prepared = await self._api.prepare(body, len(raw), call)
            if asked is not NOTHING:
                prepared = replace(prepared, retention=asked.over(prepared.retention))
            if targets is not None:
                prepared = replace(prepared, targets=targets)
            core.check_priority(prepared, call)
            if prepared.detached:
                document = await self._api.detach(prepared, body, call, places.pop_all())
                call.status = 200
                await send_json(send, 200, document, call.headers())
                return
            exchange = self._exchange(prepared, send, call)
            with departure(exchange, receive, call.lane):
                await self._generate(prepared, body, exchange, send, call)

    async def _generate(
        self, prepared: Prepared, body: Body, exchange: Exchange, send: Send, call: Call
    ) -> None:
        core = self._core
        started = await begin(prepared, exchange, core, call)
        try:
            await self._wait(exchange)
            if exchange.left:
                core.metrics.aborts.labels("disconnect").inc()
                raise Disconnected
        finally:
            exchange.settle()
            if exchange.unfinished:
                core.hub.abort(started)
        if isinstance(exchange, StreamExchange):
            await self._end_stream(prepared, body, exchange, call)
        elif isinstance(exchange, CollectExchange):
            await self._answer(prepared, body, exchange, send, call)

    def _exchange(self, prepared: Prepared, send: Send, call: Call) -> Exchange:
        core = self._core
        if not prepared.stream:
            return collect(prepared, core, call)
        writer = SseWriter(send, core.settings.max_pending_bytes, call.lane)
        headers = [*SSE_HEADERS, *call.headers()]
        return StreamExchange(
            core.metrics, call.account, prepared.choices, prepared.encoder(), writer, headers
        )

    async def _wait(self, exchange: Exchange) -> None:
        """Until the answer has ended or the client has left; keeps a silent stream open."""
        if not isinstance(exchange, StreamExchange):
            await exchange.done
            return
        beat = KeepAlive(exchange, self._core.settings.keepalive_s)
        try:
            await exchange.done
        finally:
            beat.stop()

    async def _end_stream(self, prepared: Prepared, body: Body, exchange: StreamExchange, call: Call) -> None:
        if exchange.error is not None and not exchange.writer.started:
            raise exchange.error
        call.status = 200 if exchange.error is None else exchange.error.status
        if exchange.abandoned:
            self._core.metrics.aborts.labels("slow_reader").inc()
            exchange.writer.discard()
            return
        try:
            if exchange.error is None:
                await self._api.completed(prepared, body, exchange.encoder.document(), call)
                exchange.writer.write(exchange.encoder.finish())
            await within(self._core.settings.write_timeout_s, exchange.writer.close())
        except (TimeoutError, SlowReader):
            self._core.metrics.aborts.labels("slow_reader").inc()
            exchange.writer.discard()

    async def _answer(
        self, prepared: Prepared, body: Body, exchange: CollectExchange, send: Send, call: Call
    ) -> None:
        if exchange.error is not None:
            raise exchange.error
        document = exchange.result()
        await self._api.completed(prepared, body, document, call)
        call.status = 200
        await send_json(send, 200, document, call.headers())
