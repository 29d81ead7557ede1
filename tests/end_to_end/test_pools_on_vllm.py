"""The laptop's recipe whole: Ray Serve, a prefill engine, a decode engine, NIXL between them, all real.

Tokens are compared with one engine's, in float32 and batch-invariant mode, where company and chunks change
nothing. VLLM_DEEPINFER_PROMPTS sets how many prompts (8; the figure in the README is from 50).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.application.kills import invariant
from vllm_deepinfer.engine import GenerateRequest, SamplingParams, collect
from vllm_deepinfer.recipes import Recipe, load_recipe
from vllm_deepinfer.recipes.checkpoints import ensure_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed."),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed."),
]
LAPTOP = Path(__file__).resolve().parents[2] / "recipes" / "laptop.yaml"
INVARIANT = {"additional_config": {"deepinfer": {"batch_invariant": True}}}
ANSWER = 12
COUNT = int(os.environ.get("VLLM_DEEPINFER_PROMPTS", "8"))

SINGLE = """
import json, sys
from vllm import LLM, SamplingParams
given = json.load(sys.stdin)
llm = LLM(model=given["model"], dtype="float32", enforce_eager=True, max_model_len=4096, block_size=32,
          max_num_seqs=1, skip_tokenizer_init=True, enable_prefix_caching=False, **given["extra"])
sampling = SamplingParams(temperature=0, max_tokens=given["answer"], ignore_eos=True, detokenize=False)
answers = [llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0].token_ids
           for prompt in given["prompts"]]
print("ANSWERS " + json.dumps([list(answer) for answer in answers]))
"""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return invariant(load_recipe(LAPTOP))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Lengths from 1 to 2,000, block edges among them."""
    edges = [1, 2, 31, 32, 33, 64, 1999, 2000]
    rng = random.Random(5)
    lengths = (edges + [rng.randint(1, 2000) for _ in range(COUNT)])[: max(COUNT, 2)]
    return [[rng.randrange(20, 500) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(recipe: Recipe, prompts: list[list[int]]) -> list[list[int]]:
    """What one engine answers, in a process that has ended before the pools start."""
    given = {
        "model": str(ensure_checkpoint(recipe)),
        "prompts": prompts,
        "answer": ANSWER,
        "extra": INVARIANT,
    }
    done = subprocess.run(
        [sys.executable, "-c", SINGLE],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        check=False,
    )
    line = next((one for one in done.stdout.splitlines() if one.startswith("ANSWERS ")), None)
    assert line is not None, done.stderr[-3000:]
    found: list[list[int]] = json.loads(line.removeprefix("ANSWERS "))
    return found


@pytest.fixture(scope="module")
def application(recipe: Recipe, expected: object) -> Iterator[Any]:
    from vllm_deepinfer.cluster.application.launch import Application

    with Application(recipe) as running:
        yield running


@pytest.fixture(scope="module")
def engine(application: Any) -> Iterator[tuple[asyncio.Runner, Any]]:
    """What a gateway stands on, in an event loop of the tests."""
    from ray.serve.handle import DeploymentHandle

    from vllm_deepinfer.cluster.application.gateway_replica import engine_over, pools_of
    from vllm_deepinfer.cluster.application.specs import GatewaySpec

    recipe = application.recipe

    # Not Serve's cached handles, which the application's metrics use from other threads.
    handles = {name: DeploymentHandle(name, recipe.name) for name in recipe.pools}
    spec = GatewaySpec(recipe=recipe.model_dump_json(), session=application.session)

    async def begin() -> tuple[Any, Any]:
        pools = pools_of(recipe, handles, spec)
        for pool in pools.values():
            await pool.start()
        made = engine_over(recipe, pools)
        await made.start()
        return made, pools

    async def end() -> None:
        await made.close()
        for pool in pools.values():
            await pool.close()

    with asyncio.Runner() as runner:
        made, pools = runner.run(begin())
        yield runner, made
        runner.run(end())


def ask(engine: tuple[asyncio.Runner, Any], prompts: Sequence[list[int]], at_once: int) -> list[list[int]]:
    async def main() -> list[list[int]]:
        gate = asyncio.Semaphore(at_once)

        async def one(number: int, prompt: list[int]) -> list[int]:
            sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
            async with gate:
                request = GenerateRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)
                return list((await collect(engine[1], request)).token_ids)

        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))

    return engine[0].run(main())


def test_a_streamed_chat_through_gateway_prefill_and_decode(application: Any) -> None:
    body = {
        "model": "tiny-v4.1",
        "stream": True,
        "max_tokens": 8,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "user", "content": "Hello, and a few words more so that it is not all one block."}
        ],
    }
    with httpx.stream("POST", f"{application.urls[0]}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["usage"]["completion_tokens"] == 8
    metrics = httpx.get(application.metrics_url, timeout=30).text
    steps = {
        line.split('pool="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("deepinfer_replica_steps_total{")
    }
    assert set(steps) == {"prefill", "decode"} and min(steps.values()) > 0


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_tokens_are_one_engines(
    engine: Any, prompts: list[list[int]], expected: list[list[int]], at_once: int
) -> None:
    answers = ask(engine, prompts, at_once)
    differing = [
        len(prompt) for prompt, mine, theirs in zip(prompts, answers, expected, strict=True) if mine != theirs
    ]
    assert not differing, f"prompts of these lengths differ: {differing}"
