"""The ranked queue against a sorted list, whatever vLLM does to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_deepinfer_plugins.scheduler.waiting import RankedQueue


def request(name: int, deadline: float = 0.0) -> Any:
    return SimpleNamespace(request_id=str(name), deadline=deadline)


def queue() -> RankedQueue:
    return RankedQueue(lambda r: (0, True, r.deadline, 0.0))


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5)),
        st.tuples(st.just("prepend"), st.integers(0, 5)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=60,
)


@given(operations)
def test_it_is_a_stable_sort_by_rank(steps: list[tuple[str, int]]) -> None:
    ranked, model = queue(), []
    for number, (what, value) in enumerate(steps):
        if what in ("add", "prepend"):
            new = request(number, value)
            (ranked.add_request if what == "add" else ranked.prepend_request)(new)
            model.append(new)
            model.sort(key=lambda r: r.deadline)
        elif what == "pop" and model:
            assert ranked.peek_request() is model[0]
            assert ranked.pop_request() is model.pop(0)
        elif what == "remove" and model:
            victim = model.pop(value % len(model))
            ranked.remove_request(victim)
        assert list(ranked) == model and len(ranked) == len(model) and bool(ranked) == bool(model)
        assert [r for _, r in ranked.ranked()] == model


def test_rerank_uses_what_the_policy_knows_now() -> None:
    ranked = queue()
    first, second = request(1, 1.0), request(2, 2.0)
    ranked.prepend_requests([second, first])
    first.deadline = 3.0
    assert list(ranked) == [first, second]
    ranked.rerank()
    assert list(ranked) == [second, first]
    ranked.remove_request(first)
    assert list(ranked) == [second]


def test_removing_several_ignores_those_that_are_not_there() -> None:
    ranked = queue()
    inside, outside = [request(i, i) for i in range(4)], request(9)
    for one in inside:
        ranked.add_request(one)
    ranked.remove_requests({r.request_id: r for r in (inside[1], outside, inside[3])}.values())
    assert list(ranked) == [inside[0], inside[2]]


def test_an_empty_queue() -> None:
    ranked = queue()
    assert not ranked and len(ranked) == 0
    for method in (ranked.peek_request, ranked.pop_request):
        with pytest.raises(IndexError, match="empty"):
            method()
    with pytest.raises(ValueError, match="request 1 is not in the queue"):
        ranked.remove_request(request(1))


def test_iterating_survives_changes() -> None:
    ranked = queue()
    for number in range(3):
        ranked.add_request(request(number, number))
    assert [ranked.pop_request() is one for one in ranked] == [True] * 3
