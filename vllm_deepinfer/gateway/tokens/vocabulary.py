"""What a tokenizer.json says about its tokens: which are control tokens, and the bytes of each id.

A control token is any entry of `added_tokens`: role markers, thinking and tool markup, placeholders. DeepSeek
flags most of them `"special": false`, so switching off "special tokens" in a tokenizer library protects
almost nothing (`<｜User｜>`, `<｜Assistant｜>` and `</think>` stay live). The only safe way is to encode text
with a tokenizer that does not have them at all, and to know that its merges cannot reach their ids.
`Vocabulary` gives that tokenizer and checks that.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from vllm_deepinfer.gateway.tokens.errors import TokenizerError


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


class Vocabulary:
    """The tokens of one byte-level BPE tokenizer.json.

    Raises TokenizerError if the tokenizer is of another kind, or if plain text could be encoded to a control
    token.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._parsed: dict[str, Any] = json.loads(tokenizer_json)
        self._model: dict[str, Any] = self._parsed["model"]
        self.control_ids: Mapping[str, int] = {
            token["content"]: token["id"] for token in self._parsed.get("added_tokens", ())
        }
        self._require_byte_level_bpe()
        self._require_unforgeable()

    @property
    def parsed(self) -> Mapping[str, Any]:
        """The parsed tokenizer.json."""
        return self._parsed

    @cached_property
    def plain_json(self) -> str:
        """The tokenizer.json for text: no control tokens, no template, no truncation, no padding."""
        plain: dict[str, Any] = {
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        return json.dumps(self._parsed | plain, ensure_ascii=False)

    @cached_property
    def token_bytes(self) -> list[bytes | None]:
        """The bytes of every id, control tokens as their spelling; None for ids that name no token."""
        vocab = self._model["vocab"]
        size = max([*vocab.values(), *self.control_ids.values()]) + 1
        table: list[bytes | None] = [None] * size
        for token, token_id in vocab.items():
            table[token_id] = _bytes_of(token)
        for spelling, token_id in self.control_ids.items():
            table[token_id] = spelling.encode()
        return table

    def require(self, spellings: Iterable[str]) -> None:
        """Raises TokenizerError unless every spelling is a control token: a prompt template is going to need
        it.
        """
        missing = sorted(set(spellings) - self.control_ids.keys())
        if missing:
            raise TokenizerError(
                f"The tokenizer has no control token {missing[0]}, which the model's prompt template uses; "
                "load the tokenizer.json that was released with the model."
            )

    def _require_byte_level_bpe(self) -> None:
        last = self._parsed.get("pre_tokenizer") or {}
        while last.get("type") == "Sequence":
            last = last["pretokenizers"][-1]
        if self._model.get("type") != "BPE" or last.get("type") != "ByteLevel":
            raise TokenizerError(
                f"The tokenizer is {self._model.get('type')} after {last.get('type')}; "
                "only byte-level BPE tokenizers such as DeepSeek's are supported."
            )

    def _require_unforgeable(self) -> None:
        reachable = self._reachable_from_text()
        for spelling, token_id in self.control_ids.items():
            if token_id in reachable:
                raise TokenizerError(
                    f"Plain text can be encoded to the control token {spelling} (id {token_id}), so users "
                    "could forge it; give control tokens ids that no merge produces."
                )

    def _reachable_from_text(self) -> set[int]:
        """Every id that BPE can output for some text: its bytes, the products of its merges, its unknown
        token.
        """
        vocab: dict[str, int] = self._model["vocab"]
        if self._model.get("ignore_merges"):  # a whole piece is looked up in the vocabulary first
            return {token_id for token, token_id in vocab.items() if all(char in _ALPHABET for char in token)}
        reachable = {vocab[char] for char in _ALPHABET if char in vocab}
        for merge in self._model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            reachable.add(vocab[left + right])
        unknown = self._model.get("unk_token")
        return reachable | ({vocab[unknown]} if unknown in vocab else set())


def _bytes_of(token: str) -> bytes:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode()
