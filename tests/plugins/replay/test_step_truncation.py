"""From an input batch to the model's arguments, against a plain loop over requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_deepinfer_plugins.replay.message import Start
from vllm_deepinfer_plugins.replay.step_truncation import Truncations


def batch(requests: dict[str, tuple[int, int]], ids: Any = None) -> Any:
    """By id: computed and prompt tokens; vLLM's arrays are longer than the batch."""
    computed = [pair[0] for pair in requests.values()] + [99]
    prompts = [pair[1] for pair in requests.values()] + [99]
    return SimpleNamespace(
        req_ids=list(requests),
        num_computed_tokens_cpu=np.array(computed, dtype=np.int32),
        num_prompt_tokens=np.array(prompts, dtype=np.int32),
        token_ids_cpu=ids,
    )


def test_each_request_in_the_order_of_the_batch() -> None:
    made = Truncations(8, rows=10, depth=0, starts={"b": Start(24, 32), "gone": Start(1, 9)})
    found = made.truncation(batch({"a": (0, 50), "b": (24, 60), "c": (0, 5)}), {})
    assert found is not None
    assert found.floors.tolist() == [0, 24, 0] and found.hits.tolist() == [0, 32, 0]
    assert found.kept.tolist() == [40, 50, 0]


def test_nobody_trims_a_request_whose_every_row_is_read() -> None:
    found = Truncations(8, 10, 0).truncation(
        batch({"a": (0, 50), "b": (0, 50)}), {"a": SimpleNamespace(prompt_logprobs=0)}
    )
    assert found is not None and found.kept.tolist() == [0, 40]


@pytest.mark.parametrize(("computed", "cut"), [(0, True), (46, True), (47, False), (50, False)])
def test_decodes_are_not_cut(computed: int, cut: bool) -> None:
    """A row at 47 sees 40 to 47, and 40 is the first that is there."""
    assert (Truncations(8, 10, 0).truncation(batch({"a": (computed, 50)}), {}) is not None) == cut


def test_without_decoder_replay_only_hits_matter() -> None:
    made = Truncations(8, None, 0, {"a": Start(24, 32)})
    assert made.truncation(batch({"b": (0, 50)}), {}) is None
    found = made.truncation(batch({"b": (0, 50), "a": (31, 50)}), {})
    assert found is not None and found.kept.tolist() == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 80), st.integers(0, 5)), min_size=1, max_size=5))
def test_none_only_where_a_loop_finds_nothing_to_cut(requests: list[tuple[int, int, int]]) -> None:
    window, rows, starts, given_, cut = 8, 20, {}, {}, False
    for number, (computed, prompt, hit) in enumerate(requests):
        key, hit = str(number), hit * 16
        floor = max(hit - window, 0)
        starts[key], given_[key] = Start(floor, hit), (max(computed, floor), prompt)
        kept = max(prompt - rows, 0)
        row = max(computed, floor)
        bound = max(floor, kept)
        cut |= row < hit or row < kept or (bound > 0 and row - window + 1 < bound)
    found = Truncations(window, rows, 0, starts).truncation(batch(given_), {})
    assert (found is not None) == cut


def test_lookback_is_what_lies_in_front() -> None:
    ids = np.arange(100, 140, dtype=np.int32).reshape(2, 20)
    made = Truncations(8, None, depth=3)
    found = made.lookback(batch({"a": (1, 9), "b": (5, 9)}, ids))
    assert found is not None and found.tolist() == [[-1, -1, 100], [122, 123, 124]]
    assert Truncations(8, None, depth=0).lookback(batch({"a": (1, 9)}, ids)) is None
