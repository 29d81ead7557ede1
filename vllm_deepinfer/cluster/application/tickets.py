"""What the one Serve call of a request says: enough to route it and to wait for its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

PREFIX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Ticket:
    """Travels to the replica as the argument of its `lease`; the request itself takes the token channel.

    Attributes:
        key: under which the replica's lease waits for the request; unique in the cluster.
        prompt_tokens: of the prompt; with `output_tokens` what a decode will occupy of the KV.
        output_tokens: that are reserved for the answer.
        computed_tokens: of the prompt that need no prefill there, because their KV is fetched.
        avoid: replicas that have just refused this request.
        prefix: equal for prompts that begin alike (`prefix_of`). Ours does not route by it: prefixes lie in a
            store. A router that keeps them together can.
    """

    key: str
    prompt_tokens: int
    output_tokens: int = 0
    computed_tokens: int = 0
    avoid: frozenset[str] = frozenset()
    prefix: int = 0

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the replica has to compute."""
        return max(self.prompt_tokens - self.computed_tokens, 0)

    @property
    def kv_tokens(self) -> int:
        """KV that the request will occupy."""
        return self.prompt_tokens + self.output_tokens


def prefix_of(prompt_token_ids: Sequence[int]) -> int:
    """A checksum of the first `PREFIX_TOKENS` ids, 2 µs."""
    return crc32(array("q", prompt_token_ids[:PREFIX_TOKENS]).tobytes())
