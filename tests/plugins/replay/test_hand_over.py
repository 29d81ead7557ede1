"""Replays beside a hand-over by NIXL: two real engines answer what one does, windows are handed over."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from vllm_deepinfer_plugins.hand_over.settings import transfer_config

from tests.plugins.engine.starting import started
from vllm_deepinfer.engine import GenerateRequest, KvHandOver, SamplingParams

from .oracle import BLOCK, ENGINES, ON, SPECULATION, checkpoint, engine
from .test_engine import DOCUMENT, TOKENS, answer, ids, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENGINES, reason="two engines of its own: set DEEPINFER_REPLAY_ENGINES=1"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed."),
]
LENGTHS = (1, 2, 15, 16, 17, 18, 31, 32, 33, 47, 64, 100, 113)
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "additional_config": {"deepinfer": ON}}


async def ask(engine: Any, name: str, prompt: list[int], tokens: int, hand_over: KvHandOver) -> Any:
    """Tokens of the answer, and the final delta. Not by `stream`, whose abort would release the hold."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = GenerateRequest(
        request_id=name, prompt_token_ids=prompt, sampling=sampling, hand_over=hand_over
    )
    queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(deltas: Any) -> None:
        for delta in deltas:
            queue.put_nowait(delta)

    await engine.submit(request, put)
    answer: list[int] = []
    while True:
        delta = await queue.get()
        answer += delta.token_ids
        if delta.final:
            return answer, delta


async def split(prefill: Any, decode: Any, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """The answer of two engines, and how many tokens the prefill engine had cached."""
    _, first = await ask(prefill, name, prompt, 1, KvHandOver(keep=True))
    assert first.kv_source is not None
    tokens, _ = await ask(decode, name, prompt, TOKENS, KvHandOver(source=first.kv_source))
    return tokens, first.cached_tokens


@pytest.mark.parametrize("blocks", [0, 2], ids=["alone", "a drafter"])
def test_two_engines_answer_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """New prompts of any length; then prompts whose prefix the prefill engine has cached and replays."""
    path = checkpoint(tmp_path, blocks)
    given = {**SETTINGS, **({"speculative_config": SPECULATION} if blocks else {})}
    new = {f"new {n}": ids(n, seed=n) for n in LENGTHS}
    known = {f"known {n}": DOCUMENT[:n] + ids(9, seed=n) for n in (33, 48, 64, 100)}
    expected: dict[str, list[int]] = {}
    with engine(tmp_path / "one", max_num_seqs=1, blocks=blocks) as llm:
        for name, prompt in ({"document": DOCUMENT} | new | known).items():
            expected[name] = answer(serve(llm, {name: prompt})[name])
    monkeypatch.setitem(os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def main() -> dict[str, tuple[list[int], int]]:
        prefill = await started(path, kv_transfer_config=transfer_config("prefill", cpu=True), **given)
        decode = await started(path, kv_transfer_config=transfer_config("decode", cpu=True), **given)
        try:
            found = {}
            for name, prompt in ({"document": DOCUMENT} | new | known).items():
                found[name] = await split(prefill, decode, name, prompt)
            lost = decode.holds.counts + prefill.holds.counts  # without zeros
            assert not lost, "nothing was recomputed or foreign"
            return found
        finally:
            await decode.close()
            await prefill.close()

    found = asyncio.run(main())
    assert {name: tokens for name, (tokens, _) in found.items()} == expected
    assert all(found[name][1] >= 32 for name in known), "the prefill engine was meant to hit its cache"
