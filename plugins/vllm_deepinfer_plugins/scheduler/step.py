"""One step while vLLM's loops put it together: what was planned, what has been charged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_deepinfer.policy.prefill_budget import StepBudget
from vllm_deepinfer.policy.step_cost import Features


@dataclass(slots=True)
class Step:
    """What `_reserve_prefill_lookahead` asks for every candidate, in vLLM's order: running, then waiting.

    Running prefills get what the plan says, and no more: the rest is reserved for those that the plan puts
    first and that vLLM comes to later. Waiting ones get what is left when it is their turn, because how much
    of a prompt is cached is only known then.

    Attributes:
        live: charged with what is really scheduled.
        plan: request id to tokens; None: no usable cost model, nothing is cut.
        forced: the first in the plan gets its smallest chunk whatever it costs.
        chunks: prefill tokens scheduled, by request id.
        decodes: requests that are scheduled as decodes.
        limit: seconds that the step may take.
    """

    live: StepBudget
    plan: Mapping[str, int] | None
    forced: bool
    decodes: int
    limit: float
    chunks: dict[str, int] = field(default_factory=dict)

    def running(self, key: str, tokens: int) -> int:
        """Tokens that a running prefill may have, of `tokens` that vLLM would schedule."""
        return min(tokens, self.live.tokens_left if self.plan is None else self.plan.get(key, 0))

    def waiting(self, key: str, context: int, tokens: int) -> int:
        """Tokens that a waiting prefill may have, of `tokens` that vLLM would schedule."""
        if self.plan is None:
            return min(tokens, self.live.tokens_left)
        fitting = self.live.chunk(context, tokens)
        if fitting < tokens and self.chunks and not self.live.worthwhile(context, fitting):
            fitting = 0
        if not fitting and self.forced:
            fitting = min(tokens, self.plan.get(key, 0))
        return fitting

    def decode(self, features: Features) -> None:
        """A waiting request is admitted as a decode: all but its last token came from elsewhere."""
        self.live.used = self.live.used + features
        self.decodes += 1

    def charge(self, key: str, context: int, tokens: int) -> None:
        """The prefill is scheduled with this many tokens, as far as this scheduler can tell."""
        if tokens > 0:
            self.live.charge(context, tokens)
            self.chunks[key] = tokens
