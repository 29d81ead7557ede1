"""The rest of a request, and when there is none."""

from __future__ import annotations

import pytest

from vllm_deepinfer.cluster.continuation import Repeats, continued, resumed, why_not
from vllm_deepinfer.engine import FinishReason, GenerateRequest, SamplingParams, TokenDelta, TokenLogprobs


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


def test_what_counts_from_the_first_token_is_asked_for_again_whole() -> None:
    whole = request(seed=1, max_tokens=10, min_tokens=3, prompt_logprobs=1)
    again, _ = resumed(whole, [5, 6], "b")
    assert (again.request_id, again.prompt_token_ids, again.sampling.forced) == ("b", [1, 2], [5, 6])
    assert (again.sampling.max_tokens, again.sampling.min_tokens) == (10, 3)
    assert again.sampling.prompt_logprobs is None
    assert why_not(whole, [5], forces=True) is None
    # lost once more, before all was repeated: what was forced stays forced
    shorter, _ = resumed(again, [5], "c")
    assert shorter.sampling.forced == [5, 6]
    plain, repeats = resumed(request(), [5], "d")
    assert plain.prompt_token_ids == [1, 2, 5] and not plain.sampling.forced
    assert repeats.cut(TokenDelta("d", [7])) == TokenDelta("d", [7])


def test_repeats_are_cut_off_wherever_the_deltas_end() -> None:
    repeats = Repeats((5, 6, 7))
    assert repeats.cut(TokenDelta("a", [5])) is None
    logprobs = [TokenLogprobs(token, -1.0) for token in (6, 7, 8)]
    new = repeats.cut(TokenDelta("a", [6, 7, 8], logprobs=logprobs))
    assert new is not None and (new.token_ids, new.logprobs) == ([8], logprobs[2:])
    assert repeats.cut(TokenDelta("a", [9])) == TokenDelta("a", [9])
    stop, error = FinishReason.STOP, FinishReason.ERROR
    assert Repeats((5,)).cut(TokenDelta("a", [5], stop)) == TokenDelta("a", [], stop)
    assert Repeats((5,)).cut(TokenDelta("a", (), error)) == TokenDelta("a", (), error)
    with pytest.raises(ValueError, match="instead of"):
        Repeats((5, 6)).cut(TokenDelta("a", [5, 9]))


def test_repeats_are_spent_once_all_has_been_given_again() -> None:
    assert Repeats().spent
    repeats = Repeats((5, 6, 7))
    assert not repeats.spent
    repeats.cut(TokenDelta("a", [5, 6]))
    assert not repeats.spent
    repeats.cut(TokenDelta("a", [7, 8]))
    assert repeats.spent
    delta = TokenDelta("a", [9])
    assert repeats.cut(delta) is delta
