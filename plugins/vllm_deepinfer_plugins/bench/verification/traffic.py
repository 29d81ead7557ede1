"""Easy, hard and mixed traffic: numbered requests for a script, held-out lessons for a real drafter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from vllm_deepinfer.checkpoint.tokenizer import tokenizer_of
from vllm_deepinfer.lessons.stream import DocumentKind, documents

from .plan import PROMPT
from .scripted import prompt_of
from .successor import FIRST

KINDS: dict[str, Sequence[DocumentKind]] = {
    "easy": ("copy", "json", "tools", "retrieval"),
    "hard": ("prose", "chat", "reasoning"),
    "mixed": ("copy", "prose", "json", "chat", "tools", "reasoning", "retrieval", "code"),
}
"""Answers that are copied from the prompt or follow a form; answers in free words."""
LONGEST = 256
"""Tokens of a lesson's prompt: prefill is not what is measured, and would take most of the time."""


def numbered(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of so many requests of a script."""
    rng = random.Random(f"prompts {seed}")
    return [
        prompt_of(number, [rng.randrange(FIRST, vocabulary) for _ in range(PROMPT - 2)])
        for number in range(count)
    ]


class Lessons:
    """Held-out prompts of a trained checkpoint's vocabulary, never the same one twice."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizer_of(folder)
        self._streams = {traffic: self._stream(traffic) for traffic in KINDS}

    def prompts(self, traffic: str, count: int) -> list[list[int]]:
        """The next ones."""
        return list(islice(self._streams[traffic], count))

    def _stream(self, traffic: str) -> Iterator[list[int]]:
        """The kinds in turn."""
        streams = [documents(1, "heldout", self._tokenizer, {kind: 1.0}) for kind in KINDS[traffic]]
        while True:
            for stream in streams:
                document = next(stream)
                first = document.mask.index(True)
                end = first if first > 1 else max(len(document.tokens) // 2, 1)
                if end <= LONGEST:
                    yield document.tokens[:end]
