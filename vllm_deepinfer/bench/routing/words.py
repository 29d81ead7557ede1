"""A vocabulary that lets a client read token ids from a text: every answered token is a word with its number.

Simulated engines answer with pseudo-random ids. With a real vocabulary some of them are halves of characters,
whose text comes with the next token: a client would see no event for one and two tokens in the next, and
measure a gap that no engine made.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint.tokenizer import BOS, SMALLEST, small_tokenizer, tokenizer_files
from vllm_deepinfer.engine import GenerateRequest
from vllm_deepinfer.engine.simulated.tokens import chained_tokens

VOCABULARY = 1 << 16
"""Of these the control tokens and single bytes are 281: one answered token in 230 is none of the words."""
USER, ASSISTANT, END_OF_THINKING = 3, 4, 7  # as in CONTROL_TOKENS
TEMPLATE = 4
_WORD = re.compile(r" w(\d+);")


def write_tokenizer(folder: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Prompts of ASCII text have one token per character."""
    files = tokenizer_files(small_tokenizer(SMALLEST), context_length=context_length)
    document = json.loads(files["tokenizer.json"])
    # No merge makes them: a text is never encoded to them, but they are decoded. Ġ is byte-level BPE's space.
    document["model"]["vocab"] |= {f"Ġw{token};": token for token in range(SMALLEST, VOCABULARY)}
    files["tokenizer.json"] = json.dumps(document, ensure_ascii=False)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def words_of(text: str) -> list[int]:
    """The ids of an answer's words, in order; what is no word is left out."""
    return [int(number) for number in _WORD.findall(text)]


def prompt_of(session: int, tokens: int) -> str:
    """The text of a prompt of exactly so many tokens, `TEMPLATE` included; a session's begin alike."""
    return (f"session {session}" + " lorem" * (tokens // 6 + 1))[: max(tokens - TEMPLATE, 1)]


def prompt_ids(session: int, tokens: int) -> list[int]:
    """What the gateway makes of `prompt_of` without thinking: markers, and a token per character."""
    text = prompt_of(session, tokens)
    return [BOS, USER, *_bytes().encode(text).ids, ASSISTANT, END_OF_THINKING]


def expected_words(session: int, prompt_tokens: int, answer_tokens: int) -> list[int]:
    """The words of a simulated engine's answer of so many tokens."""
    request = GenerateRequest(request_id="expected", prompt_token_ids=prompt_ids(session, prompt_tokens))
    token_at = chained_tokens(VOCABULARY)(request)
    return [token for position in range(answer_tokens) if (token := token_at(position)) >= SMALLEST]


@cache
def _bytes() -> Tokenizer:
    return small_tokenizer(SMALLEST)
