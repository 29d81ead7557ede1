"""Per-key limits: requests and tokens per minute as leaky buckets, and requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.limits.keys import ApiKey


@dataclass
class Bucket:
    """Holds up to a minute's worth; refills evenly; may go negative: an answer's length is known late.

    Attributes:
        per_minute: size and refill. level: what may still be spent.
    """

    per_minute: int
    level: float
    updated: float

    def refill(self, now: float) -> None:
        """Add what has come in since the last look."""
        self.level = min(float(self.per_minute), self.level + (now - self.updated) * self.per_minute / 60)
        self.updated = now

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` may be spent; amounts over a minute's worth need a full bucket."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * 60 / self.per_minute)


@dataclass
class _Usage:
    requests: Bucket | None
    tokens: Bucket | None
    active: int = 0


@dataclass
class RateLimits:
    """Usage of every key that has limits. In memory: a restart forgives."""

    clock: Callable[[], float] = time.monotonic
    _usage: dict[str, _Usage] = field(default_factory=dict)

    def enter(self, key: ApiKey | None) -> None:
        """Count a request in. Raises: ApiError 429."""
        if key is None:
            return
        usage, now = self._of(key), self.clock()
        if key.max_concurrent is not None and usage.active >= key.max_concurrent:
            raise _refuse(f"{key.max_concurrent} requests at once", 1.0)
        if usage.requests is not None:
            usage.requests.refill(now)
            if (wait := usage.requests.wait_s(1)) > 0:
                raise _refuse(f"{usage.requests.per_minute} requests per minute", wait)
        if usage.tokens is not None:
            usage.tokens.refill(now)
            if (wait := usage.tokens.wait_s(1)) > 0:
                raise _refuse(f"{usage.tokens.per_minute} tokens per minute", wait)
        if usage.requests is not None:
            usage.requests.level -= 1
        usage.active += 1

    def leave(self, key: ApiKey | None, output_tokens: int) -> None:
        """Count a request out, and what it generated."""
        if key is None:
            return
        usage = self._of(key)
        usage.active -= 1
        if usage.tokens is not None:
            usage.tokens.level -= output_tokens

    def charge_prompt(self, key: ApiKey | None, tokens: int) -> None:
        """Spend a prompt's tokens. Raises: ApiError 429, and then nothing is spent."""
        usage = self._of(key) if key is not None else None
        if usage is None or usage.tokens is None:
            return
        usage.tokens.refill(self.clock())
        if (wait := usage.tokens.wait_s(tokens)) > 0:
            raise _refuse(f"{usage.tokens.per_minute} tokens per minute", wait)
        usage.tokens.level -= tokens

    def _of(self, key: ApiKey) -> _Usage:
        usage = self._usage.get(key.name)
        if usage is None:
            now = self.clock()
            usage = self._usage[key.name] = _Usage(
                _full(key.requests_per_minute, now), _full(key.tokens_per_minute, now)
            )
        return usage


def _full(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, float(per_minute), now)


def _refuse(limit: str, wait_s: float) -> ApiError:
    return ApiError(
        429,
        f"this API key's limit of {limit} is reached; try again in {max(1, round(wait_s))} s.",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )
