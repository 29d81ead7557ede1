"""LedgerEngine: one line per accepted request, and every way to break the rules shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_deepinfer.bench.gateway.ledger import LedgerEngine
from vllm_deepinfer.engine import FinishReason, GenerateRequest, Overloaded, SamplingParams, TokenDelta
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.policy.step_cost import StepCost


def request(name: str, tokens: int = 3) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=[1, 2], sampling=sampling)


async def make() -> tuple[LedgerEngine, SimulatedEngine]:
    engine = SimulatedEngine(SimulatedConfig(cost=StepCost(per_step=0.0005, per_token=0.0)))
    ledger = LedgerEngine(engine)
    await ledger.start()
    return ledger, engine


async def test_requests_that_end_once_balance() -> None:
    ledger, _ = await make()
    seen: list[TokenDelta] = []
    for name in ("a", "b", "c"):
        await ledger.submit(request(name), seen.extend)
    await ledger.abort(["b"])
    await ledger.drain()
    assert (ledger.accepted, ledger.ended, ledger.open, dict(ledger.faults)) == (3, 3, set(), {})
    finals = [delta.request_id for delta in seen if delta.final]
    assert sorted(finals) == ["a", "b", "c"]
    await ledger.close()


async def test_a_refused_request_was_never_accepted() -> None:
    ledger, engine = await make()
    engine.faults.refuse = Overloaded("full.")
    with pytest.raises(Overloaded):
        await ledger.submit(request("a"), lambda deltas: None)
    assert (ledger.accepted, ledger.ended, ledger.open) == (0, 0, set())
    await ledger.close()


async def test_what_is_still_running_is_open() -> None:
    ledger, _ = await make()
    await ledger.submit(request("a", 1000), lambda deltas: None)
    assert ledger.open == {"a"}
    assert ledger.load().active_requests == 1
    await ledger.close()
    assert ledger.open == set()
    assert ledger.ended == 1


async def test_a_sink_gets_one_call_per_step() -> None:
    """As without the ledger: it must not hide what it is there to watch."""
    ledger, _ = await make()
    steps: list[int] = []

    def sink(deltas: Sequence[TokenDelta]) -> None:
        steps.append(len(deltas))

    await ledger.submit(request("a"), sink)
    await ledger.submit(request("b"), sink)
    await ledger.drain()
    assert steps == [2, 2, 2]
    await ledger.close()


async def test_an_engine_that_breaks_the_rules_is_noticed() -> None:
    ledger, _ = await make()
    sink = ledger._noting(lambda deltas: None)
    ledger.open.add("a")
    sink([TokenDelta("a", [1], FinishReason.STOP)])
    sink([TokenDelta("a", [2])])
    sink([TokenDelta("a", [], FinishReason.ABORT)])
    assert ledger.ended == 2
    assert dict(ledger.faults) == {"delta after the end": 2}
    await ledger.submit(request("x", 1000), lambda deltas: None)
    with pytest.raises(ValueError, match="in use"):
        await ledger.submit(request("x", 1000), lambda deltas: None)
    assert ledger.faults["submitted twice"] == 1
    await ledger.close()
