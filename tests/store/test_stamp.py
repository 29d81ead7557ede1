"""Stamps: through an mtime and back, and what a refresh does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.store.stamp import MAX_CLASS, MAX_HITS, Stamp

STAMPS = st.builds(
    Stamp,
    expires=st.integers(0, 10**10),
    traffic_class=st.integers(0, MAX_CLASS),
    hits=st.integers(0, MAX_HITS),
    last_use=st.integers(0, 2**31).map(float),
)


@given(STAMPS)
def test_times_go_both_ways_also_through_microseconds(stamp: Stamp) -> None:
    assert Stamp.from_times(stamp.mtime_ns, stamp.atime_ns) == stamp
    assert Stamp.from_times(stamp.mtime_ns // 1_000 * 1_000, stamp.atime_ns) == stamp


@given(STAMPS)
def test_whole_seconds_keep_the_expiry(stamp: Stamp) -> None:
    coarse = Stamp.from_times(stamp.mtime_ns // 10**9 * 10**9, stamp.atime_ns)
    assert (coarse.expires, coarse.traffic_class, coarse.hits) == (stamp.expires, 0, 0)


@given(STAMPS, STAMPS, st.booleans())
def test_a_refresh_never_shortens_and_counts_the_hit(old: Stamp, other: Stamp, hit: bool) -> None:
    new = old.refreshed(other, hit)
    assert new.expires == max(old.expires, other.expires)
    assert new.traffic_class == (other if other.expires > old.expires else old).traffic_class
    assert new.hits == min(old.hits + hit, MAX_HITS)
    assert new.last_use == max(old.last_use, other.last_use)


def test_a_file_keeps_it(tmp_path: Path) -> None:
    stamp = Stamp.new(1_800_000_000.25, 259_200, 1)
    assert (stamp.expires, stamp.last_use) == (1_800_259_201, 1_800_000_000.25)
    path = tmp_path / "f"
    path.write_bytes(b"x")
    os.utime(path, ns=(stamp.atime_ns, stamp.mtime_ns))
    found = path.stat()
    read = Stamp.from_times(found.st_mtime_ns, found.st_atime_ns)
    assert replace(read, last_use=stamp.last_use) == stamp
    assert abs(read.last_use - stamp.last_use) < 1e-6


def test_limits() -> None:
    assert Stamp.new(0, 1e30, 0).expires == 253_402_300_799
    with pytest.raises(ValueError, match=r"not in 0\.\.99"):
        Stamp.new(0, 1, 100)
