"""Deltas on their way to one gateway: what a slow one has not fetched is merged, and too much is given up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_deepinfer.engine.messages import TokenDelta


class Outbox:
    """Collects deltas until they may be sent. Does no I/O.

    Args:
        credit: Steps that may be under way without the gateway having said that it has them.
        most_tokens: Tokens that may wait; beyond them the gateway counts as lost.
    """

    def __init__(self, credit: int = 16, most_tokens: int = 1 << 20) -> None:
        self._credit, self._most = credit, most_tokens
        self._waiting: dict[str, TokenDelta] = {}
        self._tokens = 0
        self.sent, self.received = 0, 0

    def add(self, deltas: Sequence[TokenDelta]) -> None:
        """Take the deltas of a step; those of a request that waits already are merged with it."""
        for delta in deltas:
            before = self._waiting.get(delta.request_id)
            self._waiting[delta.request_id] = delta if before is None else merged(before, delta)
            self._tokens += len(delta.token_ids)

    def acknowledge(self, received: int) -> None:
        """The gateway has all steps up to that number. A number from nowhere is ignored."""
        if self.received < received <= self.sent:
            self.received = received

    @property
    def overflows(self) -> bool:
        """Whether more waits than a gateway is worth."""
        return self._tokens > self._most

    def take(self) -> tuple[int, list[TokenDelta]] | None:
        """The next step's number and deltas, or None if there is nothing to send or no credit."""
        if not self._waiting or self.sent - self.received >= self._credit:
            return None
        deltas = list(self._waiting.values())
        self._waiting, self._tokens = {}, 0
        self.sent += 1
        return self.sent, deltas


def merged(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Two deltas of one request, in order, as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return msgspec.structs.replace(
        second,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        accepted_draft_tokens=first.accepted_draft_tokens + second.accepted_draft_tokens,
    )
