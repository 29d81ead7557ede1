"""What the drafter is calibrated on: a file of prompts, or lessons that no training has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.lessons.stream import Document, documents

FIELDS = ("prompt_token_ids", "prompt")
FORM = 'write {"prompt_token_ids": [5, 17]} or {"prompt": "text"}'


def lessons(tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """Prompts of held-out lessons, code and prose, in the mix of the training.

    Args:
        longest: tokens of a prompt.

    Raises:
        UserError: The vocabulary is not one that lessons can be written in.
    """
    found = map(_prompt, documents(0, "heldout", tokenizer))
    try:
        return list(islice((prompt for prompt in found if len(prompt) <= longest), count))
    except KeyError as error:
        raise UserError(
            f"The checkpoint's tokenizer lacks the control token {error}, which lessons are written with: "
            "give --prompts FILE."
        ) from None


def _prompt(document: Document) -> list[int]:
    """Up to the first token that is to be written; code and prose are to be continued from their middle."""
    first = document.mask.index(True)
    return document.tokens[: first if first > 1 else max(len(document.tokens) // 2, 1)]


def from_file(path: Path, tokenizer: Tokenizer, vocabulary: int, longest: int) -> list[list[int]]:
    """The prompts of a file of JSON lines: `FORM`, or just the list, or just the text.

    Args:
        vocabulary: token ids are below this.
        longest: tokens of a prompt.

    Raises:
        UserError: One sentence with the number of the first line that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--prompts {path} cannot be read ({reason}).") from None
    prompts = []
    for number, line in _lines(text):
        where = f"--prompts {path}, line {number}"
        ids = _ids(_value(line, where), tokenizer, vocabulary, where)
        if not 0 < len(ids) <= longest:
            raise UserError(f"{where}: the prompt has {len(ids)} tokens; it may have 1 to {longest}.")
        prompts.append(ids)
    if not prompts:
        raise UserError(f"--prompts {path} has no line: {FORM}, one per line.")
    return prompts


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines by number, empty ones left out. JSON may hold what str.splitlines takes for the end of a line."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _value(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): {FORM}.") from None
    if not isinstance(value, dict):
        return value
    given = [name for name in FIELDS if name in value]
    if len(given) != 1:
        raise UserError(f"{where} has {' and '.join(given) or 'no prompt'}: {FORM}.")
    return value[given[0]]


def _ids(value: Any, tokenizer: Tokenizer, vocabulary: int, where: str) -> list[int]:
    if isinstance(value, str):
        ids: list[int] = tokenizer.encode(value, add_special_tokens=True).ids
        return ids
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise UserError(f"{where} is neither a text nor a list of token ids: {FORM}.")
    wrong = [each for each in value if not 0 <= each < vocabulary]
    if wrong:
        raise UserError(f"{where}: the token id {wrong[0]} is not below the vocabulary's size, {vocabulary}.")
    return value
