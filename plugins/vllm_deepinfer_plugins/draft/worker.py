"""vLLM's CPU worker with a model runner that tells the proposer how requests sample.

The runner hands a proposer of `custom_class` tokens and nothing else. Drafts that are drawn, not the
likeliest, need the requests' temperatures, and the rejection sampler needs what they were drawn from.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class DraftRunner(CPUModelRunner):
    """Made of a CPUModelRunner by its worker, which builds the runner by its name."""

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.drafter.begin(sampling_metadata)
        drafts = super().propose_draft_token_ids(
            scheduler_output, sampled_token_ids, sampling_metadata, *args, **kwargs
        )
        probabilities = self.drafter.take_probabilities()
        if probabilities is not None:
            self._draft_probs = probabilities
            self._draft_prob_req_ids = self.input_batch.req_ids.copy()
        return drafts


class DraftWorker(CPUWorker):
    """vLLM's CPU worker whose runner is a `DraftRunner`."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = DraftRunner
