"""Tokenising: a long prompt on all cores against one call, and the next turn of a long conversation."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    DeepseekV41Encoding,
    Message,
    RenderedPrompt,
    SystemMessage,
    Tokenizer,
    UserMessage,
)
from tokenizers import Tokenizer as Vocabulary

from vllm_deepinfer.checkpoint.tokenizer import released_tokenizer
from vllm_deepinfer.gateway.tokens import PromptTokenizer
from vllm_deepinfer.gateway.tokens.vocabulary import byte_alphabet, plain_json

MEGABYTE = 1_000_000
TURNS = 100
TURN_CHARS = 4_000
_ALPHABET = byte_alphabet()


@dataclass(frozen=True)
class Round:
    """Seconds of each way to tokenise."""

    serial: float  # one call of the recipe's tokenizer
    parallel: float  # encode_plain, nothing cached
    conversation: float  # the conversation's last prompt, nothing cached
    next_turn: float  # the same prompt when the one before it was tokenised earlier


def sample_text(vocabulary: Vocabulary, size: int, rng: Random) -> str:
    """At least `size` bytes: source code and English from Python's own library, and Chinese words in turn."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    words = sorted(
        word for word in map(_plain, vocabulary.get_vocab()) if word and "\u4e00" <= word[0] <= "\u9fa5"
    )
    parts, length = [], 0
    while length < size:
        code = rng.choice(files).read_text(encoding="utf-8", errors="ignore")
        start = rng.randrange(max(1, len(code) - 3000))
        chinese = "".join(rng.choice(words) + rng.choice(["", "", "", "，", "。\n"]) for _ in range(350))
        parts += [code[start : start + 3000], chinese, "\n"]
        length += sum(len(part.encode()) for part in parts[-3:])
    return "".join(parts)


def _plain(token: str) -> str:
    try:
        return bytes(_ALPHABET[char] for char in token).decode()
    except (KeyError, UnicodeDecodeError):
        return ""


def conversation(text: str, turns: int) -> RenderedPrompt:
    """A chat of `turns` questions and answers cut from `text`, ending with a question."""
    pieces = [text[i * TURN_CHARS : (i + 1) * TURN_CHARS] for i in range(2 * turns)]
    messages: list[Message] = [SystemMessage("You are a careful assistant.")]
    for turn in range(turns):
        messages.append(UserMessage(pieces[2 * turn]))
        if turn + 1 < turns:
            messages.append(AssistantMessage(pieces[2 * turn + 1]))
    return DeepseekV41Encoding().render_conversation(Conversation(messages, thinking_mode=False))


class TokeniseBench:
    """Holds the texts and tokenizers; `round` measures once."""

    def __init__(self) -> None:
        vocabulary = released_tokenizer()
        text = sample_text(vocabulary, MEGABYTE, Random(0))
        tokenizer_json = vocabulary.to_str()
        self._text = text.encode()[:MEGABYTE].decode(errors="ignore")
        repeated = text * (2 * TURNS * TURN_CHARS // len(text) + 1)
        self._before, self._after = conversation(repeated, TURNS - 1), conversation(repeated, TURNS)
        self._prompts = PromptTokenizer(tokenizer_json)
        self._serial = Tokenizer.from_str(plain_json(json.loads(tokenizer_json)))

    async def round(self) -> Round:
        """Raises RuntimeError if any way gives other ids."""
        prompts = self._prompts
        serial, expected = _timed_call(lambda: self._serial.encode(self._text))
        prompts.cache.clear()
        parallel, ids = await _timed(prompts.encode_plain(self._text))
        prompts.cache.clear()
        after = self._after
        cold, whole = await _timed(prompts.encode_prompt(after.prompt, after.special_ranges))
        prompts.cache.clear()
        for _ in range(
            2
        ):  # twice: an entry is at its fastest from its second use on, as in a long conversation
            await prompts.encode_prompt(self._before.prompt, self._before.special_ranges)
        next_turn, again = await _timed(prompts.encode_prompt(after.prompt, after.special_ranges))
        if ids != expected or again != whole:
            raise RuntimeError("parallel or cached tokenisation changed the ids")
        return Round(serial, parallel, cold, next_turn)


def run(rounds: int) -> list[Round]:
    """Measure `rounds` times, after one round to warm up."""

    async def all_rounds() -> list[Round]:
        bench = TokeniseBench()
        await bench.round()
        return [await bench.round() for _ in range(rounds)]

    return asyncio.run(all_rounds())


def _timed_call(function: Callable[[], list[int]]) -> tuple[float, list[int]]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


async def _timed(awaitable: Awaitable[list[int]]) -> tuple[float, list[int]]:
    began = time.perf_counter()
    result = await awaitable
    return time.perf_counter() - began, result
