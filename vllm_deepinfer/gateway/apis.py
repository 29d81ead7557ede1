"""The three generation APIs as the endpoint drives them."""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack

from vllm_deepinfer.gateway.calls import Call
from vllm_deepinfer.gateway.core import Core
from vllm_deepinfer.gateway.dialects import responses
from vllm_deepinfer.gateway.dialects.base import Body, ModelCard, Prepared
from vllm_deepinfer.gateway.offload import offload
from vllm_deepinfer.gateway.response_store import StoredResponse
from vllm_deepinfer.gateway.stored import BackgroundResponses, earlier_items

logger = logging.getLogger(__name__)

Prepare = Callable[[Body, ModelCard, str], Prepared]


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(16)


class StatelessApi:
    """Chat Completions or Messages.

    Args:
        route: its path. prefix: of answer ids. prepare: converts.
    """

    def __init__(self, core: Core, route: str, prefix: str, prepare: Prepare) -> None:
        self.route = route
        self._core = core
        self._prefix = prefix
        self._prepare = prepare

    async def prepare(self, body: Body, size: int, call: Call) -> Prepared:
        """See Api."""
        prepared: Prepared = await offload(size, self._prepare, body, self._core.card, new_id(self._prefix))
        return prepared

    async def detach(self, prepared: Prepared, body: Body, call: Call, places: ExitStack) -> Body:
        """See Api. These APIs have no background."""
        raise NotImplementedError

    async def completed(self, prepared: Prepared, body: Body, document: Body | None, call: Call) -> None:
        """See Api. Nothing is kept."""


class ResponsesApi:
    """Responses: the same with earlier turns, and answers that are kept."""

    route = "/v1/responses"

    def __init__(self, core: Core, background: BackgroundResponses) -> None:
        self._core = core
        self._background = background

    async def prepare(self, body: Body, size: int, call: Call) -> Prepared:
        """See Api."""
        self._core.card.require(body)
        responses.check(body)
        earlier = await earlier_items(body, self._core, call)
        prepared: Prepared = await offload(
            size + 200 * len(earlier), responses.prepare, body, earlier, self._core.card, new_id("resp_")
        )
        return prepared

    async def detach(self, prepared: Prepared, body: Body, call: Call, places: ExitStack) -> Body:
        """See Api."""
        return await self._background.start(prepared, body, call, places)

    async def completed(self, prepared: Prepared, body: Body, document: Body | None, call: Call) -> None:
        """See Api."""
        if document is None or body.get("store") is False:
            return
        turn = StoredResponse(
            id=prepared.answer_id,
            tenant=call.tenant,
            document=document,
            input=responses.input_items(body),
            previous=body.get("previous_response_id"),
        )
        try:
            await self._core.responses.put(turn)
        except sqlite3.Error as error:  # the answer is complete, and the client gets it
            self._core.metrics.failures.labels("response_store").inc()
            logger.error(
                "a response was not stored, so no turn can follow it; check the disk of --response-db",
                exc_info=error,
                extra={"request_id": call.request_id},
            )
