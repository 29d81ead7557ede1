"""The stateful side of Responses: earlier turns, background work and its cancellation."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from vllm_deepinfer.gateway.calls import CLIENT_LEFT, Call
from vllm_deepinfer.gateway.core import Core
from vllm_deepinfer.gateway.dialects import responses
from vllm_deepinfer.gateway.dialects.base import Body, Prepared
from vllm_deepinfer.gateway.errors import ApiError, internal_error
from vllm_deepinfer.gateway.generation import generate
from vllm_deepinfer.gateway.response_store import MissingResponse, StoredResponse
from vllm_deepinfer.gateway.streaming.exchange import Account

logger = logging.getLogger(__name__)


def missing(response_id: str) -> ApiError:
    """404 for a response that is not (or no longer) there, or is another tenant's."""
    return ApiError(
        404,
        f"no response {response_id[:80]!r} is stored here; it may have expired or been deleted.",
        code="not_found",
    )


async def earlier_items(body: Body, core: Core, call: Call) -> list[Any]:
    """Input and output items of the turns before this one. Raises: ApiError."""
    previous = body.get("previous_response_id")
    if previous is None:
        return []
    try:
        turns = await core.responses.chain(previous, call.tenant)
    except MissingResponse as error:
        refusal = missing(error.args[0])
        refusal.param = "previous_response_id"
        raise refusal from None
    if turns[-1].document["status"] in ("queued", "in_progress"):
        raise ApiError(
            409, f"response {previous[:80]!r} has not ended yet; wait for it.", param="previous_response_id"
        )
    return [item for turn in turns for item in (*turn.input, *turn.document["output"])]


class BackgroundResponses:
    """Responses that nobody waits for."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def start(self, prepared: Prepared, body: Body, call: Call, places: ExitStack) -> Body:
        """Store a queued response and begin work on it. Returns the response as it stands.

        Args:
            places: what the request holds (admission, rate); given back when the work ends.
        """
        document = responses.pending_response(
            prepared.answer_id, prepared.model, int(time.time()), prepared.settings
        )
        turn = StoredResponse(
            id=prepared.answer_id,
            tenant=call.tenant,
            document=document,
            input=responses.input_items(body),
            previous=body.get("previous_response_id"),
        )
        with places:
            await self._core.responses.put(turn)
            places = places.pop_all()
        worker = replace(call, route="background")
        call.account = Account(received=call.account.received)  # the worker's tokens are not the caller's
        task = asyncio.create_task(self._run(prepared, turn, worker), name=f"background {turn.id}")
        key = (call.tenant, turn.id)
        self._tasks[key] = task

        def ended(_: asyncio.Task[None]) -> None:
            self._tasks.pop(key, None)
            places.close()

        task.add_done_callback(ended)
        return document

    async def cancel(self, response_id: str, tenant: str) -> Body:
        """Stop work on a response. Idempotent. Raises: ApiError 404, or 400 when it cannot be cancelled."""
        await self._stop(response_id, tenant)
        turn = await self.get(response_id, tenant)
        status = turn.document["status"]
        if status in ("queued", "in_progress"):  # cancelled before its first step
            await self._store(turn, turn.document | {"status": "cancelled"})
            return turn.document | {"status": "cancelled"}
        if not turn.document.get("background"):
            raise ApiError(
                400, "only a response with background true can be cancelled; close the connection instead."
            )
        if status in ("completed", "failed", "incomplete"):
            raise ApiError(400, f"the response is {status} already; there is nothing to cancel.")
        return turn.document

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises: ApiError 404."""
        try:
            return await self._core.responses.get(response_id, tenant)
        except MissingResponse as error:
            raise missing(error.args[0]) from None

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response, and stop work on it. Raises: ApiError 404."""
        await self._stop(response_id, tenant)
        try:
            await self._core.responses.delete(response_id, tenant)
        except MissingResponse as error:
            raise missing(error.args[0]) from None

    async def _stop(self, response_id: str, tenant: str) -> None:
        task = self._tasks.get((tenant, response_id))
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self) -> None:
        """Cancel everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, prepared: Prepared, turn: StoredResponse, call: Call) -> None:
        core = self._core
        try:
            await self._store(turn, turn.document | {"status": "in_progress"})
            document = await generate(prepared, core, call)
            await self._store(turn, document)
            call.status = 200
        except asyncio.CancelledError:
            call.status = CLIENT_LEFT
            core.metrics.aborts.labels("cancelled").inc()
            await self._store(turn, turn.document | {"status": "cancelled"})
            raise
        except ApiError as error:
            call.status = error.status
            await self._store(turn, responses.failed_response(turn.document, error))
        except Exception as error:
            call.status = 500
            logger.exception("background response failed", exc_info=error)
            await self._store(turn, responses.failed_response(turn.document, internal_error()))
        finally:
            call.end(core.metrics, background=True)

    async def _store(self, turn: StoredResponse, document: Body) -> None:
        await self._core.responses.put(
            StoredResponse(
                id=turn.id, tenant=turn.tenant, document=document, input=turn.input, previous=turn.previous
            )
        )
