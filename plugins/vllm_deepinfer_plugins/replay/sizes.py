"""The lengths that a checkpoint's config gives for replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_deepinfer.policy.replay import kept_rows


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens.

    Attributes:
        window: W.
        rows: of a prompt that go behind the last KV source. The backtrack counts DSpark's block, whether it
            drafts or not: speculation must not change what a prompt computes.
        lookback: in front of a token that Engram reads; 0 without Engram.
    """

    window: int
    rows: int
    lookback: int

    @classmethod
    def of(cls, text_config: Any) -> Sizes:
        """From ``text_config``, vLLM's or the library's."""
        window = int(text_config.sliding_window)
        drafts = int(getattr(text_config, "dspark_block_size", 0) or 0)
        ngram = int(getattr(text_config, "engram_max_ngram_size", 0) or 0)
        engram = list(getattr(text_config, "engram_layer_ids", None) or [])
        return cls(window, kept_rows(window, drafts), ngram - 1 if engram else 0)
