from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_deepinfer.checkpoint.config import ConfigError, LayerPlan, TextConfig

from .samples import refusal, text, text_config


def schedule(**changes: Any) -> tuple[LayerPlan, ...]:
    return text_config("tiny", engram_layer_ids=[], engram_num_embeddings=[], **changes).schedule()


def test_the_fixture() -> None:
    plans = text_config("tiny").schedule()
    assert [plan.index for plan in plans] == list(range(8))
    assert [plan.ratio for plan in plans] == [0, 0, 2, 2, 1, 1, 1, 1]
    assert [plan.kv_source for plan in plans] == [None, None, 2, 2, 4, 4, 4, 4]
    assert [plan.index_source for plan in plans] == [None, None, 2, 2, 4, 4, 6, 6]
    assert [plan.owns_kv for plan in plans] == [False, False, True, False, True, False, False, False]
    assert [plan.owns_index for plan in plans] == [False, False, True, False, True, False, True, False]
    assert [plan.is_candidate_source for plan in plans] == [plan.index == 4 for plan in plans]
    assert [plan.uses_candidates for plan in plans] == [plan.index == 6 for plan in plans]
    assert [plan.engram for plan in plans] == [None, 0, None, None, None, None, None, None]


def test_one_plan_in_full() -> None:
    assert asdict(text_config("tiny").schedule()[6]) == {
        "index": 6,
        "ratio": 1,
        "kv_source": 4,
        "index_source": 6,
        "owns_kv": False,
        "owns_index": True,
        "is_candidate_source": False,
        "uses_candidates": True,
        "engram": None,
    }


def test_the_release() -> None:
    plans = text_config("released").schedule()
    assert len(plans) == 40
    owners = {plan.index for plan in plans if plan.owns_kv}
    assert owners == {2, 8, 14, 20}
    assert [plans[layer].kv_source for layer in (2, 7, 8, 13, 19, 20, 39)] == [2, 2, 8, 8, 14, 20, 20]
    assert [plans[layer].index_source for layer in (19, 23, 24, 27, 39)] == [14, 20, 24, 24, 36]
    assert [plan.index for plan in plans if plan.uses_candidates] == [24, 28, 32, 36]
    assert {plan.index: plan.engram for plan in plans if plan.engram is not None} == {1: 0, 14: 1}


def test_no_candidate_filter() -> None:
    plans = text_config("tiny-no-candidates").schedule()
    assert not any(plan.is_candidate_source or plan.uses_candidates for plan in plans)


def test_window_only() -> None:
    plans = schedule(
        compress_ratios=[0] * 8,
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=-1,
    )
    assert {(plan.ratio, plan.kv_source, plan.index_source) for plan in plans} == {(0, None, None)}


def test_a_window_layer_between_two_readers_of_one_cache() -> None:
    plans = schedule(
        compress_ratios=[3, 0, 3, 0, 3, 3, 3, 3],
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0, 4],
        candidate_source_layer_id=0,
    )
    assert [plan.kv_source for plan in plans] == [0, None, 0, None, 0, 0, 0, 0]
    assert [plan.index_source for plan in plans] == [0, None, 0, None, 4, 4, 4, 4]


def test_a_prefix_of_the_release_keeps_the_sharing_of_the_whole() -> None:
    plans = text_config("released", num_hidden_layers=9, num_nextn_predict_layers=0).schedule()
    whole = text_config("released").schedule()
    assert plans == whole[:9]


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({"compress_ratios": [0, 0, 2]}, "text_config.compress_ratios has 3 entries for 8 layers: "),
        ({"compress_ratios": [0, -1, 2, 2, 1, 1, 1, 1]}, "text_config.compress_ratios[1] is -1: "),
        ({"kv_source_layer_ids": [4, 2]}, "text_config.kv_source_layer_ids is [4, 2]: write each layer once"),
        ({"kv_source_layer_ids": [2, 2, 4]}, "text_config.kv_source_layer_ids is [2, 2, 4]: write each"),
        ({"index_source_layer_ids": [2, 6, 4]}, "text_config.index_source_layer_ids is [2, 6, 4]: "),
        (
            {"index_source_layer_ids": [2, 4, 11]},
            "text_config.index_source_layer_ids lists layer 11: write ids ",
        ),
        ({"kv_source_layer_ids": [-1, 4]}, "text_config.kv_source_layer_ids lists layer -1: "),
        ({"engram_layer_ids": [99]}, "text_config.engram_layer_ids lists layer 99: "),
        (
            {"index_source_layer_ids": [2, 6]},
            "text_config.kv_source_layer_ids lists layer 4, which index_source_layer_ids does not: ",
        ),
        (
            {"kv_source_layer_ids": [4], "index_source_layer_ids": [4]},
            "text_config.kv_source_layer_ids has no layer at or before 2, which compress_ratios says reads "
            "a cache",
        ),
        (
            {"kv_source_layer_ids": [], "index_source_layer_ids": [], "candidate_source_layer_id": -1},
            "text_config.kv_source_layer_ids has no layer at or before 2",
        ),
        (
            {"kv_source_layer_ids": [2], "index_source_layer_ids": [2], "candidate_source_layer_id": -1},
            "text_config.compress_ratios[4] is 1, but the layer reads the cache of KV source 2, whose "
            "ratio is 2: ",
        ),
        (
            {"kv_source_layer_ids": [1, 2, 4], "index_source_layer_ids": [1, 2, 4]},
            "text_config.kv_source_layer_ids lists layer 1, whose compress_ratios entry is 0: ",
        ),
        (
            {"index_source_layer_ids": [0, 2, 4]},
            "text_config.index_source_layer_ids lists layer 0, whose compress_ratios entry is 0: ",
        ),
        (
            {"candidate_source_layer_id": 6},
            "text_config.candidate_source_layer_id is 6, which is no KV source: write one of [2, 4], or -1",
        ),
        (
            {"candidate_source_layer_id": -2},
            "text_config.candidate_source_layer_id is -2, which is no KV source",
        ),
        ({"candidate_topk_blocks": 0}, "text_config.candidate_topk_blocks is 0: "),
        ({"candidate_block_size": -4}, "text_config.candidate_block_size is -4: "),
        (
            {"candidate_source_layer_id": 2},
            "text_config.candidate_source_layer_id is 2, but index source 4 after it has ratio 1, not 2, ",
        ),
    ],
)
def test_impossible(changes: dict[str, Any], beginning: str) -> None:
    assert refusal("tiny", **changes).startswith(beginning)


def test_candidate_sizes_do_not_matter_without_a_source() -> None:
    plans = schedule(candidate_source_layer_id=-1, candidate_topk_blocks=0, candidate_block_size=0)
    assert not any(plan.uses_candidates for plan in plans)


layer_lists = st.lists(st.integers(0, 7), max_size=4).map(sorted)


@given(
    ratios=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    kv_sources=layer_lists,
    more_index_sources=layer_lists,
    candidate=st.integers(-1, 7),
)
def test_an_accepted_schedule_can_be_walked_and_a_refused_one_cannot(
    ratios: list[int], kv_sources: list[int], more_index_sources: list[int], candidate: int
) -> None:
    """A walk over the layers with the caches as variables, as a forward pass makes it."""
    assume(len(set(kv_sources)) == len(kv_sources))
    index_sources = sorted({*kv_sources, *more_index_sources})
    fields = text(
        "tiny",
        compress_ratios=ratios,
        kv_source_layer_ids=kv_sources,
        index_source_layer_ids=index_sources,
        candidate_source_layer_id=candidate,
        engram_layer_ids=[],
        engram_num_embeddings=[],
    )
    expected = walk(ratios, kv_sources, index_sources, candidate)
    try:
        plans = TextConfig(**fields).schedule()
    except ConfigError:
        assert expected is None
    else:
        assert [(plan.kv_source, plan.index_source, plan.uses_candidates) for plan in plans] == expected


def walk(
    ratios: list[int], kv_sources: list[int], index_sources: list[int], candidate: int
) -> list[tuple[int | None, int | None, bool]] | None:
    """What each layer reads, or None when a layer finds nothing fit to read."""
    if candidate >= 0 and candidate not in kv_sources:
        return None
    cache: tuple[int, int] | None = None  # owner and ratio
    selection: int | None = None
    blocks_of: int | None = None  # the ratio that the candidate blocks count in
    seen: list[tuple[int | None, int | None, bool]] = []
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            if layer in index_sources:
                return None
            seen.append((None, None, False))
            continue
        if layer in kv_sources:
            cache = (layer, ratio)
        if cache is None or cache[1] != ratio:
            return None
        uses = False
        if layer in index_sources:
            uses = blocks_of is not None
            if uses and blocks_of != ratio:
                return None
            selection = layer
        if layer == candidate:
            blocks_of = ratio
        seen.append((cache[0], selection, uses))
    return seen
