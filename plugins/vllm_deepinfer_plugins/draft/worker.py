"""vLLM's CPU worker with a model runner that tells the proposer how requests sample.

The runner hands a proposer of `custom_class` tokens and nothing else. Drafts that are drawn, not the
likeliest, need the requests' temperatures, and the rejection sampler needs what they were drawn from.
Replays go to the model beside the drafter as they do without it.
"""

from __future__ import annotations

from typing import Any

from ..replay.worker import ReplayRunner, ReplayWorker


class DraftRunner(ReplayRunner):
    """Made of a CPUModelRunner by its worker, which builds the runner by its name."""

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.drafter.begin(sampling_metadata, scheduler_output.num_spec_tokens_to_schedule > 0)
        drafts = super().propose_draft_token_ids(
            scheduler_output, sampled_token_ids, sampling_metadata, *args, **kwargs
        )
        probabilities = self.drafter.take_probabilities()
        if probabilities is not None:
            self._draft_probs = probabilities
            self._draft_prob_req_ids = self.input_batch.req_ids.copy()
        return drafts


class DraftWorker(ReplayWorker):
    """vLLM's CPU worker whose runner is a `DraftRunner`."""

    runner = DraftRunner
