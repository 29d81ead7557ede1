"""Everything but generation: models, tokens, stored responses, health, metrics and pages, on FastAPI."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from vllm_deepinfer.engine import HealthState
from vllm_deepinfer.gateway.apis import new_id
from vllm_deepinfer.gateway.calls import Call
from vllm_deepinfer.gateway.core import Core
from vllm_deepinfer.gateway.dialects import chat, messages
from vllm_deepinfer.gateway.dialects.base import Body
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.http_io import parse_object, read_body
from vllm_deepinfer.gateway.offload import offload
from vllm_deepinfer.gateway.openapi import documented
from vllm_deepinfer.gateway.tokens import TokenizerError

BOS = "<｜begin▁of▁sentence｜>"
OWN_TOKENIZE_FIELDS = frozenset({"return_token_strs", "add_special_tokens"})
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def _call(request: Request) -> Call:
    call: Call = request.scope["deepinfer.call"]
    return call


async def _body(request: Request, core: Core) -> tuple[Body, int]:
    settings = core.settings
    raw = await read_body(
        dict(request.scope), request.receive, settings.max_body_bytes, settings.body_timeout_s
    )
    return await offload(len(raw), parse_object, raw), len(raw)


def pages() -> APIRouter:
    """The status page and the API reference; both self-contained."""
    router = APIRouter(include_in_schema=False)

    def page(name: str) -> HTMLResponse:
        text = files("vllm_deepinfer.gateway").joinpath("pages", name).read_text(encoding="utf-8")
        return HTMLResponse(text, headers=PAGE_HEADERS)

    router.add_api_route("/", lambda: RedirectResponse("/status"), response_class=RedirectResponse)
    router.add_api_route("/status", lambda: page("status.html"), response_class=HTMLResponse)
    router.add_api_route("/docs", lambda: page("docs.html"), response_class=HTMLResponse)
    return router


def operations(core: Core) -> APIRouter:
    """Health, readiness, metrics and the status page's data."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", **documented(200, 503))
    async def health() -> JSONResponse:
        """200 while the engine makes progress, 503 when it is wedged or dead."""
        state = core.engine.health()
        document = {"status": str(state.state), "detail": state.detail}
        return JSONResponse(document, 200 if state.serving or state.state is HealthState.STARTING else 503)

    @router.get("/ready", **documented(200, 503))
    async def ready() -> JSONResponse:
        """200 while new requests are welcome."""
        state = core.engine.health()
        open_ = state.state is HealthState.READY and not core.admission.draining
        reason = "" if open_ else (state.detail or "this server is stopping")
        return JSONResponse({"ready": open_, "detail": reason}, 200 if open_ else 503)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics of this gateway."""
        return Response(core.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/status.json")
    async def status() -> JSONResponse:
        """What the status page shows."""
        return JSONResponse(core.board.report())

    return router


def models(core: Core) -> APIRouter:
    """The model list, in a form that OpenAI's and Anthropic's clients both read."""
    router = APIRouter(tags=["models"])

    def card(name: str) -> Body:
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "created": core.started_at,
            "created_at": core.started_text,
            "owned_by": "vllm-deepinfer",
            "display_name": name,
            "max_model_len": core.card.max_model_len,
        }

    @router.get("/v1/models")
    async def list_models() -> JSONResponse:
        """All names that the model answers to."""
        names = core.card.names
        cards = [card(name) for name in names]
        paging = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": cards, **paging})

    @router.get("/v1/models/{model:path}", **documented(200, 404))
    async def get_model(model: str) -> JSONResponse:
        """One of them."""
        return JSONResponse(card(core.card.require({"model": model})))

    return router


def tokens(core: Core) -> APIRouter:
    """Counting and converting tokens."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", **documented(200, 400, 404, 413, 429, body="TokenizeRequest"))
    async def tokenize(request: Request) -> JSONResponse:
        """Token ids of plain text (`prompt`), or of a chat's whole prompt (`messages`, `tools`, …)."""
        body, size = await _body(request, core)
        ids = await _tokenize(body, size, core)
        document: Body = {"count": len(ids), "max_model_len": core.card.max_model_len, "tokens": ids}
        if body.get("return_token_strs"):
            document["token_strs"] = [core.runner.prompts.decode([token]) for token in ids]
        return JSONResponse(document)

    @router.post("/detokenize", **documented(200, 400, 413, body="DetokenizeRequest"))
    async def detokenize(request: Request) -> JSONResponse:
        """Text of token ids; control tokens are spelled out."""
        body, size = await _body(request, core)
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**32 for i in ids):
            raise ApiError(400, "tokens: send a list of token ids.", param="tokens")
        try:
            return JSONResponse({"prompt": await offload(size, core.runner.prompts.decode, ids)})
        except TokenizerError as error:
            raise ApiError(400, str(error), param="tokens") from None

    @router.post(
        "/v1/messages/count_tokens", **documented(200, 400, 404, 413, 429, body="CountTokensRequest")
    )
    async def count_tokens(request: Request) -> JSONResponse:
        """Tokens of a Messages request's prompt."""
        body, size = await _body(request, core)
        prepared = await offload(size, messages.prepare_count, body, core.card)
        return JSONResponse({"input_tokens": len(await core.runner.encode(prepared.prompt))})

    return router


async def _tokenize(body: Body, size: int, core: Core) -> list[int]:
    if "messages" in body:
        plain = {name: value for name, value in body.items() if name not in OWN_TOKENIZE_FIELDS}
        plain.setdefault("model", core.card.names[0])
        prepared = await offload(size, chat.prepare, plain, core.card, new_id("tokenize-"))
        return await core.runner.encode(prepared.prompt)
    text = body.get("prompt")
    if not isinstance(text, str):
        raise ApiError(400, "prompt: send text, or messages of a chat.", param="prompt")
    if body.get("model") is not None:
        core.card.require(body)
    try:
        ids = await core.runner.prompts.encode_plain(text)
    except TokenizerError as error:
        raise ApiError(400, str(error), param="prompt") from None
    if body.get("add_special_tokens"):
        return [core.runner.prompts.vocabulary.control_ids[BOS], *ids]
    return ids
