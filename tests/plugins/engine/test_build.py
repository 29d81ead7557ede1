"""The flags of `vllm serve` reach the engine; a mistake is one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vllm_deepinfer.engine import Engine, HealthState
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway.engines import make_engine

build = pytest.importorskip("vllm_deepinfer_plugins.engine.build")


def args_of(engine: Any) -> Any:
    return engine._args


async def test_flags_reach_vllm(tmp_path: Path) -> None:
    engine = build.build(tmp_path, ["--max-model-len", "4096", "--dtype=float32", "--enforce-eager"])
    args = args_of(engine)
    assert (args.model, args.max_model_len, args.dtype) == (str(tmp_path), 4_096, "float32")
    assert args.enforce_eager is True
    assert isinstance(engine, Engine) and engine.health().state is HealthState.STARTING


async def test_the_reasoning_parser_is_v41s_unless_named(tmp_path: Path) -> None:
    assert args_of(build.build(tmp_path, [])).reasoning_parser == "deepseek_v41"
    named = build.build(tmp_path, ["--reasoning-parser", "qwen3"])
    assert args_of(named).reasoning_parser == "qwen3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-modle-len", "4096"], "--max-modle-len"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["stray"], "stray"),
    ],
)
async def test_a_flag_that_vllm_does_not_take_is_one_sentence(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        build.build(tmp_path, arguments)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("--engine-args: ")


async def test_the_gateway_finds_it_by_name(tmp_path: Path) -> None:
    engine = make_engine("vllm", tmp_path, ["--max-model-len", "512"])
    assert type(engine).__name__ == "VllmEngine"
    assert args_of(engine).max_model_len == 512


async def test_memory_for_kv_is_a_part_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(build.KV_SPACE, raising=False)
    build.build(tmp_path, [])
    assert 1 <= int(os.environ[build.KV_SPACE]) < 1024
    monkeypatch.setenv(build.KV_SPACE, "3")
    build.build(tmp_path, [])
    assert os.environ[build.KV_SPACE] == "3"
    monkeypatch.delenv(build.KV_SPACE)
    build.build(tmp_path, ["--gpu-memory-utilization", "0.4"])
    assert build.KV_SPACE not in os.environ
