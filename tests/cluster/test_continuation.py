"""The rest of a request, and when there is none."""

from __future__ import annotations

import pytest

from vllm_deepinfer.cluster.continuation import continued, why_not
from vllm_deepinfer.engine import GenerateRequest, SamplingParams


def request(**sampling: object) -> GenerateRequest:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return GenerateRequest(
        request_id="a", prompt_token_ids=[1, 2], sampling=params, cache_salt="s", priority=3
    )


def test_nothing_emitted_is_the_same_request() -> None:
    whole = request(max_tokens=10, min_tokens=3, prompt_logprobs=1)
    again = continued(whole, [], "b")
    assert (again.request_id, again.prompt_token_ids, again.sampling) == ("b", [1, 2], whole.sampling)


def test_limits_count_what_is_left() -> None:
    rest = continued(request(max_tokens=10, min_tokens=3, prompt_logprobs=1, stop_token_ids=[9]), [5, 6], "b")
    assert rest.prompt_token_ids == [1, 2, 5, 6]
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (8, 1)
    assert rest.sampling.prompt_logprobs is None and list(rest.sampling.stop_token_ids) == [9]
    assert (rest.cache_salt, rest.priority) == ("s", 3)
    assert continued(request(min_tokens=1), [5, 6], "b").sampling.min_tokens == 0
    assert continued(request(max_tokens=None), [5], "b").sampling.max_tokens is None


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"seed": 1}, "seeded"),
        ({"presence_penalty": 1.0}, "penalties"),
        ({"frequency_penalty": 1.0}, "penalties"),
    ],
)
def test_why_not(sampling: dict[str, object], word: str) -> None:
    assert why_not(request(**sampling), []) is None
    assert word in (why_not(request(**sampling), [5]) or "")


def test_a_repetition_penalty_counts_the_prompt_anyway() -> None:
    assert why_not(request(repetition_penalty=1.2, temperature=0.0), [5]) is None
