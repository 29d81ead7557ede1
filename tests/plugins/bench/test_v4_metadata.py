"""The replaced metadata kernels against loops that follow the definition token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from vllm_deepinfer_plugins.bench import v4_metadata as metadata

PAD = metadata.PAD
UNTOUCHED = -77


@dataclass
class Step:
    """One engine step: `new[r]` tokens of request r follow `old[r]` that are computed already."""

    old: list[int]
    new: list[int]

    @property
    def query_start_loc(self) -> NDArray[np.int32]:
        return np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        return (np.array(self.old) + np.array(self.new)).astype(np.int32)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """Request and position of every token, in the order of the step."""
        return [
            (request, self.old[request] + i)
            for request in range(len(self.new))
            for i in range(self.new[request])
        ]

    def block_table(self, block_size: int) -> NDArray[np.int32]:
        """Blocks of every request in an order that no arithmetic gives by chance."""
        blocks = -(-int(self.seq_lens.max()) // block_size)
        order = np.random.default_rng(0).permutation(len(self.new) * blocks) + 3
        return order.reshape(len(self.new), blocks).astype(np.int32)


@st.composite
def steps(draw: st.DrawFn, smallest_query: int = 1) -> Step:
    requests = draw(st.integers(1, 6))
    old = draw(st.lists(st.integers(0, 40), min_size=requests, max_size=requests))
    new = draw(st.lists(st.integers(smallest_query, 20), min_size=requests, max_size=requests))
    return Step(old, new)


@given(steps(), st.integers(0, 5))
def test_requests_of_tokens(step: Step, padding: int) -> None:
    count = len(step.tokens)
    out = np.full(count + padding + 2, UNTOUCHED, dtype=np.int32)
    metadata.requests_of_tokens(step.query_start_loc, out, count, count + padding)
    expected = [request for request, _ in step.tokens] + [0] * padding + [UNTOUCHED] * 2
    assert out.tolist() == expected


def test_requests_of_tokens_past_the_last_request_belong_to_it() -> None:
    """The kernel clamps in the same way: a mapped token is never without a request."""
    out = np.full(6, UNTOUCHED, dtype=np.int32)
    metadata.requests_of_tokens(np.array([0, 2, 4], dtype=np.int32), out, 6, 6)
    assert out.tolist() == [0, 0, 1, 1, 1, 1]


def test_requests_of_tokens_skips_requests_without_tokens() -> None:
    out = np.full(3, UNTOUCHED, dtype=np.int32)
    metadata.requests_of_tokens(np.array([0, 1, 1, 3], dtype=np.int32), out, 3, 3)
    assert out.tolist() == [0, 2, 2]


@given(steps(), st.integers(1, 16), st.data())
def test_gather_lens(step: Step, window: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(step.new) - 1))
    replay = [data.draw(st.integers(0, old)) for old in step.old]
    out = np.full(len(step.new) - first, UNTOUCHED, dtype=np.int32)
    metadata.gather_lens(
        out, step.seq_lens, step.query_start_loc, np.array(replay, dtype=np.int32), first, window
    )
    for index, request in enumerate(range(first, len(step.new))):
        before = [p for p in range(step.old[request]) if p >= replay[request]]
        assert out[index] == step.new[request] + len(before[-(window - 1) :] if window > 1 else [])


def test_gather_lens_by_hand() -> None:
    """Three requests, of which the last two prefill: 5 new after 100 old, and 7 new after 2 old."""
    out = np.zeros(2, dtype=np.int32)
    metadata.gather_lens(
        out,
        np.array([50, 105, 9], dtype=np.int32),
        np.array([0, 1, 6, 13], dtype=np.int32),
        np.zeros(3, dtype=np.int32),
        first=1,
        window=128,
    )
    assert out.tolist() == [105, 9]
    metadata.gather_lens(
        out,
        np.array([50, 505, 9], dtype=np.int32),
        np.array([0, 1, 6, 13], dtype=np.int32),
        np.array([0, 490, 0], dtype=np.int32),
        first=1,
        window=128,
    )
    assert out.tolist() == [15, 9]


@given(steps(), st.sampled_from([2, 4, 8]), st.integers(1, 4), st.data())
def test_compressed_slots(step: Step, ratio: int, block_size: int, data: st.DataObject) -> None:
    padded = data.draw(st.lists(st.booleans(), min_size=len(step.tokens), max_size=len(step.tokens)))
    slots = np.where(padded, PAD, np.arange(len(step.tokens))).astype(np.int64)
    table = step.block_table(block_size)
    out = np.full(len(step.tokens) + 1, UNTOUCHED, dtype=np.int64)
    metadata.compressed_slots(
        out, slots, step.query_start_loc, step.seq_lens, table, block_size=block_size, ratio=ratio
    )
    for index, (request, position) in enumerate(step.tokens):
        entry, place = divmod(position + 1, ratio)
        if place or padded[index]:
            assert out[index] == PAD
        else:
            block, offset = divmod(entry - 1, block_size)
            assert out[index] == table[request, block] * block_size + offset
    assert out[-1] == UNTOUCHED


def test_compressed_slots_by_hand() -> None:
    """Two entries to a block: position 7 completes entry 1, in block 9, position 11 entry 2, in block 5."""
    out = np.zeros(6, dtype=np.int64)
    metadata.compressed_slots(
        out,
        np.arange(6),
        np.array([0, 6], dtype=np.int32),
        np.array([12], dtype=np.int32),
        np.array([[9, 5]], dtype=np.int32),
        block_size=2,
        ratio=4,
    )
    assert out.tolist() == [PAD, 9 * 2 + 1, PAD, PAD, PAD, 5 * 2 + 0]


def test_compressed_slots_ignores_padding_requests() -> None:
    """The block table says how many requests there are; the other tensors may have rows of padding."""
    out = np.full(3, UNTOUCHED, dtype=np.int64)
    metadata.compressed_slots(
        out,
        np.arange(3),
        np.array([0, 2, 3], dtype=np.int32),
        np.array([2, 1], dtype=np.int32),
        np.array([[4]], dtype=np.int32),
        block_size=8,
        ratio=2,
    )
    assert out.tolist() == [PAD, 4 * 8, UNTOUCHED]


@given(steps(), st.sampled_from([1, 2, 4]), st.data())
def test_prefill_rows(step: Step, ratio: int, data: st.DataObject) -> None:
    count = len(step.tokens)
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, count))
    entries = step.seq_lens // ratio
    cumulative = np.concatenate([[0], np.cumsum(entries)]).astype(np.int32)
    keys = np.full(int(cumulative[-1]), UNTOUCHED, dtype=np.int32)
    starts, ends = (np.full(stop - first, UNTOUCHED, dtype=np.int32) for _ in range(2))
    metadata.prefill_rows(
        step.query_start_loc,
        step.seq_lens,
        cumulative,
        cumulative,
        keys,
        starts,
        ends,
        first=first,
        stop=stop,
        ratio=ratio,
    )
    for index, (request, position) in enumerate(step.tokens[first:stop]):
        assert starts[index] == cumulative[request]
        assert ends[index] == cumulative[request] + (position + 1) // ratio
    assert keys.tolist() == [request for request, n in enumerate(entries.tolist()) for _ in range(n)]
