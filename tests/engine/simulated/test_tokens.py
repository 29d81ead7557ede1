"""Token sources are pure functions of request and position."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.engine import GenerateRequest, SamplingParams
from vllm_deepinfer.engine.simulated.tokens import chained_tokens, hashed_tokens, logprobs_of, scripted_tokens


def request_of(prompt: list[int], seed: int | None = None) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(seed=seed))


@given(st.lists(st.integers(0, 999), min_size=1), st.integers(0, 2**31), st.integers(0, 10_000))
def test_hashed_tokens_are_in_range_and_reproducible(prompt: list[int], seed: int, position: int) -> None:
    source = hashed_tokens(1_000, reserved=16)
    token = source(request_of(prompt, seed))(position)
    assert 16 <= token < 1_000
    assert token == source(request_of(prompt, seed))(position)


def test_hashed_tokens_depend_on_prompt_seed_and_position() -> None:
    source = hashed_tokens(100_000)
    answers = {
        tuple(source(request)(i) for i in range(20))
        for request in (request_of([5]), request_of([6]), request_of([5, 6]), request_of([5], 1))
    }
    assert len(answers) == 4
    assert all(len(set(answer)) > 15 for answer in answers)


def test_hashed_tokens_spread_over_the_vocabulary() -> None:
    token_at = hashed_tokens(116, reserved=16)(request_of([1, 2, 3]))
    counts = [0] * 116
    for position in range(20_000):
        counts[token_at(position)] += 1
    assert counts[:16] == [0] * 16
    assert min(counts[16:]) > 120 and max(counts[16:]) < 280  # 200 expected


def test_a_vocabulary_needs_room() -> None:
    with pytest.raises(ValueError, match="leaves nothing"):
        hashed_tokens(16, reserved=16)


def test_scripted_tokens_play_the_script_and_end() -> None:
    token_at = scripted_tokens(lambda request: request.prompt_token_ids[::-1], eos_token_id=1)(
        request_of([7, 8])
    )
    assert [token_at(i) for i in range(4)] == [8, 7, 1, 1]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_ranked_and_sum_below_one(count: int) -> None:
    entry = logprobs_of(998, count, 1_000)
    assert (entry.token_id, entry.rank, len(entry.top)) == (998, 1, count)
    assert math.exp(entry.logprob) == pytest.approx(0.5)
    assert sum(math.exp(value) for _, value in entry.top) < 1
    assert len({token for token, _ in entry.top}) == count and all(t < 1_000 for t, _ in entry.top)


@given(st.lists(st.integers(0, 2**17), min_size=1, max_size=50), st.integers(0, 99), st.integers(0, 60))
def test_chained_tokens_go_on_from_any_place(prompt: list[int], seed: int, cut: int) -> None:
    source = chained_tokens(1_000, reserved=16)
    whole = source(request_of(prompt, seed=seed))
    answer = [whole(position) for position in range(100)]
    assert all(16 <= token < 1_000 for token in answer) and whole(3) == answer[3]
    rest = source(request_of([*prompt, *answer[:cut]], seed=seed))
    assert [rest(position) for position in range(100 - cut)] == answer[cut:]


def test_chained_tokens_show_a_lost_or_doubled_token() -> None:
    source = chained_tokens(100_000)
    whole = source(request_of([1, 2, 3]))
    answer = [whole(position) for position in range(20)]
    assert len(set(answer)) == 20
    for wrong in ([*answer[:9], answer[10]], [*answer[:10], answer[9]]):
        assert source(request_of([1, 2, 3, *wrong]))(0) not in answer


def test_chained_tokens_need_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="leaves nothing"):
        chained_tokens(16, reserved=16)
