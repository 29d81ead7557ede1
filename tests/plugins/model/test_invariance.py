"""Batch-invariant mode: exact token equality whatever the chunks, the cache, the company and the blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import engines

pytestmark = [pytest.mark.slow, pytest.mark.long]

LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 500, 1000, 1999]
TOKENS = 12
PROMPTS = engines.prompts(LENGTHS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.checkpoint("deepseek-v4.1-tiny", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[list[list[int]]]:
    """The reference: each prompt alone, whole, without prefix cache."""
    with engines.engine(path, invariant=True, enable_prefix_caching=False) as llm:
        yield [engines.greedy(llm, [prompt], TOKENS)[0] for prompt in PROMPTS]


def test_the_reference_depends_on_the_prompt(alone: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    assert all(len(set(tokens)) > 3 for tokens in alone)


@pytest.mark.parametrize("batched", [33, 200, 4096])
def test_all_together_in_chunks(path: Path, alone: list[list[int]], batched: int) -> None:
    with engines.engine(
        path, invariant=True, max_num_batched_tokens=batched, enable_prefix_caching=False
    ) as llm:
        assert engines.greedy(llm, PROMPTS, TOKENS) == alone


def test_bfloat16_in_chunks(path: Path) -> None:
    asked = PROMPTS[:-1]
    with engines.engine(path, invariant=True, dtype="bfloat16", enable_prefix_caching=False) as llm:
        expected = engines.greedy(llm, asked, TOKENS)
    with engines.engine(path, invariant=True, dtype="bfloat16", max_num_batched_tokens=77) as llm:
        assert [engines.greedy(llm, [prompt], TOKENS)[0] for prompt in asked] == expected


def test_one_token_at_a_time(path: Path, alone: list[list[int]]) -> None:
    short = [index for index, length in enumerate(LENGTHS) if length <= 129]
    with engines.engine(path, invariant=True, max_num_batched_tokens=1, max_num_seqs=1) as llm:
        assert [engines.greedy(llm, [PROMPTS[index]], TOKENS)[0] for index in short] == [
            alone[index] for index in short
        ]


@pytest.mark.parametrize("block_size", [2, 48, 256])
def test_block_sizes_and_prefix_cache_cold_and_warm(
    path: Path, alone: list[list[int]], block_size: int
) -> None:
    chosen = [index for index, length in enumerate(LENGTHS) if length <= (129 if block_size == 2 else 1999)]
    asked = [PROMPTS[index] for index in chosen]
    expected = [alone[index] for index in chosen]
    with engines.engine(path, invariant=True, block_size=block_size) as llm:
        assert engines.greedy(llm, asked, TOKENS) == expected
        before = _metric(llm, "vllm:prefix_cache_hits")
        assert engines.greedy(llm, asked, TOKENS) == expected
        assert _metric(llm, "vllm:prefix_cache_hits") > before, "the second run was meant to hit the cache"


def test_prefix_hits_at_every_block(path: Path, alone: list[list[int]]) -> None:
    """Prompts that share a prefix of any number of blocks with one that is cached."""
    base = PROMPTS[LENGTHS.index(500)]
    asked = [base[:cut] + PROMPTS[LENGTHS.index(100)][: 1 + cut % 37] for cut in range(16, 500, 23)]
    with engines.engine(path, invariant=True, block_size=16, enable_prefix_caching=False) as llm:
        expected = engines.greedy(llm, asked, TOKENS)
    with engines.engine(path, invariant=True, block_size=16) as llm:
        engines.greedy(llm, [base], TOKENS)
        assert [engines.greedy(llm, [prompt], TOKENS)[0] for prompt in asked] == expected
        assert _metric(llm, "vllm:prefix_cache_hits") > 0


def test_arrivals_at_random_times(path: Path, alone: list[list[int]]) -> None:
    with engines.engine(path, invariant=True, max_num_seqs=9, max_num_batched_tokens=300) as llm:
        for seed in range(3):
            assert _staggered(llm, random.Random(seed)) == alone


def test_forced_preemption(path: Path) -> None:
    asked = engines.prompts([40, 60, 64, 80, 100, 33, 50, 90], seed=3)
    settings: dict[str, Any] = {
        "invariant": True,
        "block_size": 16,
        "max_model_len": 256,
        "max_num_seqs": 8,
    }
    with engines.engine(path, enable_prefix_caching=False, **settings) as llm:
        expected = [engines.greedy(llm, [prompt], 100)[0] for prompt in asked[-2:]]
    for prefix_caching in (False, True):
        # 200 blocks hold the eight prompts, but not all of the hundred tokens that each of them goes on for.
        with engines.engine(
            path, enable_prefix_caching=prefix_caching, num_gpu_blocks_override=200, **settings
        ) as llm:
            assert engines.greedy(llm, asked, 100)[-2:] == expected
            assert _metric(llm, "vllm:num_preemptions") > 0, "the pool was meant to be too small"


def _staggered(llm: Any, rng: random.Random) -> list[list[int]]:
    """Submit the prompts in random order between engine steps."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    order = list(range(len(PROMPTS)))
    rng.shuffle(order)
    done: dict[int, list[int]] = {}
    while order or llm.llm_engine.has_unfinished_requests():
        for _ in range(rng.randrange(3)):
            if order:
                index = order.pop()
                llm.llm_engine.add_request(str(index), {"prompt_token_ids": PROMPTS[index]}, sampling)
        for output in llm.llm_engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
    return [done[index] for index in range(len(PROMPTS))]


def _metric(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)
