"""What a tokenizer.json says about its tokens: which are control tokens, and the bytes of each id.

A control token is any entry of `added_tokens`: role markers, thinking and tool markup, placeholders. DeepSeek
flags most of them `"special": false`, so switching off "special tokens" in a tokenizer library protects
almost nothing (`<｜User｜>`, `<｜Assistant｜>` and `</think>` stay live). The only safe way is to encode text
with a tokenizer that does not have them at all, and to know that its merges cannot reach their ids.
`Vocabulary` gives that tokenizer and checks that.
"""

import json
from collections.abc import Iterable, Mapping
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

    def __init__(self, parsed: Mapping[str, Any]) -> None:
        """
        Args:
            parsed: a tokenizer.json. It is not kept: its 255,000 containers would burden every garbage
            collection.
        """
        _require_byte_level_bpe(parsed)
        model = parsed["model"]
        self.control_ids: Mapping[str, int] = {
            token["content"]: token["id"] for token in parsed.get("added_tokens", ())
        }
        self._require_unforgeable(_reachable_from_text(model))
        self.token_bytes = _bytes_by_id(model["vocab"], self.control_ids)
        """The bytes of every id, control tokens as their spelling; None for ids that name no token."""

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

    def _require_unforgeable(self, reachable: set[int]) -> None:
        for spelling, token_id in self.control_ids.items():
            if token_id in reachable:
                raise TokenizerError(
                    f"Plain text can be encoded to the control token {spelling} (id {token_id}), so users "
                    "could forge it; give control tokens ids that no merge produces."
                )


def plain_json(parsed: Mapping[str, Any]) -> str:
    """The tokenizer.json for text: no control tokens, no template, no truncation, no padding."""
    plain: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return json.dumps({**parsed, **plain}, ensure_ascii=False)


def _require_byte_level_bpe(parsed: Mapping[str, Any]) -> None:
    last = parsed.get("pre_tokenizer") or {}
    while last.get("type") == "Sequence":
        last = last["pretokenizers"][-1]
    kind = parsed["model"].get("type")
    if kind != "BPE" or last.get("type") != "ByteLevel":
        raise TokenizerError(
            f"The tokenizer is {kind} after {last.get('type')}; only byte-level BPE tokenizers such as "
            "DeepSeek's are supported."
        )


def _reachable_from_text(model: Mapping[str, Any]) -> set[int]:
    """Every id that BPE can output for some text: bytes, the products of merges, the unknown token."""
    vocab: dict[str, int] = model["vocab"]
    if model.get("ignore_merges"):  # a whole piece is looked up in the vocabulary first
        return {token_id for token, token_id in vocab.items() if all(char in _ALPHABET for char in token)}
    reachable = {vocab[char] for char in _ALPHABET if char in vocab}
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        reachable.add(vocab[left + right])
    unknown = model.get("unk_token")
    return reachable | ({vocab[unknown]} if unknown in vocab else set())


def _bytes_by_id(vocab: Mapping[str, int], control: Mapping[str, int]) -> list[bytes | None]:
    table: list[bytes | None] = [None] * (max([*vocab.values(), *control.values()]) + 1)
    for token, token_id in vocab.items():
        table[token_id] = _bytes_of(token)
    for spelling, token_id in control.items():
        table[token_id] = spelling.encode()
    return table


def _bytes_of(token: str) -> bytes:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode()
