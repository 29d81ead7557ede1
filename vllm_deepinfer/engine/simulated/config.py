"""What a simulated engine is like."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_deepinfer.engine.messages import EngineInfo
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafts per decode, and the chance that one is accepted when its predecessors were."""

    draft_tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens must be at least 1, got {self.draft_tokens}; or leave it out.")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance must be a probability, got {self.acceptance}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Sizes and speed of a simulated engine; names follow vLLM's where vLLM has them.

    Attributes:
        cost: predicts the duration of every step.
        max_model_len: prompt and answer together, in tokens.
        block_size: tokens per KV block.
        kv_capacity_tokens: KV tokens in all; at least one request of max_model_len fits.
        max_num_seqs: most requests running at once. max_num_batched_tokens: most tokens per step.
        max_waiting: `submit` raises Overloaded once max_num_seqs + max_waiting requests are alive; None:
            never.
        prefix_caching: whether full blocks are kept and found again.
        speculation: None: one token per decode.
        eos_token_id, vocab_size: of the pretended model.
        forces_tokens: whether `SamplingParams.forced` is taken.
        wedge_after_s: work without a finished step for this long is reported as WEDGED; longer than any step.
        hold_lease_s: KV that is kept for another engine is released after so long.
        transfer_s_per_token, transfer_latency_s: duration of a fetch from another engine.
        fetch_timeout_s: a fetch that takes longer is given up, and the prompt computed.
        kv_layout: digest of the KV's layout; "": follows from model and block size.
    """

    model: str = "simulated"
    cost: StepCost = TWO_CORE_DENSE
    max_model_len: int = 32_768
    block_size: int = 32
    kv_capacity_tokens: int = 262_144
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    max_waiting: int | None = None
    prefix_caching: bool = True
    speculation: Speculation | None = None
    eos_token_id: int = 1
    vocab_size: int = 129_280
    wedge_after_s: float = 30.0
    forces_tokens: bool = True
    hold_lease_s: float = 60.0
    transfer_s_per_token: float = 1e-6
    transfer_latency_s: float = 1e-3
    fetch_timeout_s: float = 20.0
    kv_layout: str = ""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"kv_capacity_tokens {self.kv_capacity_tokens} cannot hold one request of max_model_len "
                f"{self.max_model_len} in blocks of {self.block_size}."
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: some decodes could never run."
            )
        for name in ("hold_lease_s", "fetch_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")
        for name in ("transfer_s_per_token", "transfer_latency_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(f"eos_token_id {self.eos_token_id} is not below vocab_size {self.vocab_size}.")

    @property
    def blocks(self) -> int:
        """Whole KV blocks."""
        return self.kv_capacity_tokens // self.block_size

    @property
    def draft_tokens(self) -> int:
        """Most drafts per decode."""
        return self.speculation.draft_tokens if self.speculation else 0

    @property
    def layout(self) -> str:
        """`EngineInfo.kv_layout`."""
        return self.kv_layout or f"simulated/{self.model}/{self.vocab_size}/{self.block_size}"

    def info(self) -> EngineInfo:
        """The same facts as every engine tells them."""
        return EngineInfo(
            model=self.model,
            max_model_len=self.max_model_len,
            eos_token_ids=(self.eos_token_id,),
            block_size=self.block_size,
            kv_capacity_tokens=self.blocks * self.block_size,
            vocab_size=self.vocab_size,
            draft_tokens=self.draft_tokens,
            forces_tokens=self.forces_tokens,
            kv_layout=self.layout,
            hands_over=True,
        )
