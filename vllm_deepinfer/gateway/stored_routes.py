"""Stored responses over HTTP, on FastAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from vllm_deepinfer.gateway.dialects.base import Body
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.openapi import documented
from vllm_deepinfer.gateway.stored import BackgroundResponses

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]


def responses(background: BackgroundResponses) -> APIRouter:
    """Look at, delete and cancel stored responses."""
    router = APIRouter(prefix="/v1/responses/{response_id}", tags=["responses"])

    def tenant(request: Request) -> str:
        name: str = request.scope["deepinfer.call"].tenant
        return name

    @router.get("", **documented(200, 400, 404))
    async def get_response(response_id: str, request: Request, stream: bool = False) -> JSONResponse:
        """A stored response."""
        if stream:
            raise ApiError(400, "a stored response cannot be streamed; leave out stream.", param="stream")
        return JSONResponse((await background.get(response_id, tenant(request))).document)

    @router.delete("", **documented(200, 404))
    async def delete_response(response_id: str, request: Request) -> JSONResponse:
        """Delete a stored response; work on it stops."""
        await background.delete(response_id, tenant(request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/cancel", **documented(200, 400, 404))
    async def cancel_response(response_id: str, request: Request) -> JSONResponse:
        """Stop a background response."""
        return JSONResponse(await background.cancel(response_id, tenant(request)))

    @router.get("/input_items", **documented(200, 400, 404))
    async def input_items(
        response_id: str, request: Request, order: Order = "desc", limit: Limit = 20, after: str | None = None
    ) -> JSONResponse:
        """Input items of one turn, newest first unless asked otherwise."""
        turn = await background.get(response_id, tenant(request))
        items = [shown(item, f"item_{response_id}_{i}") for i, item in enumerate(turn.input)]
        return JSONResponse(page(items[::-1] if order == "desc" else items, limit, after))

    return router


def page(items: list[Body], limit: int, after: str | None) -> Body:
    """A page of a list that begins after the item `after`. Raises: ApiError for an id that is not in it."""
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        if not start:
            raise ApiError(400, f"after: there is no item {after[:80]!r} in this list.", param="after")
    chosen = items[start : start + limit]
    ends = {"first_id": chosen[0]["id"], "last_id": chosen[-1]["id"]} if chosen else {}
    return {"object": "list", "data": chosen, "has_more": start + limit < len(items), **ends}


def shown(item: Any, item_id: str) -> Body:
    """An input item as the API lists it: with an id, and with its text as parts."""
    shown = {"id": item_id, **item}
    if "role" in shown:
        shown.setdefault("type", "message")
        kind = "output_text" if shown["role"] == "assistant" else "input_text"
        if isinstance(shown.get("content"), str):
            shown["content"] = [{"type": kind, "text": shown["content"]}]
    return shown
