"""Core: the parts of one gateway, put together, and what several endpoints need from them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from deepseek_recipe import Tokenizer

from vllm_deepinfer.engine import Engine
from vllm_deepinfer.gateway.calls import Call
from vllm_deepinfer.gateway.dialects.base import ModelCard, Prepared
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.limits.admission import Admission
from vllm_deepinfer.gateway.limits.keys import KeyRing
from vllm_deepinfer.gateway.limits.rates import RateLimits
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.response_store import ResponseStore
from vllm_deepinfer.gateway.runner import Runner
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.status import StatusBoard
from vllm_deepinfer.gateway.streaming.hub import StepHub
from vllm_deepinfer.gateway.tokens import PromptTokenizer


class Core:
    """Everything behind the HTTP surface. The engine must be started before the first request.

    Args:
        engine: answers.
        card: names, prompt encoding and context of the model.
        settings: limits.
        prompts: text to ids. output: ids to text.
        keys: who may ask.
    """

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        settings: GatewaySettings,
        prompts: PromptTokenizer,
        output: Tokenizer,
        keys: KeyRing | None = None,
    ) -> None:
        self.engine = engine
        self.card = card
        self.settings = settings
        self.keys = keys or KeyRing()
        self.metrics = GatewayMetrics()
        self.rates = RateLimits()
        self.admission = Admission(
            engine.load,
            max_active=settings.max_active,
            max_waiting=settings.max_waiting,
            max_busy=settings.max_busy,
        )
        self.hub = StepHub(engine, self.metrics)
        self.runner = Runner(engine, self.hub, prompts, output, settings.max_prompt_tokens)
        self.responses = ResponseStore(
            settings.response_db, ttl_s=settings.response_ttl_s, max_responses=settings.max_responses
        )
        self.metrics.watch(lambda: self.admission.active, engine)
        self.board = StatusBoard(engine, self.metrics, self.admission, card.names[0])
        now = datetime.now(UTC).replace(microsecond=0)
        self.started_at, self.started_text = int(now.timestamp()), now.isoformat().replace("+00:00", "Z")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start what runs beside requests; the engine is started by its owner."""
        await self.responses.open()
        self._tasks = [
            asyncio.create_task(self.admission.meter.run(), name="busy meter"),
            asyncio.create_task(self.board.run(), name="status board"),
        ]

    async def stop(self) -> None:
        """Abort what is left after a drain, and close everything but the engine."""
        await self.hub.abort_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.responses.close()
        self.runner.prompts.close()

    @contextmanager
    def hold_rate(self, call: Call) -> Iterator[None]:
        """Count a call against its key's limits while the body of the `with` runs. Raises: ApiError 429."""
        self.rates.enter(call.key)
        account = call.account
        try:
            yield
        finally:
            self.rates.leave(call.key, account.output_tokens)

    def check_priority(self, prepared: Prepared, call: Call) -> None:
        """Nobody overtakes others unless this server lets them. Raises: ApiError 400."""
        lowest = self.settings.min_priority
        if call.key is not None and call.key.min_priority is not None:
            lowest = call.key.min_priority
        if prepared.priority < lowest:
            raise ApiError(
                400,
                f"priority: at least {lowest} is allowed here, got {prepared.priority}; lower ones overtake "
                "others, so ask the operator for a key with a lower min_priority.",
                param="priority",
            )

    def cache_salt(self, prepared: Prepared, call: Call) -> str | None:
        """Requests share prefix-cache entries within a tenant only, and there only with the same own salt.

        Hashed with a length prefix, so that no tenant can choose a salt that collides with another's.
        """
        if not call.tenant and prepared.cache_salt is None:
            return None
        text = f"{len(call.tenant)}:{call.tenant}:{prepared.cache_salt or ''}"
        return hashlib.sha256(text.encode()).hexdigest()
