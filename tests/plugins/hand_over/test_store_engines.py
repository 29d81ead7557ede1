"""Two real engines that hand prompts over through the store, or by NIXL beside it, answer what one does."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from vllm_deepinfer_plugins.hand_over.settings import transfer_config

from tests.plugins.engine.starting import started
from tests.plugins.model.samples import tiny
from vllm_deepinfer.cluster.application.engines import both_connectors, store_connector
from vllm_deepinfer.cluster.disaggregated import DisaggregatedEngine
from vllm_deepinfer.engine import GenerateRequest, SamplingParams, collect
from vllm_deepinfer.recipes.schema import Store

pytestmark = [pytest.mark.slow, pytest.mark.long]
RUN, ANSWER = 32, 8
LENGTHS = (1, 31, 32, 33, 64, 100, 257)
SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "additional_config": {"deepinfer": {"batch_invariant": True}},
}


def prompt_of(length: int) -> list[int]:
    return [20 + (7 * i * i + 3 * i + length) % 400 for i in range(length)]


def connectors(kind: str, store: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the prefill and of the decode engine."""
    settings = Store(url=str(store))
    made = store_connector(settings, hand_over_wait_s=60.0 if kind == "store" else None)
    made["kv_connector_extra_config"] |= {"run_tokens": RUN, "admission": "always"}
    if kind == "store":
        return made, made
    return (
        both_connectors(transfer_config("prefill", cpu=True), made),
        both_connectors(transfer_config("decode", cpu=True), made),
    )


async def answer(engine: Any, name: str, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt somebody had already."""
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
        **more,
    )
    found = await collect(engine, request)
    return list(found.token_ids), found.cached_tokens


def objects(store: Path) -> int:
    return sum(1 for path in store.rglob("*") if path.is_file() and path.stat().st_size > 1000)


@pytest.mark.parametrize("kind", ["store", "both"])
def test_two_engines_answer_what_one_does(kind: str, tmp_path: Path) -> None:
    if kind == "both" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed.")
    path, store = tiny(tmp_path / "model", layers=4), tmp_path / "kv"
    store.mkdir()
    ours = connectors(kind, store)

    async def main() -> None:
        prefill, decode = await asyncio.gather(
            *(started(path, kv_transfer_config=config, **SETTINGS) for config in ours)
        )
        pools = DisaggregatedEngine(prefill, decode)
        try:
            await pools.start()
            for length in LENGTHS:
                prompt = prompt_of(length)
                # Another salt: nothing that the pools have computed can be used, be it cached or stored.
                expected, cached = await answer(decode, f"one-{length}", prompt, cache_salt="alone")
                assert cached == 0
                found, _ = await answer(pools, f"two-{length}", prompt)
                assert found == expected, f"a prompt of {length}"
                again, cached = await answer(pools, f"again-{length}", prompt)
                assert again == expected
                # Beside NIXL nobody waits for a save, so that it may not have ended yet.
                assert kind == "both" or cached >= (length - 1) // RUN * RUN
            assert pools.counts["handed_over"] == 2 * len(LENGTHS) and not pools.counts["prefill_down"]
            assert not prefill.holds.counts + decode.holds.counts, "nothing was recomputed, late or foreign"
            await until_released(prefill)
            assert objects(store) >= sum(length // RUN for length in LENGTHS)
        finally:
            await decode.close()
            await prefill.close()

    asyncio.run(main())


async def until_released(engine: Any) -> None:
    """Holds are released in tasks."""
    for _ in range(200):
        if not len(engine.holds):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("a hold was not released")
