"""Running one converted request: the part that does not depend on who waits for the answer."""

from __future__ import annotations

from vllm_deepinfer.gateway.calls import Call
from vllm_deepinfer.gateway.core import Core
from vllm_deepinfer.gateway.dialects.base import Body, Prepared
from vllm_deepinfer.gateway.streaming.exchange import CollectExchange, Exchange


async def begin(prepared: Prepared, exchange: Exchange, core: Core, call: Call) -> list[str]:
    """Tokenise, check limits and submit. Returns the engine's request ids. Raises: ApiError."""
    ids = await core.runner.encode(prepared.prompt)
    core.rates.charge_prompt(call.key, len(ids))
    return await core.runner.submit(prepared, ids, exchange, core.cache_salt(prepared, call))


async def generate(prepared: Prepared, core: Core, call: Call) -> Body:
    """Run a request to its end; cancelling this stops the engine's work. Raises: ApiError."""
    exchange = collect(prepared, core, call)
    started = await begin(prepared, exchange, core, call)
    try:
        await exchange.done
    finally:
        exchange.settle()
        if exchange.unfinished:
            core.hub.abort(started)
    if exchange.error is not None:
        raise exchange.error
    return exchange.result()


def collect(prepared: Prepared, core: Core, call: Call) -> CollectExchange:
    """An exchange that makes one document."""
    return CollectExchange(core.metrics, call.account, prepared.choices, prepared.collector())
