"""Replica counts, gangs and targets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.samples import ALONE, SPLIT, faults
from vllm_deepinfer.recipes.checks.scaling import check_scaling

ZERO = (
    "pools.all.replicas.min is 0, but nothing says when to stop the last replica: write "
    "autoscaling.scale_to_zero_after_s, or min: 1."
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"replicas": 3}, []),
        ({"replicas": {"min": 1, "max": 4}}, []),
        ({"replicas": {"min": 0, "max": 4}, "autoscaling": {"scale_to_zero_after_s": 60}}, []),
        ({"replicas": {"min": 4, "max": 2}}, ["pools.all.replicas.min is 4, above max 2: swap them."]),
        (
            {"replicas": {"min": 2, "max": 4, "initial": 5}},
            ["pools.all.replicas.initial is 5: write a number from 2 to 4, the bounds min and max."],
        ),
        (
            {"replicas": {"min": 2, "max": 4, "initial": 0}},
            ["pools.all.replicas.initial is 0: write a number from 2 to 4, the bounds min and max."],
        ),
        ({"replicas": {"min": 0, "max": 4}}, [ZERO]),
        ({"replicas": {"min": 0, "max": 4}, "autoscaling": {"target_queue_s": 1}}, [ZERO]),
        (
            {"replicas": 2, "autoscaling": {"target_queue_s": 1}},
            [
                "pools.all.autoscaling has no effect on a fixed number of replicas: write replicas as {min, "
                "max}, or drop it."
            ],
        ),
        (
            {"replicas": {"min": 1, "max": 2}, "autoscaling": {"scale_to_zero_after_s": 1}},
            ["pools.all.autoscaling.scale_to_zero_after_s has no effect with replicas.min 1: write min: 0."],
        ),
        ({"replicas": 8, "placement": {"gang": 4}}, []),
        (
            {"replicas": 6, "placement": {"gang": 4}},
            ["pools.all.replicas (min) is 6, no multiple of placement.gang 4: write one."],
        ),
        (
            {"replicas": {"min": 4, "max": 10}, "placement": {"gang": 4}},
            ["pools.all.replicas (max) is 10, no multiple of placement.gang 4: write one."],
        ),
        (
            {"replicas": 4, "placement": {"gang": 4, "max_replicas_per_node": 1, "strategy": "STRICT_PACK"}},
            [
                "pools.all.placement has gang and max_replicas_per_node, which Ray Serve does not combine: "
                "leave one out.",
                "pools.all.placement.strategy is STRICT_PACK, but Ray Serve places a gang by PACK or SPREAD: "
                "write one of these.",
            ],
        ),
    ],
)
def test_counts_and_gangs(changes: dict[str, Any], expected: list[str]) -> None:
    dotted = {f"pools__all__{key}": value for key, value in changes.items()}
    assert faults(ALONE, check=check_scaling, **dotted) == expected


def test_targets_belong_to_roles() -> None:
    every = {"target_queue_s": 1, "target_kv_use": 0.5, "target_itl_ms": 20}
    assert faults(
        SPLIT,
        check=check_scaling,
        pools__prefill__replicas={"min": 1, "max": 2},
        pools__prefill__autoscaling=every,
        pools__decode__replicas={"min": 1, "max": 2},
        pools__decode__autoscaling=every,
    ) == [
        "pools.prefill.autoscaling.target_kv_use does not apply to the role prefill: its targets are "
        "target_queue_s.",
        "pools.prefill.autoscaling.target_itl_ms does not apply to the role prefill: its targets are "
        "target_queue_s.",
        "pools.decode.autoscaling.target_queue_s does not apply to the role decode: its targets are "
        "target_itl_ms, target_kv_use.",
    ]
    changes: dict[str, Any] = {"pools__all__replicas": {"min": 1, "max": 2}, "pools__all__autoscaling": every}
    assert faults(ALONE, check=check_scaling, **changes) == []
