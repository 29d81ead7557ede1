"""Which bound a model's attention has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm_deepinfer_plugins.scheduler.attention import bound_of

from vllm_deepinfer.policy.step_cost import FULL_ATTENTION, AttentionBound

FULL, SMALL, LARGE = (SimpleNamespace(sliding_window=w) for w in (None, 128, 4096))


@pytest.mark.parametrize(
    ("config", "specs", "expected"),
    [
        ({}, [FULL], FULL_ATTENTION),
        ({}, [], FULL_ATTENTION),
        ({"sliding_window": 128}, [FULL, SMALL], FULL_ATTENTION),  # one full layer, and nothing is bounded
        ({"sliding_window": 128}, [SMALL], AttentionBound(window=128)),
        ({}, [SMALL, LARGE], AttentionBound(window=4096)),
        ({"index_topk": 512, "sliding_window": 128}, [SMALL], FULL_ATTENTION),  # scoring grows
        ({"index_topk": None}, [SMALL], AttentionBound(window=128)),
        ({"index_topk": None}, [object()], FULL_ATTENTION),
    ],
)
def test_bound(config: dict[str, int], specs: list[object], expected: AttentionBound) -> None:
    assert bound_of(SimpleNamespace(**config), specs) == expected
