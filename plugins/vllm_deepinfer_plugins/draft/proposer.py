"""What `--speculative-config` names: vLLM's model runner V1 makes one and calls `propose` after each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .drafted import Drafted
from .sampling import Draws


class DSparkProposer:
    """Drafts with the DSpark blocks of the target's own checkpoint.

    Its weights and its KV belong to the target's model class, which fills the one and writes the other.

    Attributes:
        drafting: Whether anything is drafted at all; a benchmark switches it.
    """

    def __init__(self, vllm_config: Any) -> None:
        speculative = vllm_config.speculative_config
        self.count: int = speculative.num_speculative_tokens
        self.most: int = vllm_config.model_config.max_model_len
        self.drafting = True
        self._probabilistic = speculative.draft_sample_method != "greedy"
        self._wanted = True
        self._target: Any = None
        self._sampling: Any = None
        self._probabilities: torch.Tensor | None = None

    def load_model(self, target: Any) -> None:
        """vLLM's runner has loaded the target."""
        self._target = target

    def begin(self, sampling_metadata: Any, wanted: bool = True) -> None:
        """How the requests of the step sample, and whether the scheduler wants drafts; from `worker`."""
        self._sampling, self._wanted = sampling_metadata, wanted

    def take_probabilities(self) -> torch.Tensor | None:
        """[requests, drafts, vocab] of the last proposals, once; None: they are certain."""
        probabilities, self._probabilities = self._probabilities, None
        return probabilities

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for each request of the step; none for those that have no new token.

        Args:
            sampled_token_ids: By request.
            num_tokens_no_spec: [requests or more] tokens of each with the new ones.
        """
        drafting = self.drafting and self._wanted
        rooms = [
            min(self.count, self.most - int(num_tokens_no_spec[row]) - 1) if tokens and drafting else 0
            for row, tokens in enumerate(sampled_token_ids)
        ]
        rows = [row for row, room in enumerate(rooms) if room > 0]
        drafts: list[list[int]] = [Drafted() for _ in sampled_token_ids]
        if not rows:
            return drafts
        anchors = torch.tensor([sampled_token_ids[row][-1] for row in rows])
        positions = torch.tensor([int(num_tokens_no_spec[row]) - 1 for row in rows])
        block = self._target.draft(torch.tensor(rows), anchors, positions, self.count, self._draws(rows))
        tokens = block.tokens.tolist()
        confidences = [[]] * len(rows) if block.confidences is None else block.confidences.tolist()
        for row, own, sure in zip(rows, tokens, confidences, strict=True):
            drafts[row] = Drafted(own[: rooms[row]], sure[: rooms[row]])
        if block.probabilities is not None:
            shape = (len(drafts), *block.probabilities.shape[1:])
            self._probabilities = block.probabilities.new_zeros(shape)
            self._probabilities[rows] = block.probabilities
        return drafts

    def _draws(self, rows: list[int]) -> Draws:
        """Greedy requests get the likeliest tokens; with `draft_sample_method` others get drawn ones."""
        metadata = self._sampling
        if not self._probabilistic or metadata is None or metadata.temperature is None:
            return Draws()
        generators = {
            at: metadata.generators[row] for at, row in enumerate(rows) if row in metadata.generators
        }
        return Draws(metadata.temperature[rows].float(), generators)
