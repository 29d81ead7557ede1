"""Deltas are grouped by sink; a broken sink is alone with its failure."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from vllm_deepinfer.engine import TokenDelta
from vllm_deepinfer.engine.delivery import Deliveries


class Gateway:
    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def receive(self, deltas: Sequence[TokenDelta]) -> None:
        self.calls.append([delta.request_id for delta in deltas])


def delta(name: str) -> TokenDelta:
    return TokenDelta(name, [1])


def test_each_sink_is_called_once_with_its_deltas_in_order() -> None:
    left, right, deliveries = Gateway(), Gateway(), Deliveries()
    # bound methods are new objects at every access, and still one sink
    deliveries.send([(left.receive, delta("a")), (right.receive, delta("b")), (left.receive, delta("c"))])
    assert (left.calls, right.calls, deliveries.failures) == ([["a", "c"]], [["b"]], 0)


def test_no_delta_no_call() -> None:
    deliveries = Deliveries()
    deliveries.send([])
    assert deliveries.failures == 0


def test_a_broken_sink_harms_nobody_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(deltas: Sequence[TokenDelta]) -> None:
        raise RuntimeError("on purpose")

    good, deliveries = Gateway(), Deliveries()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            deliveries.send([(broken, delta("a")), (good.receive, delta("b"))])
    assert good.calls == [["b"]] * 3
    assert deliveries.failures == 3
    assert [record.message for record in caplog.records] == [
        "A sink raised; the deltas of 1 requests were lost to it."
    ]
