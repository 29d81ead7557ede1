"""What is measured, as data: settings, traffic, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_deepinfer.checkpoint.options import TinyOptions

from ...draft.settle import PROPOSER, SCHEDULER
from .script import Confidences

DRAFTS = 5
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
TRAFFIC = ("easy", "hard", "mixed")
OFF = "off"
FIXED = tuple(f"fixed {drafts}" for drafts in range(1, DRAFTS + 1))
ADAPTIVE = "adaptive"
TOO_SURE, UNSURE = "adaptive, too sure", "adaptive, no confidences"
SAYS = {ADAPTIVE: Confidences.RIGHT, TOO_SURE: Confidences.TOO_SURE, UNSURE: Confidences.ABSENT}
"""What the drafter says of its drafts where verification is adaptive."""

SCRIPTED, TRAINED = "scripted", "trained"
BATCHES = ((1.5,), (-1.0,), (2.5, -1.0), (0.5, 0.0, 3.0))
"""Log odds of the first drafts of the requests of each small batch that brute force is compared on."""
BATCH_SLOPE = 0.3
CONTEXT = 1024
PROMPT = 16  # tokens


@dataclass(frozen=True)
class Plan:
    """How much.

    Attributes:
        rounds: of every setting in every cell. budget: seconds after which no further round begins.
        steps, seconds: that a slice is measured over, at least.
        outputs: tokens of an answer, where drafts are not scripted.
        variants: concurrency at which drafters that say nothing, or too much, are measured too.
        trace: steps of each brute-force measurement. rounds_of_ece: rounds of verification, about.
        patience: seconds of measuring after which disturbed slices are no longer taken again.
    """

    rounds: int
    budget: float
    steps: int
    seconds: float
    outputs: int
    variants: tuple[int, ...]
    trace: int
    rounds_of_ece: int
    patience: float


QUICK = Plan(8, 210.0, 8, 0.1, 24, (1, 8, 64), 40, 8_000, 120.0)
FULL = Plan(15, 3_600.0, 16, 0.4, 64, CONCURRENCY, 120, 30_000, 1_800.0)

MODEL = TinyOptions(
    ratios=(0, 2, 2, 1),
    kv_sources=(1, 3),
    index_sources=(1, 3),
    candidate_source=3,
    engram_layers=(1,),
    hidden=256,
    heads=4,
    head_dim=64,
    experts=16,
    top_k=2,
    expert_width=128,
    window=64,
    vocab=2048,
    encoding="bf16",
    context_length=CONTEXT,
)
"""The random weights: four layers of every kind that V4.1 has."""

NO_REPLAY = {"encoder_replay": False, "decoder_replay": False}


def engine(drafter: str, concurrency: int = CONCURRENCY[-1]) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` besides the model.

    Args:
        drafter: `SCRIPTED` or `TRAINED`.
    """
    from .scripted import SCRIPTED as SCRIPTED_CLASS

    proposer = SCRIPTED_CLASS if drafter == SCRIPTED else PROPOSER
    return {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": concurrency,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "async_scheduling": False,
        "scheduler_cls": SCHEDULER,
        "seed": 0,
        "speculative_config": {"method": "custom_class", "model": proposer, "num_speculative_tokens": DRAFTS},
        # Schedulers are swapped in the running engine, vLLM's own among them, which sends no replays.
        "additional_config": {"deepinfer": NO_REPLAY},
    }


def settings(concurrency: int, drafter: str, plan: Plan) -> tuple[str, ...]:
    """Names of what takes turns in a cell."""
    variants = drafter == SCRIPTED and concurrency in plan.variants
    return (OFF, *FIXED, *(SAYS if variants else (ADAPTIVE,)))
