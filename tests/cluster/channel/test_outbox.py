"""Whatever the timing, the same tokens in the same order, and never more under way than the credit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.cluster.channel.outbox import Outbox, merged
from vllm_deepinfer.engine import FinishReason, TokenDelta, TokenLogprobs

events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=4)),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("ack"), st.integers(-2, 40)),
    ),
    max_size=60,
)


@given(events, st.integers(1, 4))
def test_against_a_list(script: list[tuple[str, object]], credit: int) -> None:
    outbox, given_tokens, sent_tokens = Outbox(credit), dict[str, list[int]](), dict[str, list[int]]()
    token, steps = 0, 0

    def take() -> None:
        nonlocal steps
        step = outbox.take()
        if step is None:
            return
        steps += 1
        assert step[0] == steps and outbox.sent - outbox.received <= credit
        assert len({delta.request_id for delta in step[1]}) == len(step[1])
        for delta in step[1]:
            sent_tokens.setdefault(delta.request_id, []).extend(delta.token_ids)

    for kind, value in script:
        if kind == "add":
            assert isinstance(value, list)
            for name, count in dict(value).items():
                ids = list(range(token, token + count))
                token += count
                given_tokens.setdefault(name, []).extend(ids)
                outbox.add([TokenDelta(request_id=name, token_ids=ids)])
        elif kind == "take":
            take()
        else:
            assert isinstance(value, int)
            outbox.acknowledge(value)
    for _ in range(2):
        outbox.acknowledge(outbox.sent)
        take()
    assert {name: ids for name, ids in sent_tokens.items() if ids} == {
        name: ids for name, ids in given_tokens.items() if ids
    }


def test_too_much_overflows_and_a_step_makes_room() -> None:
    outbox = Outbox(credit=1, most_tokens=10)
    outbox.add([TokenDelta(request_id="a", token_ids=[1] * 11)])
    assert outbox.overflows
    assert outbox.take() is not None and not outbox.overflows
    outbox.add([TokenDelta(request_id="a", token_ids=[1])])
    assert outbox.take() is None, "no credit"
    outbox.acknowledge(2)
    assert outbox.take() is None, "an acknowledgement from nowhere"
    outbox.acknowledge(1)
    assert outbox.take() is not None


def test_merging_keeps_every_field() -> None:
    one, two = TokenLogprobs(token_id=1, logprob=-1.0), TokenLogprobs(token_id=2, logprob=-2.0)
    first = TokenDelta(
        request_id="a",
        token_ids=[1],
        logprobs=[one],
        prompt_logprobs=[None],
        cached_tokens=16,
        accepted_draft_tokens=1,
    )
    second = TokenDelta(
        request_id="a",
        token_ids=[2, 3],
        logprobs=[two, two],
        finish_reason=FinishReason.STOP,
        stop_reason=3,
        cached_tokens=16,
        accepted_draft_tokens=2,
    )
    both = merged(first, second)
    assert both == TokenDelta(
        request_id="a",
        token_ids=[1, 2, 3],
        logprobs=[one, two, two],
        prompt_logprobs=[None],
        finish_reason=FinishReason.STOP,
        stop_reason=3,
        cached_tokens=16,
        accepted_draft_tokens=3,
    )
    error = merged(first, TokenDelta(request_id="a", finish_reason=FinishReason.ERROR, error="why"))
    assert (error.token_ids, error.logprobs, error.error) == ([1], [one], "why")
