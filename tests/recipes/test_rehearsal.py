"""A recipe for real hardware on simulated engines of its true sizes."""

from __future__ import annotations

from tests.recipes.samples import RECIPES, SPLIT, recipe
from vllm_deepinfer.recipes import load_recipe
from vllm_deepinfer.recipes.facts import model_facts
from vllm_deepinfer.recipes.rehearsal import rehearsal
from vllm_deepinfer.recipes.schema import Simulated

GB200 = load_recipe(next(path for path in RECIPES if path.stem == "gb200-64"))


def test_sizes_counts_and_gateway_stay() -> None:
    found = rehearsal(GB200)
    assert {name: pool.replicas.at_start for name, pool in found.pools.items()} == {
        "prefill": 64,
        "decode": 64,
    }
    for name, pool in found.pools.items():
        assert pool.simulated == GB200.pools[name].simulated
        assert pool.role == GB200.pools[name].role
        assert (pool.engine, pool.engine_args, pool.resources.gpus) == ("simulated", {}, 0)
    assert sum(pool.replicas.at_start * pool.resources.cpus for pool in found.pools.values()) < 2
    assert (found.gateway, found.targets, found.transfer) == (GB200.gateway, GB200.targets, GB200.transfer)
    assert found.ray.deadlines == GB200.ray.deadlines


def test_names_stay_and_the_tokenizer_is_the_released_one() -> None:
    found = rehearsal(GB200)
    assert found.served_names == GB200.served_names == ("deepseek-v4.1-flash",)
    config = model_facts(found.model).config
    assert config is not None and config.text_config.vocab_size == 129_280


def test_a_local_cluster_takes_the_place_of_the_real_one() -> None:
    assert GB200.ray.address == "auto"
    assert rehearsal(GB200).ray.address == "local"


def test_a_tiny_model_and_pools_without_sizes() -> None:
    found = rehearsal(recipe(SPLIT, pools__decode__cpu_binds=["1"], pools__decode__env={"A": "b"}))
    assert found.model == recipe(SPLIT).model
    assert found.pools["decode"].simulated == Simulated()
    assert (found.pools["decode"].cpu_binds, found.pools["decode"].env) == ((), {})
