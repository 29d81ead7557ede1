"""What an engine drafted, by request and admission, and whether the rule by the letter gives the same.

Random weights accept next to nothing, so most drafts are replaced, when they have been written down, by what
the target is known to write, or nearly.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.draft.load import load_drafter
from vllm_deepinfer_plugins.draft.proposer import DSparkProposer
from vllm_deepinfer_plugins.replay.sizes import Sizes

from tests.plugins.replay.oracle import Admission, Log, cold_entries, model_of
from vllm_deepinfer.policy.replay import decoder_start

from .literal import drafts, features, first_row


@dataclass(frozen=True)
class Proposal:
    """Drafts behind the first ``known`` tokens of a request, made since its ``admission``-th admission."""

    known: int
    admission: int
    tokens: list[int]
    confidences: list[float]


class Proposals:
    """Writes down what is drafted, by request, under the ids that were given to the engine.

    Args:

    Attributes:
        made: by request.
        truth: prompts with their answers. Of drafts that follow the beginning of one, three of four are
            replaced by what it has there.
    """

    def __init__(self, llm: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[str, list[Proposal]] = defaultdict(list)
        self.truth: list[list[int]] = []
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        original = DSparkProposer.propose

        def propose(proposer: Any, sampled: Any, lengths: Any, ids: Any, slot_mappings: Any = None) -> Any:
            found = original(proposer, sampled, lengths, ids, slot_mappings)
            for row, (key, draft) in enumerate(zip(runner.input_batch.req_ids, found, strict=True)):
                name = key.rsplit("-", 1)[0]
                if draft:
                    at = len(log.admissions[name]) - 1
                    made = Proposal(int(lengths[row]), at, list(draft), list(draft.confidences))
                    self.made[name].append(made)
                self._guess(ids[row, : lengths[row]].tolist(), draft)
            return found

        monkeypatch.setattr(DSparkProposer, "propose", propose)

    def _guess(self, known: list[int], draft: list[int]) -> None:
        right = next((whole[len(known) :] for whole in self.truth if whole[: len(known)] == known), [])
        for place, token in enumerate(right[: len(draft)]):
            if (len(known) + 3 * place) % 4:
                draft[place] = token

    def check(
        self,
        llm: Any,
        name: str,
        tokens: list[int],
        prompt: int,
        admissions: list[Admission],
        document: list[int] | None = None,
    ) -> int:
        """Assert that a request's drafts are those of the rule, to the bit; how many anchors that were.

        Args:
            tokens: Prompt and answer. prompt: Tokens of the prompt.
            document: Whose cached entries the first hit adopted.
        """
        model, drafter, ids = model_of(llm), drafter_of(llm), torch.tensor(tokens)
        taps, kept = model.config.dspark_target_layer_ids, decoder_start(prompt, Sizes.of(model.config).rows)
        entries = cold_entries(llm, tuple(document)) if document is not None else {}
        ends = [admission.known for admission in admissions[1:]] + [len(ids)]
        checked = 0
        for at, (admission, end) in enumerate(zip(admissions, ends, strict=True)):
            where = {"start": admission.floor, "kept": kept}
            computed = max(end - 1, admission.known)
            rows, entries = features(model, taps, ids[:computed], hit=admission.hit, cached=entries, **where)
            own = [each for each in self.made[name] if each.admission == at and each.known <= len(ids)]
            if not own:
                continue
            anchors, first = [each.known - 1 for each in own], first_row(model, taps, **where)
            assert all(first <= max(anchor - model.config.sliding_window, 0) for anchor in anchors)
            wanted = drafts(model, drafter, ids, anchors, rows, first)
            for row, each in enumerate(own):
                assert each.tokens == wanted.tokens[row, : len(each.tokens)].tolist(), (admission, each)
                sure = wanted.confidences[row, : len(each.tokens)].tolist()
                assert each.confidences == sure, (admission, each)
            checked += len(own)
        return checked


@cache
def drafter_of(llm: Any) -> Any:
    """The drafter of an engine's checkpoint."""
    return load_drafter(Path(llm.llm_engine.model_config.model))
