"""Which pools belong together, and how KV gets from one to the other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.samples import ALONE, SIMULATED, SPLIT, faults
from vllm_deepinfer.recipes.checks.roles import check_roles, check_transfer


@pytest.mark.parametrize("base", [ALONE, SPLIT, SIMULATED])
def test_whole_deployments_pass(base: dict[str, Any]) -> None:
    assert faults(base, check=check_roles) == []
    assert faults(base, check=check_transfer) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"pools__decode": ...},
            ["pools has a prefill pool and no decode pool: add one of the role decode."],
        ),
        (
            {"pools__prefill": ...},
            ["pools has a decode pool and no prefill pool: add one, or write the role aggregated."],
        ),
        (
            {"pools__more": {"role": "aggregated"}},
            ["pools has an aggregated pool beside prefill and decode: write either form."],
        ),
        (
            {"pools__more": {"role": "decode"}},
            ["pools has 2 pools of the role decode (decode, more): write one, with more replicas."],
        ),
        (
            {"pools__eyes": {"role": "encoder"}},
            ["pools.eyes.role is encoder, which is reserved for a later version: leave the pool out."],
        ),
        (
            {"pools__decode__engine": "simulated"},
            ["pools mixes engine: vllm and engine: simulated, which share no KV: write one of them."],
        ),
    ],
)
def test_pools_that_do_not_belong_together(changes: dict[str, Any], expected: list[str]) -> None:
    assert faults(SPLIT, check=check_roles, **changes) == expected


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (
            SPLIT,
            {"transfer": {}},
            [
                "transfer.kind is none, but prefill and decode are pools of their own: write kind: nixl, or "
                "kind: store with a store, so that KV gets from one to the other."
            ],
        ),
        (
            ALONE,
            {"transfer": {"kind": "nixl"}},
            ["transfer.kind is nixl, but an aggregated pool hands nothing over: leave transfer out."],
        ),
        (
            SPLIT,
            {"transfer__kind": "store"},
            ["transfer.kind is store, but there is none: write store.url, a folder that all engines share."],
        ),
        (SPLIT, {"transfer__kind": "store", "store": {"url": "/kv"}}, []),
        (
            SPLIT,
            {"transfer__nixl__buffer_device": "cuda", "pools__decode__resources": {"gpus": 1}},
            ["transfer.nixl.buffer_device is cuda, but pools.prefill has no GPU: write buffer_device: cpu."],
        ),
        (SIMULATED, {"transfer__nixl": {"buffer_device": "cuda"}}, []),
        (
            SPLIT,
            {"pools__prefill__env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}},
            [
                "env sets VLLM_NIXL_SIDE_CHANNEL_HOST: write transfer.nixl.side_channel_host instead, for "
                "all "
                "pools."
            ],
        ),
    ],
)
def test_transfers_that_lead_nowhere(
    base: dict[str, Any], changes: dict[str, Any], expected: list[str]
) -> None:
    assert faults(base, check=check_transfer, **changes) == expected
