"""Answers that begin with given tokens: a logits processor.

An answer that was lost with its engine can go on in another one as prompt + emitted tokens, unless a
constraint, a seed or a penalty counts the answer from its first token. Then the answer is computed again from
its prompt, each step with all the logits but the emitted token's at -inf: the grammar advances, penalties
count, and the request's generator takes its draw: what follows is what the lost engine would have given.

It is an engine argument and not an entry point of vLLM: model runner V2 loads the same entry points and wants
classes of another kind, and with speculation vLLM 0.32 loads none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "deepinfer_forced_token_ids"
"""Key of `SamplingParams.extra_args`."""

NAME = f"{__name__}:ForcedTokens"


class ForcedTokens(AdapterLogitsProcessor):
    """Does nothing for requests without forced tokens; vLLM calls it once per step."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises: VLLMValidationError for anything but a list of token ids."""
        forced = (sampling_params.extra_args or {}).get(FORCED)
        if forced is None:
            return
        if not isinstance(forced, list) or not all(isinstance(one, int) and one >= 0 for one in forced):
            raise VLLMValidationError(f"{FORCED} must be a list of token ids, got {forced!r}.")

    def is_argmax_invariant(self) -> bool:
        """It decides the argmax."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """What vLLM calls with the answer so far and the row of logits; None: not this request."""
        forced = (params.extra_args or {}).get(FORCED)
        return partial(force, forced) if forced else None


def force(forced: Sequence[int], output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits [vocabulary], in place: only the next forced token is left, while there is one."""
    position = len(output_ids)
    if position < len(forced):
        logits.fill_(-math.inf)
        logits[forced[position]] = 0.0
    return logits


def add_forced_tokens(args: AsyncEngineArgs) -> None:
    """Give an engine the processor where vLLM runs it: model runner V1 (so it is on CPUs), no speculation."""
    if current_platform.is_cpu() and args.speculative_config is None:
        args.logits_processors = [*(args.logits_processors or ()), NAME]


def forces_tokens(config: Any) -> bool:
    """Whether the engine of that VllmConfig has the processor."""
    return NAME in (config.model_config.logits_processors or ())
