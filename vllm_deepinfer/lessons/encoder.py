"""Text and lessons to token ids, with the ids that the gateway would make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache

from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint.tokenizer import BOS, EOS
from vllm_deepinfer.gateway.tokens.vocabulary import plain_json

from .lesson import Lesson
from .rendering import END, Rendered, prompt, render

CACHED_PIECES = 20_000


class Encoder:
    """Encodes text between control tokens without the control tokens, as the gateway does."""

    bos, eos = BOS, EOS

    def __init__(self, tokenizer: Tokenizer) -> None:
        parsed = json.loads(tokenizer.to_str())
        self._plain = Tokenizer.from_str(plain_json(parsed))
        self._whole = tokenizer
        self._control = {token["content"]: token["id"] for token in parsed["added_tokens"]}
        self._cached = lru_cache(CACHED_PIECES)(self.text)

    @cached_property
    def words(self) -> tuple[int, ...]:
        """Ids of all tokens that are printable text."""
        return tuple(at for at in range(self._whole.get_vocab_size()) if self._is_word(at))

    def _is_word(self, at: int) -> bool:
        text: str = self._plain.decode([at])
        return bool(text) and text.isprintable() and not {"\ufffd", "｜"} & set(text)

    def text(self, text: str) -> list[int]:
        """Ids of text without control tokens, whatever it spells."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens spelled out but for the end of sentence."""
        text: str = self._whole.decode(list(ids), skip_special_tokens=False)
        return text.removesuffix(END)

    def prompt(self, lesson: Lesson, turn: int) -> list[int]:
        """Ids of the request whose answer is message ``turn``."""
        return self._ids(prompt(lesson, turn))[0]

    def lesson(self, lesson: Lesson) -> tuple[list[int], list[bool]]:
        """Ids of the whole conversation, and which of them are answers."""
        return self._ids(render(lesson))

    def _ids(self, rendered: Rendered) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        mask: list[bool] = []
        edges = [edge for span in rendered.answers for edge in span]
        place = inside = 0

        def add(more: Sequence[int]) -> None:
            ids.extend(more)
            mask.extend([bool(inside % 2)] * len(more))

        for start, stop in (*rendered.special, (len(rendered.text), len(rendered.text))):
            add(self._cached(rendered.text[place:start]))
            if start < stop:
                add([self._control[rendered.text[start:stop]]])
            place = stop
            while inside < len(edges) and edges[inside] <= place:  # an edge is always at a control token
                inside += 1
        return ids, mask
