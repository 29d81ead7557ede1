"""One request inside a simulated engine."""

from __future__ import annotations

from vllm_deepinfer.engine.base import Sink
from vllm_deepinfer.engine.messages import FinishReason, GenerateRequest
from vllm_deepinfer.engine.simulated.holds import KvSource
from vllm_deepinfer.engine.simulated.kv import block_key
from vllm_deepinfer.engine.simulated.tokens import TokenAt


class SimulatedSequence:
    """Progress of one request: what is generated, what has KV, which blocks hold it.

    Attributes:
        order: (priority, arrival): who is scheduled first and preempted last.
        generated: token ids of the answer so far.
        computed: tokens of prompt and answer that have KV.
        cached: prompt tokens that the prefix cache served when the request was first admitted.
        limit: most tokens of the answer.
        fail_after: fail instead of giving the token after this many; None: never.
        alive: False once it has ended.
        source: where the KV of its prompt is to be fetched from, until that was tried.
        fetching: it has blocks, and a fetch may write them.
    """

    __slots__ = (
        "alive", "blocks", "cached", "computed", "fail_after", "fetching", "generated", "keys", "limit",
        "min_tokens", "order", "prompt_length", "published", "request", "sink", "source", "stops", "token_at",
        "wanted_logprobs",
    )  # fmt: skip

    def __init__(
        self, request: GenerateRequest, sink: Sink, token_at: TokenAt, arrival: int, limit: int, eos: int
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.sink = sink
        self.token_at = token_at
        self.order = (request.priority, arrival)
        self.limit = limit
        self.stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {eos})
        self.min_tokens = sampling.min_tokens
        self.wanted_logprobs = sampling.logprobs
        self.prompt_length = len(request.prompt_token_ids)
        self.generated: list[int] = []
        self.computed = 0
        self.cached: int | None = None
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self.published = 0
        self.fail_after: int | None = None
        self.alive = True
        self.source: KvSource | None = None
        self.fetching = False

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_length + len(self.generated)

    @property
    def keeps(self) -> bool:
        """Whether its KV stays after a good end."""
        return self.request.hand_over is not None and self.request.hand_over.keep

    def extend_keys(self, block_size: int, tokens: int) -> None:
        """Compute the keys of all full blocks among the first `tokens` tokens."""
        if (len(self.keys) + 1) * block_size > tokens:
            return
        salt = (self.request.cache_salt or "").encode()
        prompt = self.request.prompt_token_ids
        while (end := (len(self.keys) + 1) * block_size) <= tokens:
            start = end - block_size
            ids = list(prompt[start:end])
            ids += self.generated[max(start - self.prompt_length, 0) : max(end - self.prompt_length, 0)]
            self.keys.append(block_key(self.keys[-1] if self.keys else salt, ids))

    def next_token(self, vocab_size: int) -> int:
        """The next token; one that would end the answer too early is replaced by the id after it."""
        position = len(self.generated)
        if position < len(self.request.sampling.forced):
            return self.request.sampling.forced[position]
        token = self.token_at(position)
        while position < self.min_tokens and token in self.stops:
            token = (token + 1) % vocab_size
        return token

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether the answer ends with `token`, which has just been appended."""
        if token in self.stops:  # `next_token` gives none too early
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= self.limit else None
