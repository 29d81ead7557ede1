"""Which tokens a simulated engine answers with: a pure function of the request and the position.

So the answer does not depend on batching, chunking, preemption or speculation, and a test can say what it
must be.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Callable, Sequence

from vllm_deepinfer.engine.messages import GenerateRequest, TokenLogprobs

TokenAt = Callable[[int], int]
"""Position in the answer, from 0, to token id."""

TokenSource = Callable[[GenerateRequest], TokenAt]
"""What an engine answers to each request."""

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: Weyl steps spread over the range
_LN2 = math.log(2)


def hashed_tokens(vocab_size: int, reserved: int = 16) -> TokenSource:
    """Endless pseudo-random ids in [reserved, vocab_size) that depend on prompt, seed and position."""
    span = vocab_size - reserved
    if span < 1:
        raise ValueError(f"a vocabulary of {vocab_size} leaves nothing beside {reserved} reserved ids.")

    def source(request: GenerateRequest) -> TokenAt:
        seed = zlib.crc32(array("q", request.prompt_token_ids).tobytes(), request.sampling.seed or 0)
        return lambda position: reserved + ((seed + position + 1) * _MIX & 0xFFFF_FFFF_FFFF_FFFF) % span

    return source


def chained_tokens(vocab_size: int, reserved: int = 16) -> TokenSource:
    """Endless pseudo-random ids in [reserved, vocab_size), each a function of seed and of all ids before it.

    As with a real model and greedy sampling, a request for prompt + some emitted tokens is answered with the
    rest of the same answer: what is lost or doubled on the way to another engine changes all that follows.
    """
    span = vocab_size - reserved
    if span < 1:
        raise ValueError(f"a vocabulary of {vocab_size} leaves nothing beside {reserved} reserved ids.")

    def source(request: GenerateRequest) -> TokenAt:
        chain = zlib.crc32(array("q", request.prompt_token_ids).tobytes(), request.sampling.seed or 0)
        answer: list[int] = []

        def token_at(position: int) -> int:
            nonlocal chain
            while len(answer) <= position:
                answer.append(reserved + (chain * _MIX >> 16) % span)
                chain = zlib.crc32(answer[-1].to_bytes(8, sys.byteorder), chain)
            return answer[position]

        return token_at

    return source


def scripted_tokens(script: Callable[[GenerateRequest], Sequence[int]], eos_token_id: int) -> TokenSource:
    """The ids that `script` gives for a request, then end of sequence."""

    def source(request: GenerateRequest) -> TokenAt:
        answer = script(request)
        return lambda position: answer[position] if position < len(answer) else eos_token_id

    return source


def logprobs_of(token_id: int, count: int, vocab_size: int) -> TokenLogprobs:
    """Pretended log-probabilities: the token has 1/2, the `count - 1` ids after it 1/4, 1/8, …"""
    top = tuple(((token_id + i) % vocab_size, -_LN2 * (i + 1)) for i in range(count))
    return TokenLogprobs(token_id, -_LN2, 1, top)
