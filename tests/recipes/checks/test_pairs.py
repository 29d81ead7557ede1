"""What prefill and decode must have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.samples import ALONE, SIMULATED, SPLIT, faults
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint
from vllm_deepinfer.recipes.checks.pairs import SHARED, check_pairs


def told(**changes: Any) -> list[str]:
    return faults(SPLIT, check=check_pairs, **changes)


def test_equal_pools_pass_and_one_pool_is_not_compared() -> None:
    assert told() == []
    assert told(pools__decode__engine_args__max_num_seqs=99) == []
    assert faults(ALONE, check=check_pairs) == []
    assert faults(SIMULATED, check=check_pairs) == []


VALUES = {"block_size": 64, "kv_cache_dtype": "fp8", "speculative_config": {"method": "dspark"}}


@pytest.mark.parametrize("key", SHARED)
def test_an_argument_of_one_pool_only(key: str) -> None:
    value = VALUES.get(key, "x")
    assert told(**{f"pools__prefill__engine_args__{key}": value}) == [
        f"pools.prefill.engine_args.{key} is {value!r}, but pools.decode.engine_args.{key} is left out: "
        "write "
        f"the same in both, because {SHARED[key]}."
    ]
    assert told(**{f"pools__{pool}__engine_args__{key}": value for pool in ("prefill", "decode")}) == []


def test_different_values() -> None:
    assert told(pools__prefill__engine_args__block_size=32, pools__decode__engine_args__block_size=64) == [
        "pools.prefill.engine_args.block_size is 32, but pools.decode.engine_args.block_size is 64: write "
        "the "
        "same in both, because a block of one is not a block of the other."
    ]


def test_the_portable_class_on_one_side_only() -> None:
    config = {"deepinfer": {"portable_model": True}}
    found = told(pools__decode__engine_args__additional_config=config)
    assert found == [
        "pools.prefill.engine_args.additional_config.deepinfer.portable_model is left out, but "
        "pools.decode.engine_args.additional_config.deepinfer.portable_model is True: write the same in "
        "both, "
        "because the two classes lay KV out differently."
    ]


def test_a_shorter_context_behind_a_longer_one() -> None:
    assert told(pools__decode__engine_args__max_model_len=2048) == [
        "pools.decode.engine_args.max_model_len is 2048, below the 4096 of pools.prefill: prompts that were "
        "prefilled would find no place, write at least as much."
    ]
    assert told(pools__prefill__engine_args__max_model_len=2048) == []


def test_ranks_that_do_not_divide_and_devices_that_differ() -> None:
    assert told(
        pools__prefill__engine_args__tensor_parallel_size=2,
        pools__decode__engine_args__tensor_parallel_size=3,
        pools__prefill__resources={"gpus": 2},
    ) == [
        "pools.prefill has 2 workers per replica and pools.decode 3: NIXL splits KV over ranks only when one "
        "number divides the other.",
        "pools.decode runs on CPUs and pools.prefill on GPUs: their engines lay KV out differently, give "
        "both "
        "the same kind of device.",
    ]


def test_simulated_pools_compare_their_own_sizes() -> None:
    changes: dict[str, Any] = {
        "pools__prefill__simulated": {"block_size": 16},
        "pools__decode__simulated": {"max_model_len": 64},
    }
    assert faults(SIMULATED, check=check_pairs, **changes) == [
        "pools.prefill.simulated.block_size is 16, but pools.decode.simulated.block_size is 32: write the "
        "same "
        "in both, because a block of one is not a block of the other.",
        "pools.decode.simulated.max_model_len is 64, below the 32768 of pools.prefill: prompts that were "
        "prefilled would find no place, write at least as much.",
    ]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, a copy of it, and one with other weights of the same shapes."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("model", 0), ("copy", 0), ("other", 1)):
        write_checkpoint(folder / name, TinyOptions(layers=4, seed=seed))
    return {name: folder / name for name in ("model", "copy", "other")}


def test_a_model_of_its_own_per_pool(copies: dict[str, Path]) -> None:
    base = {"model": {"path": str(copies["model"])}, "transfer__kind": "none"}
    assert told(**base, pools__decode__model_path=str(copies["copy"])) == []
    assert told(**base, pools__decode__model_path=str(copies["other"])) == [
        f"pools.decode.model_path is {copies['other']}, which holds another model than model.path (config, "
        "tokenizer or weights differ): name a copy of the same checkpoint."
    ]
    missing = copies["model"] / "no"
    assert told(**base, pools__decode__model_path=str(missing)) == [
        f"pools.decode.model_path is {missing}, which is no folder on this machine: download it and name its "
        "folder; without one, only deepseek-ai/DeepSeek-V4.1-Flash is known."
    ]


def test_nixl_compares_paths(copies: dict[str, Path]) -> None:
    found = told(model={"path": str(copies["model"])}, pools__decode__model_path=str(copies["copy"]))
    assert found == [
        "pools name different model_path: vLLM's NIXL handshake compares the paths, so keep the copies under "
        "one path on all nodes and write it in model.path."
    ]


def test_a_tiny_model_has_one_place(copies: dict[str, Path]) -> None:
    paths = {f"pools__{pool}__model_path": str(copies["copy"]) for pool in ("prefill", "decode")}
    assert told(**paths) == [
        f"pools.{pool}.model_path is given, but the recipe writes its own tiny model: leave it out."
        for pool in ("prefill", "decode")
    ]
