"""What a measurement does with an in-process vLLM engine: feed requests, time the steps, count the tokens."""

from __future__ import annotations

import math
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from .cpu_share import ForeignCpu

FIRST_ORDINARY_ID = 512  # below lie control tokens, and bytes that Engram's normalisation may merge

Timed = AbstractContextManager[Any]


@dataclass(frozen=True)
class Measurement:
    """`tokens` in `seconds`, while other processes used the share `foreign` of all cores (None: unknown).

    `fastest_step`, in seconds, is the shortest engine step of them: the least disturbed one.
    """

    tokens: int
    seconds: float
    foreign: float | None = None
    fastest_step: float | None = None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Greedy:
    """Greedy continuation of one prompt: token ids and their natural-log probabilities."""

    ids: list[int]
    logprobs: list[float]


class Workload:
    """Runs requests of random ordinary tokens on `engine`, a `vllm.v1.engine.llm_engine.LLMEngine`."""

    def __init__(self, engine: Any, vocab: int, seed: int = 0) -> None:
        self.engine = engine
        self.vocab = vocab
        self.rng = random.Random(seed)
        self._served = 0

    def prompt(self, length: int) -> list[int]:
        """The next `length` random tokens."""
        return [self.rng.randrange(FIRST_ORDINARY_ID, self.vocab) for _ in range(length)]

    def prefill(self, tokens: int, timed: Timed | None = None) -> Measurement:
        """From handing over a prompt of `tokens` tokens to its first output token."""
        prompt = self.prompt(tokens)
        with timed or nullcontext(), ForeignCpu() as others:
            start = time.perf_counter()
            self._add(prompt, outputs=1)
            _, fastest = self._drain()
            seconds = time.perf_counter() - start
        return Measurement(tokens, seconds, others.share, fastest)

    def decode(self, batch: int, context: int, outputs: int, timed: Timed | None = None) -> Measurement:
        """The outputs after the first of `batch` requests, each `context` tokens in and `outputs` out."""
        waiting = {self._add(self.prompt(context), outputs) for _ in range(batch)}
        early = 0
        while waiting:
            for output in self.engine.step():
                waiting.discard(output.request_id)
                early += len(output.outputs[0].token_ids)
        with timed or nullcontext(), ForeignCpu() as others:
            start = time.perf_counter()
            tokens, fastest = self._drain()
            seconds = time.perf_counter() - start
        if early + tokens != batch * outputs:
            raise RuntimeError(f"{early + tokens} tokens came back instead of {batch} × {outputs}")
        return Measurement(tokens, seconds, others.share, fastest)

    def continue_greedily(self, prompt: list[int], outputs: int) -> Greedy:
        """The next `outputs` tokens after `prompt`."""
        self._add(prompt, outputs, logprobs=0)
        ids: list[int] = []
        logprobs: list[float] = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                completion = output.outputs[0]
                ids += completion.token_ids
                logprobs += [
                    entry[token].logprob
                    for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
                ]
        return Greedy(ids, logprobs)

    def check(self, head: int = 256, tail: int = 900, outputs: int = 12) -> list[str]:
        """What is wrong with the engine's answers; empty when it really runs the model.

        Two prompts that differ in their first `head` tokens only must get different answers, although the
        `tail` lies beyond what all windows together reach: the difference can arrive through the compressed
        caches alone.
        """
        end = self.prompt(tail)
        first, second = (self.prompt(head) + end for _ in range(2))
        answer, again, other = (self.continue_greedily(p, outputs) for p in (first, first, second))
        faults = {
            "a log probability is not finite": not all(map(math.isfinite, answer.logprobs + other.logprobs)),
            "the same prompt got two answers": answer != again,
            f"fewer than {outputs // 2} different tokens in {outputs}": len(set(answer.ids)) < outputs // 2,
            "the answer ignores the distant context": answer.logprobs == other.logprobs,
        }
        return [fault for fault, found in faults.items() if found]

    def _drain(self) -> tuple[int, float]:
        """Step until no request is left: how many tokens came out, and the seconds of the shortest step."""
        tokens, fastest = 0, math.inf
        while self.engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = self.engine.step()
            fastest = min(fastest, time.perf_counter() - start)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens, fastest

    def _add(self, prompt: list[int], outputs: int, logprobs: int | None = None) -> str:
        self._served += 1
        name = f"bench-{self._served}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, greedy(outputs, logprobs))
        return name


def greedy(outputs: int, logprobs: int | None) -> Any:
    """vLLM's parameters for exactly `outputs` greedy tokens, each step returning its own tokens only."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=outputs,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA,
    )
