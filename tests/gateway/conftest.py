"""Fixtures for tests that talk to a gateway over a socket."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.gateway.harness import Gateway, running
from vllm_deepinfer.gateway import logs


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that configure logging: leaves it as it was."""
    logger = logging.getLogger("vllm_deepinfer")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    logs.access.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway() -> AsyncIterator[Gateway]:
    """One gateway for the tests of a module; use `gateway`."""
    async with running() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared_gateway: Gateway) -> Gateway:
    """A gateway whose engine answers "Hello there." after a little reasoning; set `script.texts` for more.

    The module's tests share it, and need `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
    """
    await shared_gateway.idle()
    script = shared_gateway.script
    script.texts, script.function = ["hmm</think>Hello there."], None
    script.requests.clear()
    return shared_gateway
