from __future__ import annotations

import pytest

from vllm_deepinfer.bench.routing.client import Record
from vllm_deepinfer.bench.routing.measure import Window, quantile, summarise
from vllm_deepinfer.bench.routing.trace import Arrival

WINDOW = Window(2.0, 10.0)


def arrival(at: float) -> Arrival:
    return Arrival(at, 100, 10, 0)


def test_times_to_first_token_are_of_requests_sent_in_the_window() -> None:
    arrivals = [arrival(1.0), arrival(3.0), arrival(9.9)]
    records = [
        Record(1.0, [1.5, 2.5], 2.5),
        Record(3.0, [3.2, 3.3], 3.3),
        Record(9.9, [10.9, 11.0], 11.0),
    ]
    found = summarise(arrivals, records, WINDOW, 5.0)
    assert found.ttft == pytest.approx([0.2, 1.0])
    assert found.tokens == 6


def test_gaps_are_between_tokens_of_one_answer_inside_the_window() -> None:
    records = [Record(1.0, [1.9, 2.1, 2.4, 9.9, 10.1], 10.1), Record(3.0, [3.0, 3.5], 3.5)]
    found = summarise([arrival(1.0), arrival(3.0)], records, WINDOW, 5.0)
    assert found.itl == pytest.approx([0.3, 0.5, 7.5])


def test_two_tokens_in_one_read_have_no_gap() -> None:
    found = summarise([arrival(3.0)], [Record(3.0, [3.1, 3.1, 3.3], 3.3)], WINDOW, 5.0)
    assert found.itl == pytest.approx([0.0, 0.2])


def test_a_request_that_never_got_a_token_counts_with_what_it_waited() -> None:
    records = [Record(3.0, [3.1, 3.2], 3.2), Record(4.0)]
    found = summarise([arrival(3.0), arrival(4.0)], records, WINDOW, 5.0)
    assert found.ttft == pytest.approx([0.1, 5.0])  # given up at 9.0
    assert (found.unfinished, found.lost) == (1, 0)


def test_what_is_lost_missing_and_doubled_is_counted() -> None:
    records = [
        Record(3.0, [3.1, 3.2], 3.2, missing=2, doubled=1),
        Record(3.0, [], None, fault="HTTP/1.1 503"),
        Record(3.0, [3.1], None),
    ]
    found = summarise([arrival(3.0)] * 3, records, WINDOW, 5.0)
    assert (found.lost, found.unfinished, found.missing, found.doubled) == (2, 1, 2, 1)


def test_a_client_that_was_late_says_so() -> None:
    records = [Record(3.0, [3.1, 3.2], 3.2), Record(4.25, [4.3], 4.3)]
    assert summarise([arrival(3.0), arrival(4.0)], records, WINDOW, 5.0).late == 0.25


def test_a_pass_without_tokens_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="no token arrived"):
        summarise([arrival(3.0)], [Record(3.0)], WINDOW, 5.0)


def test_quantiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert quantile(values, 0.5) == 51
    assert quantile(values, 0.99) == 100
    assert quantile([7.0], 0.99) == 7


def test_a_series_row_has_all_quantiles() -> None:
    row = summarise([arrival(3.0)], [Record(3.0, [3.1, 3.2], 3.2)], WINDOW, 5.0).quantiles()
    assert row["ttft_p99_s"] == pytest.approx(0.1)
    assert row["itl_p50_s"] == pytest.approx(0.1)
    assert (row["requests"], row["unfinished"], row["lost"]) == (1, 0, 0)
