"""How the checkpoint is served in each mode, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...draft.settle import PROPOSER

CONTEXT = 8192
_PLAIN = {"encoder_replay": False, "decoder_replay": False}
_DRAFTS = {"method": "custom_class", "model": PROPOSER}


@dataclass(frozen=True)
class Mode:
    """One way of serving.

    Attributes:
        encoding: of the weights: as they are, or re-encoded as released.
        deepinfer: the plugin's settings. engine: further arguments of vLLM's ``LLM``.
    """

    name: str
    dtype: str = "float32"
    encoding: str = "as_stored"
    deepinfer: dict[str, Any] = field(default_factory=lambda: dict(_PLAIN))
    engine: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False


FIRST = "float32"
MODES = (
    Mode(FIRST),
    Mode("bfloat16", dtype="bfloat16"),
    Mode("released_encoding", encoding="released"),
    Mode("encoder_replay", deepinfer={"encoder_replay": True, "decoder_replay": False, "window_tier_mib": 0}),
    Mode(
        "decoder_replay",
        deepinfer={"encoder_replay": False, "decoder_replay": True},
        engine={"enable_prefix_caching": False},
    ),
    Mode("both_replays", deepinfer={"encoder_replay": True, "decoder_replay": True}),
    Mode("speculation_fixed", deepinfer={**_PLAIN, "verification": "everything"}, drafts=True),
    Mode("speculation_adaptive", deepinfer={**_PLAIN, "verification": "adaptive"}, drafts=True),
)
NOT_AN_ENGINE = {
    "unquantised_caches": "the engine's caches have no unquantised form; perplexity is from the plain form",
}


def arguments(mode: Mode, block: int, context: int) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` besides the model.

    Args:
        block: drafts per step, the drafter's block size.
        context: tokens that the checkpoint can hold.
    """
    given: dict[str, Any] = {
        "dtype": mode.dtype,
        "enforce_eager": True,
        "max_model_len": min(CONTEXT, context),
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 32,
        "block_size": 32,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
        "additional_config": {"deepinfer": mode.deepinfer},
        **mode.engine,
    }
    if mode.drafts:
        given["speculative_config"] = {**_DRAFTS, "num_speculative_tokens": block}
    return given
