"""The choice for a prefix hit against brute force over all ways; the positions that follow from a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.replay import (
    TOKENS,
    Choice,
    Hit,
    Way,
    choose,
    decoder_start,
    kept_rows,
    prefill_seconds,
    trimmed_rows,
    window_suffices,
)
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, StepCost, Work

COSTS = st.builds(
    StepCost,
    per_step=st.floats(0, 0.1),
    per_token=st.floats(1e-6, 1e-3),
    per_pair=st.floats(0, 1e-7),
    per_prefill_context=st.floats(0, 1e-5),
    tile=st.sampled_from([1, 32, 128]),
)


@st.composite
def hits(draw: st.DrawFn) -> Hit:
    needed = draw(st.integers(1, 5000))
    restore = draw(st.none() | st.floats(0, 0.5))
    return Hit(draw(st.integers(0, needed)), needed, restore)


def by_hand(cost: StepCost, begin: int, end: int, chunk: int) -> float:
    """One step after another, as an engine that has nothing else to do takes them."""
    seconds, at = 0.0, begin
    while at < end:
        count = min(chunk, end - at)
        seconds += cost.predict([Work(at, prefill_tokens=count)])
        at += count
    return seconds


# The choice


@given(hits(), COSTS, st.integers(1, 512), st.integers(1, 4096))
def test_no_way_is_cheaper_than_the_chosen_one(hit: Hit, cost: StepCost, window: int, chunk: int) -> None:
    choice = choose(hit, window=window, cost=cost, chunk=chunk)
    cold = by_hand(cost, 0, hit.needed, chunk)
    ways = {(Way.RECOMPUTE, 0): cold}
    if hit.tokens > window:
        begin = hit.tokens - window
        ways[Way.REPLAY, begin] = by_hand(cost, begin, hit.needed, chunk)
    if hit.restore is not None and 0 < hit.tokens < hit.needed:
        rest = by_hand(cost, hit.tokens, hit.needed, chunk)
        ways[Way.RESTORE, hit.tokens] = hit.restore + rest
    assert (choice.way, choice.begin) in ways
    assert choice.seconds == pytest.approx(min(ways.values()))
    assert choice.seconds == pytest.approx(ways[choice.way, choice.begin])
    assert choice.saved == pytest.approx(cold - choice.seconds, abs=1e-9) and choice.saved >= 0


@given(hits(), COSTS, st.integers(1, 512), st.integers(1, 4096))
def test_what_is_computed_covers_what_is_missing(hit: Hit, cost: StepCost, window: int, chunk: int) -> None:
    choice = choose(hit, window=window, cost=cost, chunk=chunk)
    assert 0 <= choice.begin < hit.needed, "the last token is always computed: its logits are asked for"
    if choice.way is Way.REPLAY:
        assert choice.begin == hit.tokens - window > 0
    if choice.way is Way.RESTORE:
        assert choice.begin == hit.tokens and hit.restore is not None
    if choice.way is Way.RECOMPUTE:
        assert choice.begin == 0 and choice.saved == 0


@given(st.integers(0, 400), st.integers(1, 300))
def test_counting_tokens_adopts_every_hit_that_is_longer_than_the_window(tokens: int, more: int) -> None:
    choice = choose(Hit(tokens, tokens + more), window=128, cost=TOKENS, chunk=64)
    assert choice.way is (Way.REPLAY if tokens > 128 else Way.RECOMPUTE)
    assert choice.saved == max(tokens - 128, 0)


def test_an_equal_price_is_paid_for_the_exact_result() -> None:
    """One more token than the window, in a tile of 32: nothing is saved, so nothing is approximated."""
    cost = StepCost(0.001, 1e-4, tile=32)
    assert choose(Hit(129, 160), window=128, cost=cost, chunk=512).way is Way.RECOMPUTE
    assert choose(Hit(129, 161), window=128, cost=cost, chunk=512).way is Way.REPLAY
    assert choose(Hit(160, 161, restore=128.0), window=128, cost=TOKENS, chunk=512).way is Way.RESTORE


def test_hits_that_do_not_pay_on_two_cores() -> None:
    """A hit that ends a block behind the window saves less than the context that a replay reads again."""
    reading = StepCost(0.007, 4e-5, per_prefill_context=6e-5)
    assert choose(Hit(192, 1024), window=128, cost=reading, chunk=2048).way is Way.RECOMPUTE
    long = choose(Hit(16384, 16896), window=128, cost=TWO_CORE_DENSE, chunk=2048)
    assert long.way is Way.REPLAY and long.saved > 1.0
    assert choose(Hit(16384, 16896, 0.002), window=128, cost=TWO_CORE_DENSE, chunk=2048).way is Way.RESTORE
    assert choose(Hit(16384, 16896, 9.0), window=128, cost=TWO_CORE_DENSE, chunk=2048).way is Way.REPLAY


def test_the_example_of_the_module() -> None:
    found = choose(Hit(4096, 4608), window=128, cost=StepCost(0.0, 1e-3), chunk=2048)
    assert found.way is Way.REPLAY and found.begin == 3968
    assert found.seconds == pytest.approx(0.64) and found.saved == pytest.approx(3.968)


@pytest.mark.parametrize(("tokens", "needed"), [(-1, 4), (5, 4)])
def test_a_hit_lies_inside_its_request(tokens: int, needed: int) -> None:
    with pytest.raises(ValueError, match="between 0 and all"):
        Hit(tokens, needed)


@pytest.mark.parametrize("restore", [-0.1, float("nan")])
def test_restoring_takes_time(restore: float) -> None:
    with pytest.raises(ValueError, match="at least 0 seconds"):
        Hit(1, 2, restore)


def test_a_step_computes_something() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        prefill_seconds(TOKENS, 0, 5, 0)
    assert prefill_seconds(TOKENS, 5, 5, 1) == 0
    assert choose(Hit(0, 1), window=4, cost=TOKENS, chunk=9) == Choice(Way.RECOMPUTE, 0, 1.0, 0.0)


# Rows behind the last KV source


def test_rows_as_released() -> None:
    assert kept_rows(128, 5) == 140
    assert decoder_start(16384, 140) == 16244
    assert decoder_start(100, 140) == 0


@given(st.integers(0, 3000), st.integers(1, 400), st.lists(st.integers(1, 700), max_size=20))
def test_chunks_trim_what_the_prompt_trims(prompt: int, rows: int, chunks: list[int]) -> None:
    """Row by row: whatever the split, a row is trimmed iff it lies before the last `rows` of the prompt."""
    start, at, trimmed = decoder_start(prompt, rows), 0, 0
    for chunk in [*chunks, prompt]:
        count = min(chunk, prompt - at)
        by_row = sum(position < prompt - rows for position in range(at, at + count))
        assert trimmed_rows(at, count, start) == by_row
        trimmed, at = trimmed + by_row, at + count
    assert trimmed == max(prompt - rows, 0)


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 40), st.integers(0, 400))
def test_kept_windows_serve_if_every_row_finds_its_own(hit: int, window: int, more: int, floor: int) -> None:
    """Brute force over the rows behind the hit that go behind the last source, under their own truncation."""
    start = decoder_start(hit + more, window + 12)
    rows = range(max(hit, start), hit + more)
    read = {p for row in rows for p in range(max(start, row - window + 1), row + 1) if 0 <= p < hit}
    enough = all(position >= floor for position in read)
    suffices = window_suffices(hit, start, window, floor)
    if suffices:
        assert enough
    elif start < hit and hit - window + 1 >= 0 and window > 1:
        assert not enough
