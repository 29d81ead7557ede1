from __future__ import annotations

import statistics
from collections import Counter

import pytest

from vllm_deepinfer.bench.routing.trace import (
    MEDIAN_PROMPT,
    MOST_ANSWER,
    MOST_PROMPT,
    SCALE,
    Shape,
    draw,
)


def test_the_same_seed_gives_the_same_trace_and_another_one_another() -> None:
    shape = Shape(rate=20, seconds=5)
    assert draw(shape, 3) == draw(shape, 3)
    assert draw(shape, 3) != draw(shape, 4)


def test_the_rate_is_that_asked_for_with_and_without_bursts() -> None:
    for fan_out in (0.0, 0.3):
        arrivals = draw(Shape(rate=50, seconds=200, fan_out=fan_out), 1)
        assert len(arrivals) / 200 == pytest.approx(50, rel=0.1)


def test_arrivals_are_in_order_and_inside_the_trace() -> None:
    times = [arrival.at for arrival in draw(Shape(rate=40, seconds=10), 2)]
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 10


def test_prompts_are_as_published_in_units_of_the_scale() -> None:
    prompts = [arrival.prompt_tokens for arrival in draw(Shape(rate=100, seconds=200), 5)]
    assert statistics.median(prompts) == pytest.approx(MEDIAN_PROMPT / SCALE, rel=0.03)
    # 450,000 is the published 99th percentile: about one in a hundred reaches the bound.
    share = sum(prompt == round(MOST_PROMPT / SCALE) for prompt in prompts) / len(prompts)
    assert 0.005 < share < 0.015


def test_answers_have_the_median_of_published_ones_in_steps_and_an_end() -> None:
    answers = [arrival.answer_tokens for arrival in draw(Shape(rate=100, seconds=200), 6)]
    assert statistics.median(answers) == pytest.approx(444 / 3.51, rel=0.04)
    assert max(answers) == MOST_ANSWER
    assert min(answers) >= 2


def test_a_burst_is_requests_of_one_session_in_one_instant() -> None:
    arrivals = draw(Shape(rate=30, seconds=60, fan_out=0.2), 7)
    groups = Counter(arrival.at for arrival in arrivals)
    sizes = Counter(groups.values())
    assert set(sizes) == {1, 3, 4, 5, 6, 7, 8}
    assert sizes[1] / sum(sizes.values()) == pytest.approx(0.8, abs=0.05)
    for at in groups:
        assert len({arrival.session for arrival in arrivals if arrival.at == at}) == 1


def test_without_fan_out_nothing_comes_together() -> None:
    arrivals = draw(Shape(rate=30, seconds=20, fan_out=0.0), 8)
    assert len({arrival.at for arrival in arrivals}) == len(arrivals)


def test_sessions_are_skewed() -> None:
    arrivals = draw(Shape(rate=100, seconds=100, fan_out=0.0), 9)
    counts = Counter(arrival.session for arrival in arrivals)
    assert counts[0] / len(arrivals) == pytest.approx(0.5, abs=0.03)
    assert counts[1] / len(arrivals) == pytest.approx(1 / 6, abs=0.03)
    assert len(counts) > 20


@pytest.mark.parametrize("shape", [{"rate": 0}, {"seconds": 0}, {"fan_out": 1.5}])
def test_a_shape_that_makes_no_sense_is_refused(shape: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a trace needs a rate and a length above 0"):
        Shape(**{"rate": 1.0, "seconds": 1.0, **shape})
