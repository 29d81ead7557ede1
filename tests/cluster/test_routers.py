"""The aggregated router: loads as engines report them, and the policy's choice."""

from __future__ import annotations

from vllm_deepinfer.cluster.routers import AggregatedRouter
from vllm_deepinfer.engine import GenerateRequest, Load, SamplingParams
from vllm_deepinfer.policy.step_cost import StepCost

COST = StepCost(per_step=1e-3, per_token=1e-4, per_decode=1e-3, per_decode_context=1e-6)


def request(prompt: int = 100, max_tokens: int | None = 50) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id="a", prompt_token_ids=[1] * prompt, sampling=sampling)


def load(active: int = 0, queued: int = 0, used: int = 0, free: int = 1000) -> Load:
    return Load(
        running_requests=active, queued_prompt_tokens=queued, kv_tokens_used=used, kv_tokens_free=free
    )


def chosen(loads: dict[str, Load], one: GenerateRequest, refused: frozenset[str] = frozenset()) -> str | None:
    choice = AggregatedRouter(COST, most_active=4, clock=lambda: 0.0)(one, loads, refused)
    return None if choice is None else choice.worker


def test_queued_prompts_weigh_more_than_decodes() -> None:
    assert chosen({"a": load(queued=500), "b": load(active=3, used=300)}, request()) == "b"
    assert chosen({"a": load(active=1), "b": load(active=3, used=300)}, request()) == "a"


def test_room_is_prompt_and_output() -> None:
    assert chosen({"a": load(free=150)}, request()) == "a"
    assert chosen({"a": load(free=149)}, request()) is None
    assert chosen({"a": load(free=355)}, request(max_tokens=None)) is None
    assert chosen({"a": load(free=356)}, request(max_tokens=None)) == "a"
    assert chosen({"a": load(active=4)}, request()) is None


def test_those_that_refused_come_last() -> None:
    loads = {"a": load(), "b": load(queued=900)}
    assert chosen(loads, request(), frozenset("a")) == "b"
