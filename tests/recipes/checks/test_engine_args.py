"""Engine arguments: names, types, owners, and what one engine cannot be given together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.samples import ALONE, SIMULATED, faults
from vllm_deepinfer.recipes.checks.engine_args import OWNED, check_engine_args, known


def told(arguments: dict[str, Any], **changes: Any) -> list[str]:
    return faults(ALONE, check=check_engine_args, pools__all__engine_args=arguments, **changes)


def test_arguments_of_every_type_pass() -> None:
    arguments = {
        "enforce_eager": True,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.9,
        "cpu_offload_gb": 1,  # a whole number where a float is wanted
        "kv_cache_dtype": "auto",
        "block_size": None,  # as if it were left out
        "scheduler_cls": "vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler",
        "additional_config": {"deepinfer": {"itl_target_ms": 40}, "other": {"x": 1}},
        "allowed_media_domains": ["example.com"],
        "hf_overrides": {"num_hidden_layers": 4},
    }
    assert told(arguments) == []


@pytest.mark.parametrize(
    ("key", "value", "rest"),
    [
        ("max_num_sequences", 4, "max_num_sequences is no argument of vLLM 0.32: did you mean max_num_seqs?"),
        ("max-num-seqs", 4, "max-num-seqs is a flag: write its name in Python, max_num_seqs."),
        ("--max-num-seqs", 4, "--max-num-seqs is a flag: write its name in Python, max_num_seqs."),
        ("qqq", 4, "qqq is no argument of vLLM 0.32."),
        ("max_num_seqs", "four", "max_num_seqs is 'four': write a whole number."),
        ("max_num_seqs", True, "max_num_seqs is True: write a whole number."),
        ("max_num_seqs", 1.5, "max_num_seqs is 1.5: write a whole number."),
        ("max_num_seqs", 0, "max_num_seqs is 0: write 1 or more."),
        ("enforce_eager", 1, "enforce_eager is 1: write true or false."),
        ("enforce_eager", None, "enforce_eager is None: write true or false."),
        ("gpu_memory_utilization", "90%", "gpu_memory_utilization is '90%': write a number."),
        ("additional_config", [], "additional_config is []: write keys and values."),
        ("kv_cache_dtype", "fp9", "kv_cache_dtype is 'fp9': write fp8."),
        (
            "scheduling_policy",
            "edf",
            "scheduling_policy is 'edf': write one of fcfs, priority.",
        ),
        ("block_size", 33, "block_size is 33, which the model's ratio 2 does not divide: write a multiple."),
        (
            "max_model_len",
            8193,
            "max_model_len is 8193, but the model has 8192 positions: write at most that.",
        ),
        ("model", "x", "model is set by the application: write model.path instead."),
        ("dtype", "float32", "dtype is set by the application: write model.dtype instead."),
        (
            "kv_transfer_config",
            {},
            "kv_transfer_config is set by the application: write transfer instead.",
        ),
        (
            "kv_cache_memory_bytes",
            1,
            "kv_cache_memory_bytes is set by the application: write pools.all.kv_gib instead.",
        ),
        (
            "data_parallel_size",
            2,
            "data_parallel_size is set by the application: write pools.all.placement.gang instead.",
        ),
    ],
)
def test_an_argument_that_cannot_be_given(key: str, value: object, rest: str) -> None:
    assert told({key: value}) == [f"pools.all.engine_args.{rest}"]


@pytest.mark.parametrize(
    ("config", "rest"),
    [
        (
            {"deepinfer": {"itl_targt_ms": 4}},
            "deepinfer.itl_targt_ms is unknown: did you mean itl_target_ms?",
        ),
        ({"itl_target_ms": 4}, "itl_target_ms stands outside deepinfer: write it under deepinfer."),
        ({"deepinfer": 4}, "deepinfer is 4: write keys and values."),
    ],
)
def test_settings_of_the_plugins(config: dict[str, Any], rest: str) -> None:
    assert told({"additional_config": config}) == [f"pools.all.engine_args.additional_config.{rest}"]


def test_more_requests_than_tokens_in_a_step() -> None:
    assert told({"max_num_seqs": 64, "max_num_batched_tokens": 32}) == [
        "pools.all.engine_args.max_num_batched_tokens is 32, below max_num_seqs 64: some decodes could never "
        "run, write a larger one."
    ]


def test_a_simulated_engine_takes_none() -> None:
    found = faults(SIMULATED, check=check_engine_args, pools__decode__engine_args={"seed": 1, "unknown": 2})
    assert found == [
        "pools.decode.engine_args is not read by a simulated engine: write its sizes under "
        "pools.decode.simulated."
    ]


@pytest.mark.parametrize(
    ("resources", "placement", "arguments", "expected"),
    [
        ({"gpus": 4}, {}, {"tensor_parallel_size": 4}, []),
        ({"gpus": 4}, {"bundles": 2}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, []),
        ({"gpus": 1}, {"gang": 8}, {}, []),
        (
            {"gpus": 4},
            {"bundles": 2},
            {"tensor_parallel_size": 4},
            [
                "pools.all gives a replica 8 GPUs (2 × 4), but its engine has 4 workers: make "
                "resources.gpus × "
                "placement.bundles equal to tensor_parallel_size × pipeline_parallel_size."
            ],
        ),
        (
            {},
            {},
            {"tensor_parallel_size": 2},
            [
                "pools.all has no GPU and 2 workers per replica: on a CPU write tensor_parallel_size 1 and "
                "pipeline_parallel_size 1, and more replicas."
            ],
        ),
        (
            {},
            {"gang": 2},
            {},
            [
                "pools.all.placement.gang is 2, but vLLM 0.32 runs mixture-of-experts data parallelism on "
                "GPUs "
                "only: leave it out, replicas are independent without it."
            ],
        ),
    ],
)
def test_workers_and_devices(
    resources: dict[str, Any], placement: dict[str, Any], arguments: dict[str, Any], expected: list[str]
) -> None:
    assert told(arguments, pools__all__resources=resources, pools__all__placement=placement) == expected


def test_the_list_of_arguments_is_vllm_s_and_holds_what_is_owned() -> None:
    table = known()
    assert len(table) > 240
    assert table["max_num_seqs"] == "int null"
    assert table["kv_cache_dtype"][0] == "auto"
    assert set(OWNED) <= set(table)
