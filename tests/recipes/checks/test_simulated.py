"""Sizes of simulated engines, and what they do not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.recipes.samples import ALONE, SIMULATED, faults, recipe
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound, StepCost
from vllm_deepinfer.recipes.checks.simulated import check_simulated


def test_defaults_are_those_of_the_engine() -> None:
    assert faults(SIMULATED, check=check_simulated) == []
    sizes = recipe(SIMULATED).pools["decode"].simulated
    assert sizes is not None
    config = sizes.config("m", vocab_size=9, eos_token_id=1)
    from vllm_deepinfer.engine.simulated import SimulatedConfig

    assert config == SimulatedConfig(model="m", vocab_size=9)
    assert config.cost == TWO_CORE_DENSE


def test_costs_and_drafts_map_one_to_one() -> None:
    sizes = (
        recipe(
            SIMULATED,
            pools__decode__simulated={
                "cost": {"per_step": 1e-3, "per_token": 2e-6, "window": 128, "top_k": 512, "tile": 8},
                "speculation": {"draft_tokens": 5, "acceptance": 0.5},
            },
        )
        .pools["decode"]
        .simulated
    )
    assert sizes is not None
    config = sizes.config("m", vocab_size=9, eos_token_id=1)
    assert config.cost == StepCost(1e-3, 2e-6, attention=AttentionBound(128, 512), tile=8)
    assert config.speculation is not None
    assert (config.speculation.draft_tokens, config.speculation.acceptance) == (5, 0.5)


def test_sizes_that_contradict_one_another() -> None:
    changes: dict[str, Any] = {
        "pools__prefill__simulated": {"kv_capacity_tokens": 100},
        "pools__decode__simulated": {"max_num_seqs": 512, "max_num_batched_tokens": 256},
    }
    assert faults(SIMULATED, check=check_simulated, **changes) == [
        "pools.prefill.simulated: kv_capacity_tokens 100 cannot hold one request of max_model_len 32768 in "
        "blocks of 32.",
        "pools.decode.simulated: max_num_batched_tokens 256 is below max_num_seqs 512: some decodes could "
        "never "
        "run.",
    ]


def test_a_rehearsal_s_sizes_are_looked_at_in_pools_of_real_engines_too() -> None:
    assert faults(ALONE, check=check_simulated, pools__all__simulated={"kv_capacity_tokens": 32}) == [
        "pools.all.simulated: kv_capacity_tokens 32 cannot hold one request of max_model_len 32768 in "
        "blocks of "
        "32."
    ]


def test_what_only_real_engines_read(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "pools__decode__kv_gib": 1,
        "pools__decode__cpu_binds": ["0"],
        "pools__decode__model_path": str(tmp_path),
    }
    assert faults(SIMULATED, check=check_simulated, **changes) == [
        f"pools.decode.{key} is not read by a simulated engine: leave it out."
        for key in ("kv_gib", "cpu_binds", "model_path")
    ]
