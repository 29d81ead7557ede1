"""The share of the machine that others used, from the counters of `/proc`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_deepinfer_plugins.bench import cpu_share
from vllm_deepinfer_plugins.bench.cpu_share import ForeignCpu, busy_ticks

STAT = "cpu  100 20 30 5000 400 7 8 9 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"


def test_busy_is_neither_idle_nor_waiting() -> None:
    assert busy_ticks(STAT) == 100 + 20 + 30 + 7 + 8 + 9


@pytest.mark.parametrize(
    ("readings", "share"),
    [
        ([(10.0, 1.0, 100.0), (14.0, 4.0, 102.0)], 0.25),  # 4 s busy, 3 of them ours, 2 s on two cores
        ([(10.0, 1.0, 100.0), (13.0, 4.0, 102.0)], 0.0),
        ([(10.0, 1.0, 100.0), (13.0, 4.1, 102.0)], 0.0),  # counters of a hundredth of a second do not agree
        ([(10.0, 1.0, 100.0), (99.0, 1.0, 102.0)], 1.0),
        ([None, (99.0, 1.0, 102.0)], None),
        ([(10.0, 1.0, 100.0), None], None),
        ([(10.0, 1.0, 100.0), (11.0, 1.0, 100.0)], None),
    ],
)
def test_share(
    readings: list[tuple[float, float, float] | None], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    sequence = iter(readings)
    monkeypatch.setattr(ForeignCpu, "_read", staticmethod(lambda: next(sequence)))
    with ForeignCpu() as others:
        pass
    assert others.share == share


def test_the_share_is_there_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = iter([(0.0, 0.0, 0.0), (1.0, 0.0, 1.0)])
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(ForeignCpu, "_read", staticmethod(lambda: next(sequence)))
    others = ForeignCpu()
    with pytest.raises(KeyError), others:
        raise KeyError
    assert others.share == 1.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_neighbour_is_seen_and_our_own_work_is_not() -> None:
    """A busy neighbour for as long as we wait for it; how large its share is depends on the machine."""
    burn = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    with ForeignCpu() as others:
        subprocess.Popen([sys.executable, "-c", burn]).wait()
    assert others.share is not None and 0 < others.share <= 1


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_share, "STAT", Path(os.devnull) / "none")
    with ForeignCpu() as others:
        pass
    assert others.share is None
