"""On CUDA vLLM's own DSpark drafts and verifies; this gives its choice a cost that knows the batch's context.

vLLM 0.32 (`v1/worker/gpu/spec_decode/adaptive_verification.py`) times steps at start-up at one context
(`VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN`, 8,192) and prices every batch by that table. Here a few
sizes are timed at a second context as well, and each step's table is the one of its own contexts
(`policy/verification_curves`). Everything else is vLLM's: staleness, ranking on the device, compaction.

    --speculative-config '{"method": "dspark", "num_speculative_tokens": 5,
        "enable_adaptive_verification": true}'
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllm_side

from vllm_deepinfer.policy.verification_curves import ContextCurve, Profiled, context_slope

logger = logging.getLogger(__name__)

SIZES = 4
"""Steps that are timed at the second context, of all sizes that are captured."""
NEAR = 512
"""Tokens of the second context; a quarter of vLLM's own where that is below 2,048."""
REPLAYS = 5


def install() -> None:
    """vLLM's factory makes our class from now on. Idempotent."""
    vllm_side.AdaptiveVerificationManager = ContextAwareVerification  # type: ignore[misc]


class ContextAwareVerification(vllm_side.AdaptiveVerificationManager):
    """vLLM's manager with a table for each step's own contexts."""

    _asked: tuple[dict[str, int], ...] = ()
    _curve: ContextCurve | None = None
    cost_tables: tuple[np.ndarray, np.ndarray] | None

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """vLLM's batches, and behind them a few sizes at a second context."""
        asked: list[dict[str, int]] = []
        for batch in super().batches_to_profile(capture_sizes):
            asked.append(batch)
            yield batch
        far = max((batch["context_len"] for batch in asked), default=0)
        near = min(NEAR, far // 4)
        places = np.linspace(0, len(capture_sizes) - 1, SIZES).astype(int) if near < far else ()
        for size in sorted({capture_sizes[at] for at in places}):
            for _ in range(REPLAYS):
                asked.append({"num_tokens": size, "context_len": near})
                yield asked[-1]
        self._asked = tuple(asked)

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """vLLM's table from the samples at its own context, and ours from all of them."""
        if not self._asked or len(samples) != len(self._asked):
            logger.warning(
                "Verification knows no context: %d of %d steps of the profile were timed.",
                len(samples),
                len(self._asked),
            )
            super().set_initial_cost_curves(samples)
            return
        far = max(batch["context_len"] for batch in self._asked)
        pairs = list(zip(samples, self._asked, strict=True))
        steps = [
            Profiled(sample.num_target_tokens, sample.num_reqs, batch["context_len"], sample.forward_ms)
            for sample, batch in pairs
        ]
        slope = get_tp_group().broadcast_object(context_slope(steps), src=0)  # the same choice on all ranks
        super().set_initial_cost_curves([sample for sample, batch in pairs if batch["context_len"] == far])
        if slope is None or self.cost_tables is None:
            return
        # An entry between two sizes is that of the larger one, requests included.
        sizes = np.array(sorted({step.tokens for step in steps if step.context == far}))
        at = np.searchsorted(sizes, np.arange(len(self.cost_tables[1]))).clip(max=len(sizes) - 1)
        requests = np.minimum(sizes[at], self.req_states.max_num_reqs)
        self._curve = ContextCurve(self.cost_tables[1], requests, far, slope)
        logger.info("Verification prices a token of context at %.3g ns.", slope * 1e6)

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """vLLM's choice, by the table of these requests' contexts."""
        if self._curve is None or self.cost_tables is None:
            return int(super().get_num_tokens(num_tokens_per_req, draft_tokens))
        profiled = self.cost_tables
        slots = [self.req_states.req_id_to_index[key] for key in num_tokens_per_req]
        total = float(self.req_states.num_computed_tokens_np[slots].sum())
        self.cost_tables = (profiled[0], self._curve.at(total))
        try:
            return int(super().get_num_tokens(num_tokens_per_req, draft_tokens))
        finally:
            self.cost_tables = profiled
