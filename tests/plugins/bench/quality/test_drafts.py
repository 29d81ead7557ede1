"""Lengths and areas, against counting by hand."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_deepinfer_plugins.bench.quality.drafts import (
    ANCHORS,
    Drafts,
    anchors_of,
    area_under_curve,
    drafts_of,
)
from vllm_deepinfer_plugins.bench.quality.texts import Text
from vllm_deepinfer_plugins.draft.load import load_drafter

from tests.plugins.model.engines import FIXTURES
from tests.plugins.model.samples import backbone, token_ids

NAME = "deepseek-v4.1-tiny-dspark"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=40))
def test_the_area_is_the_share_of_pairs_in_order(seen: list[tuple[bool, int]]) -> None:
    good = [score for hit, score in seen if hit]
    bad = [score for hit, score in seen if not hit]
    found = area_under_curve(np.array([hit for hit, _ in seen]), np.array([float(s) for _, s in seen]))
    if not good or not bad:
        assert found is None
        return
    pairs = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
    assert found is not None and abs(found - pairs / (len(good) * len(bad))) < 1e-12


def test_lengths_stop_at_the_first_rejection() -> None:
    drafts = Drafts(
        [np.array([[0.5, 0.5], [1.0, 0.0]])],
        [np.array([[True, True], [False, True]])],
        [np.array([[0.9, 0.8], [0.1, 0.2]])],
    )
    assert drafts.blocks == 2
    assert drafts.accepted_length == 1 + ((0.5 + 0.25) + (1 + 0)) / 2
    assert drafts.greedy_length == 1 + (2 + 0) / 2
    assert drafts.auc() == 1.0


def test_anchors_are_followed_by_a_whole_block_that_counts() -> None:
    learnt = (False, False, True, True, True, True, False, True, True, True)
    text = Text(tuple(range(10)), learnt, 0)
    assert anchors_of(text, 3).tolist() == [1, 2, 6]
    assert anchors_of(text, 5).tolist() == []
    long = Text(tuple(range(1000)), (False, *[True] * 999), 0)
    assert 0 < len(anchors_of(long, 5)) <= ANCHORS


def test_a_drafter_s_agreement_is_a_probability() -> None:
    ids = tuple(token_ids(60).tolist())
    text = Text(ids, (False, *[True] * 59), 0)
    found = drafts_of(load_drafter(FIXTURES / NAME), backbone(NAME), [text])
    assert found.blocks == len(anchors_of(text, 5)) == 55
    assert all(((part >= 0) & (part <= 1)).all() for part in found.agreement + found.confidence)
    assert 1 <= found.accepted_length <= 6
    none = drafts_of(load_drafter(FIXTURES / NAME), backbone(NAME), [Text(ids, (False,) * 60, 0)])
    assert none.blocks == 0
    assert torch.is_grad_enabled()
