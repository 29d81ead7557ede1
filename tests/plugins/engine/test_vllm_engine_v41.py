"""VllmEngine keeps the contract on this project's own DeepSeek-V4.1 class. One engine start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.contract import EngineContract
from tests.plugins.engine.starting import started
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = tmp_path_factory.mktemp("v41")
    write_checkpoint(folder, TinyOptions())
    engine = await started(folder, additional_config={"deepinfer": {"batch_invariant": True}})
    yield engine
    await engine.close()


class TestVllmEngineOnDeepseekV41(EngineContract):
    storm_requests = 60
