"""A drafter whose acceptance is scripted, for benchmarks and tests: it knows what the target writes next.

It serves checkpoints of `successor`, whose next token is the next id. Which request it drafts for stands in
the first two tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...draft.drafted import Drafted
from .script import Confidences, Scripts, said
from .successor import FIRST, successor

SCRIPTED = f"{__name__}.ScriptedProposer"
DIGIT = 256  # requests are numbered in two digits of this base


class ScriptedProposer:
    """What vLLM's model runner V1 makes of `custom_class`.

    Attributes:
        scripts: of the requests by number; None: nothing is drafted.
        count: drafts for each. drafting: whether there are any. confidences: what it says of them.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.count: int = vllm_config.speculative_config.num_speculative_tokens
        self.drafting = True
        self.scripts: Scripts | None = None
        self.confidences = Confidences.RIGHT
        self._most: int = vllm_config.model_config.max_model_len
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()

    def load_model(self, target: Any) -> None:
        """There is nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for each request of the step; none for those that have no new token."""
        drafts: list[list[int]] = [Drafted() for _ in sampled_token_ids]
        scripts = self.scripts
        rows = [
            row
            for row, tokens in enumerate(sampled_token_ids)
            if tokens and num_tokens_no_spec[row] + self.count < self._most
        ]
        if scripts is None or not self.drafting or not rows:
            return drafts
        numbers = number_of(token_ids_cpu[rows, :2])
        known = num_tokens_no_spec[rows].astype(np.int64)
        chances = scripts.chances(numbers, known, self.count)
        right = scripts.right(numbers, known, self.count).tolist()
        sure = said(chances, self.confidences)
        for at, row in enumerate(rows):
            tokens, last = [], int(sampled_token_ids[row][-1])
            for good in right[at]:
                last = successor(last, self._vocabulary)
                tokens.append(last if good else successor(last, self._vocabulary))
            drafts[row] = Drafted(tokens, () if sure is None else sure[at].tolist())
        return drafts


def number_of(heads: NDArray[np.int32]) -> NDArray[np.int64]:
    """[n] numbers of requests by the first two tokens [n, 2] of their prompts."""
    digits = heads.astype(np.int64) - FIRST
    return digits[:, 0] * DIGIT + digits[:, 1]


def prompt_of(number: int, tail: Sequence[int]) -> list[int]:
    """The prompt of a request: its number, and any ordinary tokens."""
    return [FIRST + number // DIGIT, FIRST + number % DIGIT, *tail]
