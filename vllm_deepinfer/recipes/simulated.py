"""A pool's engine without a model: names map one to one to SimulatedConfig and StepCost."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_deepinfer.engine.simulated.config import SimulatedConfig, Speculation
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound, StepCost
from vllm_deepinfer.recipes.base import Count, NotNegative, Part, Positive


class SimulatedCost(Part):
    """Seconds per unit, as in `policy.step_cost.StepCost`; what is left out is 0.

    Attributes:
        window, top_k: keys that attention is bounded to, `AttentionBound`; None: no bound.
    """

    per_step: NotNegative
    per_token: NotNegative
    per_pair: NotNegative = 0.0
    per_decode: NotNegative = 0.0
    per_decode_context: NotNegative = 0.0
    per_prefill_context: NotNegative = 0.0
    window: Count | None = None
    top_k: Count | None = None
    tile: Count = 1

    def step_cost(self) -> StepCost:
        """The policy's own type."""
        fields = self.model_dump(exclude={"window", "top_k"})
        return StepCost(**fields, attention=AttentionBound(self.window, self.top_k))


class SimulatedSpeculation(Part):
    """Drafts per decode, and the chance that one is accepted when its predecessors were."""

    draft_tokens: Count
    acceptance: Annotated[float, Field(ge=0, le=1)]


class Simulated(Part):
    """Sizes and speed of a pool's simulated engines; the defaults are SimulatedConfig's.

    Attributes:
        cost: None: two CPU cores with a small dense model, as measured.
        kv_capacity_tokens: KV tokens of one replica. Others: see SimulatedConfig.
        transfer_gib_per_s: speed at which KV reaches the other pool; None: at once.
    """

    cost: SimulatedCost | None = None
    max_model_len: Count = 32_768
    block_size: Count = 32
    kv_capacity_tokens: Count = 262_144
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2_048
    max_waiting: Annotated[int, Field(ge=0)] | None = None
    prefix_caching: bool = True
    speculation: SimulatedSpeculation | None = None
    wedge_after_s: Positive = 30.0
    transfer_gib_per_s: Positive | None = None

    def config(self, model: str, *, vocab_size: int, eos_token_id: int) -> SimulatedConfig:
        """What SimulatedEngine is made with. Raises: ValueError for sizes that contradict one another."""
        names = (
            *("max_model_len", "block_size", "kv_capacity_tokens", "max_num_seqs", "max_num_batched_tokens"),
            *("max_waiting", "prefix_caching", "wedge_after_s"),
        )
        drafts = self.speculation
        return SimulatedConfig(
            model=model,
            cost=TWO_CORE_DENSE if self.cost is None else self.cost.step_cost(),
            speculation=None if drafts is None else Speculation(**drafts.model_dump()),
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            **{name: getattr(self, name) for name in names},
        )
