"""What the one Serve call of a request says: enough to route it and to wait for its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """Travels to the replica as the argument of its `lease`; the request itself takes the token channel.

    Attributes:
        key: under which the replica's lease waits for the request; unique in the cluster.
        prompt_tokens: of the prompt; with `output_tokens` what a decode will occupy of the KV.
        output_tokens: that are reserved for the answer.
        computed_tokens: of the prompt that need no prefill there, because their KV is fetched.
        avoid: replicas that have just refused this request.
    """

    key: str
    prompt_tokens: int
    output_tokens: int = 0
    computed_tokens: int = 0
    avoid: frozenset[str] = frozenset()

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the replica has to compute."""
        return max(self.prompt_tokens - self.computed_tokens, 0)

    @property
    def kv_tokens(self) -> int:
        """KV that the request will occupy."""
        return self.prompt_tokens + self.output_tokens
