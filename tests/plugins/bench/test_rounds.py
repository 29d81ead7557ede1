"""Pairs are taken in turn and in shuffled order; only a disturbance makes one be taken again."""

from __future__ import annotations

import random

import pytest
from vllm_deepinfer_plugins.bench.rounds import (
    ATTEMPTS,
    QUIET,
    Pair,
    Task,
    disturbed,
    rates,
    summary,
    take_pair,
    take_rounds,
)
from vllm_deepinfer_plugins.bench.workload import Measurement

SIDES = ("ours", "other")
TASK = Task("decode_b1", "decode", {"batch": 1})


class Bench:
    """Answers each measurement with the next disturbance of its list, and remembers what was asked."""

    def __init__(self, foreign: list[float | None]) -> None:
        self.foreign = foreign
        self.asked: list[tuple[str, str]] = []

    def __call__(self, side: str, task: Task) -> Measurement:
        self.asked.append((side, task.name))
        share = self.foreign[(len(self.asked) - 1) % len(self.foreign)]
        return Measurement(tokens=len(self.asked) * 10, seconds=2.0, foreign=share)


def test_a_quiet_pair_is_taken_once_in_the_order_given() -> None:
    bench = Bench([0.0, QUIET])
    pair = take_pair(TASK, ("other", "ours"), bench)
    assert bench.asked == [("other", "decode_b1"), ("ours", "decode_b1")]
    assert pair == Pair({"other": Measurement(10, 2.0, 0.0), "ours": Measurement(20, 2.0, QUIET)}, attempts=1)


def test_a_disturbed_pair_is_taken_again_as_a_whole() -> None:
    bench = Bench([0.0, 0.3, 0.01, 0.02])
    pair = take_pair(TASK, SIDES, bench)
    assert pair.attempts == 2
    assert pair.sides == {"ours": Measurement(30, 2.0, 0.01), "other": Measurement(40, 2.0, 0.02)}


def test_the_least_disturbed_attempt_is_kept_when_none_is_quiet() -> None:
    bench = Bench([0.5, 0.5, 0.2, 0.1, 0.3, 0.3, 0.9, 0.9, 0.6, 0.6])
    pair = take_pair(TASK, SIDES, bench)
    assert pair.attempts == ATTEMPTS == 5
    assert pair.sides["ours"] == Measurement(30, 2.0, 0.2)
    assert len(bench.asked) == 10


def test_a_faster_attempt_is_no_reason_to_prefer_it() -> None:
    """Attempts grow faster one by one here; the quiet first one is kept all the same."""
    pair = take_pair(TASK, SIDES, Bench([0.06, 0.06, 0.5, 0.5]))
    assert pair.sides["ours"].rate == 5.0


def test_without_time_left_nothing_is_repeated() -> None:
    bench = Bench([0.9])
    assert take_pair(TASK, SIDES, bench, patient=lambda: False).attempts == 1
    assert len(bench.asked) == 2


def test_an_unknown_disturbance_counts_as_none() -> None:
    assert take_pair(TASK, SIDES, Bench([None])).foreign == 0.0


def test_every_round_measures_every_task_on_adjacent_sides() -> None:
    tasks = [Task(name, "decode") for name in ("a", "b", "c")]
    bench, seen = Bench([0.0]), []
    pairs = take_rounds(
        tasks,
        SIDES,
        20,
        bench,
        random.Random(1),
        notify=lambda number, task: seen.append((number, task.name)),
    )
    assert {name: len(taken) for name, taken in pairs.items()} == {"a": 20, "b": 20, "c": 20}
    halves = list(zip(bench.asked[::2], bench.asked[1::2], strict=True))
    assert all(first[1] == second[1] and {first[0], second[0]} == set(SIDES) for first, second in halves)
    rounds = [[name for number, name in seen if number == n] for n in range(1, 21)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1, "the order of tasks is never shuffled"
    assert len({first[0] for first, _ in halves}) == 2, "the same side always goes first"


def test_rounds_follow_from_the_seed() -> None:
    tasks = [Task(name, "decode") for name in ("a", "b", "c")]
    first, second = Bench([0.0]), Bench([0.0])
    for bench in (first, second):
        take_rounds(tasks, SIDES, 4, bench, random.Random(7))
    assert first.asked == second.asked


def test_one_side_alone_can_be_measured() -> None:
    pairs = take_rounds([TASK], ["other"], 2, Bench([0.0]), random.Random(0))
    assert rates(pairs["decode_b1"], "other") == [5.0, 10.0]


def test_ratio_and_summary() -> None:
    pairs = [
        Pair({"ours": Measurement(100, 1.0, 0.0, 0.02), "other": Measurement(50, 1.0, 0.02)}),
        Pair({"ours": Measurement(90, 2.0, 0.1, 0.0123456), "other": Measurement(60, 1.0, None)}, attempts=5),
        Pair({"ours": Measurement(100, 3.0, 0.03), "other": Measurement(50, 1.0, 0.01)}, attempts=2),
    ]
    assert [pair.ratio("ours", "other") for pair in pairs] == pytest.approx([2.0, 0.75, 2 / 3])
    assert summary(pairs) == {
        "tokens_per_second": {"ours": [100.0, 45.0, 33.33], "other": [50.0, 60.0, 50.0]},
        "fastest_step_ms": {"ours": 12.346, "other": None},
        "foreign_cpu_share": [0.02, 0.1, 0.03],
        "repeated": 5,
    }
    assert disturbed(pairs) == 1
