"""Holds of simulated engines: who may free what, and of whom a fetch is believed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from vllm_deepinfer.engine.simulated.holds import Holds, KvSource


def holds_of(layout: str = "x") -> tuple[Holds, list[tuple[str, list[int]]]]:
    freed: list[tuple[str, list[int]]] = []
    return Holds(layout, lambda request_id, blocks: freed.append((request_id, blocks))), freed


def test_a_hold_is_released_once() -> None:
    holds, freed = holds_of()
    source = holds.add("a", [1, 2])
    assert len(holds) == 1 and "a" in holds
    assert holds.release_request("a") and not holds.release_request("a")
    assert freed == [("a", [1, 2])] and not holds.release(source.hold) and len(holds) == 0


def test_a_fetch_ends_the_hold_and_is_believed_once() -> None:
    (prefill, freed), (decode, _) = holds_of(), holds_of()
    source = prefill.add("a", [1])
    assert decode.fetched(source) and freed == [("a", [1])]
    assert not decode.fetched(source), "it is held no longer"


def test_a_fetch_from_a_dead_engine_is_not_believed() -> None:
    (prefill, freed), (decode, _) = holds_of(), holds_of()
    source = prefill.add("a", [1])
    prefill.alive = False
    assert not decode.fetched(source) and not freed


def test_a_fetch_from_an_engine_that_is_gone_is_not_believed() -> None:
    decode, _ = holds_of()
    source = holds_of()[0].add("a", [1])
    gc.collect()
    assert not decode.fetched(source)


def test_another_layout_does_not_fit() -> None:
    (prefill, _), (decode, _) = holds_of("x"), holds_of("y")
    source = prefill.add("a", [1])
    assert not decode.fits(source) and not decode.fetched(source) and prefill.fits(source)


def test_another_process_is_believed_while_it_lives() -> None:
    decode, _ = holds_of()
    here = holds_of()[0].add("a", [1])
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    there = msgspec.structs.replace(here, engine="elsewhere", process=child.pid)
    assert decode.fetched(there)
    child.kill()
    child.wait()
    assert not decode.fetched(there)
    assert not decode.fetched(msgspec.structs.replace(there, process=os.getpid())), (
        "nobody of that name is here"
    )
    assert decode.fetched(msgspec.structs.replace(there, host="another machine"))


@pytest.mark.parametrize("value", [{}, {"layout": "x"}, {"layout": 1, "engine": "a"}])
def test_what_no_simulated_engine_has_made_is_no_source(value: dict[str, Any]) -> None:
    assert KvSource.of(value) is None


def test_a_source_survives_the_wire() -> None:
    source = holds_of()[0].add("a", [1])
    wire = msgspec.msgpack.encode(msgspec.structs.asdict(source))
    assert KvSource.of(msgspec.msgpack.decode(wire)) == source
