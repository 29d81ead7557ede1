from __future__ import annotations

import pytest

from vllm_deepinfer.bench.routing.measure import Pass
from vllm_deepinfer.bench.routing.rounds import Results


def one(ttft: float) -> Pass:
    return Pass([ttft], [0.01], 0, 0, 0, 0, 1, 0.0)


def test_the_best_other_policy_is_the_one_with_the_lowest_median_not_the_luckiest_round() -> None:
    results = Results(
        {
            "ours": [one(1.0), one(2.0), one(3.0)],
            "steady": [one(2.0), one(4.0), one(4.0)],
            "lucky": [one(9.0), one(0.1), one(9.0)],
        }
    )
    best, ratios = results.ratios(lambda found: found.ttft[0])
    assert best == "steady"
    assert ratios == pytest.approx([0.5, 0.5, 0.75])


def test_ours_is_not_among_the_others() -> None:
    results = Results({"ours": [one(0.1)], "other": [one(0.2)]})
    assert results.ratios(lambda found: found.ttft[0]) == ("other", [0.5])
