"""What every engine refuses, against its own facts."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_deepinfer.engine import EngineInfo, GenerateRequest, InvalidRequest, SamplingParams
from vllm_deepinfer.engine.validation import check_request

INFO = EngineInfo(model="m", max_model_len=8, vocab_size=100, max_logprobs=5)


def request_of(prompt: list[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (
            request_of([1] * 8),
            "the prompt has 8 tokens, but the context is 8 tokens and must leave room for at least one more.",
        ),
        (request_of([1, 100]), "token id 100 of the prompt is outside the vocabulary of 100."),
        (request_of([1, -2, 3]), "token id -2 of the prompt is outside the vocabulary of 100."),
        (request_of([1], stop_token_ids=[100]), "token id 100 of stop_token_ids is not below 100."),
        (request_of([1], logit_bias={200: 1.0}), "token id 200 of logit_bias is not below 100."),
        (request_of([1], logprobs=6), "logprobs must be at most 5, got 6."),
        (request_of([1], prompt_logprobs=6), "prompt_logprobs must be at most 5, got 6."),
    ],
)
def test_what_can_never_be_served_is_refused(request_: GenerateRequest, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(request_, INFO)
    assert str(refused.value) == sentence


def test_the_limits_themselves_are_allowed() -> None:
    check_request(request_of([0, 99] * 3 + [1], stop_token_ids=[99], logprobs=5), INFO)


def test_an_unknown_vocabulary_is_not_checked() -> None:
    check_request(request_of([10**6]), EngineInfo(model="m", max_model_len=8))
