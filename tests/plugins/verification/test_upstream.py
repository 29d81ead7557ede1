"""vLLM's own manager of CUDA, driven without a GPU: with our table it chooses the best for any context."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllm_side
from vllm_deepinfer_plugins.verification import upstream
from vllm_deepinfer_plugins.verification.upstream import ContextAwareVerification

STOCK = vllm_side.AdaptiveVerificationManager
REQUESTS, DRAFTS, MOST = 8, 5, 256
CAPTURED = [1, 2, 4, 8, 16, 24, 32, 48]
SLOPE = 2e-4  # ms per token of context


def milliseconds(tokens: int, context: float) -> float:
    """A machine whose every step of the profile is known: graph sizes, dense work, and context."""
    padded = next((size for size in CAPTURED if size >= tokens), tokens)
    return 1.0 + 0.05 * padded + SLOPE * context


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(broadcast_object=lambda value, src: value)
    monkeypatch.setattr(vllm_side, "get_tp_group", lambda: group)
    monkeypatch.setattr(upstream, "get_tp_group", lambda: group)


def made(kind: Any, contexts: list[int], confidences: float) -> Any:
    """A manager without its streams and events, which need a GPU."""
    manager = object.__new__(kind)
    count = len(contexts)
    manager.req_states = SimpleNamespace(
        max_num_reqs=REQUESTS,
        max_num_batched_tokens=MOST,
        num_speculative_steps=DRAFTS,
        req_id_to_index={str(at): at for at in range(count)},
        num_computed_tokens_np=np.array(contexts, np.int64),
        prefill_len=SimpleNamespace(np=np.zeros(count, np.int64)),
    )
    manager.num_speculative_steps, manager.num_bonus_tokens = DRAFTS, 1
    manager._max_total_logits, manager._cudagraph_limit = 10_000, 0
    manager.cost_tables, manager._batch_budget, manager._stale_idx = None, None, 0
    manager._stale_confidences = [
        SimpleNamespace(np=np.full((REQUESTS, DRAFTS), confidences, np.float32))
    ] * 2
    return manager


def profiled(manager: Any, lost: int = 0) -> list[dict[str, int]]:
    """Time what it asks for, as vLLM's runner does."""
    batches = list(manager.batches_to_profile(CAPTURED))
    samples = []
    for batch in batches[lost:]:
        tokens, requests = batch["num_tokens"], min(batch["num_tokens"], REQUESTS)
        took = milliseconds(tokens, requests * batch["context_len"])
        samples.append(StepTimingSample(took, 0.2, tokens, requests, full_cudagraph=True))
    manager.set_initial_cost_curves(samples)
    return batches


def chosen(manager: Any) -> int:
    keys = list(manager.req_states.req_id_to_index)
    tokens = manager.get_num_tokens(dict.fromkeys(keys, 1 + DRAFTS), dict.fromkeys(keys, [7] * DRAFTS))
    return int(tokens) - len(keys)


def best(contexts: list[int], confidence: float) -> int:
    """By brute force over the true machine."""
    survived = np.sort(np.tile(confidence ** np.arange(1, DRAFTS + 1), len(contexts)))[::-1]
    rates = [
        (len(contexts) + survived[:n].sum()) / (0.2 + milliseconds(len(contexts) + n, sum(contexts)))
        for n in range(len(survived) + 1)
    ]
    return int(np.argmax(rates))


@pytest.mark.parametrize("confidence", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("context", [16, 1_000, 8_192, 60_000])
def test_the_best_choice_for_any_context(context: int, confidence: float) -> None:
    contexts = [context] * 4
    ours = made(ContextAwareVerification, contexts, confidence)
    profiled(ours)
    assert chosen(ours) == best(contexts, confidence)


def test_vllm_s_own_table_misses_it() -> None:
    """Why this is here: its profile prices short chats as if each had read 8,192 tokens."""
    missed = 0
    for context in (16, 1_000, 60_000):
        for confidence in (0.3, 0.6, 0.8):
            stock = made(STOCK, [context] * 4, confidence)
            profiled(stock)
            missed += chosen(stock) != best([context] * 4, confidence)
    assert missed


def test_what_is_profiled() -> None:
    stock, ours = (made(kind, [1], 0.5) for kind in (STOCK, ContextAwareVerification))
    theirs, all_of_it = profiled(stock), profiled(ours)
    assert all_of_it[: len(theirs)] == theirs, "vLLM's own come first, unchanged"
    more = all_of_it[len(theirs) :]
    assert {batch["num_tokens"] for batch in more} == {1, 4, 16, 48}
    assert {batch["context_len"] for batch in more} == {512} and len(more) == 20
    assert np.array_equal(stock.cost_tables[1], ours.cost_tables[1]), "vLLM's table is of its own samples"
    tables = ours.cost_tables
    chosen(ours)
    assert ours.cost_tables is tables, "a step's table is gone behind it"


def test_a_profile_that_was_not_timed_whole_is_vllm_s(caplog: pytest.LogCaptureFixture) -> None:
    ours, stock = (made(kind, [16] * 4, 0.6) for kind in (ContextAwareVerification, STOCK))
    with caplog.at_level(logging.WARNING):
        profiled(ours, lost=3)
    assert "knows no context: 77 of 80 steps" in caplog.text
    profiled(stock)
    assert ours._curve is None and chosen(ours) >= 0


def test_nothing_is_captured() -> None:
    ours = made(ContextAwareVerification, [1], 0.5)
    assert list(ours.batches_to_profile([])) == []


def test_vllm_s_factory_makes_it_once_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_side, "AdaptiveVerificationManager", STOCK)
    upstream.install()
    upstream.install()
    assert vllm_side.AdaptiveVerificationManager is ContextAwareVerification
    assert (
        "AdaptiveVerificationManager"
        in vllm_side.maybe_create_adaptive_verification_manager.__code__.co_names
    )
