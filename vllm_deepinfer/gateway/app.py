"""GatewayApp: the ASGI application. Generation goes down the raw path, everything else to FastAPI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vllm_deepinfer.gateway import openapi, routes, stored_routes
from vllm_deepinfer.gateway.apis import ResponsesApi, StatelessApi
from vllm_deepinfer.gateway.calls import CLIENT_LEFT, Call
from vllm_deepinfer.gateway.core import Core
from vllm_deepinfer.gateway.dialects import chat, messages
from vllm_deepinfer.gateway.endpoint import GenerationEndpoint
from vllm_deepinfer.gateway.errors import ApiError, error_body, internal_error
from vllm_deepinfer.gateway.http_io import Disconnected, Scope, header, send_json
from vllm_deepinfer.gateway.stored import BackgroundResponses
from vllm_deepinfer.gateway.streaming.sse import Message, Receive, Send

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    {"/", "/status", "/status.json", "/docs", "/openapi.json", "/health", "/ready", "/metrics"}
)
"""Need no key: they show totals, and no request's content or origin."""


class GatewayApp:
    """One gateway.

    Args:
        core: its parts. The app's lifespan starts and stops them.
        own_engine: whether the lifespan also starts and closes the engine.
    """

    def __init__(self, core: Core, *, own_engine: bool = True) -> None:
        self.core = core
        self.background = BackgroundResponses(core)
        apis = (
            StatelessApi(core, "/v1/chat/completions", "chatcmpl-", chat.prepare),
            StatelessApi(core, "/v1/messages", "msg_", messages.prepare),
            ResponsesApi(core, self.background),
        )
        self._endpoints = {api.route: GenerationEndpoint(api, core) for api in apis}
        self.own_engine = own_engine
        self.fastapi = self._build()

    def _build(self) -> FastAPI:
        core = self.core
        app = FastAPI(docs_url=None, redoc_url=None, lifespan=self._lifespan)
        for router in (
            routes.pages(),
            routes.operations(core),
            routes.models(core),
            routes.tokens(core),
            stored_routes.responses(self.background),
        ):
            app.include_router(router)
        document = openapi.build(app)
        app.openapi = lambda: document  # type: ignore[method-assign]
        app.add_exception_handler(ApiError, _on_error)
        app.add_exception_handler(HTTPException, _on_error)
        app.add_exception_handler(RequestValidationError, _on_error)
        app.add_exception_handler(Exception, _on_error)  # it is raised again, and `_route` logs it
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        if self.own_engine:
            await self.core.engine.start()
        await self.core.start()
        try:
            yield
        finally:
            await self.drain()
            await self.core.stop()
            if self.own_engine:
                await self.core.engine.close()

    async def drain(self) -> bool:
        """Admit nothing more and wait for what is in work; after the drain timeout, end it with an error.

        Returns whether all of it ended in time.
        """
        ended = await self.core.admission.drain(self.core.settings.drain_timeout_s)
        if not ended:
            await self.background.stop()
            await self.core.hub.abort_all()
        return ended

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self.fastapi(scope, receive, send)
            return
        plain: Scope = scope  # type: ignore[assignment]
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._route(plain, receive, send)
        elif scope["method"] == "POST":
            await endpoint(plain, receive, send)
        else:
            await self._wrong_method(plain, send)

    async def _wrong_method(self, scope: Scope, send: Send) -> None:
        call = Call.begin(scope, scope["path"])
        call.status = 405
        error = ApiError(405, f"{scope['path']} takes POST only.")
        headers = [*call.headers(), (b"allow", b"POST")]
        await send_json(send, 405, error_body(call.route, error, call.request_id), headers)
        call.end(self.core.metrics)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI's part, with the same ids, keys, limits and logs as generation."""
        call = Call.begin(scope, "unmatched")
        scope["deepinfer.call"] = call

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *call.headers()]
            await send(message)

        try:
            if scope["path"] in OPEN_PATHS:
                await self.fastapi(scope, receive, tagged)
                return
            call.key = self.core.keys.authenticate(
                header(scope, b"authorization"), header(scope, b"x-api-key")
            )
            if scope["method"] == "POST":
                with self.core.hold_rate(call):
                    await self.fastapi(scope, receive, tagged)
            else:  # a look at what is there costs nothing
                await self.fastapi(scope, receive, tagged)
        except ApiError as error:  # raised before FastAPI saw the request
            document = error_body(scope["path"], error, call.request_id)
            await send_json(tagged, error.status, document, error.headers())
        except Disconnected:
            call.status = CLIENT_LEFT
        except asyncio.CancelledError:
            call.status = call.status or CLIENT_LEFT
            raise
        except Exception as error:  # FastAPI has answered 500 by now, or could not
            logger.exception("request failed", exc_info=error, extra={"request_id": call.request_id})
            self.core.metrics.failures.labels("internal").inc()
            if not call.status:
                document = error_body(scope["path"], internal_error(), call.request_id)
                await send_json(tagged, 500, document)
        finally:
            route = scope.get("route")
            call.route = getattr(route, "path", call.route)
            call.end(self.core.metrics)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    refusal = _as_api_error(error, request)
    call: Call = request.scope["deepinfer.call"]
    headers = {name.decode(): value.decode() for name, value in refusal.headers()}
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers
    return JSONResponse(
        error_body(request.url.path, refusal, call.request_id), refusal.status, headers=headers
    )


def _as_api_error(error: Exception, request: Request) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        texts = {
            404: f"there is no {request.url.path[:100]} here; /docs lists what there is.",
            405: f"{request.url.path[:100]} does not take {request.method}.",
        }
        return ApiError(error.status_code, texts.get(error.status_code, str(error.detail)))
    if isinstance(error, RequestValidationError):
        return ApiError(400, "a parameter of the path or query is not valid.")
    return internal_error()
