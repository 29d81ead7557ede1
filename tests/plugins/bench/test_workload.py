"""Measurements count what they should and time only what they should, on an engine made of a dictionary."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins.bench import workload
from vllm_deepinfer_plugins.bench.workload import FIRST_ORDINARY_ID, Greedy, Measurement, Workload


class Engine:
    """Prefills `slots` requests per step and then decodes one token each; tokens follow from `answer`."""

    def __init__(self, answer: Any = sum, slots: int = 2) -> None:
        self.answer, self.slots = answer, slots
        self.waiting: list[tuple[str, list[int], Any]] = []
        self.running: list[tuple[str, list[int], Any, list[int]]] = []
        self.prompts: list[list[int]] = []
        self.steps = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self.waiting.append((name, list(prompt["prompt_token_ids"]), parameters))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        for name, prompt, parameters in self.waiting[: self.slots]:
            self.running.append((name, prompt, parameters, []))
        del self.waiting[: self.slots]
        outputs = [self._token(*request) for request in self.running]
        self.running = [request for request in self.running if len(request[3]) < request[2].outputs]
        return outputs

    def _token(self, name: str, prompt: list[int], parameters: Any, done: list[int]) -> SimpleNamespace:
        token = int(self.answer(prompt + done)) % 1000
        done.append(token)
        logprobs = [{token: SimpleNamespace(logprob=-token / 7)}]
        return SimpleNamespace(
            request_id=name, outputs=[SimpleNamespace(token_ids=[token], logprobs=logprobs)]
        )


@pytest.fixture(autouse=True)
def parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        workload, "greedy", lambda outputs, logprobs: SimpleNamespace(outputs=outputs, logprobs=logprobs)
    )


@contextmanager
def counted(engine: Engine, log: list[tuple[int, int]]) -> Any:
    """Logs the steps before and after the timed part."""
    before = engine.steps
    yield
    log.append((before, engine.steps))


def test_rate() -> None:
    assert Measurement(tokens=64, seconds=0.5).rate == 128.0


def test_prefill_counts_the_prompt_and_times_its_only_step() -> None:
    engine, log = Engine(), list[tuple[int, int]]()
    measured = Workload(engine, vocab=1000).prefill(2048, timed=counted(engine, log))
    assert measured.tokens == 2048
    assert measured.fastest_step is not None and 0 < measured.fastest_step <= measured.seconds
    assert log == [(0, 1)] and len(engine.prompts[0]) == 2048


def test_decode_times_nothing_until_every_request_has_its_first_token() -> None:
    """Five requests, two prefilled a step: the first two have three tokens when the last gets its first."""
    engine, log = Engine(), list[tuple[int, int]]()
    measured = Workload(engine, vocab=1000).decode(5, context=7, outputs=10, timed=counted(engine, log))
    assert log == [(3, 12)]
    assert measured.tokens == 5 * 10 - (3 + 3 + 2 + 2 + 1)
    assert measured.fastest_step is not None and 9 * measured.fastest_step <= measured.seconds
    assert [len(prompt) for prompt in engine.prompts] == [7] * 5


def test_decode_refuses_a_wrong_number_of_tokens() -> None:
    class Short(Engine):
        def step(self) -> list[SimpleNamespace]:
            outputs = super().step()
            return outputs[:1] if self.steps == 4 else outputs

    with pytest.raises(RuntimeError, match="19 tokens came back instead of 2 × 10"):
        Workload(Short(), vocab=1000).decode(2, context=3, outputs=10)


def test_prompts_are_ordinary_tokens_and_never_the_same() -> None:
    load = Workload(Engine(), vocab=600)
    first, second = load.prompt(500), load.prompt(500)
    assert first != second
    assert min(first + second) >= FIRST_ORDINARY_ID and max(first + second) < 600


def test_both_sides_get_the_same_prompts() -> None:
    assert Workload(Engine(), 8192, seed=3).prompt(50) == Workload(Engine(), 8192, seed=3).prompt(50)


def test_continue_greedily_collects_tokens_and_their_log_probabilities() -> None:
    answer = Workload(Engine(len), vocab=1000).continue_greedily([5, 5, 5], 3)
    assert answer == Greedy(ids=[3, 4, 5], logprobs=[-3 / 7, -4 / 7, -5 / 7])


def test_check_is_content_with_an_engine_that_reads_everything() -> None:
    assert Workload(Engine(sum), vocab=1000).check() == []


class TestCheckFinds:
    def faults(self, answer: Any) -> list[str]:
        return Workload(Engine(answer), vocab=1000).check(head=10, tail=40, outputs=12)

    def test_an_engine_that_reads_the_end_alone(self) -> None:
        assert self.faults(lambda ids: sum(ids[-20:])) == ["the answer ignores the distant context"]

    def test_an_engine_in_a_cycle(self) -> None:
        cycle = self.faults(lambda ids: (ids[0], ids[1])[len(ids) % 2])
        assert cycle == ["fewer than 6 different tokens in 12"]

    def test_an_engine_that_forgets_nothing_of_earlier_requests(self) -> None:
        calls = iter(range(10_000))
        assert "the same prompt got two answers" in self.faults(lambda ids: sum(ids) + next(calls))

    def test_an_engine_that_answers_with_nan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        token = Engine._token

        def broken(self: Engine, *request: Any) -> SimpleNamespace:
            output = token(self, *request)
            (entry,) = output.outputs[0].logprobs
            next(iter(entry.values())).logprob = float("nan")
            return output

        monkeypatch.setattr(Engine, "_token", broken)
        assert "a log probability is not finite" in self.faults(sum)
